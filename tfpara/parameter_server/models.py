"""The models that a strategy's `fit` has trained: on servers, on workers and in the chief."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import keras

from tfpara.algorithms import AsyncBMUF
from tfpara.algorithms.asgd import AsyncAverage, AsyncRule
from tfpara.keras_model import is_normalised, memory_can_change, memory_of
from tfpara.parameter_server.chief_model import ChiefModel
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.worker_step import WorkerStep
from tfpara.parameter_server.workers import Workers
from tfpara.typing import Nest

# A weight is sent to another process in one protocol buffer, which can have at most 2 GB. This
# limit keeps a margin for the other fields of the message.
LARGEST_BYTES = (1 << 31) - (1 << 20)


class Trained(NamedTuple):
    """What belongs to one trained model."""

    server: Server  # the global model, on the parameter servers
    work: WorkerStep  # the computation of a worker
    copy: ChiefModel  # the model in the chief


@dataclasses.dataclass(eq=False, repr=False)
class Models(dict[keras.Model, Trained]):
    """The parts of each trained model, by model; most fields are as for `AsyncStrategy`."""

    workers: Workers
    rule: AsyncRule
    averages: Mapping[str, AsyncAverage]
    sync_period: int
    seed: int
    record: bool
    skips: bool  # whether minibatches with NaN or Inf change nothing (nonfinite="skip")
    nonfinite_share: float
    sparse_embeddings: bool
    # `next(fits)` is the number of a new call of `fit`; it determines the data's order.
    fits: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def of(self, model: keras.Model | None) -> Trained:
        """Returns a model's parts; for None, those of the model whose first `fit` began last."""
        if model is None and self:
            return list(self.values())[-1]
        if model not in self:
            raise ValueError("the model has not been trained yet: call strategy.fit before.")
        return self[model]

    def whole(self, model: keras.Model) -> keras.Model | None:
        """Returns the trained model that has all of a model's weights; None if there is none."""
        own = {id(v) for v in model.weights}
        wholes = [each for each in self if own and own <= {id(v) for v in each.weights}]

        def trains(each: keras.Model) -> int:
            return len(own & {id(v) for v in each.trainable_variables})

        return model if model in self else max(wholes, key=trains, default=None)

    def check(self) -> None:
        """Raises ParameterServerError if the run cannot go on; else ends waits for lost workers."""
        self.workers.check()
        for worker in self.workers.lost():
            for trained in self.values():
                trained.server.forget(worker)

    def for_fit(self, model: keras.Model, spec: Nest) -> Trained:
        """Returns the parts of a built, compiled model for a `fit`; makes them if need be."""
        trained = self.get(model)
        if trained is None or not trained.work.has_these_weights:
            self[model] = self._created(model, spec)
        else:
            server, work, copy = trained
            copy.write(within_epoch=False, within_fit=False)
            if not work.has_these_metrics:
                work = self._work(model, server.rule, spec)
                server.measure(model)
                self[model] = Trained(server, work, ChiefModel(model, server, work))
        return self[model]

    def _work(self, model: keras.Model, rule: AsyncRule, spec: Nest) -> WorkerStep:
        return WorkerStep(model, rule, spec, self.sync_period, self.skips, self.sparse_embeddings)

    def _created(self, model: keras.Model, spec: Nest) -> Trained:
        rule, optimizer = self.rule, model.optimizer
        if not self.workers.is_simulated:
            _check_sizes(model)
        if isinstance(rule, AsyncBMUF) and is_normalised(optimizer):
            rule = rule.for_optimizer(memory_can_change(optimizer) or not memory_of(optimizer))
            if rule != self.rule:
                print(f"tfpara: for this local optimizer the rule is {rule}", file=sys.stderr)
        work = self._work(model, rule, spec)
        for note in (work.fit, *work.tables.notes):
            if note:
                print(f"tfpara: {note}.", file=sys.stderr)
        server = Server(
            model,
            work.state,
            rule,
            self.averages,
            self.workers.server_devices,
            self.workers.num_workers,
            self.record,
            work.tables.lazy,
        )
        return Trained(server, work, ChiefModel(model, server, work))


def _check_sizes(model: keras.Model) -> None:
    """Raises ValueError if a weight is too large to be sent."""
    for variable in model.variables:
        size = variable.value.shape.num_elements() * variable.value.dtype.size
        if size > LARGEST_BYTES:
            raise ValueError(
                f"{variable.path!r} has {size / 2**30:.1f} GB, and a weight that is sent to other "
                "processes must have less than 2 GB. Divide it into several weights: for an "
                "Embedding, make several tables and concatenate their outputs."
            )
