"""Keras callbacks of a run: checkpoints, scores on held-out data, schedules, telemetry."""

from tfpara.callbacks.checkpointing import Checkpoint, Preempted, StopTogether
from tfpara.callbacks.held_out import HeldOut
from tfpara.callbacks.telemetry import Telemetry

__all__ = ["Checkpoint", "HeldOut", "Preempted", "StopTogether", "Telemetry"]
