"""Horovod's collectives: Gloo or MPI on CPUs.

Of Horovod only the operations of `horovod.tensorflow` are used. Its Keras wrappers do not average
under Keras 3, and say nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpara.typing import Nest

# After an abort operations fail at once, unless Horovod itself waits for a process that is stopped.
_GRACE_SECONDS = 5.0
# Dtypes that Horovod does not move, and others of as many bits.
_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.bfloat16: tf.uint16}


def problem() -> str | None:
    """What keeps Horovod from being used in this process, and the command to mend it; or None."""
    spec = importlib.util.find_spec("horovod")
    command = f"run scripts/install_horovod.sh --venv={sys.prefix}"
    if spec is None or not spec.submodule_search_locations:
        return f"Horovod is not installed in {sys.prefix}. To build it, {command}"
    # Written when Horovod was built: what it was built for.
    record = Path(spec.submodule_search_locations[0]) / "metadata.json"
    built_for = json.loads(record.read_text()).get("tensorflow") if record.exists() else None
    if built_for != tf.__version__:
        what = f"TensorFlow {built_for}" if built_for else "no TensorFlow"
        return (
            f"Horovod was built for {what}, and this is TensorFlow {tf.__version__}. To build it "
            f"again, {command}"
        )
    try:
        importlib.import_module("horovod.tensorflow")
    except (ImportError, OSError, tf.errors.OpError) as error:
        cause = str(error).strip().splitlines()[0]
        return f"Horovod does not load ({cause}). To build it again, {command}"
    return None


def mpi_problem() -> str | None:
    """As `problem`, of a process that mpirun has started."""
    found = problem()
    if found is None and not load().mpi_built():
        return (
            f"Horovod was built without MPI. Run scripts/install_horovod.sh --mpi "
            f"--venv={sys.prefix} to have it under mpirun"
        )
    return found


def load() -> Any:
    """The module `horovod.tensorflow`.

    Raises:
        ValueError: it is missing, or built for another TensorFlow; says how to build it.
    """
    found = problem()
    if found:
        raise ValueError(f"collectives='horovod': {found}.")
    return importlib.import_module("horovod.tensorflow")


def abort(message: str) -> None:
    """Makes the operations under way fail, here and on all workers that still answer.

    A worker that is stopped holds up Horovod's own end, with MPI for ever: then the process prints
    the message and exits with code 1.
    """
    ending = threading.Thread(target=load().shutdown, daemon=True)
    ending.start()
    ending.join(_GRACE_SECONDS)
    if ending.is_alive():
        print(f"tfpara: {message}", file=sys.stderr, flush=True)
        os._exit(1)


class HorovodCollectives:
    """Collectives between the lead devices of the processes of Horovod's group.

    Horovod matches operations by their names; each may be under way once at a time. The process has
    joined the group before (`tfpara.sync.horovod_group.join`).

    Args:
        size: number of workers.
        rank: this worker, 0 … size − 1.
        device: this worker's lead device.
        timeout_seconds: longest wait for the other workers inside one operation that is called
            eagerly; 0 waits for ever.
        group: number of the group; names of different groups are different.
    """

    summed = frozenset({tf.float16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64})

    def __init__(
        self, size: int, rank: int, device: str, timeout_seconds: float, group: int = 0
    ) -> None:
        self.size = size
        self.rank = rank
        self._hvd = load()
        on_gpu = "GPU" in device.upper()
        self._by_nccl = on_gpu and self._hvd.nccl_built()
        # Without NCCL Horovod has operations on CPUs alone.
        self._device = "CPU:0" if on_gpu and not self._by_nccl else device
        # Gloo's all-to-all and all-gather post the send before the receive, and two workers share
        # one connection: a worker's request for data waits behind the data that it is sending.
        self.full_duplex = self._by_nccl or not self._hvd.gloo_enabled()
        self._timeout = float(timeout_seconds)
        self._group = group
        self._functions: dict[Hashable, Callable[[Nest], Nest]] = {}

    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Element-wise sums over the workers of each float buffer; buffers travel in parallel."""
        self._check(buffers, name)
        return self._call(HorovodCollectives._all_reduce, list(buffers), name)

    def _all_reduce(self, buffers: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        return [
            self._named(self._hvd.allreduce, buffer, ("reduce", name, k), op=self._hvd.Sum)
            for k, buffer in enumerate(buffers)
        ]

    def reduce_scatter(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Of each float buffer, this rank's part of the sums over the workers.

        Lengths are multiples of `size`; rank r gets the r-th of `size` equal parts.
        """
        self._check(buffers, name)
        return self._call(HorovodCollectives._reduce_scatter, list(buffers), name)

    def _reduce_scatter(self, buffers: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        if not self._by_nccl:
            # Gloo's reduce-scatter takes three times as long as the same bytes in an all-to-all
            # and a sum here.
            received = [
                self._all_to_all(tf.reshape(buffer, [self.size, -1]), f"{name}/{k}")
                for k, buffer in enumerate(buffers)
            ]
            return [tf.add_n(tf.unstack(rows, num=self.size)) for rows in received]
        parts = [
            self._named(self._hvd.reducescatter, buffer, ("scatter", name, k), op=self._hvd.Sum)
            for k, buffer in enumerate(buffers)
        ]
        for part, buffer in zip(parts, buffers, strict=True):
            if buffer.shape.is_fully_defined():
                part.set_shape([buffer.shape[0] // self.size])
        return parts

    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Row r of each worker's rows goes to rank r; returns the rows received, by sender."""
        return self._call(HorovodCollectives._all_to_all, rows, name)

    def _all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        received = self._named(self._hvd.alltoall, rows, ("all_to_all", name))
        received.set_shape(rows.shape)
        return received

    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The workers' buffers (of equal shape) stacked by rank, shape [size, ...]."""
        return self._call(HorovodCollectives._all_gather, buffer, name)

    def _all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        rows = _as_bits(buffer)[tf.newaxis]
        gathered = self._named(self._hvd.allgather, rows, ("gather", name))
        gathered.set_shape(tf.TensorShape([self.size]).concatenate(buffer.shape))
        return _from_bits(gathered, buffer.dtype)

    def broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        """The buffer of rank 0."""
        return self._call(HorovodCollectives._broadcast, buffer, name)

    def _broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        bits = _as_bits(buffer)
        sent = self._named(self._hvd.broadcast, bits, ("broadcast", name), root_rank=0)
        return _from_bits(sent, buffer.dtype)

    def barrier(self, name: str) -> None:
        """Returns once every worker has called it."""
        # The check is what keeps the operation in a graph, and an input that is read when it runs
        # keeps it from being computed once for all.
        ranks = self.all_gather(self._hvd.rank_op(), f"barrier/{name}")
        tf.debugging.assert_equal(ranks, tf.range(self.size))

    # -- calls -------------------------------------------------------------------------------

    def _named(
        self, operation: Callable[..., tf.Tensor], buffer: tf.Tensor, name: tuple, **options: object
    ) -> tf.Tensor:
        """One of Horovod's operations, under a name that is the same on every worker.

        Horovod takes what is behind the last slash of the operation's name in the graph.
        TensorFlow's optimiser renames operations that are in a branch: in one way inside a training
        step, in another where a sync is called from Python. Workers of which one does this and one
        that would wait for each other for ever. In a function that is not inlined the operation
        keeps its name.
        """
        node = ".".join(map(str, ("tfpara", self._group, *name))).replace("/", ".")
        node = node.replace(" ", "_")

        def run(tensor: tf.Tensor) -> tf.Tensor:
            with tf.device(self._device):
                return operation(tensor, name=node, ignore_name_scope=True, **options)

        attributes = {"_noinline": True}
        return tf.function(run, autograph=False, experimental_attributes=attributes)(buffer)

    def _call(self, operation: Callable[..., Nest], value: Nest, name: str) -> Nest:
        if tf.inside_function():
            with tf.device(self._device):
                return operation(self, value, name)
        # An eager operation has no name that Horovod could see; one in a function does.
        value = tf.nest.map_structure(tf.convert_to_tensor, value)
        key = operation, name, tuple(tensor.dtype for tensor in tf.nest.flatten(value))
        if key not in self._functions:
            self._functions[key] = self._function(operation, value, name)
        return self._timed(lambda: self._functions[key](*tf.nest.flatten(value)), name)

    def _function(self, operation: Callable[..., Nest], value: Nest, name: str) -> Nest:
        """A concrete function of tensors of any shapes."""

        def run(*tensors: tf.Tensor) -> Nest:
            with tf.device(self._device):
                return operation(self, tf.nest.pack_sequence_as(value, tensors), name)

        specs = [tf.TensorSpec(None, tensor.dtype) for tensor in tf.nest.flatten(value)]
        return tf.function(run, autograph=False).get_concrete_function(*specs)

    def _timed(self, call: Callable[[], Nest], name: str) -> Nest:
        """Calls; raises the interface's errors where another worker is dead or silent."""
        message = f"collective {name!r} lasted longer than timeout_seconds={self._timeout:g}"
        fired = threading.Event()

        def fire() -> None:
            fired.set()
            abort(f"{message}; another worker is silent")

        timer = threading.Timer(self._timeout, fire) if self._timeout else None
        if timer:
            timer.daemon = True
            timer.start()
        try:
            return call()
        except (tf.errors.UnknownError, tf.errors.FailedPreconditionError) as error:
            if fired.is_set():
                raise tf.errors.DeadlineExceededError(None, None, message) from error
            text = f"collective {name!r} failed: {_cause(error)}"
            raise tf.errors.UnavailableError(None, None, text) from error
        finally:
            if timer:
                timer.cancel()

    def _check(self, buffers: Sequence[tf.Tensor], name: str) -> None:
        for buffer in buffers:
            if buffer.dtype not in self.summed:
                known = ", ".join(sorted(dtype.name for dtype in self.summed))
                raise ValueError(
                    f"Horovod cannot add up {buffer.dtype.name} ({name!r}), only {known}. Send one "
                    "of these, or use collectives='tensorflow'."
                )


def _as_bits(buffer: tf.Tensor) -> tf.Tensor:
    """The same bits in a dtype that Horovod moves."""
    moved = _SAME_BITS.get(buffer.dtype)
    return tf.bitcast(buffer, moved) if moved else buffer


def _from_bits(moved: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(moved, dtype) if moved.dtype != dtype else moved


def _cause(error: tf.errors.OpError) -> str:
    text = str(error.message)
    return text[text.index("Horovod has") :] if "Horovod has" in text else text
