"""A callback that stops all workers if one worker stops."""

from __future__ import annotations

from tfpara import fit_call
from tfpara.callbacks.sync_watch import SyncWatch
from tfpara.cluster.call_site import of_callback
from tfpara.sync.one_sync.reports import Request
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.typing import Logs

_WISHES = of_callback("StopTogether")


class StopTogether(fit_call.Callback):
    """Stops all workers at the next sync or at the end of the epoch, if one worker wants to stop.

    Use it with a callback that sets `model.stop_training` on one worker, for a reason that other
    workers do not see. Without `StopTogether` the other workers would wait for that worker. This
    callback runs after all others.
    """

    order = fit_call.Order.STOPS

    def __init__(self) -> None:
        super().__init__()
        self._watch = SyncWatch()
        self._asked = False  # whether this worker has requested a stop and has no answer yet

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not isinstance(self.model.distribute_strategy, PeriodicSyncStrategy):
            raise ValueError(
                "StopTogether needs a model of a tfpara.PeriodicSyncStrategy. In the fit of a "
                "tfpara.AsyncStrategy, whose callbacks all run in the chief, leave it out: to set "
                "model.stop_training there stops all."
            )
        fit_call.at_end(self._withdraw)

    def _withdraw(self) -> None:
        """Withdraws the request to stop if `fit` has failed, for the sake of the next `fit`."""
        if self._asked:
            self._asked = False
            self.model.distribute_strategy.answered(Request.STOP)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._watch.begin(self.model)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self.model.stop_training:
            self.model.stop_training = False
            self.model.distribute_strategy.request(Request.STOP)
            self._asked = True
        if self._watch.after_batch(self.model, batch, lambda a: a.request == Request.STOP):
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        strategy = self.model.distribute_strategy
        asked = strategy.synchronizer_of(self.model).agreement().request == Request.STOP
        mine = bool(self.model.stop_training) or self._asked or asked
        self.model.stop_training = any(strategy.everyones(mine, _WISHES))
        strategy.answered(Request.STOP)
        self._asked = False
