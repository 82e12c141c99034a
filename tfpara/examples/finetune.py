"""Fine-tunes a trained network on a task with few data: first a new head alone, then all layers.

    tfpara-launch -n 2 -- python -m tfpara.examples.finetune

Every worker runs this whole program.
"""

import keras
import numpy as np

import tfpara

FEATURES, CLASSES = 30, 8


def points(number: int, seed: int, task: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns made-up data; a label is the index of the largest of the task's scores."""
    shared = np.random.default_rng(0).normal(size=(FEATURES, 2 * CLASSES)) / FEATURES**0.5
    x = np.random.default_rng(seed).normal(size=(number, FEATURES))
    hidden = np.maximum(x @ shared, 0)
    scores = hidden @ np.random.default_rng(task).normal(size=(2 * CLASSES, CLASSES))
    return x.astype("float32"), scores.argmax(1)


def compile_at(model: keras.Model, rate: float) -> None:
    """Compiles a classifier. After a change of `trainable`, Keras needs this again."""
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def with_head(base: keras.Model, rate: float) -> keras.Model:
    """Returns a compiled classifier: the layers of `base`, and a new layer on top."""
    model = keras.Sequential([base, keras.layers.Dense(CLASSES)])
    compile_at(model, rate)
    return model


def networks() -> tuple[keras.Model, keras.Model]:
    """Returns the layers that both tasks use, and a classifier for the first task."""
    hidden = [keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu")]
    base = keras.Sequential([keras.Input((FEATURES,)), *hidden])
    return base, with_head(base, rate=0.003)


def main() -> None:
    """Trains on the first task, then on the second, and writes the model."""
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5)
    batch = 32 * strategy.num_replicas
    with strategy.scope():  # If a model is loaded instead, load_model is called in the scope, too.
        base, first = networks()
    first.fit(*points(8_000, seed=1, task=1), batch_size=batch, epochs=5, verbose=2)
    strategy.forget(first)  # From now on another model trains the layers of `first`.

    few, test = points(800, seed=2, task=2), points(1_000, seed=3, task=2)
    base.trainable = False
    with strategy.scope():
        model = with_head(base, rate=0.01)
    model.fit(*few, batch_size=batch, epochs=6, validation_data=test, verbose=2)

    base.trainable = True
    with strategy.scope():
        compile_at(model, rate=0.001)  # a smaller rate, so that the model keeps what it has learned
    model.fit(*few, batch_size=batch, epochs=6, validation_data=test, verbose=2)
    model.save("finetuned.keras")


if __name__ == "__main__":
    tfpara.run(main)
