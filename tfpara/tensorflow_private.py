"""TensorFlow's private names, imported only here. Keras' private names are in `keras/replacing`."""

import contextvars
import ctypes
import pathlib
from functools import partial
from typing import Any

import tensorflow as tf

# TensorFlow's C functions for Python, of which `functions_let_threads_run` replaces two.
from tensorflow.python import pywrap_tfe

# Finds a dataset's batch size, as TensorFlow does before it divides batches between replicas.
from tensorflow.python.data.experimental.ops.distribute import compute_batch_size

# The module whose functions make the datasets of single devices. While a pass over data begins,
# tfpara replaces some of these functions.
from tensorflow.python.data.ops import multi_device_iterator_ops as multi_device

# The module of MultiWorkerMirroredStrategy. It also has this strategy's subclass of
# tf.distribute.StrategyExtended, from which tfpara's class is derived.
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms

# `input_lib` has the classes of distributed datasets; Keras accepts no others. `values` has the
# types of variables and values that have a component on each replica. Its module `values_util`
# knows the number of the replica that is being traced.
from tensorflow.python.distribute import input_lib, values

# `context` is TensorFlow's context. Its private methods start the server anew and end collectives.
# `cancellation` has the cancellation manager of a running function, see `cancel_by_thread`.
from tensorflow.python.eager import cancellation, context

# The class of plain variables. In a strategy's scope tf.Variable would create a mirrored one.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

# The class of the table by which TensorFlow calls Python functions: those of tf.py_function,
# tf.numpy_function and Dataset.from_generator. A change of workers waits for the end of such calls.
from tensorflow.python.ops.script_ops import FuncRegistry

# The initial value that tf.train.Checkpoint gives to a variable created after the restore.
from tensorflow.python.trackable.base import CheckpointInitialValue

from tfpara.contexts import context_variable

__all__ = [
    "CheckpointInitialValue",
    "FuncRegistry",
    "ResourceVariable",
    "cancel_by_thread",
    "compute_batch_size",
    "context",
    "functions_let_threads_run",
    "input_lib",
    "multi_device",
    "mwms",
    "values",
]

# If a replica gets no part of a batch, TensorFlow makes tensors without rows for the replica. It
# calls `_create_empty_value` if the spec of an element has this method, and else makes a tensor of
# the spec's shape. The spec of a None has neither this method nor a shape, so tfpara adds the
# method.
type(tf.type_spec_from_value(None))._create_empty_value = lambda spec: None

_manager: contextvars.ContextVar[Any] = contextvars.ContextVar("cancellation manager", default=None)


def cancel_by_thread() -> None:
    """Makes functions of a thread independent of the cancellation of other threads' functions.

    TensorFlow keeps the cancellation manager of a running function in one variable for all threads.
    So a function of the chief takes that of the chunks which ClusterCoordinator's threads run. If
    the function ends with an error, all chunks are cancelled. An evaluation ends in this way if the
    length of its dataset is unknown.
    """
    cancellation.context = _manager.get
    cancellation.CancellationManagerContext = partial(context_variable, _manager)


def functions_let_threads_run() -> None:
    """Makes TensorFlow release Python's lock when it tells other processes of graph functions.

    For each function that is made or deleted, TensorFlow asks all processes of the cluster, one
    after the other, and waits for their answers. It keeps Python's lock meanwhile. If a process is
    silent, the thread that finds silent processes could not run, and would never end the wait.
    """
    found = [*pathlib.Path(tf.sysconfig.get_lib()).glob("libtensorflow_cc.*")]
    if not found:  # TensorFlow has other files on this system
        return
    library = ctypes.CDLL(str(found[0]))
    library.TF_NewStatus.restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

    def call(function: Any, eager_context: Any, argument: Any) -> None:
        status = ctypes.c_void_p(library.TF_NewStatus())
        function(ctypes.c_void_p(pointer_of(eager_context, None)), argument, status)
        code, message = library.TF_GetCode(status), library.TF_Message(status).decode()
        library.TF_DeleteStatus(status)
        if code:
            raise tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)

    keeps_the_lock = pywrap_tfe.TFE_ContextAddFunction

    def add(eager_context: Any, function: Any) -> None:
        if type(type(function)).__name__ != "pybind11_type":  # not of the versions that are tested
            return keeps_the_lock(eager_context, function)
        # The first field of an object of pybind11 is the address of the C object.
        address = ctypes.c_void_p.from_address(id(function) + object.__basicsize__)
        return call(library.TFE_ContextAddFunction, eager_context, address)

    def remove(eager_context: Any, name: bytes | str) -> None:
        call(library.TFE_ContextRemoveFunction, eager_context, tf.compat.as_bytes(name))

    pywrap_tfe.TFE_ContextAddFunction, pywrap_tfe.TFE_ContextRemoveFunction = add, remove
