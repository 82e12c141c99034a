"""Starts the workers of a run on this machine: the program `tfpara-launch`."""

from tfpara.launch.command import main

__all__ = ["main"]
