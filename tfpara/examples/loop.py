"""Fits a curve in a custom training loop, without `fit`.

    tfpara-launch -n 2 -- python -m tfpara.examples.loop

Every worker runs this whole program.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfpara


def network() -> keras.Model:
    """Returns a network of one hidden layer."""
    return keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)]
    )


def main() -> None:
    """Trains in a custom loop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="loop.keras", help="file of the trained model")
    options = parser.parse_args()

    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=4)
    with strategy.scope():  # Models, optimizers and metrics must be made in the scope.
        model, optimizer = network(), keras.optimizers.Adam(0.01)
        mean_loss = keras.metrics.Mean()
    strategy.track(model)  # The strategy will synchronise this model.

    x = np.linspace(-3, 3, 2_000, dtype="float32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((x, np.sin(x))).shuffle(len(x))
    batches = strategy.experimental_distribute_dataset(dataset.batch(20 * strategy.num_replicas))

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        """Takes a step of one replica, on its own part of the batch."""
        with tf.GradientTape() as tape:
            # The loss is the mean over the replica's own samples. It is not divided by the number
            # of replicas, because a sync takes the mean of the replicas' weights.
            loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        mean_loss.update_state(loss)

    @tf.function
    def train(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        strategy.run(step, args=(inputs, targets))  # Every fourth call ends with a sync.

    for epoch in range(options.epochs):
        mean_loss.reset_state()
        for batch in batches:
            train(*batch)
        strategy.synchronize()  # A sync for the last steps, if they are fewer than four.
        loss = float(mean_loss.result())  # Every worker gets the mean over all replicas.
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: mean squared error {loss:.4f}")

    model.save(options.out)  # All workers must call this; the chief writes the global model.


if __name__ == "__main__":
    tfpara.run(main)
