"""Notes for the user on what may not be expected; each is printed once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tfpara.sync.settings import Settings, few_syncs
from tfpara.sync.start_line import counted
from tfpara.sync.topology import Topology


class Notes:
    """The notes of a strategy, which its chief prints.

    Args:
        settings: of the strategy.
        topology: the workers and devices.
        silent: returns whether this process prints nothing, though it may be the chief.
    """

    def __init__(self, settings: Settings, topology: Topology, silent: Callable[[], bool]) -> None:
        self._settings = settings
        self._topology = topology
        self._silent = silent
        self._told: set[str] = set()
        self._few_told = self._idle_told = False

    def tell(self, text: str) -> None:
        """Prints a note, unless it was printed before."""
        if self._topology.rank == 0 and not self._silent() and text not in self._told:
            self._told.add(text)
            print(f"tfpara: {text}", file=sys.stderr, flush=True)

    def few_syncs(self, period: int, steps: int, epochs: int) -> None:
        """Prints a note where a call of `fit` has fewer syncs than its replicas need, one a run.

        Args:
            period: minibatches between two syncs.
            steps: minibatches of each replica in an epoch.
            epochs: of the run, those before a resume included.
        """
        replicas = self._topology.replicas
        if self._settings.device_sync_period:
            replicas = self._topology.workers  # a worker's devices meet more often
        block = period * self._settings.fragments
        text = few_syncs(epochs * -(-steps // block), replicas) if block > 1 else ""
        if text and not self._few_told and not self._topology.changes:
            self._few_told = True
            self.tell(text)

    def small_batches(self, rows: int | None) -> None:
        """Prints a note where the batches of `fit` have fewer rows than there are replicas.

        Args:
            rows: of the largest batch; None: not known.
        """
        replicas = self._topology.replicas
        if rows is not None and rows < replicas and not self._topology.changes:
            self._idle_told = True
            self.tell(
                f"fit divides batches of {counted(rows, 'row')} among {replicas} "
                f"replicas, which leaves {replicas - rows} of them without a row in the whole run. "
                f"Give batch_size={replicas} at least, better a multiple of it: docs/data.md"
            )

    def idle_replicas(self, idle: Sequence[int]) -> None:
        """Prints a note where replicas, but not all, have had no row in the first epoch of `fit`.

        Args:
            idle: the numbers of these replicas.
        """
        replicas = self._topology.replicas
        if 0 < len(idle) < replicas and not self._idle_told and not self._topology.changes:
            self._idle_told = True
            self.tell(
                f"replicas without a row in this epoch: {', '.join(map(str, idle))} (of 0 … "
                f"{replicas - 1}). They do not train. Give batches of a multiple of {replicas} "
                "rows, or, where each worker has its own minibatches, at least one for each of its "
                "devices: docs/data.md"
            )
