"""The loop over the minibatches of a call of the train function, if `steps_per_execution` > 1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpara.sync.keras.replacing import trainer
from tfpara.sync.one_sync.graph_ops import where
from tfpara.sync.tensorflow.run_steps import RunSteps
from tfpara.typing import Nest

_Optional = tf.experimental.Optional


def several_steps(
    model: keras.Model, step: Callable[..., Nest], single: Callable[..., Nest]
) -> Callable[..., Nest]:
    """Returns a function that takes `steps_per_execution` minibatches of an iterator.

    The host decides whether the loop goes on. In Keras' own loop the GPU does, and before each
    minibatch the host waits until the GPU has finished the one before. `single` is Keras' own
    function, for iterators that are not TensorFlow's.
    """
    strategy, most = model.distribute_strategy, model.steps_per_execution

    def one(data: Nest) -> Nest:
        given = keras.tree.map_structure(lambda d: None if isinstance(d, _Optional) else d, data)
        return trainer.reduce_per_replica(strategy.run(step, args=(given,)), strategy, "auto")

    by_speed = strategy.extended.balance is not None
    several = _loop(one, strategy.extended.steps, most, by_speed)

    def function(iterator: Any) -> Nest:
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            return single(iterator)
        outputs = several(iterator)
        if not outputs.has_value():
            raise StopIteration
        return outputs.get_value()

    return function


def _loop(
    one: Callable[[Nest], Nest], steps: RunSteps, most: int, by_speed: bool
) -> Callable[[Any], Any]:
    """Returns a graph function that calls `one` for each of up to `most` minibatches.

    It returns an optional with the outputs of the last minibatch, if there was one. The steps leave
    their syncs to this loop. If blocks are `by_speed`, a sync ends the loop: workers come to it
    after unlike numbers of minibatches, and all must act on what they agree on there before any
    comes to the next sync.
    """

    @functools.partial(tf.function, reduce_retracing=True)
    @tf.autograph.experimental.do_not_convert
    def several(iterator: Any) -> Any:
        # Each time a step is traced, its outputs are appended to this list, with the syncs that may
        # be due after the step.
        traced: list[tuple[Any, list[Any]]] = []

        def goes_on(number: tf.Tensor, outputs: tf.Tensor, data: Any) -> tf.Tensor:
            del outputs
            there_are = data.has_value()
            with tf.device("CPU:0"):
                return (number < most) & there_are

        def read_if(condition: tf.Tensor, data: Any) -> Any:
            return tf.cond(condition, iterator.get_next_as_optional, lambda: data)

        def minibatch(due: tf.Tensor, number: tf.Tensor, outputs: tf.Tensor, data: Any) -> Any:
            with steps.leaving_syncs() as left:
                optional = _Optional.from_value(one(data.get_value()))
            traced.append((optional, left))
            # The loop needs a first value for the outputs, but their type is not known before the
            # loop is traced. So the loop passes on the optional's variant tensor, whose type is the
            # same for all outputs.
            (outputs,) = tf.nest.flatten(optional, expand_composites=True)
            with tf.device("CPU:0"):
                due = left[0][0] if left else due
                number += 1
                more = (number < most) & ~due
            return due, number, outputs, read_if(more, data)

        def within(due: tf.Tensor, *state: Any) -> tf.Tensor:
            with tf.device("CPU:0"):
                return goes_on(*state) & ~due

        def block(*state: Any) -> Any:
            with tf.device("CPU:0"):
                due = tf.constant(False)
            due, number, outputs, data = tf.while_loop(within, minibatch, (due, *state))
            for _, act in traced[-1][1]:
                where(due, act)
            # The sync may decide which minibatch comes next, so this minibatch is read only after
            # the sync.
            with tf.device("CPU:0"):
                number = tf.where(due & by_speed, most, number)
                more = (number < most) & due
            return number, outputs, read_if(more, data)

        with tf.device("CPU:0"):
            first = tf.constant(0)
        state = (first, tf.raw_ops.OptionalNone(), iterator.get_next_as_optional())
        _, outputs, _ = tf.while_loop(goes_on, block, state)
        return tf.nest.pack_sequence_as(traced[-1][0], [outputs], expand_composites=True)

    return several
