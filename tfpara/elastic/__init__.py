"""Synchronous training that continues while workers die, leave and join."""
