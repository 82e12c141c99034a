"""Trains a convolutional network on images that are moved, mirrored and changed in brightness.

    tfpara-launch -n 2 -- python -m tfpara.examples.cnn

Every worker runs this whole program.
"""

import keras
import numpy as np

import tfpara

SIZE, CLASSES = 16, 4


def images(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns made-up images, with a noisy ring, square, cross or stripes somewhere, and labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, number)
    across, down = np.meshgrid(np.arange(SIZE), np.arange(SIZE))
    x = across - random.uniform(5, 10, (number, 1, 1))
    y = down - random.uniform(5, 10, (number, 1, 1))
    square = np.maximum(abs(x), abs(y))
    shapes = [
        abs(np.hypot(x, y) - 3.5) < 0.8,
        abs(square - 3.5) < 0.8,
        (np.minimum(abs(x), abs(y)) < 0.8) & (square < 4.5),
        (np.mod(x, 3) < 1) & (square < 4.5),
    ]
    picture = np.select([labels[:, None, None] == k for k in range(CLASSES)], shapes)
    noisy = 0.3 + 0.4 * picture + 0.15 * random.normal(size=picture.shape)
    return noisy.clip(0, 1)[..., None].astype("float32"), labels


def network() -> keras.Model:
    """Returns a network: layers that change images (in training only), then convolutions."""
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            keras.layers.RandomFlip(),
            keras.layers.RandomTranslation(0.1, 0.1),
            keras.layers.RandomBrightness(0.2, value_range=(0, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Trains, and writes the model."""
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5)
    with strategy.scope():
        model = network()
    model.fit(
        *images(4_000, seed=1),
        batch_size=32 * strategy.num_replicas,
        epochs=6,
        validation_data=images(1_000, seed=2),
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.006 * 0.5**epoch)],
        verbose=2,
    )
    model.save("cnn.keras")


if __name__ == "__main__":
    tfpara.run(main)
