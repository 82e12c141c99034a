"""Two strategies of one cluster in a process, the second made while others are behind.

Options (JSON): late (whether this worker makes each strategy seconds after the other), out (npz).
"""

import json
import sys
import time

import keras
import numpy as np

import tfpara
from tfpara.sync.simulation import make_devices

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
Y = (X @ np.random.default_rng(1).normal(size=(6, 2))).astype("float32")


def prepared(device):
    """A strategy on a device of this process's, and a model of it."""
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(0.5), sync_period=3, devices=[device], timeout_seconds=15
    )
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", metrics=["mae"])
    return strategy, model


def main():
    options = json.loads(sys.argv[1])
    make_devices(2)
    found = {}
    first, one = prepared("CPU:0")
    one.fit(X, Y, 4, shuffle=False, verbose=0)
    if options["late"]:
        time.sleep(3.0)
    second, other = prepared("CPU:1")  # which has another lead device
    for epoch in range(2):
        log = other.fit(X, Y, 4, shuffle=False, verbose=0).history
        if epoch == 1:  # the first strategy goes on beside the second
            one.fit(X, Y, 4, shuffle=False, verbose=0)
        found[f"mae/{epoch}"] = log["mae"][0]
    for name, strategy, model in (("first", first, one), ("second", second, other)):
        with strategy.weights(model, "global"):
            found[name] = np.concatenate([np.ravel(w) for w in model.get_weights()])
    np.savez(options["out"], **found)


if __name__ == "__main__":
    main()
