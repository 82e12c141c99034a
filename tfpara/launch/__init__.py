"""The program `tfpara-launch`, which starts the workers of a run on this machine."""

from tfpara.launch.command import main

__all__ = ["main"]
