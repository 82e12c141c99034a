"""The distribution strategy, derived from `tf.distribute.MultiWorkerMirroredStrategy`.

This is the only file that touches private names of TensorFlow. Each use says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# The variable behind tf.Variable: a plain one can be created where a strategy is in scope, which
# would otherwise mirror it.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfpara import cluster, failures, startup
from tfpara.collectives import Collectives, Loopback, TensorFlowCollectives
from tfpara.fingerprint import agree
from tfpara.model_variables import optimizers, replica_variables
from tfpara.settings import (
    Settings,
    checked_aggregation,
    checked_averages,
    checked_communication,
    checked_local_state,
    checked_period,
    checked_rule,
    checked_seconds,
    warn_of_outlasting_momentum,
)
from tfpara.steps import after, batch_size, skip_empty, without_tuner
from tfpara.synchronizer import Synchronizer, SyncStatistics
from tfpara.watchdog import Watchdog

# Ends collectives that wait for a silent worker.
from tensorflow.python.eager import context as _context  # isort: skip

# The extended class that MultiWorkerMirroredStrategy builds, and the value types that its
# reductions see. They have no public names.
from tensorflow.python.distribute import collective_all_reduce_strategy as _mwms  # isort: skip
from tensorflow.python.distribute import values as _values  # isort: skip

# What tf.train.Checkpoint hands to a variable that is created after its restore.
from tensorflow.python.trackable.base import CheckpointInitialValue as _CheckpointInitialValue  # isort: skip


class PeriodicSyncStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Local optimizer steps on every replica, and a synchronisation every τ minibatches.

    Keras' `compile`, `fit`, `evaluate`, `predict` and callbacks work as usual on a model that is
    made and compiled in the strategy's scope. A replica is one device of one worker; the workers
    are those of TF_CONFIG (without it, this process alone). Nothing is exchanged in a training step
    but every `sync_period`-th.

    The end of an epoch closes the open block: all workers, however much data each had, join a last
    sync, so the metrics of the epoch's log, validation and callbacks come after it. Metrics are
    reduced over all replicas of all workers.

    Args:
        rule: `tfpara.BSP()`, `tfpara.BMUF(...)` or `tfpara.EASGD(...)`.
        sync_period: τ ≥ 1, the minibatches of each replica between two syncs.
        averages: averages of the global model by name, e.g. `{"ema": tfpara.EMA(0.99)}`; they never
            touch training.
        local_state: what becomes of the optimizer's slots (momentum …) at a sync: "keep", "reset"
            to their initial value, or "average" over the replicas.
        aggregation: "replicated": every worker keeps the whole global model and averages.
            "sharded": every replica keeps 1/N of them (paper 000, section 3.2). "auto": sharded
            where there are several replicas and the model has 16 MB or more.
        devices: this worker's devices, e.g. `["CPU:0", "CPU:1"]`. None: all GPUs, or CPU:0.
        data_plan: facts about the data that all workers must share (numbers and strings by name);
            compared before the first step.
        timeout_seconds: longest wait for other workers inside a sync. It must exceed the time by
            which the slowest worker can be late, first-step compilation included.
        startup_timeout_seconds: longest wait for all workers to appear.
        communication: "AUTO", "RING" or "NCCL", between workers.

    Raises:
        TypeError: `rule` is not a rule object, or an average is not one.
        ValueError: a value outside its range.
        tfpara.FingerprintError: workers that were started with different settings.
        tfpara.cluster.ClusterError: TF_CONFIG is wrong.
        tfpara.StartupError: workers that did not come, or see another cluster.
    """

    def __init__(
        self,
        rule: Any,
        *,
        sync_period: int,
        averages: Mapping[str, Any] | None = None,
        local_state: str = "keep",
        aggregation: str = "auto",
        devices: Sequence[str] | None = None,
        data_plan: Mapping[str, Any] | None = None,
        timeout_seconds: float = 300.0,
        startup_timeout_seconds: float = 300.0,
        communication: str = "AUTO",
    ) -> None:
        settings = Settings(
            rule=checked_rule(rule),
            sync_period=checked_period(sync_period),
            averages=checked_averages(averages or {}),
            local_state=checked_local_state(local_state),
            aggregation=checked_aggregation(aggregation),
            timeout_seconds=checked_seconds("timeout_seconds", timeout_seconds),
            communication=checked_communication(communication),
        )
        checked_seconds("startup_timeout_seconds", startup_timeout_seconds)
        found = cluster.read()
        # The grandparent's constructor: the parent's would build its own extended class.
        with startup.guard(found, startup_timeout_seconds):
            extended = _PeriodicSyncExtended(self, settings, devices, found)
            tf.distribute.Strategy.__init__(self, extended)
        if found.num_workers > 1:
            failures.explain_uncaught(found, timeout_seconds)
        extended.start(
            {
                **extended.settings.fingerprint(),
                **{f"data_plan.{k}": v for k, v in (data_plan or {}).items()},
            }
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """N; inside a replica 1, since a local step is that of a replica on its own."""
        # Keras divides the loss, and clips, by this number inside a replica.
        return 1 if _in_replica() else self.num_replicas

    @property
    def num_replicas(self) -> int:
        """N, the replicas of all workers."""
        return self.extended._num_replicas_in_sync

    @property
    def num_workers(self) -> int:
        """Processes taking part."""
        return self.extended._num_workers

    @property
    def worker_index(self) -> int:
        """This worker, 0 … num_workers − 1; 0 is the chief."""
        return self.extended._id_in_cluster

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes what is written once."""
        return self.worker_index == 0

    @property
    def local_replica_ids(self) -> list[int]:
        """The numbers, among 0 … N − 1, of this worker's replicas."""
        count = len(self.extended.worker_devices)
        return list(range(self.worker_index * count, (self.worker_index + 1) * count))

    @property
    def sync_period(self) -> int | None:
        """τ, minibatches of each replica between two syncs; None while there are none."""
        return self.extended.sync_period

    def set_sync_period(self, sync_period: int | None) -> None:
        """Sets τ from here on. Every worker must call it, between blocks: where an epoch begins.

        Args:
            sync_period: minibatches of each replica between two syncs, at least 1. None: the
                replicas are independent until it is set again; the end of an epoch averages
                nothing either.

        Raises:
            ValueError: not a whole number of at least 1; or steps were taken since the last sync.
        """
        if sync_period is not None:
            checked_period(sync_period)
        extended = self.extended
        if any(s.agreement().block_open for s in extended.synchronizers):
            raise ValueError(
                f"set_sync_period({sync_period}) inside a block: steps were taken since the last "
                "sync. Call it where an epoch begins, or after strategy.synchronize()."
            )
        extended.sync_period = sync_period
        for synchronizer in extended.synchronizers:
            synchronizer.set_sync_period(sync_period)

    def broadcast_replica(self, model: keras.Model, replica: int = 0) -> None:
        """All replicas go on from the weights of one; momentum and averages start again there.

        Closes the open block first, so every worker must call it. The optimizers' slots of each
        replica stay as they are.

        Args:
            model: the model that is trained.
            replica: 0 … N − 1, the one whose local weights (and batch-norm statistics) are taken.

        Raises:
            ValueError: there is no such replica.
        """
        self.extended.broadcast_replica(model, replica)

    @property
    def rule(self) -> Any:
        """The synchronisation rule, with defaults filled in for N replicas."""
        return self.extended.settings.rule

    @property
    def averages(self) -> dict[str, Any]:
        """The averages of the global model, by name."""
        return dict(self.extended.settings.averages)

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on every local replica and, where it takes an optimizer step, counts it.

        A replica whose part of the batch is empty takes no step. Where `fn` updates the weights of
        a model, the sync of every `sync_period`-th call is part of this call.
        """
        extended = self.extended
        with self.scope():
            synchronizer = extended.synchronizer_for(fn)
            extended.optimizer_stepped = False
            outputs = super().run(skip_empty(fn), args, kwargs, options)
            if not extended.optimizer_stepped and not _is_train_step(fn):
                return outputs
            if synchronizer is None:
                with tf.init_scope():
                    synchronizer = extended.make_synchronizer(extended.model_of(fn))
            locals_ = self.experimental_local_results((args, kwargs or {}))
            samples = [batch_size(values) for values in locals_]
            with after(locals_):
                synchronizer.after_step([1 if n is None else n for n in samples])
            return outputs

    def track(self, model: keras.Model) -> None:
        """Names the model that a custom loop trains through `run`; Keras' `fit` needs no call."""
        self.extended.tracked = model

    def synchronize(self) -> None:
        """Closes the open block: every worker must call it, and joins syncs until all have.

        `fit` does so at the end of each epoch; custom loops call it where their data ends.
        """
        self.extended.finish_blocks()

    @contextlib.contextmanager
    def weights(self, model: keras.Model, which: str) -> Iterator[None]:
        """Puts the "global" model, the "local" ones or a named average into `model` for a while.

        Every worker must enter, since the open block is closed first. Leaving the context puts the
        former weights back, bit for bit, on every device. Statistics such as those of batch
        normalisation are those of the last sync in each case. A model that has not been trained yet
        has the same weights under every name.

        Args:
            model: a model that was made in the scope.
            which: "global", "local" or a name among `averages`.

        Raises:
            ValueError: an unknown name; the message lists those there are. Or a model of another
                strategy, or one that is part of the model that was trained.
        """
        known = ["global", "local", *self.extended.settings.averages]
        if which not in known:
            raise ValueError(f"which={which!r} is unknown. There are: {', '.join(known)}.")
        self.synchronize()
        synchronizer = self.extended.trained(model)
        if synchronizer is None and self.extended.is_stranger(model):
            raise ValueError(
                f"this model has no {which!r} weights of its own: it belongs to another strategy, "
                "or is part of a model that was trained. Give the model that fit was called on."
            )
        if synchronizer is None or which == "local":
            yield
            return
        kept = synchronizer.local_weights()
        try:
            synchronizer.set_weights([synchronizer.global_weights(which)] * len(kept))
            yield
        finally:
            synchronizer.set_weights(kept)

    def statistics(self) -> SyncStatistics:
        """What this worker has done so far, over all models of the strategy."""
        total = SyncStatistics(0, 0, 0, 0.0, 0.0, 0.0)
        for synchronizer in self.extended.synchronizers:
            one = synchronizer.statistics()
            total = SyncStatistics(
                steps=total.steps + one.steps,
                samples=total.samples + one.samples,
                syncs=total.syncs + one.syncs,
                sync_seconds=total.sync_seconds + one.sync_seconds,
                wait_seconds=total.wait_seconds + one.wait_seconds,
                distance=one.distance,
            )
        return total


class _Trained(NamedTuple):
    """A model that was trained, what its synchronizer was made for, and that."""

    model: keras.Model
    identity: Any
    synchronizer: Synchronizer


class _PeriodicSyncExtended(_mwms.CollectiveAllReduceExtended):
    """Replicas that keep to themselves between syncs.

    Overrides the places in which the parent makes replicas agree at every step or every read.
    """

    # The parent's thread that probes peers; the collectives' own errors and timeouts serve us.
    _enable_check_health = False

    def __init__(
        self,
        strategy: PeriodicSyncStrategy,
        settings: Settings,
        devices: Sequence[str] | None,
        found: cluster.Cluster,
    ) -> None:
        self._wanted_devices = devices
        self.optimizer_stepped = False
        self.tracked: keras.Model | None = None
        self.sync_period: int | None = settings.sync_period
        self._trained: dict[int, _Trained] = {}  # by the model's id
        self._synchronizers_made = 0
        self._created = 0
        super().__init__(
            strategy,
            cluster_resolver=_resolver(found),
            communication_options=tf.distribute.experimental.CommunicationOptions(),
        )
        rule = settings.rule.resolve(self._num_replicas_in_sync)
        self.settings = dataclasses.replace(settings, rule=rule)
        # Weights travel between the lead devices, everything small between the hosts.
        host = f"{self._worker_device}/device:CPU:0"
        self.collectives = self._collectives(0, self.worker_devices[0], settings.communication)
        self.reports = self._collectives(1, host, "RING")
        self.control = self._collectives(2, host, "RING", settings.timeout_seconds)
        if self._num_workers > 1:
            self._watchdog = Watchdog(settings.timeout_seconds, self._waiting_since, _abort)

    def _waiting_since(self) -> float:
        return max((s.waiting_since() for s in self.synchronizers), default=0.0)

    def _collectives(
        self, group: int, device: str, communication: str, timeout_seconds: float = 0.0
    ) -> Collectives:
        if self._num_workers == 1:
            return Loopback()
        return TensorFlowCollectives(
            self._num_workers,
            self._id_in_cluster,
            device,
            timeout_seconds,
            communication,
            group,
        )

    def start(self, fingerprint: Mapping[str, Any]) -> None:
        """Compares the workers' settings."""
        agree(
            {**fingerprint, "devices per worker": len(self.worker_devices)},
            self.control,
            "start",
        )

    # -- synchronizers -----------------------------------------------------------------------

    def synchronizer_for(self, fn: Any) -> Synchronizer | None:
        """The synchronizer of the model whose step `fn` is, if there is one that still fits it."""
        trained = self._trained.get(id(self.model_of(fn)))
        if trained is None or trained.identity != _identity(trained.model):
            return None
        return trained.synchronizer

    def synchronizer_of(self, model: keras.Model) -> Synchronizer:
        """The synchronizer of a model that is built and compiled; made if there is none."""
        trained = self._trained.get(id(model))
        if trained is None or trained.identity != _identity(model):
            return self.make_synchronizer(model)
        return trained.synchronizer

    def model_of(self, fn: Any) -> keras.Model | None:
        # Keras hands its bound train_step or test_step to run().
        owner = getattr(fn, "__self__", None)
        return owner if isinstance(owner, keras.Model) else self.tracked

    def make_synchronizer(self, model: keras.Model | None) -> Synchronizer:
        """Makes the sync state of a model from its present weights."""
        if model is None:
            raise ValueError(
                "run() was given a function that updates weights, but not whose. Call "
                "strategy.track(model) once before a custom training loop."
            )
        _refuse(model)
        variables = replica_variables(model, self._container_strategy().experimental_local_results)
        name = f"model{self._synchronizers_made}"
        self._synchronizers_made += 1
        # Without the layers' names, whose numbers count every model that a process has made.
        shapes = [
            f"{n.split('/')[-1]} {tuple(v[0].shape)} {v[0].dtype.name}"
            for n, v in zip(variables.weight_names, variables.weights, strict=True)
        ]
        agree({"model": "; ".join(shapes)}, self.control, name)
        settings = self.settings
        warn_of_outlasting_momentum(settings, getattr(model, "optimizer", None))
        synchronizer = Synchronizer(
            variables,
            rule=settings.rule,
            averages=settings.averages,
            local_state=settings.local_state,
            sync_period=self.sync_period,
            aggregation=settings.aggregation,
            num_replicas=self._num_replicas_in_sync,
            first_replica=self._id_in_cluster * len(self.worker_devices),
            devices=self.worker_devices,
            collectives=self.collectives,
            reports=self.reports,
            name=name,
            make_variable=_plain_variable,
        )
        former = self._trained.get(id(model))
        if former is not None:
            synchronizer.adopt(former.synchronizer)
        others = [t.synchronizer for key, t in self._trained.items() if key != id(model)]
        if any(other.has_any_of([v[0] for v in variables.weights]) for other in others):
            raise ValueError(
                f"model {model.name!r} shares weights with another that was trained under this "
                "strategy; each would keep a global model of them. Train one model that has both."
            )
        self._trained[id(model)] = _Trained(model, _identity(model), synchronizer)
        return synchronizer

    @property
    def synchronizers(self) -> list[Synchronizer]:
        """Of all models that were trained, in the order in which they were made."""
        return [trained.synchronizer for trained in list(self._trained.values())]

    def trained(self, model: keras.Model) -> Synchronizer | None:
        """The synchronizer of a model, if it was trained."""
        found = self._trained.get(id(model))
        return found.synchronizer if found else None

    def is_stranger(self, model: keras.Model) -> bool:
        """Whether a model is another strategy's, or has weights that a trained model has."""
        if model.distribute_strategy is not self._container_strategy():
            return True
        first = self._container_strategy().experimental_local_results
        own = [first(v.value)[0] for v in model.trainable_variables]
        return any(s.has_any_of(own) for s in self.synchronizers)

    def finish_blocks(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.finish_block()

    def broadcast_replica(self, model: keras.Model, replica: int) -> None:
        if not 0 <= replica < self._num_replicas_in_sync:
            raise ValueError(
                f"replica={replica} is not one of 0 … {self._num_replicas_in_sync - 1}."
            )
        synchronizer = self.synchronizer_of(model)
        worker, device = divmod(replica, len(self.worker_devices))
        weights, state = synchronizer.replica_values(device)

        def from_worker(k: int, tensor: tf.Tensor) -> tf.Tensor:
            mine = tensor if worker == self._id_in_cluster else tf.zeros_like(tensor)
            flat = tf.reshape(mine, [-1])
            total = self.control.all_reduce([flat], f"replica/{k}")[0]
            return tf.reshape(total, tensor.shape)

        values = [from_worker(k, t) for k, t in enumerate([*weights, *state])]
        self.finish_blocks()
        synchronizer.restart(values[: len(weights)], values[len(weights) :])

    # -- local steps -------------------------------------------------------------------------

    def _use_merge_call(self) -> bool:
        # No step waits for other replicas.
        return False

    def _in_multi_worker_mode(self) -> bool:
        # True makes Keras and the input library run a collective at every step.
        return False

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        # Optimizers sum gradients over replicas here: a local step has its own alone.
        del reduce_op, options
        return value

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        # Optimizers write weights and slots through this: noticed while run() is traced.
        self.optimizer_stepped = True
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        # Python code that sets a weight (load_weights, set_weights, assign) comes through here.
        result = super()._update(var, fn, args, kwargs, group)
        if tf.executing_eagerly():
            for synchronizer in self.synchronizers:
                synchronizer.was_set(var.values[0])
        return result

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        # A metric variable that Python reads is that of all replicas; everything else (step
        # outputs, a batch that Keras looks at) is reduced over this worker's replicas.
        del destinations, options
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if isinstance(value, _values.SyncOnReadVariable):
            return self._reduce_over_all(value, mean)

        def reduce(leaf: Any) -> Any:
            if not isinstance(leaf, tf.distribute.DistributedValues):
                return leaf
            parts = self._container_strategy().experimental_local_results(leaf)
            if not mean and any(part.dtype == tf.bool for part in parts):
                return parts[0]
            total = tf.add_n([tf.convert_to_tensor(part) for part in parts])
            return total / len(parts) if mean else total

        return tf.nest.map_structure(reduce, value)

    def _reduce_over_all(self, variable: Any, mean: bool) -> tf.Tensor:
        if tf.executing_eagerly():
            self.finish_blocks()
        local = tf.add_n([v.read_value() for v in variable.values])
        if self._num_workers > 1 and tf.executing_eagerly():
            name = f"metric/{local.dtype.name}"
            flat = tf.reshape(local, [-1])
            local = tf.reshape(self.control.all_reduce([flat], name)[0], local.shape)
        return local / self._num_replicas_in_sync if mean else local

    # -- data --------------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return super()._experimental_distribute_dataset(without_tuner(dataset), options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        return super()._distribute_datasets_from_function(
            lambda context: without_tuner(dataset_fn(context)), options
        )

    # -- variables ---------------------------------------------------------------------------

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # A replica writes its own component without asking the others.
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        return super()._create_variable(next_creator, **kwargs)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        # The parent broadcasts here without a timeout and without looking at shapes.
        initial = kwargs["initial_value"]
        seed = "seed_generator_state" in (kwargs.get("name") or "")
        number = self._id_in_cluster * len(self.worker_devices) + replica_id

        def value() -> tf.Tensor:
            if primary_var is None:
                first = initial() if callable(initial) else initial
                if isinstance(first, _CheckpointInitialValue):
                    first = first.wrapped_value
                first = tf.convert_to_tensor(first, kwargs.get("dtype"))
                if tf.executing_eagerly() and kwargs.get("synchronization") != (
                    tf.VariableSynchronization.ON_READ
                ):
                    first = self._chiefs_value(first, kwargs.get("name") or "Variable")
            else:
                first = tf.identity(primary_var.read_value())
            if seed and (primary_var is None or replica_id > 0):
                # Every replica draws masks of its own: dropout is independent noise.
                step = number if primary_var is None else replica_id
                offset = tf.cast(step * 1_000_003, first.dtype)
                first = first + tf.one_hot(
                    0, first.shape[0], offset, tf.zeros_like(offset), dtype=first.dtype
                )
            return first

        return value

    def _chiefs_value(self, value: tf.Tensor, name: str) -> tf.Tensor:
        """The chief's initial value, after making sure that all create the same variable."""
        self._created += 1
        if self._num_workers == 1:
            return value
        description = f"{name} {tuple(value.shape)} {value.dtype.name}"
        number = f"variable {self._created}"
        mine = tf.constant([zlib.crc32(description.encode())], tf.int64)
        everyone = self.control.all_gather(mine, "variable/check")
        if not bool(tf.reduce_all(everyone == everyone[0])):
            agree({f"model, {number}": description}, self.control, "variable/difference")
        if not (value.dtype.is_floating or value.dtype.is_integer):
            return value
        return self.control.broadcast(value, "variable/value")

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        # The parent takes one CPU device at most.
        wanted = self._wanted_devices
        if wanted is None:
            gpus = tf.config.list_logical_devices("GPU")
            wanted = [f"GPU:{index}" for index in range(len(gpus))] or ["CPU:0"]
        available = [d.name.split("device:")[-1] for d in tf.config.list_logical_devices()]
        missing = [d for d in wanted if d.upper() not in available]
        if missing or not wanted:
            raise ValueError(
                f"devices={list(wanted)!r}: this process has {available}. Logical "
                "CPU devices are made by tf.config.set_logical_device_configuration."
            )
        kind = wanted[0].upper().split(":")[0]
        return tuple(f"{worker_device}/device:{d.upper()}" for d in wanted), kind


def _resolver(found: cluster.Cluster) -> tf.distribute.cluster_resolver.ClusterResolver:
    """TensorFlow's form of our cluster, which has been validated; TF_CONFIG is not read again."""
    if found.num_workers == 1:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    jobs = json.loads(found.tf_config())["cluster"]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs),
        task_type=found.task_type,
        task_id=found.task_index,
        rpc_layer="grpc",
    )


