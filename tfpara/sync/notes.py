"""Notes about what a user may not expect; each is printed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpara.sync.settings import Settings
from tfpara.sync.start_line import counted, say
from tfpara.sync.workers.worker import Worker

# If a run of `_MANY` or more replicas has fewer than `_SYNCS_FOR_EACH` syncs for each replica, its
# error is about 3 % or more above the error of one replica (docs/study.md).
_MANY = 4
_SYNCS_FOR_EACH = 6


@dataclasses.dataclass(eq=False)
class Notes:
    """The notes of a strategy, which its chief prints."""

    settings: Settings
    worker: Worker
    _told: set[str] = dataclasses.field(default_factory=set, init=False)
    _few_told: bool = dataclasses.field(default=False, init=False)
    _idle_told: bool = dataclasses.field(default=False, init=False)

    def tell(self, text: str) -> None:
        """Prints a note, unless it was printed before."""
        joins = self.worker.company.joining
        if self.worker.rank == 0 and not joins and text not in self._told:
            self._told.add(text)
            say(text)

    def few_syncs(self, period: int, steps: int, epochs: int) -> None:
        """Prints a note, once, if a call of `fit` has fewer syncs than its replicas need."""
        replicas = self.worker.replicas
        if self.settings.device_sync_period:
            # The replicas of a worker are averaged with each other more often than those of
            # different workers. So each worker counts as one replica.
            replicas = self.worker.num_workers
        block = period * self.settings.fragments
        syncs, enough = epochs * -(-steps // block), _SYNCS_FOR_EACH * replicas
        lacks = block > 1 and replicas >= _MANY and syncs < enough
        if lacks and not self._few_told and not self.worker.changes:
            self._few_told = True
            self.tell(
                f"fit has {counted(syncs, 'sync')} of {replicas} replicas. With fewer than about "
                f"{enough} syncs, their model makes more errors than the model of one replica: "
                "take a shorter sync_period, if only in the first epoch (callbacks.SyncPeriod), or "
                "more epochs."
            )

    def small_batches(self, rows: int | None) -> None:
        """Prints a note if the largest batch of `fit` has fewer rows than there are replicas."""
        replicas = self.worker.replicas
        if rows is not None and rows < replicas and not self.worker.changes:
            self._idle_told = True
            self.tell(
                f"fit divides batches of {counted(rows, 'row')} among {replicas} "
                f"replicas, which leaves {replicas - rows} of them without a row in the whole run. "
                f"Give batch_size={replicas} at least, better a multiple of it."
            )

    def idle_replicas(self, idle: Sequence[int]) -> None:
        """Prints a note if some replicas, by number, had no row in the first epoch of `fit`."""
        replicas = self.worker.replicas
        if 0 < len(idle) < replicas and not self._idle_told and not self.worker.changes:
            self._idle_told = True
            self.tell(
                f"replicas without a row in this epoch: {', '.join(map(str, idle))} (of 0 … "
                f"{replicas - 1}). They do not train. Give batches of a multiple of {replicas} "
                "rows, or, where each worker has its own minibatches, at least one for each of its "
                "devices."
            )
