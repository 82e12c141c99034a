"""A callback that turns the running average of averaged ASGD into the mean of the models."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from tfpara.algorithms import RunningThenMean
from tfpara.callbacks.held_out import checked_held_out, evaluate
from tfpara.fit_call import Callback
from tfpara.typing import Data, Json, Logs
from tfpara.whole_number import checked_whole


class StartMean(Callback):
    """Turns the running average into a mean, once its loss on held-out data is below the model's.

    After every `every_chunks` chunks the chief reads the server's model and its average at one
    moment, and compares their losses, while the workers train on. Once the average's loss is lower,
    the average continues as the mean (`tfpara.algorithms.RunningThenMean`), and scoring ends.

    Args:
        dataset: held-out data, in any form that `HeldOut` takes.
        every_chunks: chunks between two comparisons.
        verbose: 1: prints a line when the mean starts; 0: none.

    Raises:
        ValueError: `every_chunks` below 1, or a generator as the data; at the start of `fit`, the
            run has no `RunningThenMean` named "average". (The rule AveragedASGD makes one.)

    Source: paper 002, section 2.3.
    """

    def __init__(self, dataset: Data, every_chunks: int = 1, verbose: int = 1) -> None:
        super().__init__()
        self._dataset = checked_held_out(dataset)
        self._every = checked_whole("every_chunks", every_chunks, of="chunks")
        self._verbose = verbose
        # The number of chunks, over all epochs, that were done when the losses of the model and the
        # average were compared last.
        self._scored = 0

    def get_state(self) -> dict[str, Json]:
        return {"scored": self._scored}

    def set_state(self, state: Mapping[str, Json]) -> None:
        self._scored = state["scored"]

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        strategy = self._strategy
        if not isinstance(strategy.averages.get("average"), RunningThenMean):
            raise ValueError(
                "StartMean needs a tfpara.AsyncStrategy with the rule tfpara.AveragedASGD, or with "
                'averages={"average": tfpara.RunningThenMean(...)}.'
            )
        strategy.keep_state("start_mean", self)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        running = self.model.distribute_strategy.running
        # A resumed run then gets the value from its checkpoint.
        self._scored = running.epoch * running.chunks.count

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        running = self.model.distribute_strategy.running
        self._compare(running.epoch * running.chunks.count + running.chunks_done)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        running = self.model.distribute_strategy.running
        self._compare((epoch + 1) * running.chunks.count)
        if logs is not None:
            started = self.model.distribute_strategy.mean_started(self.model)
            logs["mean_started"] = float(started)

    def _compare(self, chunks: int) -> None:
        strategy = self.model.distribute_strategy
        if chunks - self._scored < self._every or strategy.mean_started(self.model):
            return
        self._scored = chunks
        losses, names = {}, ("global", "average")
        with strategy.at_one_moment(self.model, names):
            for which in names:
                with strategy.weights(self.model, which):
                    losses[which] = evaluate(self.model, self._dataset)["loss"]
        if losses["average"] < losses["global"]:
            strategy.start_mean(self.model)
            if self._verbose:
                print(
                    f"The running average scores better than the model ({losses['average']:.4f} "
                    f"against {losses['global']:.4f}) after {chunks} chunks: the mean starts.",
                    flush=True,
                )