def _abort(message: str) -> None:
    # The way in which the parent's own health check ends collectives.
    _context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def _is_train_step(fn: Any) -> bool:
    """Whether `fn` is the training step of a model with weights, whatever writes these."""
    model = getattr(fn, "__self__", None)
    return (
        isinstance(model, keras.Model)
        and getattr(fn, "__name__", "") == "train_step"
        and bool(model.trainable_variables)
    )


def _refuse(model: keras.Model) -> None:
    """Raises ValueError for what Keras would do behind the strategy's back."""
    if any(getattr(optimizer, "use_ema", False) for optimizer in optimizers(model)):
        raise ValueError(
            "the optimizer has use_ema=True, with which Keras overwrites each replica's weights by "
            'its own average. Use averages={"ema": tfpara.EMA(...)} of the strategy instead.'
        )
    if getattr(model, "jit_compile", False) is True:
        raise ValueError(
            "the model was compiled with jit_compile=True; collectives cannot be compiled by XLA. "
            "Compile it with jit_compile=False."
        )


def _identity(model: keras.Model) -> Any:
    """What a synchronizer was made for; compiling anew or freezing layers changes it."""
    return getattr(model, "optimizer", None), [id(v) for v in model.trainable_variables]


def _plain_variable(value: Any, name: str) -> tf.Variable:
    return ResourceVariable(value, name=f"tfpara/{name}", trainable=False)


def _in_replica() -> bool:
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
