"""The distribution strategy, derived from `tf.distribute.MultiWorkerMirroredStrategy`.

This is the only file that touches private names of TensorFlow. Each use says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

# The variable behind tf.Variable: a plain one can be created where a strategy is in scope, which
# would otherwise mirror it.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfpara import algorithms, cluster
from tfpara.collectives import Loopback, TensorFlowCollectives
from tfpara.fingerprint import agree
from tfpara.synchronizer import (
    LOCAL_STATE,
    ReplicaVariables,
    Synchronizer,
    SyncStatistics,
)
from tfpara.version import __version__

# The extended class that MultiWorkerMirroredStrategy builds, and the value types that its reductions
# see. They have no public names.
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
    """

    def __init__(
        self,
        rule: Any,
        *,
        sync_period: int,
        averages: Mapping[str, Any] | None = None,
        local_state: str = "keep",
        devices: Sequence[str] | None = None,
        data_plan: Mapping[str, Any] | None = None,
        timeout_seconds: float = 300.0,
        startup_timeout_seconds: float = 300.0,
        communication: str = "AUTO",
    ) -> None:
        settings = _Settings(
            rule=_checked_rule(rule),
            sync_period=_checked_period(sync_period),
            averages=_checked_averages(averages or {}),
            local_state=_checked_local_state(local_state),
            timeout_seconds=timeout_seconds,
            communication=communication,
        )
        found = cluster.read()
        # The grandparent's constructor: the parent's would build its own extended class.
        tf.distribute.Strategy.__init__(self, _PeriodicSyncExtended(self, settings, devices))
        del startup_timeout_seconds, found
        extended = self.extended
        extended.start(
            {
                **settings.fingerprint(),
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
    def sync_period(self) -> int:
        """τ, minibatches of each replica between two syncs."""
        return self.extended.settings.sync_period

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

        A replica whose part of the batch is empty takes no step. Where `fn` updates the weights of a
        model, the sync of every `sync_period`-th call is part of this call.
        """
        extended = self.extended
        with self.scope():
            synchronizer = extended.synchronizer_for(fn)
            extended.optimizer_stepped = False
            outputs = super().run(_skip_empty(fn), args, kwargs, options)
            if not extended.optimizer_stepped:
                return outputs
            if synchronizer is None:
                with tf.init_scope():
                    synchronizer = extended.make_synchronizer(fn)
            locals_ = self.experimental_local_results((args, kwargs or {}))
            samples = [_batch_size(values) for values in locals_]
            with _after(locals_):
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
        normalisation are those of the last sync in each case.

        Args:
            model: a model that was made in the scope.
            which: "global", "local" or a name among `averages`.

        Raises:
            ValueError: an unknown name; the message lists those there are.
        """
        known = ["global", "local", *self.extended.settings.averages]
        if which not in known:
            raise ValueError(f"which={which!r} is unknown. There are: {', '.join(known)}.")
        self.synchronize()
        synchronizer = self.extended.synchronizers.get(id(model))
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
        every = [s.statistics() for s in self.extended.synchronizers.values()]
        if not every:
            return SyncStatistics(0, 0, 0, 0.0, 0.0, 0.0)
        return SyncStatistics(
            *(sum(c) for c in list(zip(*every, strict=True))[:-1]), every[-1].distance
        )


@dataclasses.dataclass(frozen=True)
class _Settings:
    rule: Any
    sync_period: int
    averages: dict[str, Any]
    local_state: str
    timeout_seconds: float
    communication: str

    def fingerprint(self) -> dict[str, str]:
        return {
            "tfpara version": __version__,
            "tensorflow version": tf.__version__,
            "keras version": keras.__version__,
            "rule": repr(self.rule),
            "sync_period": str(self.sync_period),
            "averages": repr(self.averages),
            "local_state": self.local_state,
        }


class _PeriodicSyncExtended(_mwms.CollectiveAllReduceExtended):
    """Replicas that keep to themselves between syncs.

    Overrides the places in which the parent makes replicas agree at every step or every read.
    """

    # The parent's thread that probes peers; the collectives' own errors and timeouts serve us.
    _enable_check_health = False

    def __init__(
        self, strategy: PeriodicSyncStrategy, settings: _Settings, devices: Sequence[str] | None
    ) -> None:
        self._wanted_devices = devices
        self.optimizer_stepped = False
        self.tracked: keras.Model | None = None
        self.synchronizers: dict[int, Synchronizer] = {}
        self._models: list[keras.Model] = []
        self._created = 0
        super().__init__(
            strategy,
            cluster_resolver=tf.distribute.cluster_resolver.TFConfigClusterResolver(),
            communication_options=tf.distribute.experimental.CommunicationOptions(),
        )
        rule = settings.rule.resolve(self._num_replicas_in_sync)
        self.settings = dataclasses.replace(settings, rule=rule)
        self.collectives = Loopback()
        if self._num_workers > 1:
            self.collectives = TensorFlowCollectives(
                self._num_workers,
                self._id_in_cluster,
                self.worker_devices[0],
                settings.timeout_seconds,
                settings.communication,
            )

    def start(self, fingerprint: Mapping[str, Any]) -> None:
        """Compares the workers' settings."""
        agree(
            {**fingerprint, "devices per worker": len(self.worker_devices)},
            self.collectives,
            "start",
        )

    # -- synchronizers -----------------------------------------------------------------------

    def synchronizer_for(self, fn: Any) -> Synchronizer | None:
        model = self._model_of(fn)
        return None if model is None else self.synchronizers.get(id(model))

    def _model_of(self, fn: Any) -> keras.Model | None:
        # Keras hands its bound train_step or test_step to run().
        owner = getattr(fn, "__self__", None)
        return owner if isinstance(owner, keras.Model) else self.tracked

    def make_synchronizer(self, fn: Any) -> Synchronizer:
        """Makes the sync state of the model that `fn` trains, from its present weights."""
        model = self._model_of(fn)
        if model is None:
            raise ValueError(
                "run() was given a function that updates weights, but not whose. Call "
                "strategy.track(model) once before a custom training loop."
            )
        variables = self._replica_variables(model)
        name = f"model{len(self.synchronizers)}"
        shapes = [
            f"{n} {tuple(v[0].shape)} {v[0].dtype.name}"
            for n, v in zip(variables.weight_names, variables.weights, strict=True)
        ]
        agree({"model": "; ".join(shapes)}, self.collectives, name)
        settings = self.settings
        _warn_of_outlasting_momentum(settings, getattr(model, "optimizer", None))
        synchronizer = Synchronizer(
            variables,
            rule=settings.rule,
            averages=settings.averages,
            local_state=settings.local_state,
            sync_period=settings.sync_period,
            num_replicas=self._num_replicas_in_sync,
            first_replica=self._id_in_cluster * len(self.worker_devices),
            devices=self.worker_devices,
            collectives=self.collectives,
            name=name,
            make_variable=_plain_variable,
        )
        self.synchronizers[id(model)] = synchronizer
        self._models.append(model)  # Keeps the id in use.
        return synchronizer

    def _replica_variables(self, model: keras.Model) -> ReplicaVariables:
        def components(variables: Sequence[keras.Variable]) -> list[tuple[tf.Variable, ...]]:
            return [
                self._container_strategy().experimental_local_results(v.value) for v in variables
            ]

        weights = model.trainable_variables
        state = [
            v
            for v in model.non_trainable_variables
            # A frozen weight is not state: it is trainable to TensorFlow, and does not move.
            if v.value.dtype.is_floating and not v.value.trainable
        ]
        slots = _slots(model.optimizer) if getattr(model, "optimizer", None) is not None else []
        return ReplicaVariables(
            weights=components(weights),
            weight_names=[v.path for v in weights],
            state=components(state),
            slots=components([v for v, _ in slots]),
            slot_resets=[value for _, value in slots],
        )

    def finish_blocks(self) -> None:
        for synchronizer in list(self.synchronizers.values()):
            synchronizer.finish_block()

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
            for synchronizer in self.synchronizers.values():
                synchronizer.was_set(var.values[0])
        return result

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        # A metric variable that Python reads is that of all replicas; everything else (step outputs,
        # a batch that Keras looks at) is reduced over this worker's replicas.
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
            local = tf.reshape(self.collectives.all_reduce([flat], name)[0], local.shape)
        return local / self._num_replicas_in_sync if mean else local

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
        everyone = self.collectives.all_gather(mine, "variable/check")
        if not bool(tf.reduce_all(everyone == everyone[0])):
            agree({f"model, {number}": description}, self.collectives, "variable/difference")
        if not (value.dtype.is_floating or value.dtype.is_integer):
            return value
        return self.collectives.broadcast(value, "variable/value")

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        # The parent takes one CPU device at most.
        if self._wanted_devices is None:
            return super()._initialize_local_devices(cluster_resolver, worker_device)
        available = [d.name.split("device:")[-1] for d in tf.config.list_logical_devices()]
        missing = [d for d in self._wanted_devices if d.upper() not in available]
        if missing or not self._wanted_devices:
            raise ValueError(
                f"devices={list(self._wanted_devices)!r}: this process has {available}. Logical "
                "CPU devices are made by tf.config.set_logical_device_configuration."
            )
        kind = self._wanted_devices[0].upper().split(":")[0]
        return tuple(f"{worker_device}/device:{d.upper()}" for d in self._wanted_devices), kind


def _plain_variable(value: Any, name: str) -> tf.Variable:
    return ResourceVariable(value, name=f"tfpara/{name}", trainable=False)


def _in_replica() -> bool:
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _skip_empty(fn: Any) -> Any:
    """`fn`, but not run where the replica's batch has no samples; its results are then zeros."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        count = _batch_size((args, kwargs))
        if count is None or isinstance(count, int):
            with _after((args, kwargs)):
                return fn(*args, **kwargs)
        if tf.executing_eagerly():
            return fn(*args, **kwargs) if int(count) else None
        outputs: list[Any] = []

        def step() -> Any:
            outputs.append(tf.nest.map_structure(tf.convert_to_tensor, fn(*args, **kwargs)))
            return outputs[0]

        def skip() -> Any:
            return tf.nest.map_structure(
                lambda t: tf.zeros([d or 0 for d in t.shape], t.dtype), outputs[0]
            )

        return tf.cond(count > 0, step, skip)

    return guarded


def _after(structure: Any) -> contextlib.AbstractContextManager:
    """Operations made inside run once the tensors of `structure` are there.

    Without it a step whose data turn out to be at their end would already have counted itself, and
    let an optimizer with weight decay write.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    tensors = [t for t in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(t)]
    return tf.control_dependencies(tensors)


def _batch_size(structure: Any) -> int | tf.Tensor | None:
    """Samples in a replica's batch: length of the first tensor's first axis; None without one."""
    for leaf in tf.nest.flatten(structure):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows()
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0:
            static = leaf.shape[0] if leaf.shape.rank is not None else None
            return static if static is not None else tf.shape(leaf)[0]
    return None


def _slots(optimizer: Any) -> list[tuple[keras.Variable, float]]:
    """The optimizer's per-weight state, with the value each starts from."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    start = float(getattr(inner, "initial_accumulator_value", 0.0))
    return [
        (v, start)
        for v in inner.variables
        if v.value.dtype.is_floating
        and v.value.shape.rank
        # Gradients under way and Keras' own moving average of the weights are not momentum.
        and not v.path.endswith(("gradient_accumulator", "average"))
    ]


def _warn_of_outlasting_momentum(settings: _Settings, optimizer: Any) -> None:
    """Classical block momentum and kept local momentum that remembers longer than a block."""
    rule = settings.rule
    if not isinstance(rule, algorithms.BMUF) or rule.nesterov or settings.local_state != "keep":
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = getattr(inner, "momentum", None) or getattr(inner, "beta_1", None) or 0.0
    if not isinstance(momentum, int | float) or not 0.0 < momentum < 1.0:
        return
    memory = 1.0 / (1.0 - momentum)
    if rule.block_momentum and memory > settings.sync_period:
        warnings.warn(
            f"the local optimizer's momentum {momentum:g} remembers about {memory:.0f} minibatches, "
            f"longer than a block of sync_period={settings.sync_period}; kept across syncs under "
            "classical block momentum it is counted twice, and training may diverge. Use "
            'BMUF(nesterov=True), local_state="reset", or a longer sync_period.',
            stacklevel=2,
        )


def _checked_rule(rule: Any) -> Any:
    names = [f"tfpara.{kind.__name__}(...)" for kind in algorithms.RULES]
    if isinstance(rule, algorithms.RULES):
        return rule
    hint = ""
    if isinstance(rule, type) and rule in algorithms.RULES:
        hint = f" That is the class: write tfpara.{rule.__name__}() with parentheses."
    elif isinstance(rule, str):
        match = [k.__name__ for k in algorithms.RULES if k.__name__.lower() == rule.lower()]
        hint = f" Write tfpara.{match[0]}(), not its name." if match else ""
    raise TypeError(f"rule={rule!r} is not a rule object, one of {', '.join(names)}.{hint}")


def _checked_period(sync_period: int) -> int:
    if isinstance(sync_period, bool) or not isinstance(sync_period, int) or sync_period < 1:
        raise ValueError(
            f"sync_period={sync_period!r} must be a whole number of minibatches, at least 1."
        )
    return sync_period


def _checked_averages(averages: Mapping[str, Any]) -> dict[str, Any]:
    for name, average in averages.items():
        if not isinstance(average, algorithms.AVERAGES):
            raise TypeError(
                f"averages[{name!r}]={average!r} is not an average object, tfpara.EMA(decay) or "
                "tfpara.MA()."
            )
        if name in ("global", "local"):
            raise ValueError(f"averages: the name {name!r} is taken. Choose another.")
    return dict(averages)


def _checked_local_state(local_state: str) -> str:
    if local_state not in LOCAL_STATE:
        raise ValueError(f"local_state={local_state!r} is not one of {', '.join(LOCAL_STATE)}.")
    return local_state
