"""Simulated asynchronous workers in one process, to study a rule without a cluster."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpara import program
from tfpara.algorithms.asgd import AsyncRule
from tfpara.parameter_server.counters import Pushed
from tfpara.parameter_server.simulation import Simulation, Speed
from tfpara.parameter_server.strategy import AsyncStrategy
from tfpara.whole_number import checked_whole

if TYPE_CHECKING:
    from tfpara.parameter_server.chunks import Chunks
    from tfpara.parameter_server.server import Server
    from tfpara.parameter_server.simulation import Kept
    from tfpara.parameter_server.worker_step import ChooseRate, Work

_ALIKE = Speed(spread=0.2)


def simulate_async(
    num_workers: int,
    rule: AsyncRule,
    *,
    speeds: Sequence[Speed] | Speed = _ALIKE,
    order: Sequence[Pushed] | None = None,
    **options: Any,
) -> AsyncStrategy:
    """Returns an `AsyncStrategy` with simulated workers and a repeatable order of pulls and pushes.

    `fit` and all else work as on a cluster, with the same functions for pull, minibatch and push.
    The time that a worker takes for a minibatch is drawn from its speed. It is simulated time; the
    program does not wait for it. Two runs with the same arguments, data and seeds are equal bit for
    bit.

    Args:
        num_workers: number of workers, N ≥ 1.
        rule: a rule of `AsyncStrategy`.
        speeds: one speed for each worker, or one for all. A slow one: `tfpara.Speed(10.0)`.
        order: the record of another run (`strategy.record()`), to repeat its order of pulls and
            pushes and its chunks of each worker; the speeds are then not used.
        **options: the other arguments of `AsyncStrategy`; `seed` is also the seed of the speeds.

    Returns:
        The strategy. Its `record()` lists all pushes.

    Raises:
        ValueError: `num_workers` is not a whole number of at least 1, or the number of speeds is
            another, or the record has more workers. `fit` raises it if the record is of a run with
            other data or settings.

    Example:
        >>> strategy = simulate_async(8, tfpara.ASGD(), speeds=tfpara.Speed(1.0, spread=0.5))
        >>> strategy.num_workers
        8
    """
    program.explain_errors()
    num_workers = checked_whole("num_workers", num_workers)
    each = [speeds] * num_workers if isinstance(speeds, Speed) else list(speeds)
    if len(each) != num_workers:
        raise ValueError(
            f"speeds has {len(each)} entries for {num_workers} workers. Give one for each, or one "
            "tfpara.Speed for all."
        )
    highest = max((pushed.worker for pushed in order or ()), default=0)
    if highest >= num_workers:
        raise ValueError(
            f"order= has pushes of worker {highest}, and there are {num_workers} workers. Simulate "
            "as many as the record was made with."
        )
    return AsyncStrategy(rule, record=True, _processes=_Simulated(each, order), **options)


class _Simulated:
    """The stand-in for `processes.Processes` without a cluster."""

    is_simulated = True

    def __init__(self, speeds: list[Speed], order: Sequence[Pushed] | None) -> None:
        self.num_workers = len(speeds)
        with tf.device("CPU:0"):  # the full name differs if this process is a cluster's chief
            self.chief_device = tf.zeros([]).device
        self.server_devices = (self.chief_device,)
        self._speeds = speeds
        self._order = order
        self._kept: weakref.WeakKeyDictionary[Server, dict[int, Kept]] = (
            weakref.WeakKeyDictionary()
        )  # by server and worker: the local models and optimizers

    def executor(
        self,
        server: Server,
        work: Work,
        chunks: Chunks,
        sync_period: int,
        choose_rate: ChooseRate | None,
        order: Sequence[int],
        seed: int,
    ) -> Simulation:
        """Returns the object that trains chunks on the simulated workers."""
        return Simulation(
            server,
            work,
            chunks,
            sync_period,
            choose_rate,
            data_order=order,
            speeds=self._speeds,
            seed=seed,
            order=self._order,
            kept=self._kept.setdefault(server, {}),
        )

    asked_to_end: str | None = None

    def answer_leaving(self, exit_code: int | None) -> None:
        """Does nothing: no worker can be asked to end."""

    def check(self) -> None:
        """Does nothing: no process can be lost."""

    def lost(self) -> list[int]:
        """Returns an empty list: no worker can be lost."""
        return []

    def end_with(self, exit_code: int, sentence: str) -> None:
        """Does nothing: there are no other processes."""
