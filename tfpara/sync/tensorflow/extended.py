"""The overrides of TensorFlow's methods by which replicas are independent between syncs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara import cluster
from tfpara.cluster.call_site import call
from tfpara.steps import mapped
from tfpara.strategy import StateHolder
from tfpara.sync.data.balance import Balance
from tfpara.sync.momentum_fit import MomentumFit
from tfpara.sync.notes import Notes
from tfpara.sync.settings import Settings
from tfpara.sync.tensorflow import links
from tfpara.sync.tensorflow.devices import checked_devices
from tfpara.sync.tensorflow.distributed_data import DistributedData
from tfpara.sync.tensorflow.links import BETWEEN_STRATEGIES, LATER_SECONDS, Links
from tfpara.sync.tensorflow.nonfinite import Guard
from tfpara.sync.tensorflow.run_steps import RunSteps
from tfpara.sync.tensorflow.trained_models import TrainedModels
from tfpara.sync.tensorflow.variables import (
    InitialValues,
    MetricReads,
    plain_variable,
    with_our_class,
)
from tfpara.sync.tensorflow.waits import Waits
from tfpara.sync.workers.company import Company
from tfpara.sync.workers.json_exchange import joined
from tfpara.sync.workers.meetings import Control
from tfpara.sync.workers.worker import Worker
from tfpara.tensorflow_private import mwms as _mwms
from tfpara.tensorflow_private import values as _values
from tfpara.typing import Nest, Variable

_GATHER = call("strategy.gather()")
_REDUCE = call("strategy.reduce()")


class PeriodicSyncExtended(_mwms.CollectiveAllReduceExtended):
    """The extended strategy, with replicas that are independent between syncs.

    It overrides the methods by which the parent class makes replicas agree at every step or read.

    Attributes:
        states: objects whose state checkpoints keep, by name.
        progress: the `tfpara.sync.progress.Progress` of this worker, once it has begun.
        shown: the name given to `strategy.weights`, inside its context; else None.
    """

    # The parent class has a thread that probes whether other workers still answer. The thread is
    # turned off, because tfpara's collectives notice a silent worker themselves: a collective ends
    # with an error, at the latest after a timeout.
    _enable_check_health = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        settings: Settings,
        devices: Sequence[str],
        found: cluster.Cluster,
        company: Company,
    ) -> None:
        self._wanted_devices = devices
        self.settings = settings
        self.shown: str | None = None
        self.progress: Any = None
        self.worker = Worker(company)
        self.call_site = self.worker.call_site
        # `waits` is made early, since threads of an elastic run read it before models are trained.
        self.waits = Waits(found, self.worker, bool(settings.overlap))
        horovod = settings.collectives == "horovod" and found.num_workers > 1
        if company.changes:
            links.without_coordination()
        served = not horovod and found.num_workers > 1
        self._earlier = earlier = links.served[found] if served else 0
        # If a process makes a second strategy, the parent class would start TensorFlow's server
        # anew, and requests that a faster worker has already sent would be lost. So the server
        # keeps running, and the collectives of each strategy have keys of their own.
        self._std_server_started = earlier > 0
        strategy._collective_key_base = earlier * BETWEEN_STRATEGIES
        super().__init__(
            strategy,
            cluster_resolver=company.resolver(),
            communication_options=tf.distribute.experimental.CommunicationOptions(),
        )
        self.worker.devices, self.worker.kind = self.worker_devices, self._local_device_type
        if not horovod:
            self.worker.host = f"{self._worker_device}/device:CPU:0"
        if served:
            links.served[found] += 1
        if company.changes or found.num_workers == 1:
            self._resolve()
        company.attach(self)

    def begin(self) -> None:
        """Makes the strategy's parts, once TensorFlow's server runs; every worker must call it.

        In this method a worker may wait for others. So it is called outside of `startup.guard`,
        whose limit is shorter than `timeout_seconds`. Each part gets the earlier ones it needs.
        """
        found, worker, strategy = self.waits.found, self.worker, self._container_strategy()
        if not worker.changes and found.num_workers > 1:
            first = Links(found, self.settings, worker, self._earlier)
            self.waits.abort = first.abort
            self.waits.watch(self.settings.timeout_seconds)
            first.tell_devices()
            self._resolve()
        settings = self.settings
        self.links = Links(found, settings, worker, self._earlier)
        self.notes = Notes(settings, worker)
        self.momentum = MomentumFit(settings, worker, self.notes, plain_variable)
        self.balance: Balance | None = None
        if settings.balance is not False:
            simulates = strategy._is_simulated
            self.balance = Balance(settings, worker, self.momentum, plain_variable, simulates)
        self.models = TrainedModels(
            strategy, settings, worker, self.links, self.momentum, self.notes, self.balance
        )
        self.waits.synchronizers, self.waits.abort = self.models.in_turn, self.links.abort
        collectives = self.links.for_control()
        self.control = Control(collectives, worker.call_site, self.models.in_turn, worker.company)
        worker.control = self.control
        guard = Guard(strategy, worker.devices) if settings.nonfinite == "skip" else None
        self.steps = RunSteps(strategy, self.models, guard)
        self.data = DistributedData(worker, self.models, self.momentum, self.balance)
        self.metrics = MetricReads(worker)
        self.initial_values = InitialValues(worker)
        self.states: dict[str, StateHolder] = {"order of data": self.data.order}
        if self.balance is not None:
            self.states["balance"] = self.balance
            self.balance.open_steps = lambda: sum(
                each.graph.block.trained for each in self.models.synchronizers
            )
            if not worker.changes:
                worker.company.epoch_units = self.balance

    def _resolve(self) -> None:
        """Resolves the rule for the number of replicas with which the run begins."""
        replicas = self.worker.company.founding_replicas(len(self.worker_devices))
        self.settings = self.settings.resolved(replicas)

    # -- the workers -----------------------------------------------------------------------------

    # The parent class keeps the number of workers and the number of this worker's task as
    # attributes. Both change in an elastic run, so they are read from `worker`.
    @property
    def _num_workers(self) -> int:
        return self.worker.num_workers

    @_num_workers.setter
    def _num_workers(self, workers: int) -> None:
        self.worker.num_workers = workers

    @property
    def _id_in_cluster(self) -> int:
        return self.worker.rank

    @_id_in_cluster.setter
    def _id_in_cluster(self, rank: int) -> None:
        self.worker.rank = rank

    # The next three members are overridden, because the parent class computes their values as if
    # all workers had equally many devices.
    @property
    def _num_replicas_in_sync(self) -> int:
        return self.worker.replicas

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.worker.first_replica + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self.worker.first_replica

    def take_place(self, num_workers: int, rank: int) -> None:
        """Sets what TensorFlow has derived from its list of workers."""
        self._num_workers, self._id_in_cluster = num_workers, rank
        self._is_chief = rank == 0

    def _update_config_proto(self, config_proto: tf.compat.v1.ConfigProto) -> Any:
        # The parent class starts TensorFlow's server with this configuration. By default TensorFlow
        # ends all processes if a worker sends no heartbeat for 10 s, for example because its
        # process is stopped. So this limit is raised.
        updated = super()._update_config_proto(config_proto)
        limit = math.ceil(1000 * (self.settings.timeout_seconds + LATER_SECONDS))
        updated.experimental.coordination_config.heartbeat_timeout_in_ms = limit
        if self.worker.company.leader:
            updated.experimental.collective_group_leader = self.worker.company.leader
        return updated

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        # The parent class's method would take all GPUs, or else a single CPU device. This method
        # takes the wanted devices.
        listed = [device.name for device in tf.config.list_logical_devices()]
        devices = checked_devices(self._wanted_devices, listed, worker_device)
        return tuple(devices), self._wanted_devices[0].upper().split(":")[0]

    def _in_multi_worker_mode(self) -> bool:
        # If this method returned True, Keras and TensorFlow's `input_lib` would run a collective at
        # every step.
        return False

    # -- steps -----------------------------------------------------------------------------------

    def _use_merge_call(self) -> bool:
        # Merge calls would make the replicas wait for each other in every step.
        return False

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, options: Any = None
    ) -> Any:
        # Optimizers call this method to sum gradients over the replicas. A local step uses only the
        # gradients of its own replica, so the method returns `value` as it is.
        del reduce_op, options
        if not self.steps.trace.applying and self._num_replicas_in_sync > 1:
            self.notes.tell(
                "all_reduce in a replica gives its own value, since replicas are independent "
                "between syncs. So BatchNormalization(synchronized=True) normalises by a "
                "replica's own part of the batch."
            )
        return value

    def _replica_ctx_update(
        self, var: Variable, fn: Callable[..., Nest], args: Nest, kwargs: Nest, group: bool
    ) -> Nest:
        # While run() is traced, optimizers write weights and slots through this method. The list
        # `written` tells whether the traced function trains, and which weights it trains.
        self.steps.trace.written.append(var)
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    def _update(
        self, var: Variable, fn: Callable[..., Nest], args: Nest, kwargs: Nest, group: bool
    ) -> Nest:
        # Python code sets weights through this method, for example by load_weights, set_weights or
        # assign. The synchronizers take the new values over, for example into the global model.
        result = super()._update(var, fn, args, kwargs, group)
        if tf.executing_eagerly():
            for synchronizer in self.models.synchronizers:
                synchronizer.was_set(var.values[0])
        return result

    # -- reductions ------------------------------------------------------------------------------

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Nest, destinations: Any, options: Any
    ) -> Any:
        del destinations, options
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if isinstance(value, _values.SyncOnReadVariable):
            return self.metrics.over_all(value, mean)
        local_results = self._container_strategy().experimental_local_results
        return mapped(lambda leaf: self._reduced(local_results(leaf), mean), value)

    def _batch_reduce_to(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Sequence[tuple[Nest, Any]],
        options: Any,
    ) -> list[Any]:
        # The parent class's method expects equally many devices on all workers.
        return [
            self._reduce_to(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def _reduced(self, local: Sequence[Nest], mean: bool) -> tf.Tensor:
        """Returns the sum or mean over all replicas; `local` are this worker's replicas' values."""
        if self._num_workers > 1 and not tf.executing_eagerly():
            raise ValueError(
                "strategy.reduce inside a tf.function would have the workers wait for each other "
                "in every step. Return the values that strategy.run gives, and call "
                "strategy.reduce outside of the function, on every worker; or update a "
                "keras.metrics.Mean in the step, and read its result() where an epoch ends."
            )
        parts = [tf.convert_to_tensor(part) for part in local]
        if not all(part.shape.is_compatible_with(parts[0].shape) for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(
                f"strategy.reduce: the replicas' values have the shapes {shapes}. Give the axis of "
                "the samples too, as in strategy.reduce(op, value, axis=0)."
            )
        # A single value in `local` stands for equal values of all local replicas, so it counts once
        # for each of them.
        total = tf.add_n(parts) * (len(self.worker_devices) // len(parts))
        if self._num_workers > 1:
            total = tf.reduce_sum(joined(total[tf.newaxis], 0, self.control, _REDUCE), 0)
        return total / self._num_replicas_in_sync if mean else total

    def _gather_to_implementation(
        self, value: Nest, destinations: object, axis: int, options: object
    ) -> tf.Tensor:
        # The parent class's method has no timeout and does not know Horovod's workers. It also
        # sorts the values by the texts of device names, so that device 10 comes before device 2.
        del destinations, options
        if self._num_workers > 1 and not tf.executing_eagerly():
            raise ValueError(
                "strategy.gather inside a tf.function would have the workers wait for each other "
                "in every step. Call it outside of the function, on every worker."
            )
        parts = self._container_strategy().experimental_local_results(value)
        mine = tf.concat([tf.convert_to_tensor(part) for part in parts], axis)
        return joined(mine, axis, self.control, _GATHER) if self._num_workers > 1 else mine

    # -- data and variables ----------------------------------------------------------------------

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: object
    ) -> tf.distribute.DistributedDataset:
        distribute = super()._experimental_distribute_dataset
        if not self.data.is_by_replica:
            return self.data.divided(dataset, lambda given: distribute(given, options))
        parts = self.data.parts_of(dataset, lambda given: distribute(given, options))
        return self.distribute_parts(parts, options)

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[..., tf.data.Dataset], options: Any
    ) -> Any:
        make = super()._distribute_datasets_from_function
        return self.data.from_function(dataset_fn, lambda prepared: make(prepared, options))

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable[[tf.distribute.experimental.ValueContext], Nest]
    ) -> Any:
        # The parent class numbers replicas as if all workers had equally many devices.
        context, own = tf.distribute.experimental.ValueContext, iter(self.worker.replica_ids)
        return super()._experimental_distribute_values_from_function(
            lambda _: value_fn(context(next(own), self.worker.replicas))
        )

    def distribute_steps(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
        """Distributes a dataset of this worker's steps over its own devices alone."""
        with self.worker.alone():
            return self._experimental_distribute_dataset(dataset, None)

    def distribute_parts(self, dataset: tf.data.Dataset, options: Any = None) -> Any:
        """Distributes minibatches over this worker's devices, one to each in turn."""
        made = self._distribute_datasets_from_function(lambda context: dataset, options)
        made.of_minibatches = False
        return made

    def datasets_by_epoch(self, dataset_fn: Callable[..., tf.data.Dataset]) -> Any:
        """Distributes datasets that a function makes anew for each epoch."""
        make = super()._distribute_datasets_from_function
        return self.data.by_epoch(dataset_fn, lambda prepared: make(prepared, None))

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # With the aggregation NONE, a replica writes its own component of a variable without an
        # exchange with other replicas.
        if kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        return with_our_class(super()._create_variable(next_creator, **kwargs))

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Variable, **kwargs: Any
    ) -> Any:
        # The parent class's method broadcasts without a timeout and does not compare shapes.
        return self.initial_values.of_component(replica_id, primary_var, kwargs)

    # -- calls of Keras' fit ---------------------------------------------------------------------

    @contextlib.contextmanager
    def in_fit(self, model: keras.Model, initial_epoch: int) -> Iterator[None]:
        """A context in which `fit` trains a model, from epoch `initial_epoch` on."""
        with self.models.in_fit(model), self.data.in_fit(initial_epoch), self.call_site.in_fit():
            try:
                yield
            finally:
                self.momentum.end_fit()

    def note_idle(self, model: keras.Model) -> None:
        """Prints a note on replicas that had no rows, at the end of the first epoch of `fit`."""
        trained = self.models.trained(model)
        if trained is not None and not self.worker.changes and not self.data.position.first:
            seen = trained.graph.consensus.weights_seen
            self.notes.idle_replicas(np.flatnonzero(seen == 0).tolist())
