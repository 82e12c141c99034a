"""Keras callbacks of a run: checkpoints, scores on held-out data, schedules, telemetry."""

from tfpara.callbacks.checkpoint_base import Preempted
from tfpara.callbacks.checkpointing import Checkpoint
from tfpara.callbacks.held_out import HeldOut
from tfpara.callbacks.schedule import LearningRate, SyncPeriod
from tfpara.callbacks.stop_together import StopTogether
from tfpara.callbacks.stopping import Newbob, OverfittingGuard
from tfpara.callbacks.telemetry import Telemetry
from tfpara.callbacks.trace import Trace
from tfpara.callbacks.warm_start import WarmStart

__all__ = [
    "Checkpoint",
    "HeldOut",
    "LearningRate",
    "Newbob",
    "OverfittingGuard",
    "Preempted",
    "StopTogether",
    "SyncPeriod",
    "Telemetry",
    "Trace",
    "WarmStart",
]
