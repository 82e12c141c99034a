"""Trains on a table of numbers and words; first learns the preprocessing from the data.

    tfpara-launch -n 2 -- python -m tfpara.examples.tabular

Every worker runs this whole program.
"""

import keras
import numpy as np
import tensorflow as tf

import tfpara

TOWNS = np.array(["Aachen", "Bern", "Cork", "Delft", "Evora"])


def table(number: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns columns (size and age as numbers, town and shop as words) and made-up rents."""
    random = np.random.default_rng(seed)
    town, shop = random.integers(0, 5, number), random.integers(0, 40, number)
    size, age = random.uniform(20, 200, number), random.exponential(30, number)
    rent = size * (6 + 2 * town) / 1000 - 0.01 * age + 0.4 * (shop % 2)
    columns = {
        "size": size[:, None].astype("float32"),
        "age": age[:, None].astype("float32"),
        "town": TOWNS[town][:, None],
        "shop": np.array([f"shop {k}" for k in shop])[:, None],
    }
    noise = 0.1 * random.normal(size=number)
    return columns, (rent + noise)[:, None].astype("float32")


def network(columns: dict[str, np.ndarray]) -> keras.Model:
    """Returns a model that contains the preprocessing, too, so that one file has everything."""
    inputs, features = {}, []
    for name in ("size", "age"):
        inputs[name] = keras.Input((1,), name=name)
        scale = keras.layers.Normalization()
        scale.adapt(columns[name])  # Every worker adapts to all rows, so all get the same values.
        features.append(scale(inputs[name]))
    inputs["town"] = keras.Input((1,), name="town", dtype="string")
    known = keras.layers.StringLookup(output_mode="one_hot")
    known.adapt(columns["town"])
    features.append(known(inputs["town"]))
    inputs["shop"] = keras.Input((1,), name="shop", dtype="string")
    bins = keras.layers.Hashing(256)(inputs["shop"])  # Hashing needs no adapt: it learns nothing.
    features.append(keras.layers.Flatten()(keras.layers.Embedding(256, 4)(bins)))
    x = keras.layers.Concatenate()(features)
    for _ in range(2):
        x = keras.layers.Dense(32, "relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.003), "mse")
    return model


def main() -> None:
    """Trains, and writes the model."""
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5)
    columns, rents = table(8_000, seed=1)
    with strategy.scope():
        model = network(columns)
    train = tf.data.Dataset.from_tensor_slices((columns, rents)).shuffle(len(rents))
    test = tf.data.Dataset.from_tensor_slices(table(1_000, seed=2)).batch(1_000)
    model.fit(train.batch(32 * strategy.num_replicas), epochs=6, validation_data=test, verbose=2)
    model.save("tabular.keras")


if __name__ == "__main__":
    tfpara.run(main)
