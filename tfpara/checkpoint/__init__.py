"""Checkpoints of a run: their content, and their storage on disk."""
