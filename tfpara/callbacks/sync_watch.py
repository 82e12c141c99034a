"""Finding the batches of `fit` after which all workers are at the same step."""

from __future__ import annotations

from collections.abc import Callable

import keras

from tfpara.sync.one_sync.statistics import Agreement


class SyncWatch:
    """Finds the batches that end with a sync.

    A callback calls `begin` when an epoch begins and `after_batch` when a batch ends. Between syncs
    it counts in Python, since reading the synchronizer's variables would wait for the step.
    """

    def __init__(self) -> None:
        self._anchor = 0  # number of steps in this epoch up to the last sync
        self._closed = 0  # the strategy's `blocks_closed` at the last check
        self._syncs = 0  # number of syncs at the last check; used only if blocks differ in length

    def begin(self, model: keras.Model) -> None:
        """Notes that an epoch begins, and with it a block."""
        self._anchor = 0
        strategy = model.distribute_strategy
        self._closed = strategy.blocks_closed
        if strategy.blocks_differ and strategy.has_trained:
            self._syncs = strategy.synchronizer_of(model).agreement().syncs

    def after_batch(
        self, model: keras.Model, batch: int, needed: Callable[[Agreement], bool]
    ) -> Agreement | None:
        """Returns the agreement of all workers if this batch ended with a sync of all; else None.

        `needed` returns whether such a sync requires an action, by facts that are the same on all
        workers. A sync that still runs beside the training is awaited only if it requires one.
        """
        strategy = model.distribute_strategy
        if strategy.blocks_differ:
            return self._after_any(model, needed)
        steps, period = batch + 1, strategy.sync_period
        if strategy.blocks_closed != self._closed:
            # A callback has closed the block on all workers, either after this batch or after the
            # batch before. `_anchor` is set to the earlier of these two places, because the next
            # sync would be missed if `_anchor` were too late.
            self._closed = strategy.blocks_closed
            self._anchor = steps - 1
        elif period is None or steps - self._anchor < period:
            return None
        synchronizer = strategy.synchronizer_of(model)
        agreement = synchronizer.agreement()
        if not _is_of_all(agreement):
            return None
        self._anchor = steps
        if not needed(agreement):
            return None
        agreement = synchronizer.land()
        return agreement if agreement.all_running else None

    def _after_any(
        self, model: keras.Model, needed: Callable[[Agreement], bool]
    ) -> Agreement | None:
        """Does the work of `after_batch` if blocks have different lengths."""
        strategy = model.distribute_strategy
        synchronizer = strategy.synchronizer_of(model)
        agreement = synchronizer.agreement()
        new, self._syncs = agreement.syncs != self._syncs, agreement.syncs
        if not (new and _is_of_all(agreement) and needed(agreement)):
            return None
        agreement = strategy.company.land(synchronizer)
        self._syncs = agreement.syncs
        return agreement if _is_of_all(agreement) else None


def _is_of_all(agreement: Agreement) -> bool:
    """Returns whether all workers are at a sync, and have data left."""
    return agreement.all_running and not agreement.block_open
