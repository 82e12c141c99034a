"""Horovod's collectives: Gloo or MPI on CPUs, and NCCL on GPUs if Horovod was built with it.

This module uses only the operations of `horovod.tensorflow`: under Keras 3, Horovod's Keras
wrappers silently do not average.
"""

from __future__ import annotations

import functools
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

# The longest wait for Horovod's shutdown in `abort`. The shutdown returns at once, unless Horovod
# itself waits for a stopped process.
_GRACE_SECONDS = 5.0
# Dtypes that Horovod cannot send, each mapped to a dtype of the same size that it can send.
_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.bfloat16: tf.uint16}


def problem() -> str | None:
    """Returns the reason why this process cannot use Horovod, and the fix; else None."""
    spec = importlib.util.find_spec("horovod")
    command = f"run scripts/install_horovod.sh --venv={sys.prefix}"
    if spec is None or not spec.submodule_search_locations:
        return f"Horovod is not installed in {sys.prefix}. To build it, {command}"
    # Horovod's build writes the file metadata.json. It states the version of TensorFlow for which
    # Horovod was built.
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
    """Returns the reason why a process that mpirun has started cannot use Horovod; else None."""
    reason = problem()
    if reason is None and not load().mpi_built():
        return (
            f"Horovod was built without MPI. Run scripts/install_horovod.sh --mpi "
            f"--venv={sys.prefix} to have it under mpirun"
        )
    return reason


def load() -> Any:
    """Returns `horovod.tensorflow`; raises ValueError, with the fix, if it cannot be used."""
    reason = problem()
    if reason:
        raise ValueError(f"collectives='horovod': {reason}.")
    return importlib.import_module("horovod.tensorflow")


def abort(message: str) -> None:
    """Makes pending operations fail, here and on all workers that still answer.

    A stopped worker delays Horovod's shutdown, with MPI forever. If the shutdown takes longer than
    5 s, this process prints the message and exits with code 1.
    """
    ending = threading.Thread(target=load().shutdown, daemon=True)
    ending.start()
    ending.join(_GRACE_SECONDS)
    if ending.is_alive():
        print(f"tfpara: {message}", file=sys.stderr, flush=True)
        os._exit(1)


