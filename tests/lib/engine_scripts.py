"""Scripts of docs/engines that an engine starts, trained without it, for tests."""

import collections
import functools
import importlib.util

import keras
import numpy as np

import tfpara


def train_here(script, folder, replicas, monkeypatch):
    """Calls `train` of a script in this process, on so many devices; returns the final weights."""
    specification = importlib.util.spec_from_file_location("train_without_engine", script)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    devices = [f"CPU:{number}" for number in range(replicas)]
    with monkeypatch.context() as patch:
        strategy = functools.partial(tfpara.PeriodicSyncStrategy, devices=devices)
        patch.setattr(tfpara, "PeriodicSyncStrategy", strategy)
        assert module.train(folder) is True
    return weights(folder)


def weights(folder):
    """The weights of the model that a training has left."""
    return keras.models.load_model(folder / "model.keras").get_weights()


def assert_close(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def steps(folder, rank):
    """How many steps each process of a worker has taken, in their order."""
    return list(collections.Counter((folder / f"steps-{rank}").read_text().split()).values())
