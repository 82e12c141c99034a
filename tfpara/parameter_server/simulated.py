"""Asynchronous workers in one process, to study a rule without a cluster."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpara.algorithms.asgd import AsyncRule
from tfpara.parameter_server.books import Pushed
from tfpara.parameter_server.simulation import Simulation, Speed
from tfpara.parameter_server.strategy import AsyncStrategy
from tfpara.whole_number import checked_whole

if TYPE_CHECKING:
    from tfpara.parameter_server.chunks import Chunks
    from tfpara.parameter_server.server import Server
    from tfpara.parameter_server.simulation import Kept
    from tfpara.parameter_server.work import ChooseRate, Work

_ALIKE = Speed(spread=0.2)


def simulate_async(
    num_workers: int,
    rule: AsyncRule,
    *,
    speeds: Sequence[Speed] | Speed = _ALIKE,
    order: Sequence[Pushed] | None = None,
    **options: Any,
) -> AsyncStrategy:
    """An `AsyncStrategy` whose workers are simulated, in a repeatable order of pulls and pushes.

    `fit` and all else work as on a cluster, with the same functions for pull, minibatch and push.
    How long a worker takes for a minibatch is drawn from its speed; nothing waits for it in real
    time. Two runs with the same arguments, data and seeds are equal bit for bit.

    Args:
        num_workers: N ≥ 1.
        rule: as `AsyncStrategy` takes it.
        speeds: of each worker, or of all alike. A slow one: `tfpara.Speed(10.0)`.
        order: the record of another run (`strategy.record()`) to repeat in place of the speeds: who
            pulls and who pushes when, and which chunk.
        **options: the other arguments of `AsyncStrategy`; `seed` is also that of the speeds.

    Returns:
        The strategy. Its `record()` lists all pushes.

    Raises:
        ValueError: a number of workers or speeds that does not fit, or a record of more workers;
            in `fit`: the record of another run.

    Example:
        >>> strategy = simulate_async(8, tfpara.ASGD(), speeds=tfpara.Speed(1.0, spread=0.5))
        >>> strategy.num_workers
        8
    """
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
    """In place of the processes of a cluster."""

    def __init__(self, speeds: list[Speed], order: Sequence[Pushed] | None) -> None:
        self.num_workers = len(speeds)
        with tf.device("CPU:0"):  # its name is another one in the chief of a cluster
            self.chief_device = tf.zeros([]).device
        self.server_devices = (self.chief_device,)
        self._speeds = speeds
        self._order = order
        self._kept: weakref.WeakKeyDictionary[Server, dict[int, Kept]] = (
            weakref.WeakKeyDictionary()
        )  # by server: what workers have of their own

    def executor(
        self,
        server: Server,
        work: Work,
        chunks: Chunks,
        sync_period: int,
        choose_rate: ChooseRate | None,
        seed: int,
    ) -> Simulation:
        """What runs chunks on the simulated workers."""
        return Simulation(
            server,
            work,
            chunks,
            sync_period,
            choose_rate,
            speeds=self._speeds,
            seed=seed,
            order=self._order,
            kept=self._kept.setdefault(server, {}),
        )

    asked_to_end = None

    def check(self) -> None:
        """Nothing can be gone."""

    def lost(self) -> list[int]:
        """No worker is."""
        return []

    def end_with(self, exit_code: int, sentence: str) -> None:
        """There is nobody to tell."""
