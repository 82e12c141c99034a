"""Keras' `fit` for the asynchronous strategy: epochs, callbacks, progress and errors."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara import fit_call
from tfpara.checks import too_many_left_out
from tfpara.clock import for_tensorboard
from tfpara.keras_model import flat_log
from tfpara.measuring import is_asked
from tfpara.parameter_server.chunks import Chunks, as_chunks, limited
from tfpara.parameter_server.errors import DivergedError, explained
from tfpara.parameter_server.models import Models
from tfpara.parameter_server.search import ChunkRateSearch
from tfpara.parameter_server.server import metric_variables
from tfpara.parameter_server.workers import Training
from tfpara.strategy import Strategy
from tfpara.typing import Data, Logs

_POLL_SECONDS = 0.2
# Longest wait for workers to finish their blocks after a signal has asked the run to end. This wait
# is short, because little time is left after a signal, and workers may be gone.
_LEAVING_SECONDS = 1.0


class Fit:
    """One call of `AsyncStrategy.fit`.

    Attributes:
        epoch: the epoch that is trained, from 0.
        order: the strategy's seed and the number of earlier fits. Together with the epoch, these
            numbers determine the order of the data and what random layers draw.
        within_epoch: whether an epoch has begun and is not over, even if workers are paused.
        chunks_done: number of chunks of the epoch that are completely in the model.
        at_poll: a function that is called several times a second while workers train.
    """

    def __init__(
        self,
        models: Models,
        model: keras.Model,
        chunks: int | None,
        search_rate: ChunkRateSearch | None,
        **data: Any,
    ) -> None:
        """Makes the graphs of the workers; `data` are the data arguments of `as_chunks`."""
        x, workers = data["x"], models.workers
        self.order = [models.seed, next(models.fits)]
        if chunks is None and not isinstance(x, Chunks):
            chunks = workers.num_workers * (1 if isinstance(x, tf.data.Dataset) else 4)
            minibatches = _minibatches(x, data["batch_size"])
            if minibatches:
                chunks = min(chunks, max(1, minibatches // models.sync_period))
        self.chunks = as_chunks(
            **data, count=chunks, order=self.order, sent=not workers.is_simulated
        )
        _check_period(models.sync_period, self.chunks)
        if steps := _limit("max_steps_per_epoch"):
            self.chunks = limited(self.chunks, steps)
        self._models, self._workers = models, workers
        self.model = model
        self.server, self.work, self._copy = models.for_fit(model, self.chunks.element_spec)
        self.server.divide(self.chunks.count)
        choose_rate = None
        if search_rate is not None:
            choose_rate = search_rate.function(self.server, self.work, self.chunks)
        of_run = (models.sync_period, choose_rate, self.order, models.seed)
        self._executor = workers.executor(Training(self.server, self.work, self.chunks, *of_run))
        # How many of this epoch's minibatches were trained when the batch hooks were last called.
        self._seen = 0
        self._resumed_epoch: int | None = None
        self.epoch = self._epochs = self.chunks_done = 0
        self.within_epoch = False
        self.at_poll: Callable[[], None] = lambda: None

    def run(
        self,
        epochs: int,
        first: int,
        verbose: str | int,
        callbacks: Any,
        validation: tuple[Data, int | None, int | Collection[int]],
    ) -> keras.callbacks.History:
        """Trains the epochs `first` … `epochs` − 1, or continues from a restored checkpoint.

        The arguments and the history are those of Keras' `fit`. `first` is `initial_epoch`, and
        `validation` is (validation_data, validation_batch_size, validation_freq).
        """
        if is_asked():
            raise RuntimeError(
                "tfpara-plan --measure is for PeriodicSyncStrategy: an AsyncStrategy has no syncs."
            )
        epochs = min(epochs, _limit("max_epochs") or epochs)
        model = self.model
        model.stop_training = False
        validation_data, _, every = validation
        _check_validation(validation_data, every)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks = fit_call.arranged(callbacks.callbacks)
        else:
            verbose = 1 if verbose == "auto" else verbose
            callbacks = keras.callbacks.CallbackList(
                fit_call.arranged(for_tensorboard(keras.tree.flatten(callbacks or []))),
                add_history=True,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=self.chunks.num_minibatches,
                model=model,
            )
        fit_call.keep_memories(callbacks.callbacks, Strategy.of(model))
        for callback in callbacks.callbacks:
            self._prepare(callback)
        self.epoch, self._epochs = first, epochs
        logs: Logs = {}
        callbacks.on_train_begin()
        self._write()
        while not self.is_over:
            logs = self._run_epoch(callbacks, *validation)
        callbacks.on_train_end(logs)
        self._write()
        return model.history

    def _run_epoch(self, callbacks: keras.callbacks.CallbackList, *validation: Any) -> Logs:
        model = self.model
        self.server.open_epoch(self.epoch, anew=self._resumed_epoch != self.epoch)
        self._seen = self.server.trained()
        model.reset_metrics()
        callbacks.on_epoch_begin(self.epoch)
        self._write()
        self.within_epoch = True
        self._train_epoch(callbacks)
        if not model.stop_training:
            self.chunks.check(self.epoch, self.server.first.progress.done.numpy().tolist())
        # While `within_epoch` is true, `_write` sends nothing: it only raises an error if weights
        # of the chief's model were set during the epoch.
        self._write()
        self.within_epoch = False
        self._copy.read()
        self._read_rate()
        left_out = self._check_left_out(is_over=True)
        logs = self._logs() | self._validated(callbacks, *validation)
        if self._models.skips:
            logs["left_out"] = float(left_out)
        if left_out:
            print(
                f"tfpara: epoch {self.epoch + 1} left out {left_out} minibatches whose loss or "
                "gradient had NaN or Inf; the workers have named them",
                file=sys.stderr,
                flush=True,
            )
        self.epoch += 1
        callbacks.on_epoch_end(self.epoch - 1, logs)
        self._write()
        return logs

    def resume(self, epoch: int, within: bool, finished: bool, order: Sequence[int]) -> None:
        """Continues from a restored checkpoint; called in `on_train_begin`.

        Args:
            epoch: the epoch to continue with.
            within: whether the checkpoint is from the middle of that epoch.
            finished: whether the run had already been stopped (`stop_training`).
            order: the attribute `order` at the time of the checkpoint.
        """
        self.epoch = epoch
        self.order[:] = order
        self.server.generation += 1
        self._resumed_epoch = epoch if within else None
        # If the restored rates of the chief and the servers differ, the cause is a ChunkRateSearch,
        # which within an epoch changes the servers' rate only. So the chief's rate counts as sent,
        # and `follow_rate` does not overwrite the servers' rate.
        self.server.told_rate = self._chiefs_rate()
        self.work.read_frozen()
        self._copy.read()
        self.model.stop_training = finished

    def follow_rate(self) -> None:
        """Sends the rate of the model's optimizer to the servers if a callback has changed it."""
        rate = self._chiefs_rate()
        if rate is not None and rate != self.server.told_rate:
            self.server.learning_rate = self.server.told_rate = rate

    def _read_rate(self) -> None:
        """Gives the chief's optimizer the rate that a ChunkRateSearch has chosen, if there is one.

        So the epoch's log has this rate, a callback that lowers the rate starts from it, and a rate
        that is set later counts as a change, even if training began with the same one.
        """
        rate = self.server.learning_rate
        if rate is not None and rate != self.server.told_rate:
            self.model.optimizer.learning_rate = rate
            self.server.told_rate = self._chiefs_rate()

    def give_up(self, longest_seconds: float) -> None:
        """After `run` has failed: stops the workers, and copies the global weights to the chief."""
        with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the cluster may be gone
            # `_halt` waits for the workers, so that no push of this fit arrives in the next fit.
            self._halt(longest_seconds)
        with contextlib.suppress(tf.errors.OpError):
            self._copy.read()

    @property
    def is_over(self) -> bool:
        """Whether all epochs are trained, or training was stopped."""
        return self.epoch >= self._epochs or bool(self.model.stop_training)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the workers inside the context, so that the servers' state does not change."""
        self._halt()
        yield
        self.server.open_epoch(self.epoch, anew=False)
        self._submit()

    def _halt(self, longest_seconds: float = float("inf")) -> None:
        """Tells the workers to stop, and waits at most `longest_seconds` until they have."""
        self.server.counters.halted.assign(True)
        self._executor.halt()
        begun = time.monotonic()
        while not self._wait():
            asked = self._workers.state.asked_to_end is not None
            if time.monotonic() - begun > (_LEAVING_SECONDS if asked else longest_seconds):
                break
        self.server.close()

    def _train_epoch(self, callbacks: keras.callbacks.CallbackList) -> None:
        self.follow_rate()
        self._submit()
        first = True
        while True:
            done = self._wait()
            self.chunks_done = self.chunks.count - len(self._left())
            if self._tell(callbacks) and first:
                # `_write` raises an error if a batch hook has set weights. Without this call, the
                # error would come only at the end of the epoch.
                self._write()
                first = False
            self.follow_rate()
            # If `stop_training` is set, a callback has ended the training, and with it this epoch.
            if self.model.stop_training:
                if not done:
                    self._halt()
                return
            self.at_poll()
            self._check_left_out(is_over=False)
            if done and (self.model.stop_training or not self._left()):
                return
            if done:
                self._submit()  # the chunks that are not finished

    def _check_left_out(self, *, is_over: bool) -> int:
        """Returns how many minibatches the epoch left out; raises DivergedError for too many."""
        if not self._models.skips:
            return 0
        left_out, share = int(self.server.counters.left_out), self._models.nonfinite_share
        of_epoch = self.server.trained()
        if too_many_left_out(left_out, of_epoch, share, is_over):
            raise DivergedError(
                f"{left_out} of {of_epoch} minibatches of this epoch had NaN or Inf in the loss or "
                f"a gradient and were left out, more than nonfinite_share={share:g} allows; the "
                "workers have named them. Lower the learning rate or clip the gradients, and look "
                "at the data."
            )
        return left_out

    def _write(self) -> None:
        """Sends weights that were set in the chief's model to the servers."""
        self._copy.write(self.within_epoch, within_fit=True)

    def _prepare(self, callback: keras.callbacks.Callback) -> None:
        """If a callback saves the model within epochs, makes it save the servers' weights.

        Raises ValueError if the callback cannot be used with parameter servers.
        """
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "BackupAndRestore keeps the weights of the chief's model, and neither the "
                "optimizer and averages on the servers nor the position in the data: a run would "
                "not go on where it was. Use "
                f"tfpara.AsyncCheckpoint({os.fspath(callback.backup_dir)!r}) in its place."
            )
        if not isinstance(getattr(callback, "save_freq", None), int):
            return
        hook = callback.on_train_batch_end

        def on_train_batch_end(batch: int, logs: Logs | None = None) -> None:
            self._write()
            with self._copy.showing("global"):
                hook(batch, logs)

        callback.on_train_batch_end = on_train_batch_end
        fit_call.at_end(lambda: setattr(callback, "on_train_batch_end", hook))

    def _left(self) -> list[int]:
        """Returns the chunks of the epoch that are not finished."""
        return np.flatnonzero(~self.server.counters.finished.numpy()).tolist()

    def _submit(self) -> None:
        self._executor.submit(self.epoch, self._left())

    def _wait(self) -> bool:
        try:
            done = bool(self._executor.wait(_POLL_SECONDS))
            self._models.check()
            return done
        except tf.errors.OpError as error:
            raise explained(error, self._models.check) from error

    def _tell(self, callbacks: keras.callbacks.CallbackList) -> bool:
        """Calls the batch hooks for the newest minibatch; without a new push, returns False."""
        seen = self.server.trained()
        if seen <= self._seen:
            return False
        callbacks.on_train_batch_begin(seen - 1)
        callbacks.on_train_batch_end(seen - 1, self._logs())
        self._seen = seen
        return True

    def _chiefs_rate(self) -> float | None:
        """Returns the rate of the chief's optimizer; None if the servers' rate is a schedule."""
        if self.server.learning_rate is None:
            return None
        return float(self.model.optimizer.learning_rate)

    def _logs(self) -> Logs:
        for variable, value in zip(metric_variables(self.model), self.server.metrics, strict=True):
            variable.assign(tf.identity(value))
        results = flat_log(self.model.get_metrics_result())
        # A metric's result may be an array, which stays an array.
        return {k: float(v) if np.ndim(v) == 0 else v for k, v in results.items()}

    def _validated(
        self,
        callbacks: keras.callbacks.CallbackList,
        data: Data,
        batch_size: int | None,
        every: int | Collection[int],
    ) -> Logs:
        number = self.epoch + 1
        due = number % every == 0 if isinstance(every, int) else number in every
        if data is None or not due:
            return {}
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        results = self.model.evaluate(
            x,
            y,
            batch_size=batch_size,
            verbose=0,
            sample_weight=sample_weight,
            callbacks=callbacks,
            return_dict=True,
        )
        return {f"val_{name}": value for name, value in results.items()}


