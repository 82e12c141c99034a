"""Models that are trained one after the other, and deleted or forgotten.

Options (JSON): keeps (whether this worker deletes the first two models later than others do), out
(npz), and those of PeriodicSyncStrategy.
"""

import json
import sys

import keras
import numpy as np

import tfpara

X = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
Y = (X @ np.random.default_rng(1).normal(size=(6, 2))).astype("float32")


def main():
    options = json.loads(sys.argv[1])
    keeps, out = options.pop("keeps"), options.pop("out")
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(0.5), averages={"ema": tfpara.EMA(0.5)}, timeout_seconds=60, **options
    )
    kept, counts, found = [], [], {}

    def train(number, layers=()):
        """Trains a model, alone or with the layers of another; counts what is kept then."""
        with strategy.scope():
            keras.utils.set_random_seed(number)
            layers = list(layers) or [keras.layers.Dense(3, "tanh")]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
        found[f"loss/{number}"] = model.fit(X, Y, 4, epochs=2, verbose=0).history["loss"]
        counts.append(len(strategy.extended.models.synchronizers))
        if keeps:
            kept.append(model)
        return model

    train(0)
    train(1)
    train(2)
    kept.clear()
    last = train(3)  # all have deleted the former ones, and this begins to be trained
    kept.clear()
    head = last.layers[:-1]
    del last
    last = train(4, head)
    kept.clear()
    strategy.forget(last)
    train(5, last.layers[:-1])
    found["steps"] = strategy.statistics().steps
    weights = last.layers[0].weights
    found["weights"] = np.concatenate([np.ravel(w.value.numpy()) for w in weights])
    np.savez(out, counts=counts, **found)


if __name__ == "__main__":
    main()
