"""Trains a variational autoencoder that has a `train_step` of its own.

    tfpara-launch -n 2 -- python -m tfpara.examples.vae

Every worker runs this whole program.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfpara

SIZE, LATENT = 12, 2


def images(number: int, seed: int) -> np.ndarray:
    """Returns made-up images of one bright spot each, so that two numbers describe an image."""
    random = np.random.default_rng(seed)
    x, y = random.uniform(2, SIZE - 3, (2, number, 1))
    across, down = np.divmod(np.arange(SIZE * SIZE), SIZE)
    return np.exp(-((across - x) ** 2 + (down - y) ** 2) / 8).astype("float32")


class VAE(keras.Model):
    """An autoencoder. The encoder returns means and log variances. Make it in the scope."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential([layers.Dense(64, "relu"), layers.Dense(2 * LATENT)])
        self.decoder = keras.Sequential([layers.Dense(64, "relu"), layers.Dense(SIZE * SIZE)])
        self.seeds = keras.random.SeedGenerator(1)
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.mean_loss]

    def call(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        image = self.decoder(mean + ops.exp(log_variance / 2) * noise)
        return image, ops.sum(ops.exp(log_variance) + mean**2 - 1 - log_variance, 1) / 2

    def losses_of(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the mean over a replica's minibatch; do not divide by the number of replicas."""
        image, divergence = self(x)
        return ops.mean(ops.sum((image - x) ** 2, 1) / 0.1 + divergence)

    def train_step(self, x: tf.Tensor) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.losses_of(x)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}

    def test_step(self, x: tf.Tensor) -> dict[str, Any]:
        self.mean_loss.update_state(self.losses_of(x))
        return {"loss": self.mean_loss.result()}


def main() -> None:
    """Trains, and writes the decoder."""
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5)
    with strategy.scope():
        model = VAE()
        model.compile(keras.optimizers.Adam(0.003))
    model.fit(
        images(4_000, seed=1),
        batch_size=32 * strategy.num_replicas,
        epochs=8,
        validation_data=images(1_000, seed=2),
        verbose=2,
    )
    model.decoder.save("decoder.keras")


if __name__ == "__main__":
    tfpara.run(main)
