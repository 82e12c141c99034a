"""tfpara: Keras models trained in parallel, with a synchronisation every few minibatches.

The names below load TensorFlow when they are first used, so that `tfpara.cluster` and
`tfpara.launch` can check and start a cluster without it.
"""

from __future__ import annotations

import importlib
from typing import Any

from tfpara.version import __version__

_LOCATION = {
    "ASGD": "tfpara.algorithms",
    "AsyncCheckpoint": "tfpara.parameter_server.checkpointing",
    "AsyncEASGD": "tfpara.algorithms",
    "AsyncStatistics": "tfpara.parameter_server.strategy",
    "AsyncStrategy": "tfpara.parameter_server.strategy",
    "AveragedASGD": "tfpara.algorithms",
    "BMUF": "tfpara.algorithms",
    "BMUFAdam": "tfpara.algorithms",
    "BSP": "tfpara.algorithms",
    "DiLoCo": "tfpara.algorithms",
    "Downpour": "tfpara.algorithms",
    "EASGD": "tfpara.algorithms",
    "CheckpointError": "tfpara.checkpoint_store",
    "ChunkError": "tfpara.parameter_server.errors",
    "ChunkRateSearch": "tfpara.parameter_server.search",
    "Chunks": "tfpara.parameter_server.chunks",
    "DivergedError": "tfpara.parameter_server.errors",
    "EMA": "tfpara.algorithms",
    "MA": "tfpara.algorithms",
    "Outer": "tfpara.algorithms",
    "FingerprintError": "tfpara.fingerprint",
    "ParameterServerError": "tfpara.parameter_server.lobby",
    "PeriodicSyncStrategy": "tfpara.strategy",
    "Pushed": "tfpara.parameter_server.books",
    "RunningThenMean": "tfpara.algorithms",
    "SlowMo": "tfpara.algorithms",
    "Speed": "tfpara.parameter_server.simulation",
    "export": "tfpara.saved_model",
    "run": "tfpara.program",
    "StartMean": "tfpara.parameter_server.start_mean",
    "StartupError": "tfpara.startup",
    "SyncStatistics": "tfpara.statistics",
    "simulate": "tfpara.simulation",
    "simulate_async": "tfpara.parameter_server.simulated",
}
_MODULES = (
    "callbacks",
    "cluster",
    "launch",
    "optimizers",
    "pretraining",
    "schedules",
    "startup",
)

__all__ = ["__version__", *_LOCATION, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _LOCATION:
        return getattr(importlib.import_module(_LOCATION[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"tfpara.{name}")
    raise AttributeError(f"module 'tfpara' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
