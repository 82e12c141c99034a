"""Elastic runs, whose workers may join and leave."""
