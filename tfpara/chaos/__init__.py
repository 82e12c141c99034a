"""The program `tfpara-chaos`, which makes faults in a run and says what each has cost."""

from tfpara.chaos.command import main

__all__ = ["main"]
