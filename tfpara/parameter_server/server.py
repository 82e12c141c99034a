"""The global model on the parameter servers: what a pull reads and a push writes.

Each parameter server has a *shard*: some of the weights, with their optimizer slots and averages,
and a lock. A pull reads a shard, and a push changes it, while holding its lock; what travels over
the network is sent before the lock is taken or after it is given back. So on each server pushes
follow one another as if workers took turns. The first server keeps the books as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpara.algorithms.asgd import AsyncAverage, AsyncRule
from tfpara.parameter_server.books import Books
from tfpara.parameter_server.shard import NOT_FINITE, Shard, commit, variable
from tfpara.parameter_server.turns import DROP, GO, Turns
from tfpara.typing import Nest

_numbers = itertools.count()


class Pulled(NamedTuple):
    """What a worker gets: tensors on the servers.

    Attributes:
        weights: the trainable weights, in the model's order.
        state: the averaged state (moving statistics), in the model's order.
        versions: pushes so far, of each server.
        halted: whether workers are asked to stop where they are.
        minibatches: in the model so far, of rules whose workers have optimizers.
        rate: the learning rate of these, where it is a number.
    """

    weights: list[tf.Tensor]
    state: list[tf.Tensor]
    versions: list[tf.Tensor]
    halted: tf.Tensor
    minibatches: tf.Tensor | None = None
    rate: tf.Tensor | None = None


class Place(NamedTuple):
    """Where a minibatch is: int64 scalars.

    Attributes:
        epoch, chunk: of the data.
        start: its number in the chunk.
    """

    epoch: tf.Tensor
    chunk: tf.Tensor
    start: tf.Tensor


class Push(NamedTuple):
    """What a worker sends.

    Attributes:
        values: for each weight the gradient (ASGD), how far it has come since the pull (Downpour),
            or the local weight (EASGD).
        state: what the block adds to the averaged state, once it has left of it what is `kept`:
            S ← D S + (s − D S_pulled), s being the worker's after the block. So moving statistics
            are those of one worker that has all minibatches, however many were pushed meanwhile.
        kept: D, of each element of the state: a product over the minibatches, such as ρ^τ.
        metrics: what the minibatches add to the metrics' variables.
        worker: its index.
        place: of the first minibatch.
        minibatches: how many they are.
        samples: how many samples they have.
        rate: the learning rate of this push; negative: the server's own.
        squares: for each weight the gradients' squares, where the rule needs those of several
            minibatches; else empty.
    """

    values: Sequence[tf.Tensor]
    state: Sequence[tf.Tensor]
    kept: Sequence[tf.Tensor]
    metrics: Sequence[tf.Tensor]
    worker: tf.Tensor
    place: Place
    minibatches: tf.Tensor
    samples: tf.Tensor
    rate: tf.Tensor
    squares: Sequence[tf.Tensor] = ()


class Answer(NamedTuple):
    """What a push is answered.

    Attributes:
        versions: the servers' pushes after it.
        moves: for each weight what the local model loses, of rules that have local models.
        settled: False: it must be offered again, for the sake of other workers' staleness.
        included: whether its minibatches are in the model, on all servers, by this push or by one
            before.
    """

    versions: list[tf.Tensor]
    moves: list[tf.Tensor]
    settled: tf.Tensor
    included: tf.Tensor


class Server:
    """The global model, its optimizer, averages and books, on one or several devices.

    Args:
        model: built and compiled; the initial weights are read from it.
        state: the variables, among those not trained, that workers share: moving statistics.
        rule: a resolved rule of `tfpara.algorithms.asgd`.
        averages: averages of the global model, by name.
        devices: of the parameter servers. Weights go, largest first, where there is least yet.
        num_workers: how many may push.
        record: whether to keep a line for each push.

    Attributes:
        number: of no other server in this process's lifetime.
        generation: of models: workers with a local one begin anew with the next.
    """

    def __init__(
        self,
        model: keras.Model,
        state: Sequence[keras.Variable],
        rule: AsyncRule,
        averages: Mapping[str, AsyncAverage],
        devices: Sequence[str],
        num_workers: int,
        record: bool = False,
    ) -> None:
        self.number = next(_numbers)
        self.rule = rule
        self.averages = dict(averages)
        weights = model.trainable_variables
        self.names = [v.path for v in weights]
        self.state_names = [v.path for v in state]
        self.shards = [Shard(device, number) for number, device in enumerate(devices)]
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
            shard.fill(weights, rule, averages, model.optimizer)
        self._local_rate: tf.Variable | None = None  # that workers' optimizers are told
        if rule.local_steps and isinstance(model.optimizer.learning_rate, keras.Variable):
            with tf.device(self.first.device):
                self._local_rate = variable(model.optimizer.learning_rate.value)
        self.told_rate = self.learning_rate  # the chief's, as the servers know it
        self.generation = 0
        bound = getattr(rule, "max_staleness", None)
        with tf.device(self.first.device):
            self.state = [variable(v.value) for v in state]
            self.metrics = [variable(tf.zeros_like(v.value)) for v in metric_variables(model)]
            self.books = Books(num_workers, record)
            self.turns = None if bound is None else Turns(num_workers, bound)
        # In which all take the servers' locks: where two workers' orders differed, TensorFlow's
        # order of a graph's operations could let each hold the lock that the other waits for.
        self._order = self.shards if self.turns is None else [*self.shards[1:], self.first]

    # What workers run, in their graphs.

    def rate(self) -> tf.Tensor:
        """The learning rate that the servers have, where it is a number."""
        with tf.device(self.first.device):
            return tf.identity(self._rates()[0][1])

    def set_rate(self, rate: tf.Tensor) -> list[tf.Tensor]:
        """Gives all servers a learning rate; returns what must have run for it to be so."""
        done = []
        for shard, kept in sorted(self._rates(), key=lambda held: self._order.index(held[0])):
            value = _sent(shard, tf.cast(rate, kept.dtype))
            done.append(self._locked(shard, value, functools.partial(_assigned, kept, value)))
        return done

    def _rates(self) -> list[tuple[Shard, tf.Variable]]:
        """Where the learning rate is, if it is a number: on the first server, where workers have
        the optimizers, or else on each."""
        if self._local_rate is not None:
            return [(self.first, self._local_rate)]
        at = None if self.first.steps is None else self.first.steps.rate_index
        return [] if at is None else [(shard, shard.optimizer[at]) for shard in self.shards]

    def pull(self, worker: tf.Tensor) -> Pulled:
        """Reads the model for a push of a worker; waits where the rule bounds the staleness."""
        if self.turns is None:
            return self.read()
        turns = self.turns
        with tf.device(self.first.device):

            def again(_: tf.Tensor) -> tuple[tf.Tensor]:
                may = self.ask_to_pull(worker)
                token = tf.cond(may, lambda: True, lambda: turns.wait(worker))
                with tf.control_dependencies([token]):
                    return (tf.identity(may),)

            (may,) = tf.while_loop(tf.logical_not, again, (tf.constant(False),))
        with tf.control_dependencies([may]):
            return self.read()

    def ask_to_pull(self, worker: tf.Tensor, waits: bool = True) -> tf.Tensor:
        """Whether a worker may pull now; if so it counts as having done it.

        Args:
            worker: who asks.
            waits: whether it will wait for a token otherwise.
        """
        turns = self.turns
        if turns is None:
            return tf.constant(True)
        worker = _sent(self.first, worker)
        return self._locked(
            self.first,
            worker,
            lambda: turns.ask_to_pull(worker, tf.identity(self.first.version), waits),
        )

    def read(self) -> Pulled:
        """Reads the model."""
        weights: list[tf.Tensor] = [None] * len(self.names)
        state: list[tf.Tensor] = []
        versions: list[tf.Tensor] = [None] * len(self.shards)
        halted = None
        told: list[tf.Tensor] = []  # to workers' optimizers
        to_tell = [self.books.minibatches] if self.rule.local_steps else []
        to_tell += [] if self._local_rate is None else [self._local_rate]
        for shard in self._order:
            with tf.device(shard.device):
                held = [*shard.weights, shard.version]
                if shard is self.first:
                    held += [self.books.halted, *self.state, *to_tell]
                values = shard.lock.execute(lambda held=held: [tf.identity(v) for v in held])
            for index, value in zip(shard.indices, values, strict=False):
                weights[index] = value
            rest = values[len(shard.indices) :]
            versions[shard.number] = rest[0]
            if shard is self.first:
                halted, *state = rest[1:]
                state, told = state[: len(self.state)], state[len(self.state) :]
        return Pulled(weights, state, versions, halted, *told)

    def push(self, push: Push, pulled: Pulled, waits: bool = True) -> Answer:
        """Applies what a worker sends, on each server where it is not in yet.

        A push that is not finite is an error, `tf.errors.InvalidArgumentError` with `NOT_FINITE` in
        its message, and nothing is written on the server that notices.

        Args:
            push, pulled: what is sent, and what it was computed from.
            waits: whether to wait where the rule bounds the staleness; if not, what is returned may
                not be `settled`.
        """
        parts = [self._part(shard, push) for shard in self.shards]
        settled = accepted = tf.constant(True)
        if self.turns is not None:
            settled, accepted = self._turn(parts[0], pulled, waits)
        answers: list[Any] = [None] * len(self.shards)
        for shard in self._order:
            number = shard.number
            if self.turns is None or shard is not self.first:
                answers[number] = self._apply(shard, parts[number], pulled, accepted)
            else:  # the first server comes last, and gives the turn to others
                there = [there for there, *_ in answers[1:]]
                everywhere = tf.reduce_all(tf.stack([accepted, *there]))
                answers[number] = self._end_turn(parts[number], pulled, accepted, everywhere)
        moves: list[tf.Tensor] = [None] * len(self.names)
        for shard, (_, _, *own) in zip(self.shards, answers, strict=True):
            for index, move in zip(shard.indices, own, strict=False):
                moves[index] = move
        if not self.rule.local_models:
            moves = []
        included = tf.reduce_all(tf.stack([there for there, *_ in answers]))
        return Answer([version for _, version, *_ in answers], moves, settled, included)

    def _part(self, shard: Shard, push: Push) -> Push:
        """What of a push is a server's, sent to it."""
        first = shard is self.first
        push = push._replace(
            values=[push.values[k] for k in shard.indices],
            squares=[push.squares[k] for k in shard.indices] if push.squares else [],
            state=list(push.state) if first else [],
            kept=list(push.kept) if first else [],
            metrics=list(push.metrics) if first else [],
        )
        return _sent(shard, push)

    def _locked(self, shard: Shard, sent: Nest, inside: Callable[[], Nest]) -> Nest:
        """Runs what is to be inside the lock, when all that was `_sent` for it has arrived."""
        with (
            tf.device(shard.device),
            tf.control_dependencies(tf.nest.flatten(sent)),
        ):
            return shard.lock.execute(inside)

    def _apply(
        self, shard: Shard, part: Push, pulled: Pulled, accepted: tf.Tensor
    ) -> list[tf.Tensor]:
        """Takes the lock for `_take`."""
        accepted = _sent(shard, accepted)
        return self._locked(
            shard, (part, accepted), lambda: self._take(shard, part, pulled, accepted)
        )

    def _take(
        self, shard: Shard, part: Push, pulled: Pulled, accepted: tf.Tensor
    ) -> list[tf.Tensor]:
        """Inside the lock: applies a push if it is accepted and not in yet.

        Returns whether its minibatches are in then, the version, and the moves.
        """

        def write() -> list[tf.Tensor]:
            # A statistic that is NaN once stays so. Those of other shards are an empty list.
            added = [
                tf.debugging.check_numerics(d, f"{NOT_FINITE} {name!r}")
                for d, name in zip(part.state, self.state_names, strict=False)
            ]
            changes, moves, staleness = shard.changes(part, pulled)
            if shard is not self.first:
                written = commit(changes)
            else:
                changes += [
                    (v, v * kept + s)
                    for v, kept, s in zip(self.state, part.kept, added, strict=True)
                ]
                changes += [(v, v + d) for v, d in zip(self.metrics, part.metrics, strict=True)]
                changes += self.books.changes(part, staleness)
                at = pulled.versions[0]
                written = commit(changes, lambda: self.books.record(part, staleness, at))
            with tf.control_dependencies([written]):
                return [tf.identity(shard.version), *(tf.identity(m) for m in moves)]

        def leave() -> list[tf.Tensor]:
            moves = [tf.zeros_like(v) for v in part.values] if self.rule.local_models else []
            return [tf.identity(shard.version), *moves]

        fresh = tf.logical_and(accepted, shard.takes(part, pulled))

        def here(branch: Callable[[], list[tf.Tensor]]) -> Callable[[], list[tf.Tensor]]:
            def placed() -> list[tf.Tensor]:
                with tf.device(shard.device):  # a branch is a graph of its own, without the scope
                    return branch()

            return placed

        result = tf.cond(fresh, here(write), here(leave))
        with tf.control_dependencies(result):
            return [shard.progress.includes(part), *result]

    def _turn(self, part: Push, pulled: Pulled, waits: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Waits for a push's turn on the first server.

        Returns whether what becomes of it is settled, and whether it is made.
        """
        turns: Any = self.turns
        first = self.first

        def inside() -> list[tf.Tensor]:
            verdict = tf.where(
                first.progress.next_is(part),
                turns.verdict(part.worker, pulled.versions[0], tf.identity(first.version)),
                DROP,
            )
            return [turns.settle(part.worker, verdict, waits), tf.equal(verdict, GO)]

        if not waits:
            return tuple(self._locked(first, part, inside))
        with tf.device(first.device):

            def again(_: tf.Tensor, __: tf.Tensor) -> tuple[tf.Tensor, ...]:
                settled, goes = self._locked(first, part, inside)
                token = tf.cond(settled, lambda: True, lambda: turns.wait(part.worker))
                with tf.control_dependencies([token]):
                    return tf.identity(settled), goes

            no = tf.constant(False)
            return tuple(tf.while_loop(lambda settled, _: ~settled, again, (no, no)))

    def _end_turn(
        self, part: Push, pulled: Pulled, goes: tf.Tensor, everywhere: tf.Tensor
    ) -> list[tf.Tensor]:
        """The push on the first server, if it is on all others, and the end of its turn."""
        turns: Any = self.turns
        goes, everywhere = _sent(self.first, (goes, everywhere))

        def inside() -> list[tf.Tensor]:
            answer = self._take(self.first, part, pulled, everywhere)
            with tf.control_dependencies(answer):
                left = turns.leave(part.worker, goes)
            with tf.control_dependencies([left]):
                return [tf.identity(tensor) for tensor in answer]

        return self._locked(self.first, (part, goes, everywhere), inside)

    def begin(self, worker: tf.Tensor, chunk: tf.Tensor) -> tf.Tensor:
        """Has nobody wait for whoever had a chunk before; returns minibatches of it that are in.

        Args:
            worker: who trains it from here on.
            chunk: its number.
        """
        turns = self.turns
        if turns is None:
            return self.done(chunk)
        worker, chunk = _sent(self.first, (worker, chunk))
        begun = self._locked(self.first, (worker, chunk), lambda: turns.begin(worker, chunk))
        with tf.control_dependencies([begun]):
            return self.done(chunk)

    def halted(self) -> tf.Tensor:
        """Whether workers are asked to stop."""
        with tf.device(self.first.device):
            return self.books.halted.read_value()

    def done(self, chunk: tf.Tensor) -> tf.Tensor:
        """Minibatches of a chunk of this epoch that are in the model, on all servers."""
        counts = []
        for shard in self.shards:
            with tf.device(shard.device):
                counts.append(tf.gather(shard.progress.done.read_value(), chunk))
        return tf.reduce_min(tf.stack(counts))

    def finish(self, epoch: tf.Tensor, chunk: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
        """Enters whether all minibatches of a chunk have been pushed; returns `ended`."""
        epoch, chunk, ended = _sent(self.first, (epoch, chunk, ended))
        return self._locked(
            self.first,
            (epoch, chunk, ended),
            lambda: self.books.finish(
                chunk, tf.logical_and(ended, self.first.progress.is_of(epoch)), ended
            ),
        )

    # What the chief does with it.

    def divide(self, num_chunks: int) -> None:
        """Epochs have so many chunks from here on; before graphs are made."""
        for shard in self.shards:
            shard.divide(num_chunks)
        with tf.device(self.first.device):
            self.books.divide(num_chunks, self.first.progress)

    def open_epoch(self, epoch: int, anew: bool) -> None:
        """Has workers go on, with minibatches of an epoch; there are none under way.

        Args:
            epoch: from 0.
            anew: whether no chunk of it has begun.
        """
        for shard in self.shards:
            shard.progress.open(epoch, anew)
        if anew:
            self.books.begin_epoch()
            for metric in self.metrics:
                metric.assign(tf.zeros_like(metric))
        if self.turns is not None:
            self.turns.clear()
        self.books.halted.assign(False)

    def forget(self, worker: int) -> None:
        """Has nobody wait for a worker that is lost.

        Args:
            worker: its index.
        """
        turns = self.turns
        if turns is not None:
            with tf.device(self.first.device):
                self.first.lock.execute(lambda: turns.leave(tf.constant(worker, tf.int64)))

    def global_weights(self) -> list[tf.Tensor]:
        """The weights, in the model's order."""
        return self._collect(lambda shard: shard.weights)

    def average_weights(self, name: str) -> list[tf.Tensor]:
        """The weights of an average."""
        return self._collect(lambda shard: shard.average(name))

    def _collect(self, of: Callable[[Shard], Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        found: list[tf.Tensor] = [None] * len(self.names)
        for shard in self.shards:
            with tf.device(shard.device):
                values = shard.lock.execute(lambda shard=shard: [tf.identity(v) for v in of(shard)])
            for index, value in zip(shard.indices, values, strict=True):
                found[index] = value
        return found

    def set_weights(self, weights: Sequence[tf.Tensor]) -> None:
        """Goes on from other weights; averages, and what workers have of their own, start anew.

        No worker may be between a pull and a push.

        Args:
            weights: in the model's order.
        """
        self.generation += 1
        for shard in self.shards:
            for place, index in enumerate(shard.indices):
                with tf.device(shard.device):
                    value = tf.identity(weights[index])
                    shard.weights[place].assign(value)
                    for name, average in self.averages.items():
                        started = average.init(value)
                        for kept, new in zip(shard.averages[name][place], started, strict=True):
                            kept.assign(tf.cast(new, kept.dtype))

    def set_state(self, state: Sequence[tf.Tensor]) -> None:
        """Goes on from other moving statistics, in the order of `state`."""
        for shared, value in zip(self.state, state, strict=True):
            shared.assign(tf.identity(value))

    def snapshot(self) -> Callable[[], None]:
        """Keeps weights, moving statistics, averages, and the optimizers' slots and steps.

        Returns:
            What goes back to them; workers begin anew from there. The learning rate stays as it is
            then, and so does whether a mean has started.
        """
        left_out = {id(rate) for _, rate in self._rates()}
        left_out |= {
            id(state.mean)
            for shard in self.shards
            for states in shard.averages.values()
            for state in states
            if hasattr(state, "mean")
        }
        kinds = ("weight", "state", "average", "optimizer")
        held = [v for name, v in self.variables().items() if name.split("/")[0] in kinds]
        held.append(self.books.minibatches)  # the steps of workers' optimizers, for a schedule
        kept = [(v, tf.identity(v)) for v in held if id(v) not in left_out]

        def restore() -> None:
            self.generation += 1
            for held, value in kept:
                held.assign(value)

        return restore

    def start_mean(self, name: str) -> None:
        """Has the running average `name` go on as a mean."""
        for shard in self.shards:
            shard.start_mean(name)

    def mean_started(self, name: str) -> bool:
        """Whether the running average `name` goes on as a mean, on all servers."""
        held = [shard.averages[name] for shard in self.shards if shard.averages[name]]
        return all(bool(states[0].mean) for states in held)

    @property
    def learning_rate(self) -> float | None:
        """That the servers have; None where it is a schedule."""
        rates = self._rates()
        return float(rates[0][1]) if rates else None

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.set_rate(tf.constant(rate))

    def variables(self) -> dict[str, tf.Variable]:
        """All that a checkpoint must hold, by name; fixed by the model and number of servers."""
        found: dict[str, tf.Variable] = {}
        for shard in self.shards:
            found.update(shard.variables())
        found.update({f"state/{k}": v for k, v in enumerate(self.state)})
        found.update({f"metric/{k}": v for k, v in enumerate(self.metrics)})
        found.update(self.books.variables())
        if self._local_rate is not None:
            found["local_rate"] = self._local_rate
        return found


def _assigned(kept: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    return tf.identity(kept.assign(value))


def _sent(shard: Shard, values: Nest) -> Nest:
    """Tensors on a server. What holds its lock must use these, and wait for nothing from afar."""
    with tf.device(shard.device):
        return tf.nest.map_structure(tf.identity, values)


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of the model's metrics, that of the loss included."""
    return [variable for metric in model.metrics for variable in metric.variables]
