"""Trains a transformer in mixed precision, by AdamW with a cosine schedule and clipped gradients.

    tfpara-launch -n 2 -- python -m tfpara.examples.transformer

The network learns to sort: its k-th output is the k-th smallest token.
"""

import keras
import numpy as np

import tfpara

TOKENS, LENGTH, WIDTH = 12, 8, 32
EPOCHS, BATCH = 5, 32


def sequences(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns made-up data: random tokens, and the same tokens sorted."""
    tokens = np.random.default_rng(seed).integers(0, TOKENS, (number, LENGTH))
    return tokens, np.sort(tokens)


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    """Applies attention, then dense layers to each token, each with a residual connection."""
    normal = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal)
    normal = keras.layers.LayerNormalization()(x)
    hidden = keras.layers.Dense(4 * WIDTH, "gelu")(normal)
    return x + keras.layers.Dropout(0.05)(keras.layers.Dense(WIDTH)(hidden))


def network(steps: int) -> keras.Model:
    """Returns a network. Its learning rate rises for a tenth of the steps, then falls to 0."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.arange(LENGTH)
    x = keras.layers.Embedding(TOKENS, WIDTH)(tokens)
    x = x + keras.layers.Embedding(LENGTH, WIDTH)(places)
    x = block(x)
    logits = keras.layers.Dense(TOKENS, dtype="float32")(keras.layers.LayerNormalization()(x))
    model = keras.Model(tokens, logits)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=0.005, warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.01, clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Trains, and writes the model."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5)
    x, y = sequences(8_000, seed=1)
    batch = BATCH * strategy.num_replicas
    with strategy.scope():
        model = network(steps=EPOCHS * len(x) // batch)  # the number of steps of each replica
    model.fit(
        x,
        y,
        batch_size=batch,
        epochs=EPOCHS,
        validation_data=sequences(1_000, seed=2),
        verbose=2,
    )
    model.save("transformer.keras")


if __name__ == "__main__":
    tfpara.run(main)
