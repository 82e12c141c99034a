"""Tags the tokens of sequences of different length, with sample weights for doubtful labels.

    tfpara-launch -n 2 -- python -m tfpara.examples.sequences

Every worker runs this whole program.
"""

import keras
import numpy as np
import tensorflow as tf

import tfpara

TOKENS, LENGTH = 8, 20


def sequences(number: int, seed: int, doubtful: float = 0.0) -> tuple[np.ndarray, ...]:
    """Returns made-up tokens (0 is padding), tags, and sample weights, one of each per position.

    A tag tells whether token 1 has come since the last token 2. But the fraction `doubtful` of the
    sequences has random tags and small weights.
    """
    random = np.random.default_rng(seed)
    tokens = random.integers(1, TOKENS, (number, LENGTH))
    tags = np.zeros((number, LENGTH), "int64")
    for k in range(LENGTH):
        former = tags[:, k - 1] if k else 0
        tags[:, k] = np.select([tokens[:, k] == 1, tokens[:, k] == 2], [1, 0], former)
    tokens[np.arange(LENGTH) >= random.integers(4, LENGTH + 1, (number, 1))] = 0
    guessed = random.uniform(size=number) < doubtful
    tags[guessed] = random.integers(0, 2, (guessed.sum(), LENGTH))
    weights = np.where(guessed, 0.05, 1.0)[:, None] * np.ones(LENGTH)  # one weight for each token
    return tokens, tags, weights.astype("float32")


def network() -> keras.Model:
    """Returns a network. Its embedding masks the padding for the GRU, the loss and the metric."""
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(TOKENS, 8, mask_zero=True),
            keras.layers.GRU(24, return_sequences=True),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model


def tokens_in(minibatch: tuple[tf.Tensor, ...]) -> tf.Tensor:
    """Returns the number of tokens without padding, over which the loss is a mean."""
    return tf.reduce_sum(tf.cast(minibatch[0] != 0, tf.float32))


def main() -> None:
    """Trains, and writes the model."""
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5)
    strategy.weigh_minibatches(tokens_in)
    with strategy.scope():
        model = network()
    tokens, tags, weights = sequences(4_000, seed=1, doubtful=0.3)
    model.fit(
        tokens,
        tags,
        sample_weight=weights,
        batch_size=32 * strategy.num_replicas,
        epochs=3,
        validation_data=sequences(1_000, seed=2),
        verbose=2,
    )
    model.save("sequences.keras")


if __name__ == "__main__":
    tfpara.run(main)
