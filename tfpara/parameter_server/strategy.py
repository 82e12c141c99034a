"""Asynchronous training with parameter servers, as users see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from tfpara import fit_call
from tfpara.algorithms import ASYNC_RULES, AsyncEASGD, AveragedASGD, Rule
from tfpara.algorithms.asgd import AsyncAverage, AsyncRule
from tfpara.checks import checked_averages, checked_period, checked_seconds
from tfpara.parameter_server import processes
from tfpara.parameter_server.books import Pushed
from tfpara.parameter_server.chief_model import ChiefModel
from tfpara.parameter_server.errors import lost
from tfpara.parameter_server.fit import Fit
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.work import Work
from tfpara.strategy import StateHolder, Strategy
from tfpara.typing import Data, Nest
from tfpara.whole_number import checked_whole

if TYPE_CHECKING:
    import numpy as np

    from tfpara.parameter_server.chunks import Chunks
    from tfpara.parameter_server.cluster_run import Cluster
    from tfpara.parameter_server.search import ChunkRateSearch
    from tfpara.parameter_server.simulation import Simulation
    from tfpara.parameter_server.work import ChooseRate


class AsyncStatistics(NamedTuple):
    """Counts of what has been pushed so far.

    Attributes:
        pushes: updates of the global model.
        samples: that these pushes had.
        staleness: int64 [256], pushes by staleness k; the last counts the staler ones too.
        by_worker: int64 [workers], pushes of each worker in this process's lifetime.
    """

    pushes: int
    samples: int
    staleness: np.ndarray
    by_worker: np.ndarray

    @property
    def syncs(self) -> int:
        """The pushes: what scores within a run are listed by."""
        return self.pushes

    @property
    def mean_staleness(self) -> float:
        """Over all pushes; 0 before the first."""
        total = self.staleness.sum()
        return float((self.staleness * range(len(self.staleness))).sum() / max(1, total))


class AsyncStrategy(tf.distribute.OneDeviceStrategy, Strategy):
    """Asynchronous training: workers pull the model from servers, and push without waiting.

    Built on `tf.distribute.ParameterServerStrategy` and `ClusterCoordinator`. The same script runs
    in every process of TF_CONFIG (`tfpara-launch --ps 1 -n 2 -- script.py`): in the chief the
    constructor returns; workers and parameter servers stay inside it, do what the chief sends them,
    and exit when the chief is done.

    The model lives in the chief, where Keras' `evaluate`, `predict` and `export` work on it; to
    train it call the strategy's `fit`. The workers compute its loss (`compute_loss`) and metrics;
    what travels is weights, gradients, changes of moving statistics and of metrics. Each worker
    process uses one device: its first GPU, or the CPU.

    Args:
        rule: `tfpara.ASGD(...)`, `tfpara.AveragedASGD(...)`, `tfpara.Downpour(...)` or
            `tfpara.AsyncEASGD(...)`.
        sync_period: τ ≥ 1, minibatches between a worker's pull and its push.
        averages: averages of the global model by name, such as `{"ema": tfpara.EMA(0.999)}`, which
            take in the model after every push; they never touch training. Beside EMA and MA there
            is `tfpara.RunningThenMean(...)`; under the name "average" `tfpara.StartMean` starts its
            mean.
        seed: ≥ 0, of the order of arrays and of shuffled datasets, and of simulated workers.
        record: whether the first parameter server keeps a line for each push, for `record`.
        timeout_seconds: a parameter server that is silent for so long is given up.
        startup_timeout_seconds: longest wait for all processes to appear.

    Raises:
        TypeError: `rule` is not an asynchronous rule.
        ValueError: a value outside its range.
        tfpara.cluster.ClusterError: TF_CONFIG is wrong, or has no parameter server or chief.
        tfpara.StartupError: processes that did not come, or see another cluster.
    """

    def __init__(
        self,
        rule: AsyncRule,
        *,
        sync_period: int = 1,
        averages: Mapping[str, AsyncAverage] | None = None,
        seed: int = 0,
        record: bool = False,
        timeout_seconds: float = 60.0,
        startup_timeout_seconds: float = 300.0,
        _processes: Any = None,
    ) -> None:
        """Joins the other processes; returns in the chief alone. Arguments as above."""
        checked_rule(rule)
        sync_period = checked_period(sync_period)
        self._averages = checked_averages(averages, asynchronous=True)
        if isinstance(rule, AveragedASGD):
            if "average" in self._averages:
                raise ValueError("averages has 'average', which is the name of AveragedASGD's own.")
            self._averages["average"] = rule.average
        seed = checked_whole("seed", seed, at_least=0)
        checked_seconds("timeout_seconds", timeout_seconds)
        checked_seconds("startup_timeout_seconds", startup_timeout_seconds)
        self._processes = _processes or processes.join(timeout_seconds, startup_timeout_seconds)
        if isinstance(rule, AsyncEASGD):
            rule = rule.resolve(self._processes.num_workers)
        super().__init__(self._processes.chief_device)
        self._rule = rule
        self._period = sync_period
        self.timeout_seconds = timeout_seconds
        self.seed = seed
        self._record = record
        self._states: dict[str, StateHolder] = {}
        self._servers: dict[keras.Model, tuple[Server, Work]] = {}
        self._copies: dict[keras.Model, ChiefModel] = {}
        self._fits = 0
        self.running: Fit | None = None

    rule = property(lambda self: self._rule, doc="The rule, with defaults filled in.")
    sync_period = property(lambda self: self._period, doc="τ, minibatches of a push.")
    averages = property(lambda self: dict(self._averages), doc="Averages, by name.")
    num_workers = property(lambda self: self._processes.num_workers, doc="Worker processes.")
    weight_names = property(lambda self: ["global", *self._averages], doc="What `weights` takes.")

    def __repr__(self) -> str:
        workers = f"{self.num_workers} worker{'s' * (self.num_workers != 1)}"
        averages = f", averages={self.averages}" if self.averages else ""
        return f"AsyncStrategy of {workers}: {self.rule}, sync_period={self.sync_period}{averages}"

    def run(
        self, fn: Callable[..., Nest], args: Nest = (), kwargs: Nest = None, options: object = None
    ) -> Nest:
        """Runs `fn` on the chief; a Keras training step is refused."""
        if isinstance(getattr(fn, "__self__", None), keras.Model) and fn.__name__ == "train_step":
            raise RuntimeError(
                "model.fit would train on the chief alone. Call strategy.fit(model, ...), which "
                "takes the same arguments."
            )
        return super().run(fn, args, kwargs, options)

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
        """Trains the model on the workers; Keras' `fit`, with its arguments, callbacks and history.

        An epoch is divided into chunks. A chunk goes to one worker at a time, and to another one if
        that dies, which goes on where the model is: every minibatch is in the model once, on every
        parameter server.

        What workers have of their own (AsyncEASGD, Downpour) goes on from fit to fit, as the
        servers' optimizer does.

        The progress bar, and the batch hooks of callbacks, follow the pushes several times a
        second, not each of them. After `fit` the model has the global weights.

        Args:
            model: built and compiled in the scope.
            x, y, batch_size, shuffle, class_weight, sample_weight: arrays, or a `tf.data.Dataset`
                of minibatches without Python functions in it, or `tfpara.Chunks`. Arrays, and what
                the dataset shuffles, have a new order in every epoch.
            epochs, initial_epoch, verbose, callbacks, validation_data, validation_batch_size,
                validation_freq: as in Keras.
            chunks: chunks of an epoch, for arrays and datasets; None: four for each worker from
                arrays, and one for each from a dataset, of which every chunk reads the whole.
            search_rate: a `tfpara.ChunkRateSearch`, to choose the rate of each chunk.

        Returns:
            The history: metrics of each epoch.

        Raises:
            ValueError: an argument that does not fit; a model that is not built or compiled, or
                has a training step of its own; `sync_period` longer than a chunk.
            tfpara.DivergedError: a push was not finite.
            tfpara.ParameterServerError: a parameter server is gone.
        """
        running = Fit(
            self,
            model,
            (x, y, sample_weight),
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            chunks=chunks,
            search_rate=search_rate,
        )
        validation = (validation_data, validation_batch_size, validation_freq)
        self.running = running
        try:
            with fit_call.under_way():
                return running.run(epochs, initial_epoch, verbose, callbacks, validation)
        except BaseException as error:
            failure = lost(error, self)
            running.give_up()
            if failure is not None:
                raise failure from error
            raise
        finally:
            self.running = None

    @contextlib.contextmanager
    def weights(self, model: keras.Model, which: str) -> Iterator[None]:
        """Puts the "global" model or an average into the chief's model for a while.

        Weights that were set in the chief's model become those of the servers before (`write`).

        Args:
            model: made in the scope.
            which: "global" or a name among `averages`.

        Raises:
            ValueError: an unknown name; the message lists those there are. Or weights that are set
                inside the context.
        """
        known = self.weight_names
        if which not in known:
            raise ValueError(f"which={which!r} is unknown. There are: {', '.join(known)}.")
        copy = self._copies.get(model)
        if copy is None:  # not trained yet: all are the same
            yield
            return
        if not copy.shows:
            self.write(model)
        with copy.showing(which):
            yield

    def read(self, model: keras.Model) -> None:
        """Copies weights, and the moving statistics, from the servers into the chief's model."""
        self._copies[model].read()

    def write(self, model: keras.Model) -> None:
        """Sends the weights that were set in the chief's model to the servers.

        `fit` does so itself: at its start, for what was set since the last one, and after each of
        on_train_begin, on_epoch_begin, on_epoch_end and on_train_end. So `model.set_weights` and
        the like work in a callback; call this where the servers must have the weights at once.

        The weights become those of the global model. Averages start anew from them, and so do
        the models and optimizers that workers have of their own (AsyncEASGD, Downpour); the slots
        of an optimizer on the servers stay. Nothing happens where nothing was set, or the model
        has not been trained yet.

        Args:
            model: made in the scope.

        Raises:
            ValueError: weights were set in the middle of an epoch, where they would be lost; frozen
                ones in a `fit`; or the model shows others (`weights`).
        """
        if model in self._copies:
            running = self.running if self.running and self.running.model is model else None
            within_epoch = running is not None and running.within_epoch
            self._copies[model].write(within_epoch, within_fit=running is not None)

    def snapshot(self, model: keras.Model) -> Callable[[], None]:
        """Keeps the global model as it is, to go back to: weights, moving statistics, optimizer.

        Args:
            model: that is trained; not in the middle of an epoch.

        Returns:
            A function that goes back: the servers and the chief's model have the former weights and
            moving statistics, the servers their averages, and their optimizer its slots and number
            of steps, but not the learning rate. What workers have of their own starts anew.

        Raises:
            ValueError: in the middle of an epoch; or the model has not been trained yet.
        """
        self._of(model)
        self._check_between_epochs()
        self.write(model)
        restore = self._copies[model].snapshot()

        def go_back() -> None:
            self._check_between_epochs()
            restore()

        return go_back

    def _check_between_epochs(self) -> None:
        if self.running is not None and self.running.within_epoch:
            raise ValueError(
                "a snapshot is of the whole model, which workers change in the middle of an epoch. "
                "Take it, and go back to it, in on_epoch_begin, on_epoch_end or between two fits."
            )

    def statistics(self, model: keras.Model | None = None) -> AsyncStatistics:
        """Returns counts of what has been pushed so far.

        Args:
            model: of this model; None: of the one that is trained, or was trained first by a `fit`
                last.

        Raises:
            ValueError: it has not been trained yet.
        """
        server = self._of(model)
        books = server.books
        return AsyncStatistics(
            pushes=int(server.first.version),
            samples=int(books.samples),
            staleness=books.histogram.numpy(),
            by_worker=books.by_worker.numpy(),
        )

    def record(self, model: keras.Model | None = None) -> list[Pushed]:
        """Who pulled and pushed when, since this process has begun: a line for each push.

        `tfpara.simulate_async(order=...)` repeats it.

        Args:
            model: as for `statistics`.

        Raises:
            ValueError: the strategy was made without `record=True`; or the model has not been
                trained yet.
        """
        return self._of(model).books.lines()

    def start_mean(self, model: keras.Model) -> None:
        """Has the average "average", a `RunningThenMean`, go on as the mean of the models."""
        self._servers[model][0].start_mean("average")

    def mean_started(self, model: keras.Model) -> bool:
        """Returns whether the average "average" is a mean by now; it is none after a new start."""
        return self._servers[model][0].mean_started("average")

    @property
    def asked_to_end(self) -> str | None:
        """A sentence, if a parameter server waits for the run to end in good order."""
        return self._processes.asked_to_end

    def end_with(self, exit_code: int, sentence: str) -> None:
        """Sets the code and the sentence with which the other processes end when this one does.

        Args:
            exit_code: theirs.
            sentence: what they print.
        """
        self._processes.end_with(exit_code, sentence)

    def keep_state(self, name: str, holder: StateHolder) -> None:
        """Has the state of an object kept in checkpoints and restored from them.

        Args:
            name: the state's; a second object under one name replaces the first.
            holder: `get_state()` returns what JSON can carry, `set_state(state)` takes it back.
        """
        self._states[name] = holder

    @property
    def states(self) -> dict[str, StateHolder]:
        """The objects of `keep_state`."""
        return dict(self._states)

    def count_fit(self) -> int:
        """Fits that have begun before; counts one more. Each has its own order of the data."""
        self._fits += 1
        return self._fits - 1

    def server_of(self, model: keras.Model, spec: Nest) -> tuple[Server, Work]:
        """The model on the servers, made from the chief's where there is none yet.

        Weights that were set in the chief since the last `fit` go to the servers, where averages
        start anew; a model that was compiled again is made anew.

        Args:
            model: built and compiled.
            spec: of its minibatches.
        """
        kept = self._servers.get(model)
        if kept is not None and kept[1].optimizer is model.optimizer:
            self.write(model)
        else:
            work = Work(model, self._rule, spec, self._period)
            server = Server(
                model,
                work.state,
                self._rule,
                self._averages,
                self._processes.server_devices,
                self.num_workers,
                self._record,
            )
            self._servers[model] = (server, work)
            self._copies[model] = ChiefModel(model, server, work)
        return self._servers[model]

    def executor(
        self, server: Server, work: Work, chunks: Chunks, choose_rate: ChooseRate | None
    ) -> Cluster | Simulation:
        """Returns the executor that runs chunks on the workers."""
        return self._processes.executor(
            server, work, chunks, self._period, choose_rate, seed=self.seed
        )

    def check(self) -> None:
        """Raises what ends the run, if something does.

        Raises:
            tfpara.ParameterServerError: a parameter server is gone.
        """
        self._processes.check()
        for worker in self._processes.lost():
            for server, _ in self._servers.values():
                server.forget(worker)

    def _of(self, model: keras.Model | None) -> Server:
        """The model's server; None: that of the newest model."""
        if model is None and self._servers:
            return list(self._servers.values())[-1][0]
        if model not in self._servers:
            raise ValueError("the model has not been trained yet: call strategy.fit before.")
        return self._servers[model][0]


def checked_rule(rule: object) -> AsyncRule:
    """The rule, if it is an asynchronous one."""
    if isinstance(rule, Rule):
        raise TypeError(
            f"{type(rule).__name__} is a synchronous rule: give it to "
            "tfpara.PeriodicSyncStrategy. AsyncStrategy takes ASGD, AveragedASGD, Downpour or "
            "AsyncEASGD."
        )
    if not isinstance(rule, ASYNC_RULES):
        raise TypeError(
            "rule must be tfpara.ASGD(...), AveragedASGD(...), Downpour(...) or AsyncEASGD(...), "
            f"not {rule!r}."
        )
    return rule
