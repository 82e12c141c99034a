"""tfpara: Keras models trained in parallel, with a synchronisation every few minibatches.

The names below load TensorFlow when they are first used, so that `tfpara.cluster` and
`tfpara.launch` can check and start a cluster without TensorFlow.

Public are the names in `__all__` here, and in `__all__` of the modules that docs/design.md lists
under "What is public". All other modules are internal, and may change without notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfpara.version import __version__

# Only type checkers and editors read these imports. At run time, `__getattr__` below imports the
# same names when they are used.
if TYPE_CHECKING:
    from tfpara import callbacks as callbacks
    from tfpara import cluster as cluster
    from tfpara import launch as launch
    from tfpara import optimizers as optimizers
    from tfpara import pretraining as pretraining
    from tfpara import schedules as schedules
    from tfpara.algorithms import ASGD as ASGD
    from tfpara.algorithms import BMUF as BMUF
    from tfpara.algorithms import BSP as BSP
    from tfpara.algorithms import EASGD as EASGD
    from tfpara.algorithms import EMA as EMA
    from tfpara.algorithms import MA as MA
    from tfpara.algorithms import AsyncBMUF as AsyncBMUF
    from tfpara.algorithms import AsyncEASGD as AsyncEASGD
    from tfpara.algorithms import Average as Average
    from tfpara.algorithms import AveragedASGD as AveragedASGD
    from tfpara.algorithms import BMUFAdam as BMUFAdam
    from tfpara.algorithms import DiLoCo as DiLoCo
    from tfpara.algorithms import Downpour as Downpour
    from tfpara.algorithms import Outer as Outer
    from tfpara.algorithms import Rule as Rule
    from tfpara.algorithms import RunningThenMean as RunningThenMean
    from tfpara.algorithms import SlowMo as SlowMo
    from tfpara.callbacks.async_checkpointing import AsyncCheckpoint as AsyncCheckpoint
    from tfpara.callbacks.start_mean import StartMean as StartMean
    from tfpara.checkpoint.store import CheckpointError as CheckpointError
    from tfpara.cluster import is_evaluator as is_evaluator
    from tfpara.cluster.startup import StartupError as StartupError
    from tfpara.elastic.settings import Elastic as Elastic
    from tfpara.evaluator import evaluate_checkpoints as evaluate_checkpoints
    from tfpara.parameter_server.chunks import Chunks as Chunks
    from tfpara.parameter_server.control.lobby import ParameterServerError as ParameterServerError
    from tfpara.parameter_server.counters import Pushed as Pushed
    from tfpara.parameter_server.errors import ChunkError as ChunkError
    from tfpara.parameter_server.errors import DivergedError as DivergedError
    from tfpara.parameter_server.search import ChunkRateSearch as ChunkRateSearch
    from tfpara.parameter_server.simulation import Speed as Speed
    from tfpara.parameter_server.simulation import simulate_async as simulate_async
    from tfpara.parameter_server.strategy import AsyncStatistics as AsyncStatistics
    from tfpara.parameter_server.strategy import AsyncStrategy as AsyncStrategy
    from tfpara.program import run as run
    from tfpara.saved_model import export as export
    from tfpara.sync.one_sync.statistics import SyncStatistics as SyncStatistics
    from tfpara.sync.simulation import simulate as simulate
    from tfpara.sync.strategy import PeriodicSyncStrategy as PeriodicSyncStrategy
    from tfpara.sync.workers.company import MismatchError as MismatchError
    from tfpara.sync.workers.settings_check import FingerprintError as FingerprintError

# Maps each module to the public names that it defines, separated by spaces.
_NAMES = {
    "tfpara.algorithms": (
        "ASGD AsyncBMUF AsyncEASGD Average AveragedASGD BMUF BMUFAdam BSP DiLoCo Downpour EASGD"
        " EMA MA Outer Rule RunningThenMean SlowMo"
    ),
    "tfpara.callbacks.async_checkpointing": "AsyncCheckpoint",
    "tfpara.callbacks.start_mean": "StartMean",
    "tfpara.checkpoint.store": "CheckpointError",
    "tfpara.cluster": "is_evaluator",
    "tfpara.cluster.startup": "StartupError",
    "tfpara.elastic.settings": "Elastic",
    "tfpara.evaluator": "evaluate_checkpoints",
    "tfpara.parameter_server.chunks": "Chunks",
    "tfpara.parameter_server.control.lobby": "ParameterServerError",
    "tfpara.parameter_server.counters": "Pushed",
    "tfpara.parameter_server.errors": "ChunkError DivergedError",
    "tfpara.parameter_server.search": "ChunkRateSearch",
    "tfpara.parameter_server.simulation": "Speed simulate_async",
    "tfpara.parameter_server.strategy": "AsyncStatistics AsyncStrategy",
    "tfpara.program": "run",
    "tfpara.saved_model": "export",
    "tfpara.sync.one_sync.statistics": "SyncStatistics",
    "tfpara.sync.simulation": "simulate",
    "tfpara.sync.strategy": "PeriodicSyncStrategy",
    "tfpara.sync.workers.company": "MismatchError",
    "tfpara.sync.workers.settings_check": "FingerprintError",
}
_LOCATION = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("callbacks", "cluster", "launch", "optimizers", "pretraining", "schedules")

__all__ = ["__version__", *_LOCATION, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _LOCATION:
        return getattr(importlib.import_module(_LOCATION[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"tfpara.{name}")
    raise AttributeError(f"module 'tfpara' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
