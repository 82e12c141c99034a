"""Starts the workers of a run on this machine: the program `tfpara-launch`."""

from tfpara.launch.command import main as main
