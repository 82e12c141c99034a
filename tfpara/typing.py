"""Type aliases that many signatures use. TensorFlow, Keras and NumPy are not imported here.

TensorFlow and Keras have no types that a checker can follow, so to mypy most of these are `Any`; to
a reader they say what a value is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
    from numpy.typing import NDArray

# An array of weights, or of one value for each weight: a tensor of TensorFlow in a run, an array of
# NumPy in the checks of a rule.
Array: TypeAlias = "NDArray[Any] | tf.Tensor"
# A number, or a scalar tensor that a graph computes.
Scalar: TypeAlias = "float | NDArray[Any] | tf.Tensor"
# State of a rule or an average: the NamedTuple of arrays and numbers that its `init` returns.
State: TypeAlias = Any
# A variable of TensorFlow or of Keras.
Variable: TypeAlias = "tf.Variable | keras.Variable"
# Tensors in tuples, lists and dicts, as `tf.nest` takes them; also None, or a single tensor.
Nest: TypeAlias = Any
# Data that Keras' `fit` takes: nested structures of arrays, datasets, `PyDataset`s or generators.
Data: TypeAlias = Any
# A value that JSON can carry.
Json: TypeAlias = Any
# The logs that callbacks get from Keras: metrics by name.
Logs: TypeAlias = "dict[str, float]"
