"""The global model on the parameter servers: what a pull reads and a push writes.

Each parameter server has a *shard*: some of the weights, with their optimizer slots and averages,
and a lock. A pull reads a shard, and a push changes it, while holding its lock; what travels over
the network is sent before the lock is taken or after it is given back. So on each server pushes
follow one another as if workers took turns. The first server keeps the books as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpara.algorithms import AsyncEASGD
from tfpara.algorithms.keras_step import KerasSteps
from tfpara.parameter_server.books import Books


class Pulled(NamedTuple):
    """What a worker gets: tensors on the servers.

    Attributes:
        weights: the trainable weights, in the model's order.
        state: the averaged state (moving statistics), in the model's order.
        versions: pushes so far, of each server.
        halted: whether workers are asked to stop where they are.
    """

    weights: list[tf.Tensor]
    state: list[tf.Tensor]
    versions: list[tf.Tensor]
    halted: tf.Tensor


class Push(NamedTuple):
    """What a worker sends.

    Attributes:
        values: for each weight the gradient (ASGD) or the local weight (EASGD).
        state: changes of the averaged state since the pull.
        metrics: what the minibatches add to the metrics' variables.
        worker: its index.
        chunk: which chunk the minibatches are of.
        minibatches: how many they are.
        samples: how many samples they have.
        rate: the learning rate of this push; negative: the server's own.
    """

    values: Sequence[tf.Tensor]
    state: Sequence[tf.Tensor]
    metrics: Sequence[tf.Tensor]
    worker: tf.Tensor
    chunk: tf.Tensor
    minibatches: tf.Tensor
    samples: tf.Tensor
    rate: tf.Tensor


class _Shard:
    """What one parameter server holds."""

    def __init__(self, device: str, number: int) -> None:
        self.device = device
        self.number = number
        self.indices: list[int] = []  # of the model's weights
        self.weights: list[tf.Variable] = []
        self.averages: dict[str, list[Any]] = {}  # states of variables, one for each weight
        self.steps: KerasSteps | None = None
        self.optimizer: list[tf.Variable] = []
        with tf.device(device):
            # Unnamed: resources of this name are this object's alone.
            self.lock = tf.CriticalSection(name=f"shard_{number}")
            self.version = tf.Variable(0, dtype=tf.int64, trainable=False)


class Server:
    """The global model, its optimizer, averages and books, on one or several devices.

    Args:
        model: built and compiled; the initial weights are read from it.
        state: the variables, among those not trained, that workers share: moving statistics.
        rule: a resolved rule of `tfpara.algorithms.asgd`.
        averages: averages of the global model, by name.
        devices: of the parameter servers. Weights go, largest first, where there is least yet.
        num_workers: how many may push.
    """

    def __init__(
        self,
        model: keras.Model,
        state: Sequence[keras.Variable],
        rule: Any,
        averages: Mapping[str, Any],
        devices: Sequence[str],
        num_workers: int,
    ) -> None:
        self.rule = rule
        self.averages = dict(averages)
        weights = model.trainable_variables
        self.names = [v.path for v in weights]
        self.shards = [_Shard(device, number) for number, device in enumerate(devices)]
        self.first = self.shards[0]
        loads = [0] * len(devices)
        for index in sorted(
            range(len(weights)), key=lambda k: -weights[k].value.shape.num_elements()
        ):
            number = loads.index(min(loads))
            loads[number] += weights[index].value.shape.num_elements()
            self.shards[number].indices.append(index)
        for shard in self.shards:
            shard.indices.sort()
            with tf.device(shard.device):
                self._fill(shard, [weights[k] for k in shard.indices], model.optimizer)
        with tf.device(self.first.device):
            self.state = [_variable(v.value) for v in state]
            self.metrics = [_variable(tf.zeros_like(v.value)) for v in metric_variables(model)]
            self.books = Books(num_workers)

    def _fill(self, shard: _Shard, weights: Sequence[keras.Variable], optimizer: Any) -> None:
        shard.weights = [_variable(v.value) for v in weights]
        for name, average in self.averages.items():
            shard.averages[name] = [_states(average.init(tf.identity(v.value))) for v in weights]
        if not isinstance(self.rule, AsyncEASGD):
            # The workers clip: they see all gradients.
            shard.steps = KerasSteps(optimizer, weights, clip=False)
            shard.optimizer = [_variable(value) for value in shard.steps.initial]

    # What workers run, in their graphs.

    def rate(self) -> tf.Tensor:
        """The learning rate of the optimizer on the servers, where it is a number."""
        with tf.device(self.first.device):
            return tf.identity(self.first.optimizer[self._rate_index])

    def set_rate(self, rate: tf.Tensor) -> list[tf.Tensor]:
        """Gives all servers a learning rate; returns what must have run for it to be so."""
        done = []
        for shard in self.shards:
            with tf.device(shard.device):
                variable = shard.optimizer[self._rate_index]
                done.append(
                    shard.lock.execute(lambda variable=variable: tf.identity(variable.assign(rate)))
                )
        return done

    @property
    def _rate_index(self) -> int:
        at = None if self.first.steps is None else self.first.steps.rate_index
        if at is None:
            raise ValueError("the servers have no learning rate that is a number.")
        return at

    def pull(self, worker: tf.Tensor) -> Pulled:
        """Reads the model, for a push of a worker."""
        del worker
        return self.read()

    def read(self) -> Pulled:
        """Reads the model."""
        weights: list[Any] = [None] * len(self.names)
        state: list[tf.Tensor] = []
        versions, halted = [], None
        for shard in self.shards:
            with tf.device(shard.device):
                held = [*shard.weights, shard.version]
                if shard is self.first:
                    held += [self.books.halted, *self.state]
                values = shard.lock.execute(lambda held=held: [tf.identity(v) for v in held])
            for index, value in zip(shard.indices, values, strict=False):
                weights[index] = value
            rest = values[len(shard.indices) :]
            versions.append(rest[0])
            if shard is self.first:
                halted, *state = rest[1:]
        return Pulled(weights, state, versions, halted)

    def push(self, push: Push, pulled: Pulled) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Applies what a worker sends.

        A push that is not finite is an error, `tf.errors.InvalidArgumentError` with `NOT_FINITE` in
        its message, and nothing is written on the server that notices.

        Returns:
            The servers' versions after it; and, of rules that have local models, for each weight
            what the local model loses.
        """
        versions: list[tf.Tensor] = []
        moves: list[Any] = [None] * len(self.names)
        for shard in self.shards:
            with tf.device(shard.device):
                own = [tf.identity(push.values[k]) for k in shard.indices]
                sent = [*own]
                books = push._replace(values=[], state=[], metrics=[])
                if shard is self.first:
                    books = push._replace(
                        values=[],
                        state=[tf.identity(t) for t in push.state],
                        metrics=[tf.identity(t) for t in push.metrics],
                    )
                    sent += [*books.state, *books.metrics]
                # All has arrived before the lock is taken.
                with tf.control_dependencies(sent):
                    result = shard.lock.execute(
                        lambda shard=shard, own=own, books=books: self._apply(
                            shard, own, books, pulled
                        )
                    )
            versions.append(result[0])
            for index, move in zip(shard.indices, result[1:], strict=False):
                moves[index] = move
        return versions, moves if isinstance(self.rule, AsyncEASGD) else []

    def _apply(
        self, shard: _Shard, values: Sequence[tf.Tensor], push: Push, pulled: Pulled
    ) -> list[tf.Tensor]:
        """The step on one server, inside its lock: its version after it, and the moves."""
        before = [tf.identity(v) for v in shard.weights]
        version = tf.identity(shard.version)
        staleness = version - pulled.versions[shard.number]
        moves: list[tf.Tensor] = []
        optimizer: list[tf.Tensor] = []
        if shard.steps is None:
            moves = [self.rule.move(v, w) for v, w in zip(values, before, strict=True)]
            after = [w + m for w, m in zip(before, moves, strict=True)]
        else:
            after, optimizer = self._step(shard, before, values, push.rate, staleness, pulled)
        names = [self.names[k] for k in shard.indices]
        after = [
            tf.debugging.check_numerics(w, f"{NOT_FINITE} {name!r}")
            for w, name in zip(after, names, strict=True)
        ]
        with tf.control_dependencies([*after, *moves, *optimizer]):
            written = [v.assign(w) for v, w in zip(shard.weights, after, strict=True)]
            written += [v.assign(s) for v, s in zip(shard.optimizer, optimizer, strict=True)]
            for name, average in self.averages.items():
                for kept, new in zip(shard.averages[name], after, strict=True):
                    values_ = average.update(_read(kept), new)
                    written += [
                        v.assign(tf.cast(x, v.dtype)) for v, x in zip(kept, values_, strict=True)
                    ]
            written.append(shard.version.assign(version + 1))
            if shard is self.first:
                written += [v.assign_add(d) for v, d in zip(self.state, push.state, strict=True)]
                written += [
                    v.assign_add(d) for v, d in zip(self.metrics, push.metrics, strict=True)
                ]
                written += self.books.enter(push, staleness)
        with tf.control_dependencies(written):
            return [version + 1, *(tf.identity(m) for m in moves)]

    def _step(
        self,
        shard: _Shard,
        weights: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        rate: tf.Tensor,
        staleness: tf.Tensor,
        pulled: Pulled,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The optimizer's step on a shard, corrected as the rule says."""
        steps: Any = shard.steps
        corrected = [
            self.rule.gradient(g, pulled=pulled.weights[k], current=w)
            for g, k, w in zip(gradients, shard.indices, weights, strict=True)
        ]
        state = [tf.identity(v) for v in shard.optimizer]
        at = steps.rate_index
        if at is None:
            return steps(weights, state, corrected)
        own = state[at]
        chosen = tf.where(rate >= 0.0, tf.cast(rate, own.dtype), own)
        state[at] = chosen * self.rule.rate_factor(tf.cast(staleness, own.dtype))
        after, state = steps(weights, state, corrected)
        state[at] = own
        return after, state

    def finish(self, chunk: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
        """Enters whether all minibatches of a chunk have been pushed; returns `ended`."""
        with tf.device(self.first.device):
            return self.first.lock.execute(lambda: self.books.finish(chunk, ended))

    # What the chief does with it.

    def divide(self, num_chunks: int) -> None:
        """Epochs have so many chunks from here on; before graphs are made."""
        with tf.device(self.first.device):
            self.books.divide(num_chunks)

    def global_weights(self) -> list[tf.Tensor]:
        """The weights, in the model's order."""
        return self._collect(lambda shard: shard.weights)

    def average_weights(self, name: str) -> list[tf.Tensor]:
        """The weights of an average."""
        average = self.averages[name]
        return self._collect(lambda shard: [average.value(_read(s)) for s in shard.averages[name]])

    def _collect(self, of: Callable[[_Shard], Sequence[Any]]) -> list[tf.Tensor]:
        found: list[Any] = [None] * len(self.names)
        for shard in self.shards:
            with tf.device(shard.device):
                values = shard.lock.execute(lambda shard=shard: [tf.identity(v) for v in of(shard)])
            for index, value in zip(shard.indices, values, strict=True):
                found[index] = value
        return found

    def start_mean(self, name: str) -> None:
        """Has the running average `name` go on as a mean."""
        average = self.averages[name]
        for shard in self.shards:
            for state in shard.averages[name]:
                state.mean.assign(average.start_mean(_read(state)).mean)

    @property
    def learning_rate(self) -> float | None:
        """That of the optimizer on the servers; None where it is a schedule or there is none."""
        at = None if self.first.steps is None else self.first.steps.rate_index
        return None if at is None else float(self.first.optimizer[at])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for shard in self.shards:
            if shard.steps is not None and shard.steps.rate_index is not None:
                shard.optimizer[shard.steps.rate_index].assign(rate)

    def variables(self) -> dict[str, tf.Variable]:
        """All that a checkpoint must hold, by name; fixed by the model and number of servers."""
        found: dict[str, tf.Variable] = {}
        for shard in self.shards:
            found[f"version/{shard.number}"] = shard.version
            for k, variable in zip(shard.indices, shard.weights, strict=True):
                found[f"weight/{k}"] = variable
            for name, states in shard.averages.items():
                for k, state in zip(shard.indices, states, strict=True):
                    for field, variable in zip(state._fields, state, strict=True):
                        found[f"average/{name}/{k}/{field}"] = variable
            for k, variable in enumerate(shard.optimizer):
                found[f"optimizer/{shard.number}/{k}"] = variable
        found.update({f"state/{k}": v for k, v in enumerate(self.state)})
        found.update({f"metric/{k}": v for k, v in enumerate(self.metrics)})
        found.update(self.books.variables())
        return found


NOT_FINITE = "a push would make this weight infinite or NaN:"


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of the model's metrics, that of the loss included."""
    return [variable for metric in model.metrics for variable in metric.variables]


def _variable(value: Any) -> tf.Variable:
    return tf.Variable(tf.identity(value), trainable=False)


def _states(state: Any) -> Any:
    """A NamedTuple of variables that holds the NamedTuple `state`."""
    return type(state)(*(_variable(tf.convert_to_tensor(value)) for value in state))


def _read(state: Any) -> Any:
    return type(state)(*(tf.identity(v) for v in state))
