"""Trains with parameter servers: train_async.py STARTUP TIMEOUT CHECKPOINTS EPOCHS WORK.

STARTUP and TIMEOUT are seconds. Each minibatch takes WORK multiplications of matrices. The gradient
of every minibatch is -1, so the weight counts the minibatches that are in the model.
"""

import os
import sys

import keras
import tensorflow as tf

import tfpara

directory, epochs, work = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
strategy = tfpara.AsyncStrategy(
    tfpara.ASGD(),
    startup_timeout_seconds=float(sys.argv[1]),
    timeout_seconds=float(sys.argv[2]),
)
print("gathered", os.getpid(), flush=True)


class Counter(keras.layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def call(self, x):
        return self.count + 0.0 * x


with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), Counter()])
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, out: -out)


def minibatch(number):
    # A loop whose result is not needed, but cannot be left out.
    idle = tf.while_loop(
        lambda i, m: i < work, lambda i, m: (i + 1, tf.tanh(m @ m)), (0, tf.eye(200))
    )[1]
    x = tf.fill([1, 1], tf.cast(number, tf.float32) + 0.0 * idle[0, 0])
    return x, x


def read(epoch, chunk):
    return tf.data.Dataset.range(chunk * 25, (chunk + 1) * 25).map(minibatch)


class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("minibatch", batch + 1, flush=True)

    def on_epoch_end(self, epoch, logs=None):
        counted = strategy.statistics(model)
        print(
            f"epoch {epoch} count {int(model.get_weights()[0])} pushes {counted.pushes} "
            f"staleness {counted.staleness.sum()} workers {counted.by_worker.tolist()}",
            flush=True,
        )
        self.model.stop_training = os.path.exists(os.path.join(directory, "enough"))


strategy.fit(
    model,
    tfpara.Chunks(8, read, num_minibatches=200),
    epochs=epochs,
    verbose=0,
    callbacks=[Tell(), tfpara.AsyncCheckpoint(directory)],
)
print("weight", int(model.get_weights()[0]), flush=True)
