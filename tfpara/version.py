"""The version, which is written here alone."""

__version__ = "0.3.0.dev0"
