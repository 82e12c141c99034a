"""The workers of a run, and their exchanges from Python."""
