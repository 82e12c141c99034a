"""TensorFlow's peers: MultiWorkerMirroredStrategy and Horovod, averaging gradients at every step.

Keras 3's `fit` fails under MultiWorkerMirroredStrategy, and Horovod's optimizer for Keras averages
nothing under Keras 3. So both peers run in custom loops around a Keras 3 model and optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from models.dnn import dnn
from scripts.benchmarks.peers import process


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Runs the training loop that `options["system"]` names."""
    return {"mirrored": mirrored, "horovod": horovod, "horovod_all_reduce": all_reduce}[
        options["system"]
    ](options)


def mirrored(options: dict[str, Any]) -> dict[str, Any]:
    """Measures MultiWorkerMirroredStrategy.

    The optimizer sums the workers' gradients, so each worker divides its mean loss by their number.
    """
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = _model(options), _optimizer()
        optimizer.build(model.trainable_variables)
    x, y = _minibatch(options)
    share = 1.0 / strategy.num_replicas_in_sync

    @tf.function
    def step() -> tf.Tensor:
        return strategy.run(lambda: _step(model, optimizer, x, y, share=share))

    return process.timed_training(options, lambda: step(), lambda: _norm(model))


def horovod(options: dict[str, Any]) -> dict[str, Any]:
    """Measures Horovod; one grouped all-reduce averages the gradients."""
    hvd = start_horovod()
    model, optimizer = _model(options), _optimizer()
    optimizer.build(model.trainable_variables)
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(hvd.broadcast(variable.value, 0, name=f"weight_{number}"))
    x, y = _minibatch(options)

    def reduced(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return hvd.grouped_allreduce(gradients, op=hvd.Average, name="gradients")

    @tf.function
    def step() -> tf.Tensor:
        return _step(model, optimizer, x, y, reduced if hvd.size() > 1 else None)

    return process.timed_training(options, lambda: step(), lambda: _norm(model))


def all_reduce(options: dict[str, Any]) -> dict[str, Any]:
    """Measures Horovod's all-reduce of the model's bytes, in one piece."""
    hvd = start_horovod()
    buffer = tf.ones([options["elements"]])

    @tf.function
    def exchange() -> tf.Tensor:
        return hvd.allreduce(buffer, op=hvd.Sum, name="bare")[0]

    return process.timed_sync(options, lambda: exchange().numpy())


def start_horovod() -> Any:
    """Starts Horovod between the processes of TF_CONFIG; the first one serves the rendezvous."""
    import horovod.tensorflow as hvd

    from tfpara import cluster
    from tfpara.cluster import rendezvous

    found = cluster.read()
    if found.num_workers > 1:
        host, _, port = found.addresses[0].rpartition(":")
        if found.rank == 0:
            # The server is made an attribute of the function, so that it lives as long as the
            # process.
            start_horovod.server = rendezvous.Server(int(port), host)
        os.environ |= rendezvous.variables(found, host, int(port))
        rendezvous.meet(found, os.environ, 60.0)
    hvd.init()
    return hvd


def _step(
    model: keras.Model,
    optimizer: keras.Optimizer,
    x: tf.Tensor,
    y: tf.Tensor,
    reduced: Callable[[list[tf.Tensor]], list[tf.Tensor]] | None = None,
    share: float = 1.0,
) -> tf.Tensor:
    """Trains a minibatch by SGD with momentum; `reduced` averages gradients over the workers."""
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss = share * tf.reduce_mean(losses)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    if reduced is not None:
        gradients = reduced(gradients)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


def _norm(model: keras.Model) -> float:
    """Returns the norm of the weights; waits until they are written."""
    squares = [tf.reduce_sum(tf.cast(v.value, tf.float64) ** 2) for v in model.trainable_variables]
    return float(tf.sqrt(tf.add_n(squares)))


def _model(options: dict[str, Any]) -> keras.Model:
    sizes = {"layers": options["layers"], "width": options["width"]}
    return dnn(options["inputs"], options["classes"], **sizes)


def _optimizer() -> keras.Optimizer:
    return keras.optimizers.SGD(process.LEARNING_RATE, momentum=process.MOMENTUM)


def _minibatch(options: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(process.place()[0])
    x = rng.normal(size=(options["batch"], options["inputs"])).astype("float32")
    return tf.constant(x), tf.constant(rng.integers(0, options["classes"], options["batch"]))


if __name__ == "__main__":
    process.run(main)
