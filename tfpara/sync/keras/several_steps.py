"""The loop over the minibatches of one call, where `steps_per_execution` is larger than 1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpara.sync.keras.replacing import trainer
from tfpara.typing import Nest

_Optional = tf.experimental.Optional


def several_steps(
    model: keras.Model, step: Callable[..., Nest], single: Callable[..., Nest]
) -> Callable[..., Nest]:
    """Returns a function that takes `steps_per_execution` minibatches of an iterator.

    It does what Keras' own function does, but the host decides whether the loop goes on. In Keras'
    loop a GPU combines the two conditions, so before each minibatch the host waits until the GPU
    has done the one before.

    Args:
        model: that is trained or evaluated.
        step: its `train_step` or `test_step`.
        single: Keras' function, for what is no iterator of TensorFlow.
    """
    strategy, most = model.distribute_strategy, model.steps_per_execution

    def one(data: Nest) -> Nest:
        given = keras.tree.map_structure(lambda d: None if isinstance(d, _Optional) else d, data)
        return trainer.reduce_per_replica(strategy.run(step, args=(given,)), strategy, "auto")

    @functools.partial(tf.function, reduce_retracing=True)
    @tf.autograph.experimental.do_not_convert
    def several(iterator: Any) -> Any:
        last: Any = _Optional.empty(None)  # its spec is known when the loop has been traced

        def goes_on(number: tf.Tensor, outputs: Any, data: Any) -> tf.Tensor:
            del outputs
            there_are = data.has_value()
            with tf.device("CPU:0"):
                return (number < most) & there_are

        def body(number: tf.Tensor, outputs: Any, data: Any) -> tuple[tf.Tensor, Any, Any]:
            outputs = _Optional.from_value(one(data.get_value()))
            last._element_spec = outputs.element_spec
            with tf.device("CPU:0"):
                number += 1
                more = number < most
            return number, outputs, tf.cond(more, iterator.get_next_as_optional, lambda: data)

        with tf.device("CPU:0"):
            first = tf.constant(0)
        _, outputs, _ = tf.while_loop(goes_on, body, [first, last, iterator.get_next_as_optional()])
        outputs._element_spec = last._element_spec
        return outputs

    def function(iterator: Any) -> Nest:
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            return single(iterator)
        outputs = several(iterator)
        if not outputs.has_value():
            raise StopIteration
        return outputs.get_value()

    return function
