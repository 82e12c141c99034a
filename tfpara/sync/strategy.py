"""The distribution strategy, derived from `tf.distribute.MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from tfpara import program
from tfpara.algorithms.rule import Average, Rule
from tfpara.checks import check_libraries
from tfpara.cluster.call_site import call
from tfpara.contexts import attributes
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
    are those of TF_CONFIG, or those that srun, mpirun, torchrun or another engine has started; else
    the process trains alone. Workers exchange data only in every `sync_period`-th training step.

    At the end of an epoch all workers take part in a last sync, even if they had different amounts
    of data. Validation, callbacks and the metrics of the epoch's log come after this sync. The
    metrics cover all replicas of all workers.

    Keras constraints are applied to the weights from which replicas continue, and to the global
    model and the averages where they are shown or written; but not within the rule's state.

    Args:
        rule: `tfpara.BSP()`, `BMUF(...)`, `EASGD(...)`, `BMUFAdam(...)`, `DiLoCo(...)`,
            `SlowMo(...)` or, around a Keras optimizer, `Outer(...)`.
        sync_period: τ ≥ 1, the minibatches of each replica between two syncs.
        averages: averages of the global model by name, e.g. `{"ema": tfpara.EMA(0.99)}`; they do
            not change the training.
        local_state: the effect of a sync on the optimizer's slots (momentum …): "keep", "reset" to
            their initial value, or "average" over the replicas. "auto" keeps them. If the rule has
            a momentum of its own (BMUF, DiLoCo, SlowMo), "auto" also shortens the momentum of local
            SGD, and β₁ of Adam, to fit into the block: two long momenta together are unstable.
        aggregation: "replicated": every worker keeps the whole global model and averages.
            "sharded": every replica keeps 1/N of them (paper 000, section 3.2). "auto": sharded
            with `compression`, and if there are several replicas and the model has 16 MiB or more;
            never with `elastic`.
            For three or more workers without NCCL, and for two with Horovod over Gloo, a sharded
            sync takes longer on a slow link: there "auto" shards only models from 1 GiB on.
        devices: this worker's devices, e.g. `["CPU:0", "CPU:1"]`; others may have more, fewer, or
            another kind, but not with `elastic`. None: all GPUs that this process sees, or CPU:0.
        overlap: False: training stops for a sync. True: a sync runs while the next block trains,
            and is merged at that block's end. A number d ≤ τ: the sync is merged d minibatches
            after its start.
        fragments: number of fragments of the model, which are synchronised in turn: one every τ
            minibatches, so each every `fragments`·τ. 1: the whole model every τ minibatches.
        compression: format of the bytes between workers. "none": float32. "bf16" and "fp16": half
            the bytes. "int8": a quarter. "int4": a seventh. The next sync makes up for rounding.
        device_sync_period: number of minibatches after which a worker's devices also average their
            weights among themselves; τ must be a multiple. None: only syncs average weights.
        data_plan: facts about the data that must be equal on all workers (numbers and strings by
            name); compared before the first step.
        timeout_seconds: longest wait for other workers inside a sync. It must exceed the time by
            which the slowest worker can be late, first-step compilation included.
        startup_timeout_seconds: longest wait for all workers to appear.
        communication: how TensorFlow's collectives carry the weights between workers; the same on
            all of them. "RING": a ring over gRPC. "NCCL": NVIDIA's library, which needs a GPU of
            its own as each worker's first device. "AUTO": NCCL if CUDA's driver confirms such GPUs,
            and `elastic` is None; else the ring.
        collectives: the backend that connects the workers: "tensorflow", "horovod", or "auto":
            Horovod if horovodrun, mpirun or `tfpara-launch --collectives=horovod` has started the
            process, else TensorFlow.
        elastic: a `tfpara.Elastic`: training continues while workers are lost, leave and join.
            None: the loss of a worker ends the run.
        balance: True: in each block worker i of W takes a number τ_i of steps by its speed, so that
            all workers end the block together. The τ_i, 1 ≤ τ_i ≤ 4τ, have the sum W·τ and make
            max_i s_i·τ_i least, with s_i the seconds of a step in the blocks before; that is about
            τ_i = W·τ·(1/s_i) / Σ_j (1/s_j). The mean of the replicas weighs by samples, as always.
            `fit` deals each minibatch of an epoch to one replica, by the τ_i. Workers must have one
            device each. Not with `overlap`, `fragments`, `device_sync_period` or BMUFAdam. A
            record, which is `strategy.balance_record` of another run: uses its τ_i block by block,
            and after its end τ for all; not with `elastic`. False: τ_i = τ.
        nonfinite: "raise": a weight with NaN or Inf ends the run at the next sync. "skip": a
            minibatch whose loss or gradient has NaN or Inf changes nothing on its replica and has
            weight 0 in the next sync. Such minibatches are counted, and named when the epoch ends.
        nonfinite_share: with "skip", the run ends if more than this share, in [0, 1], of an epoch's
            minibatches was left out; checked when the epoch ends, and earlier once ten were.
        status_port: port of a live page of all workers, which the chief serves to its own machine;
            0: any free port. None: no page. `tfpara-launch --status_port` needs no such argument.

    Raises:
        TypeError: `rule` is not a rule object, or an average is not one.
        ValueError: a value is outside its range; or TFPARA_MEETING is set, and `elastic` is not;
            or `communication="NCCL"` connects CPUs, or two workers on one GPU; or a port is taken.
        tfpara.FingerprintError: the workers were started with different settings.
        tfpara.cluster.ClusterError: TF_CONFIG, or an engine's variables, are wrong.
        tfpara.StartupError: some workers did not come, or have another cluster.
    """

    _is_simulated = False  # whether this process stands for all workers, as in `simulate`

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
        check_libraries()
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
        """N, the replicas of all workers; 1 inside a replica, since its steps are its own.

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

        In an elastic run another worker becomes the chief once all of a lower rank are lost: in
        `fit` at the next exchange, elsewhere at once.
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
        """Sets τ from here on. Every worker must call it between blocks, as when an epoch begins.

        Args:
            sync_period: τ ≥ 1. None: until a period is set again the replicas are independent, and
                the end of an epoch averages nothing.

        Raises:
            ValueError: `sync_period` is not a whole number of at least 1, or does not go with
                `overlap` or `device_sync_period`; or steps were taken since the last sync.
        """
        extended = self.extended
        if sync_period is not None:
            # `replace` checks all settings, and raises if the period does not go with the others.
            settings = dataclasses.replace(extended.settings, sync_period=sync_period)
            sync_period = settings.sync_period
        if any(s.agreement().block_open or s.in_flight for s in extended.models.synchronizers):
            raise ValueError(
                f"set_sync_period({sync_period}) inside a block: steps were taken since the last "
                "sync. Call it where an epoch begins, or after strategy.synchronize()."
            )
        extended.momentum.set_period(sync_period)

    def broadcast_replica(self, model: keras.Model, replica: int = 0) -> None:
        """Sets all replicas to the weights of one, from which momentum and averages restart.

        This closes the open block first, so every worker must call it. Optimizers keep their slots.

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

        Once a model trains, the defaults are those for its local optimizer, too.
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

        Every worker must call it, as often as the others, and outside of a `tf.function` if there
        are several workers. It closes no block. A replica that took no step, since its part of the
        batch was empty, counts with zeros.

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
            dataset_fn: called on each worker as `dataset_fn(epoch, first)`. It returns this
                worker's minibatches of that epoch (from 0), those of its replicas in turn: a
                minibatch for each of `local_replica_ids`, then the next for each, and so on. In it,
                with `balance`, `local_replica_ids` and `num_replicas` are those of a run of one
                worker; with `elastic` they change. So it must read them anew in each call.
                It must leave out the first `first` minibatches, counted over all replicas, which
                have been trained already: 0 where an epoch begins, and at most all minibatches. All
                datasets, an empty one too, must have the same element spec.

        Returns:
            Data that follow the epochs of `fit`: `fit(initial_epoch=2)` begins with epoch 2. In a
            loop of your own every pass that follows training steps is the next epoch's. In a
            resumed run `tfpara.callbacks.Checkpoint` sets the epoch and `first`.
        """
        return self.datasets_by_number(of_one_reader(dataset_fn))

    def minibatches_by_epoch(
        self, dataset_fn: Callable[[int], tf.data.Dataset]
    ) -> tf.distribute.DistributedDataset:
        """Returns data for `fit` that are another dataset in every epoch, dealt out to replicas.

        Like `datasets_by_epoch`, but the function need not know which minibatches are this
        worker's: minibatch k of an epoch belongs to replica k mod N. Every worker reads all
        minibatches and keeps its own, so reading should be cheap beside training.

        Args:
            dataset_fn: called on each worker as `dataset_fn(epoch)`, with the epoch from 0. It
                returns all minibatches of that epoch; each is for one replica. Their order must be
                the same on all workers and in each call: every shuffle or random draw needs a seed,
                as in `dataset.shuffle(1000, seed=epoch)`.

        Raises:
            TypeError: the function returns no dataset.
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

        That is its global model, momentum and averages, which else are in memory until all workers
        have deleted the model and begin to train another one. The open block is closed first. The
        model keeps its weights; where those of replicas differ, all take the global ones. It and
        models that share weights with it, such as one with a new head, may be trained again as
        models that were never trained. Write averages that are still wanted before, by
        `tfpara.export`.

        A model that was not trained stays as it is. A loop of your own must call `track` again, and
        make a new `tf.function`, because the old one contains the syncs of the model.

        Args:
            model: the model that was trained; or a part of it, or one of several models that are
                tracked together, which stands for all of them.

        Raises:
            ValueError: inside `fit` or `strategy.weights(...)`, or in an elastic run.
        """
        extended = self.extended
        if self.company.changes:
            raise ValueError(
                "strategy.forget() does not go with elastic=, whose run trains one model."
            )
        inside = "in a callback of fit" if extended.call_site.fits else ""
        if inside or extended.shown is not None:
            inside = inside or "inside strategy.weights(...)"
            raise ValueError(f"strategy.forget() {inside}: a model is in use. Call it afterwards.")
        extended.models.forget(model)

    def synchronize(self) -> None:
        """Closes the open block: takes part in syncs until every worker has called it.

        Every worker must call it: `fit` does so where an epoch ends, custom loops where data end.
        """
        self.extended.models.finish_blocks()

    def barrier(self) -> None:
        """Waits until every worker has called this.

        After it, all workers can read files that the chief wrote before it.
        """
        self.extended.control.together(call("strategy.barrier()"))

    @contextlib.contextmanager
    def weights(self, model: keras.Model, which: str) -> Iterator[None]:
        """Puts the "global", the "local" or an average's weights into `model` for a while.

        Every worker must enter, since the open block is closed first. Leaving the context puts the
        former weights back, bit for bit, on every device. Keras constraints are applied to what is
        shown. Statistics such as those of batch normalisation are those of the last sync in each
        case. A model that has not been trained yet has the same weights under every name. Models
        that are tracked together all get these weights, and so does the whole trained model if a
        part of it is given. Contexts may be nested: the inner one holds.

        Args:
            model: a model that was made in the scope, or a part of one that was trained.
            which: "global", "local" or a name among `averages`.

        Raises:
            ValueError: an unknown name; the message lists those there are. Weights that are set, or
                trained by `fit`, inside the context. Or a model of another strategy, or one that
                shares only some of its weights with a model that was trained.
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
        showing = synchronizer.showing(which) if synchronizer else contextlib.nullcontext()
        with attributes(self.extended, shown=which), showing:
            yield

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

        For other data than arrays n counts batches, not rows. Every worker must call it, with the
        same data. If an elastic run loses a worker meanwhile, the others begin anew.

        Args:
            model: a model that was made in the scope.
            x: arrays or a structure of them, a `keras.utils.PyDataset`, or a `tf.data.Dataset` of
                batches in an order that all workers have.
            batch_size: rows of a batch, if x are arrays; None: 32.
            which: the weights: "global", "local" or a name among `averages`. None: those that
                `strategy.weights` shows, else "global".
            only_chief: whether only the chief returns the result; the others return None.
            verbose: as in Keras; only the chief shows progress.

        Raises:
            ValueError: data without a known end or order, or that differ, or an unknown name.
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
