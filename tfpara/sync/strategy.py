"""The distribution strategy, derived from `tf.distribute.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from tfpara import program
from tfpara.algorithms.rule import Average, Rule
from tfpara.checks import check_backend
from tfpara.cluster.call_site import call
from tfpara.elastic.settings import Elastic
from tfpara.group import as_list
from tfpara.sync.data.elastic_data import by_epoch, of_one_reader
from tfpara.sync.for_callbacks import ForCallbacks
from tfpara.sync.keras import scope
from tfpara.sync.keras.predicting import predict
from tfpara.sync.one_sync.statistics import SyncStatistics
from tfpara.sync.settings import Settings
from tfpara.sync.start import start
from tfpara.sync.start_line import counted
from tfpara.sync.tensorflow.variables import in_replica
from tfpara.sync.workers import data_place
from tfpara.typing import Data, Json, Nest, Scalar


class PeriodicSyncStrategy(tf.distribute.MultiWorkerMirroredStrategy, ForCallbacks):
    """Every replica trains by itself, and all replicas are synchronised every τ minibatches.

    Keras' `compile`, `fit`, `evaluate`, `predict` and callbacks work as usual on a model that is
    made and compiled in the strategy's scope. A replica is one device of one worker. The workers
    are those of TF_CONFIG, or those that srun, mpirun, horovodrun, torchrun or another engine has
    started. Without these, the process trains alone. Workers exchange data only in every
    `sync_period`-th training step.

    At the end of an epoch all workers take part in a last sync, even if they had different amounts
    of data. Validation, callbacks and the metrics of the epoch's log come after this sync. The
    metrics cover all replicas of all workers.

    The weights from which replicas continue satisfy the Keras constraints of their layers. So do
    the global model and the averages when they are read or saved.

    Args:
        rule: `tfpara.BSP()`, `BMUF(...)`, `EASGD(...)`, `BMUFAdam(...)`, `DiLoCo(...)`,
            `SlowMo(...)` or, around a Keras optimizer, `Outer(...)`.
        sync_period: τ ≥ 1, the minibatches of each replica between two syncs.
        averages: averages of the global model by name, e.g. `{"ema": tfpara.EMA(0.99)}`; they do
            not change the training.
        local_state: what a sync does with the optimizer's slots (momentum …). "keep": nothing.
            "reset": sets them to their initial values. "average": averages them over the replicas.
            "auto": keeps them, and if the rule has momentum (BMUF, DiLoCo, SlowMo), also lowers the
            momentum of local SGD, or β₁ of Adam, in short blocks, since the two momenta together
            make training unstable.
        aggregation: where the global model and the averages are. "replicated": every worker has all
            of them. "sharded": every replica has 1/N of them (paper 000, section 3.2). "auto":
            "sharded" with `compression`. Without: "sharded" if there are several replicas and the
            model has at least 16 MB; or 1 GiB, if there are three or more workers without NCCL, or
            two workers of Horovod over Gloo, because there a sharded sync takes longer on a slow
            link.
        devices: this worker's devices, e.g. `["CPU:0", "CPU:1"]`. None: all GPUs that this process
            sees, or CPU:0. Other workers may have more, fewer or other devices, but not with
            `elastic`.
        overlap: False: training stops for a sync. True: a sync runs while the next block trains,
            and its result is merged at the end of that block. A number d ≤ τ: the result is merged
            d minibatches after the sync began.
        fragments: number F of parts of the model. Each sync exchanges one part; the parts take
            turns. 1: each sync exchanges the whole model.
        compression: format of the bytes between workers. "none": float32. "bf16" and "fp16": half
            the bytes. "int8": a quarter. "int4": a seventh. The next sync makes up for rounding.
        device_sync_period: number of minibatches after which the devices of a worker average their
            weights among themselves; τ must be a multiple of it. None: devices are only combined in
            syncs of all replicas.
        data_plan: facts about the data that must be equal on all workers (numbers and strings by
            name). The workers compare them before the first step.
        timeout_seconds: longest wait for other workers in a sync. It must be longer than the
            slowest worker can be late, also by the compilation of the first step.
        startup_timeout_seconds: longest wait at the start until all workers are there.
        communication: how TensorFlow's collectives send the weights between workers; the same on
            all workers. "RING": a ring over gRPC. "NCCL": NVIDIA's library; the first device of
            each worker must be a GPU of its own. "AUTO": NCCL if all workers have such GPUs and
            `elastic` is None; else the ring.
        collectives: the backend that connects the workers: "tensorflow", "horovod", or "auto":
            Horovod if horovodrun, mpirun or `tfpara-launch --collectives=horovod` has started the
            process, else TensorFlow.
        elastic: a `tfpara.Elastic`: training continues while workers are lost, leave and join.
            None: the loss of a worker ends the run.
        balance: False: each worker takes τ steps in a block. True: a slower worker takes fewer
            steps, so that all workers finish a block together. Worker i of W takes τ_i steps, with
            Σ τ_i = W·τ and 1 ≤ τ_i ≤ 4τ, about τ_i = W·τ·(1/s_i) / Σ_j (1/s_j), where s_i are the
            seconds of its steps in earlier blocks. Each minibatch of an epoch goes to one replica.
            Each worker has one device. Not with `overlap`, `fragments` or BMUFAdam. A record
            (`strategy.balance_record` of another run): takes the τ_i of that run again, and τ after
            its last block; not with `elastic`.
        nonfinite: "raise": a weight with NaN or Inf ends the run at the next sync. "skip": a
            minibatch whose loss or gradient has NaN or Inf is left out: it changes nothing on its
            replica, and does not count in the next sync. The end of the epoch reports it.
        nonfinite_share: with "skip", the largest share of an epoch's minibatches, in [0, 1], that
            may be left out. With more, the run ends: at the end of the epoch, or earlier if at
            least ten were left out.
        status_port: port at which the chief serves a live page of all workers to its own machine;
            0: any free port. None: no page. `tfpara-launch --status_port` does the same without a
            change of the script.

    Raises:
        TypeError: `rule` is not a rule object, or an average is not one.
        ValueError: a value is outside its range; or TFPARA_MEETING is set, and `elastic` is not;
            or `communication="NCCL"` connects CPUs, or two workers on one GPU; or a port is taken.
        tfpara.FingerprintError: the workers were started with different settings.
        tfpara.cluster.ClusterError: TF_CONFIG, or an engine's variables, are wrong.
        tfpara.StartupError: some workers did not come, or have another cluster.
    """

    _is_simulated = False  # whether one process stands for all, whatever the environment says

    def __init__(
        self,
        rule: Rule,
        *,
        sync_period: int,
        averages: Mapping[str, Average] | None = None,
        local_state: str = "auto",
        aggregation: str = "auto",
        overlap: bool | int = False,
        fragments: int = 1,
        compression: str = "none",
        device_sync_period: int | None = None,
        devices: Sequence[str] | None = None,
        data_plan: Mapping[str, Json] | None = None,
        timeout_seconds: float = 300.0,
        startup_timeout_seconds: float = 300.0,
        communication: str = "AUTO",
        collectives: str = "auto",
        elastic: Elastic | None = None,
        balance: bool | Sequence[Sequence[int]] = False,
        nonfinite: str = "raise",
        nonfinite_share: float = 0.01,
        status_port: int | None = None,
    ) -> None:
        """Joins the other workers and compares settings with them; for the arguments see above."""
        program.explain_errors()
        check_backend()
        settings = Settings(
            rule=rule,
            sync_period=sync_period,
            averages={} if averages is None else averages,
            local_state=local_state,
            aggregation=aggregation,
            timeout_seconds=timeout_seconds,
            communication=communication,
            collectives=collectives,
            data_plan=dict(data_plan or {}),
            overlap=overlap,
            fragments=fragments,
            compression=compression,
            device_sync_period=device_sync_period,
            balance=balance,
            nonfinite=nonfinite,
            nonfinite_share=nonfinite_share,
        )
        start(self, settings, devices, elastic, startup_timeout_seconds, status_port)

    def __repr__(self) -> str:
        count = f"{counted(self.num_workers, 'worker')}, {counted(self.num_replicas, 'replica')}"
        period = "no syncs" if self.sync_period is None else f"sync_period={self.sync_period}"
        averages = f", averages={self.averages}" if self.averages else ""
        return f"PeriodicSyncStrategy of {count}: {self.rule}, {period}{averages}"

    @property
    def has_trained(self) -> bool:
        """Whether a model was trained under this strategy."""
        return self.extended.models.has_trained

    @property
    def num_replicas_in_sync(self) -> int:
        """N, the replicas of all workers; 1 inside a replica, whose steps are its own.

        Inside a replica Keras divides the loss by this number.
        """
        return 1 if in_replica() else self.num_replicas

    @property
    def num_replicas(self) -> int:
        """N, the replicas of all workers."""
        place = data_place.present()
        return place.num_replicas if place else self.extended.worker.replicas

    @property
    def num_workers(self) -> int:
        """The number of processes that take part."""
        place = data_place.present()
        return place.workers if place else self.extended.worker.num_workers

    @property
    def worker_index(self) -> int:
        """This worker, 0 … num_workers − 1; 0 is the chief."""
        place = data_place.present()
        return place.worker if place else self.extended.worker.rank

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the files of which the run needs only one copy.

        In an elastic run another worker becomes the chief when all workers of lower rank are lost:
        in `fit` from the next exchange on, elsewhere at once.
        """
        return self.extended.worker.company.is_chief

    @property
    def local_replica_ids(self) -> list[int]:
        """The numbers, among 0 … N − 1, of this worker's replicas."""
        return (data_place.present() or self.extended.data.place_of(0, 0)).replica_ids

    @property
    def sync_period(self) -> int | None:
        """τ, the minibatches of each replica between two syncs; None while no syncs happen."""
        return self.extended.momentum.sync_period

    @property
    def balance_record(self) -> list[list[int]]:
        """With `balance`: the steps τ_i of each worker in each block of this process so far."""
        balance = self.extended.balance
        return [] if balance is None else [list(shares) for shares in balance.record]

    def set_sync_period(self, sync_period: int | None) -> None:
        """Sets τ from here on. Every worker must call it, at the beginning of an epoch.

        Args:
            sync_period: minibatches of each replica between two syncs, at least 1. None: no syncs,
                also at the end of an epoch, until a number is set again.

        Raises:
            ValueError: `sync_period` is not a whole number of at least 1, or does not go with
                `overlap` or `device_sync_period`; or steps were taken since the last sync.
        """
        extended = self.extended
        if sync_period is not None:
            # Raises if the period does not go with the other settings.
            settings = dataclasses.replace(extended.settings, sync_period=sync_period)
            sync_period = settings.sync_period
        if any(s.agreement().block_open or s.in_flight for s in extended.models.synchronizers):
            raise ValueError(
                f"set_sync_period({sync_period}) inside a block: steps were taken since the last "
                "sync. Call it where an epoch begins, or after strategy.synchronize()."
            )
        extended.momentum.set_period(sync_period)

    def broadcast_replica(self, model: keras.Model, replica: int = 0) -> None:
        """Sets all replicas to the weights of one; momentum and averages restart from these.

        This closes the open block first, so every worker must call it. Each replica keeps the slots
        of its optimizer.

        Args:
            model: the model that is trained.
            replica: 0 … N − 1, the replica whose local weights and batch-norm statistics are taken.

        Raises:
            ValueError: there is no such replica.
        """
        self.extended.models.broadcast_replica(model, replica)

    @property
    def rule(self) -> Rule:
        """The synchronisation rule, with the defaults for N replicas filled in.

        Once a model trains, the defaults for its local optimizer are filled in, too.
        """
        return self.extended.models.rule

    @property
    def averages(self) -> dict[str, Average]:
        """The averages of the global model, by name."""
        return dict(self.extended.settings.averages)

    @property
    def weight_names(self) -> list[str]:
        """The names that `weights` takes: "local", "global" and those of the averages."""
        return ["local", "global", *self.extended.settings.averages]

    def run(
        self, fn: Callable[..., Nest], args: Nest = (), kwargs: Nest = None, options: object = None
    ) -> Nest:
        """Runs `fn` on every replica of this worker.

        If `fn` takes an optimizer step, the call counts as a step, and every `sync_period`-th such
        call includes a sync. A replica whose part of the batch is empty takes no step.
        """
        with self.scope():
            return self.extended.steps.run(super().run, fn, args, kwargs, options, scope.check)

    def reduce(
        self, reduce_op: str | tf.distribute.ReduceOp, value: Nest, axis: int | None = None
    ) -> Nest:
        """Returns the sum or mean of a value over the replicas of all workers.

        Every worker must call it equally often. With several workers, call it outside of a
        `tf.function`. It closes no block. A replica whose part of the batch was empty has zeros.

        Args:
            reduce_op: "SUM" or "MEAN".
            value: the result of `run`, or a structure of such results.
            axis: the axis of the samples; the values are also summed or averaged over this axis.

        Raises:
            ValueError: inside a `tf.function`, if there are several workers; or values of different
                shapes, on every worker.
        """
        return super().reduce(reduce_op, value, axis)

    def datasets_by_epoch(
        self, dataset_fn: Callable[[int, int], tf.data.Dataset]
    ) -> tf.distribute.DistributedDataset:
        """Returns data for `fit` with a new dataset for every epoch; runs can be resumed.

        Args:
            dataset_fn: called on each worker as `dataset_fn(epoch, first)`, with the epoch from 0.
                It returns this worker's minibatches of that epoch in turn for its replicas: a
                minibatch for each of `local_replica_ids`, then the next one for each, and so on.
                `first` is the number of minibatches, counted over all replicas, that were trained
                before the run was resumed; `dataset_fn` must leave them out. In all other epochs
                `first` is 0. All datasets must have the same element spec.

        Returns:
            Data for `fit`. The epochs are numbered as in `fit`: `fit(initial_epoch=2)` begins with
            epoch 2. In a loop of your own, each pass over the data after training steps is the next
            epoch. In a resumed run `tfpara.callbacks.Checkpoint` sets the epoch and `first`.
        """
        return self.datasets_by_number(of_one_reader(dataset_fn))

    def minibatches_by_epoch(
        self, dataset_fn: Callable[[int], tf.data.Dataset]
    ) -> tf.distribute.DistributedDataset:
        """Returns data for `fit` with a new dataset for every epoch, divided among the replicas.

        As `datasets_by_epoch`, but tfpara divides the minibatches: replica k mod N gets minibatch k
        of an epoch. Every worker reads all minibatches and keeps its own, so reading should be
        cheap compared to training.

        Args:
            dataset_fn: called on each worker as `dataset_fn(epoch)`, with the epoch from 0. It
                returns all minibatches of that epoch; each is for one replica. Their order must be
                the same on all workers and in each call: every shuffle or random draw needs a seed,
                as in `dataset.shuffle(1000, seed=epoch)`.

        Raises:
            TypeError: it returns no dataset.
            ValueError: a dataset has no end, or an order that cannot be repeated.
        """
        return by_epoch(self, dataset_fn)

    def weigh_minibatches(self, weight: Callable[..., Scalar]) -> None:
        """Sets the weight of a minibatch in the mean of the replicas, before the first step.

        By default the weight is the number by which Keras divides the compiled loss of a minibatch.
        This is the number of its samples, including samples with weight 0; or the sum of the sample
        weights if the loss has reduction="mean_with_sample_weight". A loss of a custom loop, or one
        with Keras' masks, may divide by another number, such as a number of frames. Give that
        number here, so that every frame has the same weight in the model.

        Args:
            weight: called with the arguments of a replica's step (Keras gives it one, the
                minibatch); returns a number or a scalar tensor. The same on every worker.

        Raises:
            ValueError: a model was trained already, by steps that count otherwise.
        """
        if self.has_trained:
            raise ValueError(
                "weigh_minibatches() after a model was trained: its compiled step counts "
                "otherwise. Call it right after the strategy is made."
            )
        self.extended.steps.minibatch_weight = weight

    def track(
        self,
        model: keras.Model | Sequence[keras.Model],
        optimizers: keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer] = (),
    ) -> None:
        """Names the models that a custom loop trains through `run`; `fit` does not need it.

        Several models are synchronised as one: a call of `run` that trains any of them is a step of
        all. `weights`, `broadcast_replica` and `state_bytes` act on all of them, too.

        Args:
            model: the model, or a list of all models that the loop trains.
            optimizers: the optimizer of the loop, or a list, in addition to those with which the
                models are compiled. `local_state` "reset" and "average" and BMUFAdam need it.

        Raises:
            TypeError: an argument is no model, or no optimizer.
            ValueError: the list of models is empty.
        """
        self.extended.models.track(as_list(model), as_list(optimizers))

    def forget(self, model: keras.Model) -> None:
        """Frees what the strategy stores for a trained model; every worker must call it.

        This is the global model, its momentum and its averages. Without this call they stay in
        memory until all workers have deleted the model and begin to train another one. The open
        block is closed first. The model keeps its weights; where replicas have different weights,
        all get those of the global model. You may train the model again, or another model that
        shares weights with it, such as one with a new head: both begin like new models. If you
        still need an average, write it before (`tfpara.export`).

        A model that was not trained stays as it is. A loop of your own must call `track` again, and
        make a new `tf.function`, because the old one contains the syncs of the model.

        Args:
            model: the model that was trained. A part of it stands for the whole, and one of several
                models that are tracked together stands for all of them.

        Raises:
            ValueError: inside `fit` or `strategy.weights(...)`, or in an elastic run.
        """
        extended = self.extended
        if self.members_change:
            raise ValueError(
                "strategy.forget() does not go with elastic=, whose run trains one model."
            )
        if extended.call_site.fits or extended.shown is not None:
            inside = (
                "in a callback of fit"
                if extended.call_site.fits
                else "inside strategy.weights(...)"
            )
            raise ValueError(f"strategy.forget() {inside}: a model is in use. Call it afterwards.")
        extended.models.forget(model)

    def synchronize(self) -> None:
        """Closes the open block: takes part in syncs until every worker has called it.

        Every worker must call it. `fit` does so at the end of each epoch; custom loops call it at
        the end of their data.
        """
        self.extended.models.finish_blocks()

    def barrier(self) -> None:
        """Waits until every worker has called this.

        For example, after the call all workers can read files that the chief wrote before it.
        """
        self.extended.control.together(call("strategy.barrier()"))

    @contextlib.contextmanager
    def weights(self, model: keras.Model, which: str) -> Iterator[None]:
        """Puts the "global", the "local" or an average's weights into `model` for a while.

        Every worker must enter the context, because this closes the open block first. Leaving the
        context restores the former weights, bit for bit, on every device. The weights satisfy their
        Keras constraints. Statistics, as of batch normalisation, are always those of the last sync.
        A model that has not been trained yet has the same weights under every name. Models that are
        tracked together all get these weights. If `model` is a part of a trained model, the whole
        model gets them. Contexts may be nested; the inner one holds.

        Args:
            model: a model that was made in the scope, or a part of one that was trained, such as
                the student that a distiller trains.
            which: "global", "local" or a name among `averages`.

        Raises:
            ValueError: an unknown name; or weights that are set, or trained by `fit`, inside the
                context; or a model of another strategy; or a model that shares only some of its
                weights with a trained model.
        """
        known = self.weight_names
        if which not in known:
            raise ValueError(f"which={which!r} is unknown. There are: {', '.join(known)}.")
        self.extended.models.finish_blocks(call(f"strategy.weights(model, {which!r})"))
        synchronizer = self.extended.models.trained(model)
        if synchronizer is None and self.extended.models.is_stranger(model):
            raise ValueError(
                f"this model has no {which!r} weights of its own: it belongs to another strategy, "
                "or shares some of its weights with a model that was trained. Give the model that "
                "fit was called on, or one all of whose weights are that model's."
            )
        former, self.extended.shown = self.extended.shown, which
        try:
            with synchronizer.showing(which) if synchronizer else contextlib.nullcontext():
                yield
        finally:
            self.extended.shown = former

    def predict(
        self,
        model: keras.Model,
        x: Data,
        batch_size: int | None = None,
        *,
        which: str | None = None,
        only_chief: bool = False,
        verbose: str | int = "auto",
    ) -> Nest:
        """Returns what `model.predict` returns; the workers divide the rows among themselves.

        Worker r of W computes rows n·r/W to n·(r + 1)/W of n rows in arrays, or of n batches in
        other data. Every worker must call it, with the same data. If an elastic run loses a worker
        meanwhile, the workers that are left begin anew.

        Args:
            model: a model that was made in the scope.
            x: arrays or a structure of them, a `keras.utils.PyDataset`, or a `tf.data.Dataset` of
                batches in an order that all workers have.
            batch_size: for arrays, the rows of a batch; None: 32.
            which: the weights: "global", "local" or a name among `averages`. None: those that
                `strategy.weights` shows, else "global".
            only_chief: whether only the chief returns the result; the others return None.
            verbose: as in Keras; only the chief shows progress.

        Raises:
            ValueError: data without a known end or order, other data on another worker, or an
                unknown name.
        """
        with self.weights(model, which or self.extended.shown or "global"):
            return predict(self, model, x, batch_size, only_chief, verbose)

    def state_bytes(self, model: keras.Model) -> list[int]:
        """Returns the bytes of global state (model, momentum, averages) that this worker stores.

        The list has one number if this worker stores the whole state, and one number for each of
        its replicas if the state is sharded. Every worker must call it.

        Args:
            model: a model that is built and compiled in the scope.
        """
        with self.scope():
            return self.extended.models.synchronizer_of(model).graph.global_state.nbytes

    def statistics(self) -> SyncStatistics:
        """Returns counts and times of this worker's syncs so far, over all models."""
        return self.extended.models.statistics()