def _operation(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of `HorovodCollectives`, so that it runs on the object's device.

    An eager call runs the method in a graph function, since Horovod does not see the names of eager
    operations. It may last `timeout_seconds` at most.
    """

    @functools.wraps(method)
    def call(self: HorovodCollectives, value: Nest, name: str) -> Nest:
        if tf.inside_function():
            with tf.device(self._device):
                return method(self, value, name)
        value = tf.nest.map_structure(tf.convert_to_tensor, value)
        key = method, name, tuple(tensor.dtype for tensor in tf.nest.flatten(value))
        if key not in self._functions:
            self._functions[key] = self._function(method, value, name)
        return self._timed(lambda: self._functions[key](*tf.nest.flatten(value)), name)

    return call


class HorovodCollectives:
    """The `Collectives` between the lead devices of the processes of Horovod's group.

    Horovod matches operations by their names, so no two operations under way may have one name. The
    process must have joined the group before (`tfpara.sync.workers.horovod_group.join`).

    Args:
        device: this worker's lead device.
        timeout_seconds: longest wait for the others inside one eager operation; 0: forever.
        group: number of the group, which is part of its operations' names.

    Attributes:
        summed: the dtypes that Horovod can add up.
    """

    summed = frozenset({tf.float16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64})

    def __init__(
        self, size: int, rank: int, device: str, timeout_seconds: float, group: int = 0
    ) -> None:
        self.size, self.rank = size, rank
        self._hvd = load()
        on_gpu = "GPU" in device.upper()
        self._by_nccl = on_gpu and self._hvd.nccl_built()
        # Without NCCL all of Horovod's operations run on CPUs.
        self._device = "CPU:0" if on_gpu and not self._by_nccl else device
        # `longest` is the largest number of workers with which a reduce-scatter is fast. With Gloo
        # even two workers are too many. They share one connection, and Gloo's all-to-all and
        # all-gather send before they receive. So a worker's request for the other's data waits
        # until its own data are sent, and the two directions take turns.
        longest = 1 if self._hvd.gloo_enabled() else 2
        self.scatters_well = self._by_nccl or size <= longest
        self._timeout, self._group = float(timeout_seconds), group
        self._functions: dict[Hashable, Callable[[Nest], Nest]] = {}

    @_operation
    def all_reduce(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        self._check(buffers, name)
        return [
            self._named(self._hvd.allreduce, buffer, ("reduce", name, k), op=self._hvd.Sum)
            for k, buffer in enumerate(buffers)
        ]

    @_operation
    def reduce_scatter(self, buffers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        self._check(buffers, name)
        if not self._by_nccl:
            # An all-to-all and a local sum send as many bytes as Gloo's reduce-scatter, but take a
            # third of its time.
            received = [
                self.all_to_all(tf.reshape(buffer, [self.size, -1]), f"{name}/{k}")
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

    @_operation
    def all_to_all(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        received = self._named(self._hvd.alltoall, rows, ("all_to_all", name))
        received.set_shape(rows.shape)
        return received

    @_operation
    def all_gather(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        rows = _as_bits(buffer)[tf.newaxis]
        gathered = self._named(self._hvd.allgather, rows, ("gather", name))
        gathered.set_shape(tf.TensorShape([self.size]).concatenate(buffer.shape))
        return _from_bits(gathered, buffer.dtype)

    @_operation
    def broadcast(self, buffer: tf.Tensor, name: str) -> tf.Tensor:
        bits = _as_bits(buffer)
        sent = self._named(self._hvd.broadcast, bits, ("broadcast", name), root_rank=0)
        return _from_bits(sent, buffer.dtype)

    def barrier(self, name: str) -> None:
        # The assertion keeps TensorFlow from removing the all-gather. `rank_op` has a value only
        # when the graph runs, and so keeps TensorFlow from computing the result once in advance.
        ranks = self.all_gather(self._hvd.rank_op(), f"barrier/{name}")
        tf.debugging.assert_equal(ranks, tf.range(self.size))

    def _named(
        self, operation: Callable[..., tf.Tensor], buffer: tf.Tensor, name: tuple, **options: object
    ) -> tf.Tensor:
        """Runs one of Horovod's operations under a name that is the same on every worker.

        Horovod identifies an operation by the part of its graph name after the last slash.
        TensorFlow's graph optimiser renames operations in a conditional branch, such as the sync in
        a training step. A worker in such a sync and one in a sync that Python code calls would then
        wait for each other forever. In a function that is not inlined an operation keeps its name.
        """
        node = ".".join(map(str, ("tfpara", self._group, *name)))
        node = node.replace("/", ".").replace(" ", "_")

        def run(tensor: tf.Tensor) -> tf.Tensor:
            with tf.device(self._device):
                return operation(tensor, name=node, ignore_name_scope=True, **options)

        attributes = {"_noinline": True}
        return tf.function(run, autograph=False, experimental_attributes=attributes)(buffer)

    def _function(self, operation: Callable[..., Nest], value: Nest, name: str) -> Nest:
        def run(*tensors: tf.Tensor) -> Nest:
            with tf.device(self._device):
                return operation(self, tf.nest.pack_sequence_as(value, tensors), name)

        specs = [tf.TensorSpec(None, tensor.dtype) for tensor in tf.nest.flatten(value)]
        return tf.function(run, autograph=False).get_concrete_function(*specs)

    def _timed(self, call: Callable[[], Nest], name: str) -> Nest:
        """Calls a function; raises the errors of `Collectives` if a worker is dead or silent."""
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
    """Returns the same bits in a dtype that Horovod can send."""
    moved = _SAME_BITS.get(buffer.dtype)
    return tf.bitcast(buffer, moved) if moved else buffer


def _from_bits(moved: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(moved, dtype) if moved.dtype != dtype else moved


def _cause(error: tf.errors.OpError) -> str:
    text = str(error.message)
    return text[text.index("Horovod has") :] if "Horovod has" in text else text
