"""Scores of the run's weights on held-out data."""

from __future__ import annotations

import contextlib
from typing import Any

import keras


class HeldOut(keras.callbacks.Callback):
    """After each epoch, scores weights of the run on held-out data.

    The results join the epoch's log on every worker, as `NAME_loss` and so on for each metric. Put
    it before callbacks that read them.

    Args:
        dataset: held-out data, in any form that `model.evaluate` takes. A plain dataset is the same
            whole one on every worker, and is divided among them.
        which: the weights to score: "global", "local" or an average's name.
        name: prefix of the results.
    """

    def __init__(self, dataset: Any, which: str = "global", name: str = "validation") -> None:
        super().__init__()
        self._dataset = dataset
        self._which = which
        self._name = name

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        strategy = self.model.distribute_strategy
        with contextlib.ExitStack() as stack:
            if hasattr(strategy, "weights"):
                stack.enter_context(strategy.weights(self.model, self._which))
            results = self.model.evaluate(self._dataset, verbose=0, return_dict=True)
        if logs is not None:
            logs.update({f"{self._name}_{key}": value for key, value in results.items()})
