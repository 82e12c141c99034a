"""Synchronous training that goes on while workers die, leave and come."""
