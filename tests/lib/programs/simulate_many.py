"""Trains so many replicas in a process that TensorFlow needs two threads; then gets stuck.

Options (JSON): replicas, overlap, directory (of checkpoints). Prints the weights, then "stuck".
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfpara


def main():
    options = json.loads(sys.argv[1])
    count = options["replicas"]
    strategy = tfpara.simulate(
        count, tfpara.BSP(), sync_period=1, overlap=options["overlap"], timeout_seconds=3
    )
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(6 * count, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2 * count)
    model.fit(data, epochs=2, verbose=0)
    print(json.dumps(model.get_weights()[0].ravel().tolist()), flush=True)

    def wait_for_ever(batch, logs):
        print("stuck", flush=True)
        tf.queue.FIFOQueue(1, [tf.float32]).dequeue()

    stuck = keras.callbacks.LambdaCallback(on_train_batch_end=wait_for_ever)
    checkpoint = tfpara.callbacks.Checkpoint(options["directory"])
    model.fit(data, epochs=2, verbose=0, callbacks=[stuck, checkpoint])


if __name__ == "__main__":
    main()