def _limit(name: str) -> int | None:
    """Returns Keras' limit of this name, which KERAS_MAX_… sets for a quick try of a script."""
    # Older versions of Keras lack the limits.
    limit: int | None = getattr(keras.config, name, lambda: None)()
    if limit:
        warnings.warn(f"Keras' limit: {name}={limit}", stacklevel=4)
    return limit


def _minibatches(x: Data, batch_size: int | None) -> int:
    """Returns the number of minibatches of an epoch; 0 if it is not known."""
    if isinstance(x, tf.data.Dataset):
        return max(0, int(x.cardinality()))
    first: Any = next((each for each in tf.nest.flatten(x) if each is not None), None)
    return -(-len(first) // (batch_size or 32)) if hasattr(first, "__len__") else 0


def _check_validation(data: Data, every: object) -> None:
    if hasattr(data, "__next__"):
        raise TypeError(
            f"validation_data is a {type(data).__name__}, which gives its batches once, and fit "
            "needs them after each epoch. Give arrays, a tf.data.Dataset or a "
            "keras.utils.PyDataset."
        )
    if isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "the dataset of validation_data is infinite, and an evaluation must end. Give "
            "dataset.take(minibatches)."
        )
    one = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not one and not isinstance(every, list | tuple | set):
        raise ValueError(
            f"validation_freq={every!r} must be a whole number of epochs, at least 1, or a list of "
            "the epochs, counted from 1, after which to validate."
        )


def _check_period(period: int, chunks: Chunks) -> None:
    if chunks.num_minibatches is None:
        return
    smallest = chunks.num_minibatches // chunks.count
    if period > max(1, smallest):
        fewer = f", or fewer than {chunks.count} chunks" if chunks.count > 1 else ""
        raise ValueError(
            f"sync_period={period} exceeds the {smallest} minibatches of a chunk, so no push would "
            f"have so many. Give a shorter period{fewer}."
        )
