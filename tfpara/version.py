"""The one place where the version stands."""

__version__ = "0.3.0.dev0"
