"""A parameter server's part of the model, and how a push changes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.algorithms.asgd import ASGD, AsyncAverage, AsyncBMUF, AsyncRule
from tfpara.algorithms.keras_step import KerasSteps
from tfpara.keras_model import constrained
from tfpara.parameter_server.counters import Change, Progress
from tfpara.parameter_server.messages import Push
from tfpara.typing import Array, Nest, State

NOT_FINITE = "a push would make this weight infinite or NaN:"


class Shard:
    """A shard of the model: some weights with their optimizer slots and averages, and a lock.

    Methods marked "inside the lock" must be called in `locked`. `device` and `number` (from 0) are
    those of the parameter server.

    Args:
        indices: the indices of the shard's weights among the model's trainable weights.
        weights: the model's trainable weights, whose values are the initial ones.
        lazy: the indices of the tables of which a push changes only the rows that it contains.

    Attributes:
        weights, optimizer: the variables of the weights, and of the state of `steps`.
        averages: for each average, by name, a list of states, one for each weight; the fields of
            a state are variables.
        kept: for each weight the rule's state, whose fields are variables; empty without a state.
        steps: the optimizer's step; None if the workers have the optimizers.
        version: number of pushes applied so far.
        progress: counts the minibatches of each chunk that are in the shard's weights.
    """

    def __init__(
        self,
        device: str,
        number: int,
        indices: Sequence[int],
        weights: Sequence[keras.Variable],
        rule: AsyncRule,
        averages: Mapping[str, AsyncAverage],
        optimizer: keras.optimizers.Optimizer,
        lazy: Collection[int],
    ) -> None:
        self.device, self.number, self.indices = device, number, indices
        # The type is Any, because rules have different methods. A rule's flags, such as
        # `local_steps`, tell which methods it has.
        self._rule: Any = rule
        self._averages: Mapping[str, Any] = averages
        self._lazy = lazy
        own = [weights[k] for k in indices]
        self.names = [v.path for v in own]
        self._constraints = [v.constraint for v in own]
        self.kept: list[State] = []
        self.steps: KerasSteps | None = None
        self.optimizer: list[tf.Variable] = []
        with tf.device(device):
            # TensorFlow 2.17 ignores this name: all locks that are made eagerly on one device share
            # one mutex. So pushes of different models on a server exclude each other, too.
            self.lock = tf.CriticalSection(name=f"shard_{number}")
            self.version = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.progress = Progress(1)
            self.weights = [variable(v.value) for v in own]
            self.averages = {
                name: [_states(_start(average, precise(v.value))) for v in own]
                for name, average in averages.items()
            }
            if isinstance(rule, AsyncBMUF):
                self.kept = [_states(rule.init(v.value)) for v in own]
            if isinstance(rule, ASGD):
                # The optimizer does not clip here. The workers clip gradients, because a global
                # norm needs the gradients of all shards.
                self.steps = KerasSteps(optimizer, own, clip=False)
                self.optimizer = [variable(value) for value in self.steps.initial]
                if self.steps.rate_index is None and rule.rate_by_staleness:
                    raise ValueError(
                        "rate_by_staleness=True divides a learning rate that is a number, and the "
                        "optimizer has a schedule. Compile it with a number, and set that by a "
                        "callback such as tfpara.callbacks.LearningRate."
                    )

    def sent(self, values: Nest) -> Nest:
        """Sends tensors to this server. Only tensors that were sent may be used inside the lock."""
        # Otherwise the lock would be held while they cross the network.
        with tf.device(self.device):
            return tf.nest.map_structure(tf.identity, values)

    def locked(self, sent: Nest, inside: Callable[[], Nest]) -> Nest:
        """Calls `inside` with the lock held, after the tensors `sent` have arrived."""
        with tf.device(self.device), tf.control_dependencies(tf.nest.flatten(sent)):
            return self.lock.execute(inside)

    def takes(self, push: Push) -> tf.Tensor:
        """Returns whether a push has the next minibatches and is not too stale; inside the lock."""
        next_is = self.progress.next_is(push)
        bound = getattr(self._rule, "max_staleness", None)
        if bound is None:
            return next_is
        staleness = tf.identity(self.version) - push.version
        return next_is & (staleness <= bound)

    def changes(
        self, push: Push, held: Sequence[tf.Tensor]
    ) -> tuple[list[Change], list[tf.Tensor], tf.Tensor]:
        """Computes the changes that this shard's part of a push makes; inside the lock.

        `held` is that of `Pulled`. Returns the changes; the moves, one for each local weight, which
        the worker subtracts from it (empty without local models); and the staleness.
        """
        # For each weight: the ids of the rows that change, or None if the whole weight changes.
        ids = [push.rows.get(k) if k in self._lazy else None for k in self.indices]
        before = [taken(v, rows) for v, rows in zip(self.weights, ids, strict=True)]
        version = tf.identity(self.version)
        staleness = version - push.version
        after, moves, state = self._updated(before, ids, push, held, staleness)
        after = self._finite(after)
        if self._rule.local_steps:  # else the optimizer's step has applied the constraints
            after = constrained(after, self._constraints)
        of_weights = [Change(*each) for each in zip(self.weights, after, ids, strict=True)]
        changes = [*of_weights, *state]
        for name, average in self._averages.items():
            for kept, change in zip(self.averages[name], of_weights, strict=True):
                changes += _stored(kept, average.update(_read(kept), precise(_whole(change))))
        # `push.left_out` has one element: the number of the push's minibatches that were left out
        # for NaN or Inf. It is empty if minibatches are never left out. If all minibatches of the
        # push were left out, the values stay as they are.
        for left_out in push.left_out:
            some = push.minibatches > left_out
            changes = [
                c._replace(value=tf.where(some, c.value, taken(c.variable, c.ids))) for c in changes
            ]
            moves = [tf.where(some, move, tf.zeros_like(move)) for move in moves]
        changes += [Change(self.version, version + 1), self.progress.change(push)]
        return changes, moves, staleness

    def _finite(self, weights: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the weights; if one is infinite or NaN, the graph fails and names the weight.

        A sum of numbers can only be finite if each number is. A sum takes a tenth of the time of
        `check_numerics`, so this is called only if a sum is not finite.
        """
        if not weights:
            return weights

        def known() -> tf.Tensor:
            with tf.device(self.device):
                return tf.constant(True)

        def examined() -> tf.Tensor:
            with tf.device(self.device):
                named = [
                    tf.debugging.check_numerics(w, f"{NOT_FINITE} {name!r}")
                    for w, name in zip(weights, self.names, strict=True)
                ]
                with tf.control_dependencies(named):
                    return tf.constant(True)

        sums = tf.stack([tf.cast(tf.reduce_sum(w), tf.float32) for w in weights])
        is_finite = tf.reduce_all(tf.math.is_finite(sums))
        all_are = tf.cond(is_finite, known, examined)
        with tf.control_dependencies([all_are]):
            return [tf.identity(w) for w in weights]

    def _updated(
        self,
        before: list[tf.Tensor],
        ids: Sequence[tf.Tensor | None],
        push: Push,
        held: Sequence[tf.Tensor],
        staleness: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[Change]]:
        """Returns the weights after the push, the moves, and the changes of other variables."""
        if not self._rule.local_steps:
            return self._step(before, ids, push, staleness, held)
        pairs = list(zip(before, self._spread(push.values, ids, push), strict=True))
        if self._rule.local_models:
            moves = [self._rule.move(v, w) for w, v in pairs]
            return [w + m for w, m in zip(before, moves, strict=True)], moves, []
        if not self._rule.keeps_state:
            update = self._rule.update
            return [update(w, v, tf.cast(staleness, w.dtype)) for w, v in pairs], [], []
        after, changes = [], list[Change]()
        for (weight, value), kept in zip(pairs, self.kept, strict=True):
            # The update is computed in at least float32, because the state has a count of rounds.
            # In bfloat16 the count could not exceed 256.
            exact = precise(weight)
            state = type(kept)(*(tf.cast(v, exact.dtype) for v in _read(kept)))
            new, state = self._rule.update(exact, state, precise(value))
            after.append(tf.cast(new, weight.dtype))
            changes += _stored(kept, state)
        return after, [], changes

    def _step(
        self,
        weights: Sequence[tf.Tensor],
        ids: Sequence[tf.Tensor | None],
        push: Push,
        staleness: tf.Tensor,
        held: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[Change]]:
        """Takes an optimizer's step with the rule's gradient and rate; results as of `_updated`."""
        steps: Any = self.steps
        squares = push.squares or [None] * len(weights)
        corrected = [
            self._rule.gradient(
                g,
                pulled=held[k] if held else None,
                current=w if rows is not None else taken(w, push.rows.get(k)),
                squares=s,
            )
            for g, k, w, rows, s in zip(
                push.values, self.indices, weights, ids, squares, strict=True
            )
        ]
        corrected = self._spread(corrected, ids, push)
        of_slots = [None if owner is None else ids[owner] for owner in steps.owners]
        state = [taken(v, rows) for v, rows in zip(self.optimizer, of_slots, strict=True)]
        at = steps.rate_index
        if at is None:
            after, state = steps(weights, state, corrected)
        else:
            own = state[at]
            chosen = tf.where(push.rate >= 0.0, tf.cast(push.rate, own.dtype), own)
            state[at] = chosen * self._rule.rate_factor(tf.cast(staleness, own.dtype))
            after, state = steps(weights, state, corrected)
            state[at] = own
        of_state = zip(self.optimizer, state, of_slots, strict=True)
        return after, [], [Change(*each) for each in of_state]

    def _spread(
        self, values: Sequence[tf.Tensor], ids: Sequence[tf.Tensor | None], push: Push
    ) -> list[tf.Tensor]:
        """Returns the values, with zeros for the missing rows of weights that change as a whole."""
        places = enumerate(zip(self.indices, values, strict=True))
        return [
            tf.scatter_nd(
                push.rows[k][:, None], value, tf.constant(self.weights[p].shape.as_list(), tf.int64)
            )
            if k in push.rows and ids[p] is None
            else value
            for p, (k, value) in places
        ]

    def average(self, name: str) -> list[tf.Tensor]:
        """Returns the weights of an average, after their constraints."""
        found = [self._averages[name].value(_read(state)) for state in self.averages[name]]
        found = [tf.cast(v, w.dtype) for v, w in zip(found, self.weights, strict=True)]
        return constrained(found, self._constraints)

    def start_mean(self, name: str) -> None:
        """Makes the running average `name` continue as a mean."""

        def start() -> list[tf.Tensor]:
            average = self._averages[name]
            means = [(s.mean, average.start_mean(_read(s)).mean) for s in self.averages[name]]
            return [tf.identity(kept.assign(mean)) for kept, mean in means]

        self.locked((), start)

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that a checkpoint must hold, by name."""
        found: dict[str, tf.Variable] = {}
        for k, weight in zip(self.indices, self.weights, strict=True):
            found[f"weight/{k}"] = weight
        kinds = {f"average/{name}": states for name, states in self.averages.items()}
        for kind, states in {**kinds, "rule": self.kept}.items():
            for k, state in zip(self.indices, states, strict=False):  # `kept` may be empty
                found |= {f"{kind}/{k}/{field}": v for field, v in state._asdict().items()}
        found |= {f"optimizer/{self.number}/{k}": v for k, v in enumerate(self.optimizer)}
        found[f"version/{self.number}"] = self.version
        found[f"progress/{self.number}"] = self.progress.done
        return found


def commit(changes: Sequence[Change], record: Callable[[], None] = lambda: None) -> tf.Tensor:
    """Makes all changes and calls `record`; does nothing if the worker dies before.

    When a worker dies, TensorFlow stops the graph that the worker runs on a server, between two
    operations. So that all changes are made or none, all assignments are in one function that is
    not inlined: it is one operation of that graph, and starts when all values are computed.
    """

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def write(values: list[tuple[tf.Tensor, tf.Tensor | None]]) -> tf.Tensor:
        for change, (value, ids) in zip(changes, values, strict=True):
            if ids is None:
                change.variable.assign(value)
            else:
                change.variable.scatter_update(tf.IndexedSlices(value, ids))
        record()
        return tf.constant(True)

    return write([(change.value, change.ids) for change in changes])


def taken(value: Array | tf.Variable, ids: tf.Tensor | None) -> tf.Tensor:
    """Returns the rows of `value` with these ids; None: all rows."""
    return tf.identity(value) if ids is None else tf.gather(value, ids)


def _whole(change: Change) -> tf.Tensor:
    """Returns the next value of the whole variable."""
    variable, value, ids = change
    if ids is None:
        return value
    return tf.tensor_scatter_nd_update(tf.identity(variable), ids[:, None], value)


def precise(weights: Array) -> tf.Tensor:
    """Returns weights in at least float32, because averages add small fractions of them."""
    weights = tf.convert_to_tensor(weights)
    return tf.cast(weights, tf.float32) if weights.dtype.size < 4 else tf.identity(weights)


def variable(value: Array) -> tf.Variable:
    """Returns a variable with this initial value, on the current device."""
    return tf.Variable(tf.identity(value), trainable=False)


def _start(average: AsyncAverage, weights: tf.Tensor) -> State:
    """Returns an average's state at `weights`; its numbers, too, have the type of the weights."""
    return tf.nest.map_structure(lambda v: tf.cast(v, weights.dtype), average.init(weights))


def _states(state: State) -> State:
    """Returns a NamedTuple of variables with the values of the NamedTuple `state`."""
    return type(state)(*(variable(tf.convert_to_tensor(value)) for value in state))


def _read(state: State) -> State:
    return type(state)(*(tf.identity(v) for v in state))


def _stored(variables: State, state: State) -> list[Change]:
    """Returns the changes that give the `variables` of a state the values in `state`."""
    return [Change(v, tf.cast(x, v.dtype)) for v, x in zip(variables, state, strict=True)]
