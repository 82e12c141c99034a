"""For tools that look for a setup.py: pyproject.toml has all that it would say."""

from setuptools import setup

setup()
