"""Replacements of TensorFlow's loss functions for custom loops, in replicas with local steps.

Under tf.distribute a replica's loss is its share of the global batch's loss: the shares, and their
gradients, are added up over the replicas. `tf.nn.compute_average_loss` and
`tf.nn.scale_regularization_loss` compute such shares: ℓ/N, for a replica's own loss ℓ. With local
steps no gradients are added up, and a replica needs the gradient of ℓ. So in a replica of a
`PeriodicSyncStrategy` both functions return ℓ/N, which `strategy.reduce` adds up as usual, with
the gradient of ℓ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.tensorflow.variables import in_replica
from tfpara.typing import Scalar


@functools.cache
def install() -> None:
    """Replaces both functions of TensorFlow; a second call changes nothing."""
    average, scale = tf.nn.compute_average_loss, tf.nn.scale_regularization_loss

    @functools.wraps(average, updated=())
    @tf.autograph.experimental.do_not_convert
    def averaging(
        per_example_loss: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        global_batch_size: Scalar | None = None,
    ) -> tf.Tensor:
        replicas = _replicas()
        if replicas is None:
            return average(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is not None:
            raise ValueError(
                "tf.nn.compute_average_loss(..., global_batch_size=...) in a replica that takes "
                "steps of its own: its loss is the mean over its own samples, not over those of "
                "all replicas. Leave out global_batch_size=; strategy.reduce gives the same sum."
            )
        # In a replica `num_replicas_in_sync` is 1, so `average` returns the mean over the replica's
        # own samples.
        return _share(average(per_example_loss, sample_weight), replicas)

    @functools.wraps(scale, updated=())
    @tf.autograph.experimental.do_not_convert
    def scaling(regularization_loss: tf.Tensor) -> tf.Tensor:
        replicas = _replicas()
        loss = scale(regularization_loss)
        return loss if replicas is None else _share(loss, replicas)

    for module in (tf.nn, tf.compat.v2.nn):
        module.compute_average_loss = averaging
        module.scale_regularization_loss = scaling


def _replicas() -> int | None:
    """Returns N inside a replica of a `PeriodicSyncStrategy`, else None."""
    extended = tf.distribute.get_strategy().extended
    ours = isinstance(extended, PeriodicSyncExtended) and in_replica()
    return extended.worker.replicas if ours else None


def _share(loss: tf.Tensor, replicas: int) -> tf.Tensor:
    """Returns ℓ/N, with the gradient of ℓ."""

    @tf.custom_gradient
    def shared(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return own / tf.cast(replicas, own.dtype), tf.identity

    return shared(loss)
