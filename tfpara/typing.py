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

# An array of weights, or of values for them: NumPy's in checks of a rule, TensorFlow's in a run.
Array: TypeAlias = "NDArray[Any] | tf.Tensor"
# A number that a graph may compute.
Scalar: TypeAlias = "float | NDArray[Any] | tf.Tensor"
# State of a rule or an average: the NamedTuple of arrays and numbers that its `init` returns.
State: TypeAlias = Any
# A variable of TensorFlow or of Keras.
Variable: TypeAlias = "tf.Variable | keras.Variable"
# Tensors in tuples, lists and dicts, as `tf.nest` takes them; also None, or a single tensor.
Nest: TypeAlias = Any
# Data for Keras' `fit`: arrays in structures as of `Nest`, datasets, `PyDataset`, generators.
Data: TypeAlias = Any
# A value that JSON can carry.
Json: TypeAlias = Any
# The logs that callbacks get from Keras: metrics by name.
Logs: TypeAlias = "dict[str, float]"
