"""Checkpoints of a run: what is in them, and how they are kept on disk."""
