"""The strategy for asynchronous training with parameter servers: the public interface."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpara import fit_call, program
from tfpara.algorithms import ASYNC_RULES, AsyncBMUF, AsyncEASGD, AveragedASGD, Rule
from tfpara.algorithms.asgd import AsyncAverage, AsyncRule
from tfpara.checks import (
    check_libraries,
    checked_averages,
    checked_nonfinite,
    checked_period,
)
from tfpara.cluster import quiet
from tfpara.contexts import attributes
from tfpara.parameter_server import processes
from tfpara.parameter_server.counters import Pushed
from tfpara.parameter_server.errors import lost
from tfpara.parameter_server.fit import Fit
from tfpara.parameter_server.models import Models
from tfpara.parameter_server.search import ChunkRateSearch
from tfpara.parameter_server.workers import Workers
from tfpara.steps import without_tuner
from tfpara.strategy import Strategy
from tfpara.typing import Data, Nest
from tfpara.whole_number import checked_seconds, checked_whole


class AsyncStatistics(NamedTuple):
    """Counts of the pushes so far.

    Attributes:
        pushes: number of pushes, which are updates of the global model.
        samples: number of samples in these pushes.
        staleness: int64 [256], number of pushes with staleness k = 0, 1, …; the last element also
            counts the pushes with a higher staleness.
        by_worker: int64 [workers], number of pushes of each worker since this process started.
    """

    pushes: int
    samples: int
    staleness: np.ndarray
    by_worker: np.ndarray

    @property
    def syncs(self) -> int:
        """The number of pushes, for code that reads `syncs` under any strategy."""
        return self.pushes

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of all pushes; 0 before the first. 256 and more count as 255."""
        total = self.staleness.sum()
        return float((self.staleness * range(len(self.staleness))).sum() / max(1, total))

    def of_epoch(
        self, begin: AsyncStatistics, first: AsyncStatistics, seconds: float, times: float
    ) -> dict[str, float]:
        """Returns what TensorBoard shows for an epoch; `self` has the statistics at its end.

        `begin` has those at its start, and `first` those at the first batch hook, before which
        workers have pushed already; since then `seconds` have passed.
        """
        del times  # `samples` already counts the samples of all workers
        epoch = self._replace(staleness=self.staleness - begin.staleness)
        return {
            "samples_per_second": (self.samples - first.samples) / seconds,
            "pushes": float(epoch.staleness.sum()),
            "staleness": epoch.mean_staleness,
            "staleness_max": float(np.flatnonzero(self.staleness).max(initial=0)),
        }


