"""The program `tfpara-chaos`, which injects faults into a run and reports the cost of each."""

from tfpara.chaos.command import main

__all__ = ["main"]
