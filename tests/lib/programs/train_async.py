"""Trains with parameter servers: train_async.py STARTUP TIMEOUT CHECKPOINTS EPOCHS WORK.

STARTUP and TIMEOUT are seconds. Each minibatch takes WORK multiplications of matrices. The model
has a weight for each minibatch, which counts how often it is in the model.
"""

import os
import pathlib
import sys

import keras
import tensorflow as tf

import tfpara
from tfpara.checkpoint import lease

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from counting import counting_model  # noqa: E402

MINIBATCHES, CHUNKS = 200, 8
directory, epochs, work = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
if len(sys.argv) > 6:
    lease.SECONDS = float(sys.argv[6])
strategy = tfpara.AsyncStrategy(
    tfpara.ASGD(),
    startup_timeout_seconds=float(sys.argv[1]),
    timeout_seconds=float(sys.argv[2]),
)
print("gathered", strategy._processes._lobby.tensorflow_address, flush=True)


with strategy.scope():
    model = counting_model(MINIBATCHES)


def minibatch(number):
    # A loop whose result is not needed, but cannot be left out.
    idle = tf.while_loop(
        lambda i, m: i < work, lambda i, m: (i + 1, tf.tanh(m @ m)), (0, tf.eye(200))
    )[1]
    nothing = 0.0 * idle[0, 0]
    return number[tf.newaxis] + tf.cast(nothing, tf.int64), nothing[tf.newaxis]


def read(epoch, chunk):
    each = MINIBATCHES // CHUNKS
    return tf.data.Dataset.range(chunk * each, (chunk + 1) * each).map(minibatch)


class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("minibatch", batch + 1, flush=True)
        if os.path.exists(os.path.join(directory, "evaluate")):
            # TensorFlow tells all processes of the functions that this makes.
            self.model.evaluate(read(0, 0).take(1), verbose=0)

    def on_epoch_end(self, epoch, logs=None):
        counted, counts = strategy.statistics(model), model.get_weights()[0]
        print(
            f"epoch {epoch} count {int(counts.sum())} each {counts.min():g} to {counts.max():g} "
            f"pushes {counted.pushes} "
            f"staleness {counted.staleness.sum()} workers {counted.by_worker.tolist()}",
            flush=True,
        )
        self.model.stop_training = os.path.exists(os.path.join(directory, "enough"))


strategy.fit(
    model,
    tfpara.Chunks(CHUNKS, read, num_minibatches=MINIBATCHES),
    epochs=epochs,
    verbose=0,
    callbacks=[Tell(), tfpara.AsyncCheckpoint(directory)],
)
print("weight", int(model.get_weights()[0].sum()), flush=True)
