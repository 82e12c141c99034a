"""Trains a classifier with `fit`, resumes from checkpoints, and exports the averaged weights.

    tfpara-launch -n 2 -- python -m tfpara.examples.classify

Every worker runs this whole program. It asks which worker it is only to print each line once.
"""

import argparse

import keras
import numpy as np

import tfpara

CLASSES, FEATURES = 10, 20


def points(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Made-up data: points around ten centres, and the numbers of their centres."""
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, number)
    return (centres[labels] + random.normal(size=(number, FEATURES))).astype("float32"), labels


def network() -> keras.Model:
    """A small classifier, as in any Keras script."""
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(CLASSES)]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Trains, and writes the averaged model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="classify", help="folder of what is written")
    options = parser.parse_args()

    # The strategy is made first, since TensorFlow must know the other workers before it does
    # anything else.
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(), sync_period=10, averages={"ema": tfpara.EMA(0.9)}
    )
    with strategy.scope():
        model = network()

    # All workers give `fit` the same data. Each worker trains on its share of the data.
    model.fit(
        *points(10_000, seed=1),
        batch_size=32 * strategy.num_replicas,
        epochs=options.epochs,
        validation_data=points(1_000, seed=2),
        callbacks=[tfpara.callbacks.Checkpoint(f"{options.out}/checkpoints")],
    )

    # Every worker must make these calls, since each waits for the others in them.
    for which in ("global", "ema"):
        with strategy.weights(model, which):
            _, accuracy = model.evaluate(*points(1_000, seed=3), verbose=0)
        if strategy.is_chief:
            print(f"{which} weights: accuracy {accuracy:.3f}")
    tfpara.export(model, f"{options.out}/model", which="ema")


if __name__ == "__main__":
    tfpara.run(main)
