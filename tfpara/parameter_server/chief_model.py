"""The copy of the model in the chief, and its exchange of weights with the parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfpara.contexts import attributes
from tfpara.parameter_server.messages import Moment
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.worker_step import WorkerStep
from tfpara.typing import Array, Variable


class ChiefModel:
    """Exchanges weights between the chief's model and the servers, which begin with equal weights.

    Attributes:
        shown: the argument of `showing`, while its context is active; else None.
        moment: the models that `showing` has; None: those at the call.
    """

    def __init__(self, model: keras.Model, server: Server, work: WorkerStep) -> None:
        self._server = server
        self._work = work
        self._weights = model.trainable_variables
        self.shown: str | None = None
        self.moment: Moment | None = None
        self._remember()

    def _remember(self) -> None:
        """Keeps the present values, which the servers have too, so that `write` finds changes."""
        # These are no copies: the tensors share the variables' memory until an assignment.
        self._seen = _values(self._weights)
        self._seen_state = _values(self._work.state)

    def read(self) -> None:
        """Copies the servers' model into the chief's."""
        now = self._server.weights_at_once(["global"])
        _assign(self._weights, now.weights["global"])
        _assign(self._work.state, now.state)
        # Keras' TensorBoard callback reads `_iterations`. It plots the scores of `evaluate` at this
        # step, and if the learning rate is a schedule, it shows the schedule's rate at this step.
        self._work.optimizer._iterations.assign(self._server.steps)
        self._remember()

    def write(self, within_epoch: bool, within_fit: bool) -> None:
        """Sends the weights and moving statistics that were set in the chief's model since `read`.

        `within_epoch` and `within_fit` tell whether workers are training now, and whether a `fit`
        is running. Raises ValueError if weights were set that cannot be sent now.
        """
        if self.shown is not None:
            raise ValueError(
                f"the model shows its {self.shown!r} weights, from which training cannot go on: "
                "leave `with strategy.weights(...)` before."
            )
        weights = _differ(self._weights, self._seen)
        state = _differ(self._work.state, self._seen_state)
        changed = [self._weights[k] for k in weights] + [self._work.state[k] for k in state]
        if within_epoch and changed:
            raise ValueError(
                f"{changed[0].path!r} was set while workers train. In the middle of an epoch the "
                "chief's model is that of the epoch's beginning, and what is set there would be "
                "lost. Set weights in on_epoch_begin or on_epoch_end, or between two fits."
            )
        if within_epoch:
            return
        if not within_fit:
            self._work.read_frozen()
        elif frozen := _differ(self._work.frozen, self._work.frozen_values):
            raise ValueError(
                f"{self._work.frozen[frozen[0]].path!r} is frozen, and was set while fit runs: "
                "workers have it as it was when fit began. Set frozen weights between two fits."
            )
        if weights:
            self._server.set_weights(_values(self._weights))
        if changed:
            self._server.set_state(_values(self._work.state))
            self._remember()

    @contextlib.contextmanager
    def showing(self, which: str) -> Iterator[None]:
        """A context in which the chief's model has the "global" weights or those of an average."""
        variables = [*self._weights, *self._work.state]
        kept, moment = _values(variables), self.moment
        if moment is None or which not in moment.weights:
            moment = self._server.weights_at_once([which])
        _assign(variables, [*moment.weights[which], *moment.state])
        put_in = _values(self._weights)
        try:
            with attributes(self, shown=which):
                yield
            if changed := _differ(self._weights, put_in):
                raise ValueError(
                    f"{self._weights[changed[0]].path!r} was set inside `with strategy.weights(..."
                    f", {which!r})`, and would be lost on leaving. Read the weights inside, leave, "
                    "and set them then."
                )
        finally:
            _assign(variables, kept)


def _values(variables: Sequence[Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(v.value) for v in variables]


def _assign(variables: Sequence[Variable], values: Sequence[Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.identity(value))


def _differ(variables: Sequence[Variable], values: Sequence[Array]) -> list[int]:
    """Returns the indices of the variables whose values differ from `values`."""
    pairs = zip(variables, values, strict=True)
    return [k for k, (v, value) in enumerate(pairs) if not np.array_equal(v.numpy(), value)]
