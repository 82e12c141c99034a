"""tfpara: Keras models trained in parallel, with a synchronisation every few minibatches.

The names below load TensorFlow when they are first used, so that `tfpara.cluster` and
`tfpara.launch` can check and start a cluster without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfpara.version import __version__

if TYPE_CHECKING:  # for type checkers and editors; the same names as below
    from tfpara import callbacks as callbacks
    from tfpara import cluster as cluster
    from tfpara import launch as launch
    from tfpara import optimizers as optimizers
    from tfpara import pretraining as pretraining
    from tfpara import schedules as schedules
    from tfpara import startup as startup
    from tfpara.algorithms import ASGD as ASGD
    from tfpara.algorithms import BMUF as BMUF
    from tfpara.algorithms import BSP as BSP
    from tfpara.algorithms import EASGD as EASGD
    from tfpara.algorithms import EMA as EMA
    from tfpara.algorithms import MA as MA
    from tfpara.algorithms import AsyncEASGD as AsyncEASGD
    from tfpara.algorithms import AveragedASGD as AveragedASGD
    from tfpara.algorithms import BMUFAdam as BMUFAdam
    from tfpara.algorithms import DiLoCo as DiLoCo
    from tfpara.algorithms import Downpour as Downpour
    from tfpara.algorithms import Outer as Outer
    from tfpara.algorithms import RunningThenMean as RunningThenMean
    from tfpara.algorithms import SlowMo as SlowMo
    from tfpara.checkpoint_store import CheckpointError as CheckpointError
    from tfpara.control import MismatchError as MismatchError
    from tfpara.fingerprint import FingerprintError as FingerprintError
    from tfpara.parameter_server.books import Pushed as Pushed
    from tfpara.parameter_server.checkpointing import AsyncCheckpoint as AsyncCheckpoint
    from tfpara.parameter_server.chunks import Chunks as Chunks
    from tfpara.parameter_server.errors import ChunkError as ChunkError
    from tfpara.parameter_server.errors import DivergedError as DivergedError
    from tfpara.parameter_server.lobby import ParameterServerError as ParameterServerError
    from tfpara.parameter_server.search import ChunkRateSearch as ChunkRateSearch
    from tfpara.parameter_server.simulated import simulate_async as simulate_async
    from tfpara.parameter_server.simulation import Speed as Speed
    from tfpara.parameter_server.start_mean import StartMean as StartMean
    from tfpara.parameter_server.strategy import AsyncStatistics as AsyncStatistics
    from tfpara.parameter_server.strategy import AsyncStrategy as AsyncStrategy
    from tfpara.program import run as run
    from tfpara.saved_model import export as export
    from tfpara.simulation import simulate as simulate
    from tfpara.startup import StartupError as StartupError
    from tfpara.statistics import SyncStatistics as SyncStatistics
    from tfpara.strategy import PeriodicSyncStrategy as PeriodicSyncStrategy

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
    "MismatchError": "tfpara.control",
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
