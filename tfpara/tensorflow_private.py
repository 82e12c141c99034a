"""TensorFlow's private names, imported only here. Keras' private names are in `keras/replacing`."""

import contextvars
from functools import partial
from typing import Any

import tensorflow as tf

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
