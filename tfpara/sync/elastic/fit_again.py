"""A call of `fit` in an elastic run, in which workers may meet, and which may be repeated."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.callbacks import History

from tfpara.cluster import parent
from tfpara.contexts import attributes
from tfpara.elastic.meeting import Passed
from tfpara.sync.elastic.connection import LOST, GivenUp, in_short
from tfpara.sync.elastic.rejoin import Rejoin
from tfpara.sync.elastic.state_transfer import told
from tfpara.sync.keras.replacing import trainer
from tfpara.sync.one_sync.reports import Request
from tfpara.sync.one_sync.statistics import NO_SYNCS
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.start_line import say
from tfpara.sync.workers.company import Fit
from tfpara.typing import Json

# The members send the `History` of each earlier call of `fit` to the meeting point. To keep the
# messages short, a `History` whose JSON text has more characters than this is sent without values.
_LONGEST_HISTORY = 1 << 16
_log = logging.getLogger(__name__)


class _Over(BaseException):
    """The others have begun a later call of `fit` than the one in which this worker would join."""


class _Regrouped(BaseException):
    """The members have changed while a step was traced; the step must read other data now."""


@contextlib.contextmanager
def stepping(
    model: keras.Model, step: Callable[[Callable[..., Any], Iterator[Any]], Any]
) -> Iterator[None]:
    """A context in which `fit` calls `step(function, iterator)` in place of Keras' own `function`.

    Keras makes that function in `fit`, unless an earlier `fit` has made it.
    """
    make = model.make_train_function

    def making(force: bool = False) -> None:
        make(force)
        function = model.train_function
        if not hasattr(function, "inner"):

            def ours(iterator: Iterator[Any]) -> Any:
                return step(function, iterator)

            ours.inner = function  # type: ignore[attr-defined]
            model.train_function = ours

    model.make_train_function = making
    try:
        yield
    finally:
        del model.make_train_function
        model.train_function = getattr(model.train_function, "inner", model.train_function)


class FitAgain:
    """The calls of `fit` of a worker, in which it may meet the others (`rejoin`)."""

    def __init__(self, rejoin: Rejoin) -> None:
        self._rejoin, self._progress = rejoin, rejoin.progress
        self._extended, self._connection = rejoin.extended, rejoin.connection
        self._data, self._transfer = rejoin.data, rejoin.transfer
        self._histories: list[Any] = []  # the `History` of each earlier call of `fit`, as JSON
        self._logs: Any = None  # the logs of the last step
        # The generation in which the present step began, or the last one.
        self._step_began_in = self._connection.form.number
        # Whether this worker, as the chief, has sent `Rejoin.terms` to the meeting point in the
        # present call of `fit`.
        self._agreed = False
        self._failed = False  # whether the last call of `fit` has begun, but has not returned
        self._returns = False  # whether this worker has rejoined within the present call of `fit`
        self._passes_by = False  # whether this worker takes no part in the present call of `fit`
        self._given: Mapping[str, Any]  # the arguments of the present call of `fit`
        self._alone: Iterator[Any]  # data for the step that a joiner takes before it joins

    @property
    def gave_up(self) -> bool:
        """Whether the last call has failed, and not because all workers were asked to end."""
        return self._failed and not self._rejoin.last

    @property
    def _synchronizer(self) -> Synchronizer:
        (synchronizer,) = self._extended.models.synchronizers
        return synchronizer

    def check(self, model: keras.Model) -> None:
        """Raises ValueError if another model was trained already, or if `fit` is running."""
        former = self._transfer.model
        if former is not None and former is not model:
            raise ValueError(
                f"elastic= trains one model, and {former.name!r} was trained already. Make a "
                f"strategy of its own for {model.name!r}, in a program of its own."
            )
        if self._connection.in_fit:
            raise ValueError(
                "fit was called in a callback of fit: a worker that joins could not take part in "
                "it. Call one after the other."
            )

    def call(self, model: keras.Model, given: Mapping[str, Any], fit: Fit) -> History:
        """Calls `fit` with the arguments `given`; repeats it if this worker was lost and rejoins.

        If the others are in a later call, it returns at once, with their History of this call.
        """
        self._given, self._failed = given, True
        while True:
            self._connection.in_fit = True
            try:
                if self._connection.joining:
                    with self._connection.refusals():
                        self._pass_by(*self._connection.line.where())
                history = fit(given)
                self._failed = False
                return history
            except GivenUp as error:
                self._rejoin.come_back(str(error))
                self._returns = True
            except _Over:
                self._passes_by = True
                if not model.built:
                    # With 0 epochs, `fit` only makes the model's variables. They are made now,
                    # because the script may freeze a layer after its call of `fit`. If they were
                    # made after that, the frozen layer would have other variables than on the other
                    # workers.
                    fit({"x": given["x"], "epochs": 0, "verbose": 0})
                self._failed = False
                model.history = History()
                vars(model.history).update(self._histories[self._progress.fit])
                model.history.set_model(model)
                return model.history
            finally:
                self._connection.in_fit = self._passes_by = False

    def _pass_by(self, fit: int, histories: list[Json]) -> None:
        """Notes the others' call of `fit`; raises `_Over` if it is a later one."""
        self._histories = histories
        if fit > self._progress.fit:
            say(f"call {self._progress.fit + 1} of fit is over; the others are in call {fit + 1}")
            raise _Over

    @contextlib.contextmanager
    def training(self, model: keras.Model) -> Iterator[None]:
        """A context for one call of `fit`.

        Inside, this worker meets the others before or after a step when members change. At the end
        all members wait for each other; a worker that has not been admitted does not wait.
        """
        self._transfer.model = model
        progress, line = self._progress, self._connection.line
        progress.fit, progress.epoch, self._logs = progress.fit + 1, -1, None
        self._agreed = self._returns = False
        self._transfer.holders.clear()  # they belong to callbacks of an earlier call of `fit`
        for synchronizer in self._extended.models.synchronizers:
            # An earlier call of `fit` may have left a request to meet. It is dropped, because it is
            # not needed: a worker that wants to join is told that this call has begun, and asks
            # again.
            synchronizer.graph.answered(Request.MEET)
        if not self._connection.joining and progress.fit:
            line.begins(progress.fit, self._histories)
        former = None
        if threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGTERM, self._leave_by_signal)
        try:
            with stepping(model, self._step):
                yield
            if not self._connection.joining:
                # Because of this barrier, no worker ends its program while another still waits for
                # it in an exchange.
                control = self._extended.control
                control.whole(lambda: control.collectives.barrier("fit"))
                text = told(model.history)
                history = json.loads(text)
                if len(text) > _LONGEST_HISTORY:
                    history["history"] = {}
                self._histories = [*self._histories, history]
        finally:
            model._initial_epoch = None
            if former is not None:
                signal.signal(signal.SIGTERM, former)

    def _leave_by_signal(self, number: int, frame: FrameType | None) -> None:
        """Leaves after the next sync; a second SIGTERM ends the process at once."""
        del frame
        if self._connection.leaves:
            os._exit(128 + number)
        self._connection.leaves = True
        if "checkpoints" in self._transfer.holders:
            # If all members leave, they write a checkpoint before they end. The launcher is told,
            # so that it gives them time to write.
            parent.tell(saves=True)
        if self._connection.joining:
            self._connection.line.give_up()

    def begin(self) -> None:
        """Lets this worker join, if it is a joiner, after the callbacks' `on_train_begin`."""
        if not self._connection.joining or self._passes_by:
            return
        model = self._transfer.trained_model
        if not (self._returns and self._extended.models.synchronizers):
            self._trace_alone(model)
        try:
            self._rejoin.join()
        except Passed as error:
            self._pass_by(error.fit, error.histories)
        self._connection.line.begins(self._progress.fit, self._histories)
        self._connection.joining = False
        model._initial_epoch = self._data.plan.epoch

    def _trace_alone(self, model: keras.Model) -> None:
        """Takes a step, a sync, a meeting and a step of validation, which are no part of the run.

        TensorFlow takes long for the first ones, and in the run all workers would wait for that.
        """
        balance = self._extended.balance
        before = [each.graph.statistics() for each in self._extended.models.synchronizers]
        self._alone = self._data.data()
        step: Any = model.train_function
        with contextlib.suppress(tf.errors.OutOfRangeError, StopIteration):
            self._logs = step.inner(self._alone)
            # If the function takes several steps, its graph contains a sync of its own. TensorFlow
            # takes long for the first run of that sync, too. So the sync is made to run now: the
            # next step is made the last one of its block.
            if balance is None and model.steps_per_execution > 1:
                block = self._synchronizer.graph.block
                block.steps.assign(block.period - 1)
                step.inner(self._alone)
        self._synchronizer.rehearse()
        self._synchronizer.meet(0.0)
        _validate_once(model, self._given)
        self._synchronizer.graph.set_statistics(*before or [NO_SYNCS])
        if balance is not None:
            balance.record.clear()

    def begin_epoch(self, epoch: int) -> None:
        self._progress.epoch = epoch
        self._data.begin(epoch, self._progress.fit)

    def _step(self, function: Callable[..., Any], iterator: Iterator[Any]) -> Any:
        """Runs a training step of Keras, before or after which the members may change."""
        # The others may have closed the epoch while this worker was behind. Then no step is left.
        if self._progress.epoch_is_closed:
            raise StopIteration
        with attributes(self._progress, in_step=True):
            self._meet_if_needed()
            # The terms are sent only after a first step, because this step finds out whether the
            # model was compiled again.
            if not self._agreed and self._connection.rank == 0 and self._logs is not None:
                self._agreed = True
                self._connection.line.agreed(self._rejoin.terms())
            return self._step_until_trained(function, iterator)

    def _step_until_trained(self, function: Callable[..., Any], iterator: Iterator[Any]) -> Any:
        models, trained = self._extended.models, False
        before = models.steps_seen
        while True:
            try:
                may_be_due, self._progress.sync_may_be_due = self._progress.sync_may_be_due, False
                if not trained and not (may_be_due and self._sync_is_due()):
                    former, self._step_began_in = self._step_began_in, self._connection.form.number
                    self._logs = function(self._data.reader(iterator))
                    if former != self._step_began_in and not self._sync_is_due():
                        # TensorFlow sets the sync up beside the next steps. Otherwise it would do
                        # so when the sync begins, and all workers would wait.
                        self._synchronizer.graph.prepare()
                trained = True
                # The sync is run here, before Keras calls the callbacks of the step. So on all
                # workers the callbacks see the sync after the same step.
                if self._sync_is_due():
                    self._synchronizer.act()
                return {} if self._logs is None else self._logs
            except _Regrouped:
                continue
            except (tf.errors.OutOfRangeError, StopIteration):
                if self._close_epoch():
                    raise
            except LOST as error:
                _log.info("tfpara: a sync has failed: %s", in_short(error))
                trained |= models.steps_seen > before
                self._rejoin.meet(failed=True)

    def check_step(self) -> None:
        """Restarts a step with other data if the members have changed while it was traced."""
        if self._progress.in_step and self._step_began_in != self._connection.form.number:
            raise _Regrouped

    def _sync_is_due(self) -> bool:
        """Returns whether the open block is complete, or a sync in flight is to be merged."""
        return bool(self._extended.models.synchronizers) and self._synchronizer.is_due()

    def _meet_if_needed(self) -> None:
        """Meets the others if all have agreed to it in a sync, or if a member is lost.

        A loss is not left to the next sync, which would fail: a spare worker would wait until then,
        and TensorFlow would prepare a sync twice if a step's graph has syncs.
        """
        if not self._extended.models.synchronizers:
            return
        if self._rejoin.last and "checkpoints" not in self._transfer.holders:
            self._connection.end(
                f"{self._rejoin.last}: training ends, and there is no Checkpoint callback."
            )
        self._connection.say_leaving()
        graph = self._synchronizer.graph
        request, alike = graph.agreed()
        # Members meet only if all of them have data left, or none has. While some members have data
        # left, a member without data waits for them in a sync, and would not come to a meeting.
        if request == Request.MEET and alike:
            graph.answered(Request.MEET)
            self._rejoin.meet(failed=False)
        elif self._connection.line.lost and self._extended.balance is None:
            self._rejoin.meet(failed=True)
        elif self._connection.line.wanted:
            graph.request(Request.MEET)

    def _close_epoch(self) -> bool:
        """Closes the epoch's last block; returns whether nothing is left to train of the epoch."""
        progress = self._progress
        if progress.epoch_is_closed:
            return True
        try:
            self._synchronizer.finish_block()
        except LOST as error:
            _log.info("tfpara: the last sync of an epoch has failed: %s", in_short(error))
            self._rejoin.meet(failed=True)
            return progress.epoch_is_closed
        progress.closed = progress.fit, progress.epoch
        return True


def _validate_once(model: keras.Model, given: Mapping[str, Any]) -> None:
    """Runs one step of an evaluation on the validation data of `fit`, unless that uses them up.

    Keras' passes over these data stay in the model, where `fit` finds them.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(given.get("validation_data"))
    if x is None or hasattr(x, "__next__"):
        return
    size = given.get("validation_batch_size") or given.get("batch_size")
    # If `fit` had to make these passes, at its first evaluation, all workers would wait: 0.3 s for
    # arrays.
    model._eval_epoch_iterator = trainer.TFEpochIterator(
        x=x,
        y=y,
        sample_weight=weights,
        batch_size=size,
        distribute_strategy=model.distribute_strategy,
        steps_per_execution=model.steps_per_execution,
        steps_per_epoch=given.get("validation_steps"),
        shuffle=False,
    )

    def stop(batch: int, logs: Any) -> None:
        del batch, logs
        model.stop_evaluating = True

    first = keras.callbacks.LambdaCallback(on_test_batch_end=stop)
    model.evaluate(x, y, verbose=0, callbacks=[first], _use_cached_eval_dataset=True)
    model._eval_epoch_iterator.reset()