class AsyncStrategy(tf.distribute.OneDeviceStrategy, Strategy):
    """Asynchronous training: workers pull the model from servers, and push without waiting.

    It is built on `tf.distribute.ParameterServerStrategy` and `ClusterCoordinator`. The same script
    runs in every process of TF_CONFIG (`tfpara-launch --ps 1 -n 2 -- script.py`). The constructor
    returns in the chief only. Workers and parameter servers stay in the constructor, run the graphs
    that the chief sends them, and exit when the chief is done.

    The chief has a copy of the model, for Keras' `evaluate`, `predict` and `export`. To train it,
    call the strategy's `fit`. The workers compute the model's loss (`compute_loss`) and metrics.
    The processes exchange weights, gradients, and changes of moving statistics and metrics. Each
    worker process uses one device: its first GPU, or the CPU.

    Args:
        rule: `tfpara.ASGD(...)`, `tfpara.AveragedASGD(...)`, `tfpara.Downpour(...)`,
            `tfpara.AsyncBMUF(...)` or `tfpara.AsyncEASGD(...)`.
        sync_period: τ ≥ 1, minibatches between a worker's pull and its push.
        averages: averages of the global model by name, such as `{"ema": tfpara.EMA(0.999)}`. They
            are updated after every push, and do not influence training. Besides `EMA` and `MA`,
            an average may be `tfpara.RunningThenMean(...)`. If its name is "average", the callback
            `tfpara.StartMean` turns it from a running average into a mean.
        seed: seed ≥ 0 for the order of arrays and shuffled datasets, and for simulated workers.
        record: whether the first parameter server records each push, for the method `record`.
        nonfinite: "raise": a push that would make a weight NaN or Inf ends the run. "skip": a
            minibatch whose loss or gradient has NaN or Inf changes nothing.
        nonfinite_share: with "skip", the run ends if more than this share, in [0, 1], of an epoch's
            minibatches is left out. The share is checked at the end of the epoch, and from the
            tenth minibatch that is left out also within the epoch.
        sparse_embeddings: whether, of `Embedding` tables of 4 MB or more, only the rows that a
            push's minibatches use are pulled, pushed and changed. False: whole tables.
        timeout_seconds: silence after which a worker or parameter server counts as lost; also
            how long training waits for a worker to come back when all workers are lost.
        startup_timeout_seconds: longest wait for all processes to start.

    Raises:
        TypeError: `rule` is not an asynchronous rule.
        ValueError: a value outside its range.
        tfpara.cluster.ClusterError: TF_CONFIG is wrong, or has no parameter server or chief.
        tfpara.StartupError: processes did not connect, or have another TF_CONFIG.
    """

    def __init__(
        self,
        rule: AsyncRule,
        *,
        sync_period: int = 1,
        averages: Mapping[str, AsyncAverage] | None = None,
        seed: int = 0,
        record: bool = False,
        nonfinite: str = "raise",
        nonfinite_share: float = 0.01,
        sparse_embeddings: bool = True,
        timeout_seconds: float = 60.0,
        startup_timeout_seconds: float = 300.0,
        _processes: Workers | None = None,
    ) -> None:
        """Joins the other processes; returns in the chief only. Arguments as above.

        `_processes` replaces the processes of TF_CONFIG by simulated ones.
        """
        program.explain_errors()
        check_libraries()
        quiet.install()
        checked_rule(rule)
        sync_period = checked_period(sync_period)
        kept = checked_averages(averages, asynchronous=True)
        if isinstance(rule, AveragedASGD):
            if "average" in kept:
                raise ValueError("averages has 'average', which is the name of AveragedASGD's own.")
            kept["average"] = rule.average
        self.seed = checked_whole("seed", seed, at_least=0)
        checked_nonfinite(nonfinite, nonfinite_share)
        checked_seconds("timeout_seconds", timeout_seconds)
        checked_seconds("startup_timeout_seconds", startup_timeout_seconds)
        self._processes = _processes or processes.join(timeout_seconds, startup_timeout_seconds)
        self._asked_rule = rule
        if isinstance(rule, AsyncEASGD | AsyncBMUF):
            rule = rule.resolve(self._processes.num_workers)
        super().__init__(self._processes.chief_device)
        self.timeout_seconds = timeout_seconds
        self._models = Models(
            self._processes,
            rule,
            kept,
            sync_period,
            self.seed,
            record,
            skips=nonfinite == "skip",
            nonfinite_share=nonfinite_share,
            sparse_embeddings=sparse_embeddings,
        )
        self.running: Fit | None = None

    rule = property(lambda self: self._models.rule, doc="The rule, with defaults filled in.")

    @property
    def rule_of_a_run(self) -> AsyncRule:
        """The rule without the number of workers, which may change, unless the user gave it."""
        asked, rule = self._asked_rule, self._models.rule
        if not isinstance(asked, AsyncBMUF) or not isinstance(rule, AsyncBMUF):
            return rule
        return dataclasses.replace(rule, workers=asked.workers)

    sync_period = property(lambda self: self._models.sync_period, doc="τ, minibatches of a push.")
    averages = property(lambda self: dict(self._models.averages), doc="Averages, by name.")
    num_workers = property(lambda self: self._processes.num_workers, doc="Worker processes.")
    is_simulated = property(
        lambda self: self._processes.is_simulated, doc="Whether this process has all workers."
    )
    weight_names = property(
        lambda self: ["global", *self._models.averages], doc="What `weights` takes."
    )

    def __repr__(self) -> str:
        workers = f"{self.num_workers} worker{'s' if self.num_workers != 1 else ''}"
        averages = f", averages={self.averages}" if self.averages else ""
        return f"AsyncStrategy of {workers}: {self.rule}, sync_period={self.sync_period}{averages}"

    def run(
        self, fn: Callable[..., Nest], args: Nest = (), kwargs: Nest = None, options: object = None
    ) -> Nest:
        """Runs `fn` on the chief; refuses a Keras training step."""
        if isinstance(getattr(fn, "__self__", None), keras.Model) and fn.__name__ == "train_step":
            raise RuntimeError(
                "model.fit or train_on_batch would train on the chief alone. Call strategy.fit("
                "model, ...), which takes the arguments of model.fit except steps_per_epoch, "
                "validation_steps and validation_split."
            )
        return super().run(fn, args, kwargs, options)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> tf.data.Dataset:
        """Returns `dataset` for the chief, with tf.data's autotuning off: see `without_tuner`."""
        # With autotuning, TensorFlow would wait for the tuner's thread when the process ends. This
        # could take up to a minute.
        return super().experimental_distribute_dataset(without_tuner(dataset), options)

    def fit(
        self,
        model: keras.Model,
        x: Data = None,
        y: Data = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.CallbackList | None = None,
        validation_data: Data = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Data = None,
        initial_epoch: int = 0,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        chunks: int | None = None,
        search_rate: ChunkRateSearch | None = None,
    ) -> keras.callbacks.History:
        """Trains the model on the workers; callbacks and history are as in Keras' `fit`.

        So are the arguments that are not explained below. Keras' `steps_per_epoch`,
        `validation_steps` and `validation_split` are not among the arguments.

        An epoch is divided into chunks. A chunk is trained by one worker at a time. If the worker
        dies, another worker continues with the chunk's first minibatch that is not in the model
        yet. So every minibatch is applied exactly once on every parameter server.

        The workers' optimizers (under all rules but ASGD and AveragedASGD), the workers' models
        (under AsyncEASGD) and the servers' optimizer are kept from one `fit` to the next. After
        `fit` the model has the global weights.

        The progress bar and the callbacks' batch hooks are updated several times a second, not at
        each push; but in a simulation at each push.

        Args:
            model: built and compiled in the scope.
            x: arrays, or a `tf.data.Dataset` that gives minibatches and contains no Python
                functions, or `tfpara.Chunks`. Arrays, and what the dataset shuffles, have a new
                order in every epoch.
            y: the targets, if `x` is arrays.
            batch_size: rows of a worker's minibatch, if `x` is arrays. None: 32.
            shuffle: whether arrays have a new order in every epoch.
            chunks: number of chunks of an epoch, for arrays and datasets. None: four times the
                number of workers for arrays, and the number of workers for a dataset, because each
                chunk reads the whole dataset; but fewer if a chunk would have fewer than
                `sync_period` minibatches.
            search_rate: a `tfpara.ChunkRateSearch`, to choose the learning rate of each chunk.

        Returns:
            The history: metrics of each epoch.

        Raises:
            ValueError: an argument that is not valid; a model that is not built or compiled, or
                has a training step of its own; `sync_period` longer than a chunk; a call inside of
                the strategy's scope.
            tfpara.DivergedError: a push would have made a weight infinite or NaN.
            tfpara.ParameterServerError: a parameter server is lost, or all workers are.
        """
        if tf.distribute.has_strategy():
            raise ValueError(
                "strategy.fit was called inside of `with strategy.scope():`. Make and compile the "
                "model there, and call fit after the with statement."
            )
        running = Fit(
            self._models,
            model,
            chunks,
            search_rate,
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        validation = (validation_data, validation_batch_size or batch_size, validation_freq)
        outer, self.running = self.running, running  # `outer`: a callback of it calls this `fit`
        try:
            with fit_call.under_way():
                return running.run(epochs, initial_epoch, verbose, callbacks, validation)
        except BaseException as error:
            failure = lost(error, self._models.check)
            running.give_up(self.timeout_seconds)
            if failure is not None:
                raise failure from error
            raise
        finally:
            self.running = outer

    def predict(self, model: keras.Model, *args: object, **kwargs: object) -> Nest:
        """Raises RuntimeError, because workers only train; the chief has `model.predict`."""
        raise RuntimeError(
            "strategy.predict divides rows among the workers of a PeriodicSyncStrategy; those of "
            "an AsyncStrategy only train. Call model.predict(...) on the chief, within "
            "strategy.weights(model, ...) for an average."
        )

    @contextlib.contextmanager
    def weights(self, model: keras.Model, which: str) -> Iterator[None]:
        """A context in which the chief's model has the "global" weights or those of an average.

        Weights that a script has set in the chief's model are sent to the servers first (`write`).

        Args:
            model: a model made in the strategy's scope, or a part of one that was trained.
            which: "global" or a name among `averages`.

        Raises:
            ValueError: the name is unknown; the message lists the known ones. Or weights were set
                inside the context.
        """
        known = self.weight_names
        if which not in known:
            raise ValueError(f"which={which!r} is unknown. There are: {', '.join(known)}.")
        whole = self._models.whole(model)
        if whole is None:  # not trained yet: all averages equal the model
            yield
            return
        copy = self._models[whole].copy
        if copy.shown is None:
            self.write(whole)
        with copy.showing(which):
            yield

    def has_fitted(self, model: keras.Model) -> bool:
        """Returns whether `fit` was called with this model, or with one that contains it."""
        return self._models.whole(model) is not None

    @contextlib.contextmanager
    def at_one_moment(
        self, model: keras.Model, names: Sequence[str]
    ) -> Iterator[Callable[[], int]]:
        """A context in which all calls of `weights` show the models of the same moment.

        Workers keep training meanwhile. With several parameter servers, each server has a moment of
        its own. Yields a function that returns the number of pushes on the first server before its
        moment. `names` are the models that `weights` will show.
        """
        trained = self._models.get(model)
        if trained is None:
            yield lambda: 0
            return
        moment = trained.server.weights_at_once(names)
        with attributes(trained.copy, moment=moment):
            yield lambda: moment.pushes

    def read(self, model: keras.Model) -> None:
        """Copies weights and moving statistics from the servers into a trained model."""
        self._models.of(model).copy.read()

    def write(self, model: keras.Model) -> None:
        """Sends the weights that were set in the chief's model to the servers.

        `fit` calls this method when it starts, and after on_train_begin, on_epoch_begin,
        on_epoch_end and on_train_end. So `model.set_weights` and the like work in these callbacks,
        and between two fits. Call `write` yourself only if the servers must have the weights at
        once.

        The weights become those of the global model. Averages restart from them, and so do the
        workers' local optimizers and local models, and the momentum of AsyncBMUF. The slots of
        an optimizer on the servers stay. Nothing happens if no weights were set, or if the model
        has not been trained yet.

        Args:
            model: a model made in the strategy's scope.

        Raises:
            ValueError: weights were set in the middle of an epoch, where they would be lost; or
                frozen weights were set during a `fit`; or the model has other weights now, inside
                the context of `weights`.
        """
        trained = self._models.get(model)
        if trained is not None:
            running = self.running if self.running and self.running.model is model else None
            within_epoch = running is not None and running.within_epoch
            trained.copy.write(within_epoch, within_fit=running is not None)

    def forget(self, model: keras.Model) -> None:
        """Deletes all that the strategy and the servers keep of a model that `fit` has trained.

        This frees the memory of its global model, slots and averages. The chief's model keeps its
        weights, and may be trained again like a new one. Before you call `forget`, export the
        averages that you need (`tfpara.export`). Nothing happens to a model that was not trained.

        Args:
            model: a model made in the strategy's scope.

        Raises:
            ValueError: inside `fit` or `strategy.weights(...)`.
        """
        trained = self._models.get(model)
        shown = trained is not None and trained.copy.shown is not None
        if self.running is not None or shown:
            where = "inside strategy.weights(...)" if shown else "in a callback of fit"
            raise ValueError(f"strategy.forget() {where}: a model is in use. Call it afterwards.")
        self._models.pop(model, None)

    def snapshot(self, model: keras.Model) -> Callable[[], None]:
        """Keeps the state of the global model, and returns a function that restores it.

        Args:
            model: a model that `fit` was called with.

        Returns:
            A function that restores the weights and moving statistics on the servers and in the
            chief's model, and on the servers also the averages, and the optimizer's slots and
            number of steps. It does not restore the learning rate. The workers' local models and
            optimizers restart.

        Raises:
            ValueError: it is the middle of an epoch, or the model has not been trained yet. The
                returned function also raises ValueError in the middle of an epoch.
        """
        server, _, copy = self._models.of(model)
        self._check_between_epochs()
        self.write(model)
        restore = server.snapshot()

        def go_back() -> None:
            self._check_between_epochs()
            restore()
            copy.read()

        return go_back

    def _check_between_epochs(self) -> None:
        if self.running is not None and self.running.within_epoch:
            raise ValueError(
                "a snapshot is of the whole model, which workers change in the middle of an epoch. "
                "Take it, and go back to it, in on_epoch_begin, on_epoch_end or between two fits."
            )

    def statistics(self, model: keras.Model | None = None) -> AsyncStatistics:
        """Returns the numbers of pushes so far, by staleness and by worker.

        Args:
            model: a model that `fit` was called with. None: of all such models, the one whose
                first `fit` began last.

        Raises:
            ValueError: the model has not been trained yet.
        """
        server = self._models.of(model).server
        counters = server.counters
        return AsyncStatistics(
            pushes=int(server.first.version),
            samples=int(counters.samples),
            staleness=counters.histogram.numpy(),
            by_worker=counters.by_worker.numpy(),
        )

    statistics_of = statistics

    def record(self, model: keras.Model | None = None) -> list[Pushed]:
        """Returns the pushes since this process started, in their order.

        `tfpara.simulate_async(order=...)` repeats the order.

        Args:
            model: as for `statistics`.

        Raises:
            ValueError: the strategy was made without `record=True`; or the model has not been
                trained yet.
        """
        return self._models.of(model).server.counters.lines()

    def start_mean(self, model: keras.Model) -> None:
        """Makes the average named "average", a `RunningThenMean`, continue as a mean."""
        self._models.of(model).server.start_mean("average")

    def mean_started(self, model: keras.Model) -> bool:
        """Returns whether the average named "average" has become a mean.

        Setting weights (`write`) restarts the average as a running average.
        """
        return self._models.of(model).server.mean_started("average")

    @property
    def asked_to_end(self) -> str | None:
        """A sentence if the chief or a parameter server was asked to end; else None."""
        return self._processes.state.asked_to_end

    def ask_to_end(self, sentence: str) -> None:
        """Notes that the chief was asked to end; it then waits at most 1 s for busy workers."""
        self._processes.state.asked_to_end = sentence

    def answer_leaving(self, exit_code: int | None) -> None:
        """Sets the exit code of workers that a signal ends while the run continues.

        As long as SIGTERM in the chief leads to a checkpoint, this is the code that asks for a
        restart. None: 128 plus the number of the signal.
        """
        self._processes.state.restart_code = exit_code

    def end_with(self, exit_code: int, sentence: str) -> None:
        """Sets the exit code and the last sentence of the processes that end after this one."""
        self._processes.end_with(exit_code, sentence)


def checked_rule(rule: object) -> AsyncRule:
    """Returns the rule if it is an asynchronous one; else raises TypeError."""
    kind = rule if isinstance(rule, type) else type(rule)
    if issubclass(kind, Rule):
        raise TypeError(
            f"{kind.__name__} is a synchronous rule: give it to "
            "tfpara.PeriodicSyncStrategy. AsyncStrategy takes ASGD, AveragedASGD, Downpour, "
            "AsyncBMUF or AsyncEASGD."
        )
    if not isinstance(rule, ASYNC_RULES):
        raise TypeError(
            "rule must be tfpara.ASGD(...), AveragedASGD(...), Downpour(...), AsyncBMUF(...) or "
            f"AsyncEASGD(...), not {rule!r}."
        )
    return rule
