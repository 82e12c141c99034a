"""The global model on the parameter servers, and its operations pull and push.

Each parameter server has a *shard*: some of the weights, with their optimizer slots and averages,
and a lock. A pull reads a shard, and a push changes it, while holding the lock. Tensors are sent
over the network before the lock is taken or after it is released. So the pushes on a server are
applied one after another. The first server also has the moving statistics, metrics and counters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.algorithms.asgd import AsyncAverage, AsyncRule
from tfpara.parameter_server.counters import Books
from tfpara.parameter_server.messages import Answer, Moment, Pulled, Push
from tfpara.parameter_server.shard import NOT_FINITE, Shard, commit, precise, variable
from tfpara.parameter_server.staleness import DROP, GO, Turns
from tfpara.typing import Nest

_numbers = itertools.count()


class Server:
    """The global model with its optimizer, averages and counters, on one or several devices.

    Args:
        model: built and compiled; the initial weights are read from it.
        state: those of the model's non-trainable variables that workers share: moving statistics.
        rule: a resolved rule of `tfpara.algorithms.asgd`.
        averages: averages of the global model, by name.
        devices: devices of the parameter servers. The weights are placed in the order of their
            size, largest first, each on the device with the fewest elements so far.
        num_workers: number of workers.
        record: whether to keep a line for each push.

    Attributes:
        number: a number that no other `Server` of this process has.
        generation: increases when the model is set from outside. Workers with local models or
            optimizers then start again from the servers' model.
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
        self._local_rate: tf.Variable | None = None  # learning rate of the workers' optimizers
        if rule.local_steps and isinstance(model.optimizer.learning_rate, keras.Variable):
            with tf.device(self.first.device):
                self._local_rate = variable(model.optimizer.learning_rate.value)
        self.told_rate = self.learning_rate  # rate of the chief's optimizer when it was last sent
        self.generation = 0
        bound = getattr(rule, "max_staleness", None)
        with tf.device(self.first.device):
            self.state = [variable(v.value) for v in state]
            self.books = Books(num_workers, record)
            self.turns = None if bound is None else Turns(num_workers, bound)
        self.measure(model)
        # The order in which every graph takes the servers' locks. With different orders, two
        # workers could each hold the lock for which the other waits.
        self._order = self.shards if self.turns is None else [*self.shards[1:], self.first]

    # Operations in the workers' graphs.

    def rate(self) -> tf.Tensor:
        """Returns the servers' learning rate; only if it is a number, not a schedule."""
        with tf.device(self.first.device):
            return tf.identity(self._rates()[0][1])

    def set_rate(self, rate: tf.Tensor) -> list[tf.Tensor]:
        """Sets the learning rate on all servers; returns tensors that are computed afterwards."""
        done = []
        for shard, kept in sorted(self._rates(), key=lambda held: self._order.index(held[0])):
            value = _sent(shard, tf.cast(rate, kept.dtype))
            done.append(self._locked(shard, value, functools.partial(_assigned, kept, value)))
        return done

    def _rates(self) -> list[tuple[Shard, tf.Variable]]:
        """Returns the servers with a variable of the learning rate, and these variables.

        There is one on the first server if workers have the optimizers, otherwise one on each; none
        if the rate is a schedule.
        """
        if self._local_rate is not None:
            return [(self.first, self._local_rate)]
        at = None if self.first.steps is None else self.first.steps.rate_index
        return [] if at is None else [(shard, shard.optimizer[at]) for shard in self.shards]

    def pull(self, worker: tf.Tensor) -> Pulled:
        """Reads the model for a worker; if the rule bounds the staleness, waits for its turn."""
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
        """Returns whether a worker may pull now; if so, its pull is counted as done.

        Args:
            worker: index of the worker that asks.
            waits: whether it will wait for a token (`Turns.wait`) if it may not.
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
        told: list[tf.Tensor] = []  # values for the workers' optimizers
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
        """Applies a push on each server that does not have it yet.

        If a weight would become infinite or NaN, the graph fails with
        `tf.errors.InvalidArgumentError` and `NOT_FINITE` in its message; nothing is written on the
        server that has the weight.

        Args:
            push: the push.
            pulled: the pulled model from which it was computed.
            waits: whether to wait for the turn if the rule bounds the staleness. Without waiting,
                the answer may be not `settled`.
        """
        # TensorFlow releases a graph's locks in the order in which they are written there. So a
        # push that had a lock before the pull is over would keep it until the pull has got its own
        # locks, and two workers could wait for each other for ever. A weight's gradient may not
        # depend on what another server has, so the pull is waited for here.
        with tf.control_dependencies(pulled.versions):
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
        """Returns the part of a push that belongs to a server, sent to that server."""
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
        """Calls `inside` with the lock held, after the tensors `sent` (by `_sent`) have arrived."""
        with (
            tf.device(shard.device),
            tf.control_dependencies(tf.nest.flatten(sent)),
        ):
            return shard.lock.execute(inside)

    def _apply(
        self, shard: Shard, part: Push, pulled: Pulled, accepted: tf.Tensor
    ) -> list[tf.Tensor]:
        """Calls `_take` with the lock held."""
        accepted = _sent(shard, accepted)
        return self._locked(
            shard, (part, accepted), lambda: self._take(shard, part, pulled, accepted)
        )

    def _take(
        self, shard: Shard, part: Push, pulled: Pulled, accepted: tf.Tensor
    ) -> list[tf.Tensor]:
        """Applies a push if it is accepted and not in the weights yet; inside the lock.

        Returns whether its minibatches are in the weights afterwards, the version, and the moves.
        """

        def write() -> list[tf.Tensor]:
            # A moving statistic that is NaN would stay NaN. Only the first server has statistics;
            # `part.state` is empty on the others.
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
                with tf.device(shard.device):  # a branch's graph does not inherit the device scope
                    return branch()

            return placed

        result = tf.cond(fresh, here(write), here(leave))
        with tf.control_dependencies(result):
            return [shard.progress.includes(part), *result]

    def _turn(self, part: Push, pulled: Pulled, waits: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Waits for a push's turn on the first server, if `waits`.

        Returns whether the verdict is settled (not to wait), and whether the push has the turn.
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
        """Applies a push on the first server if it is on all others, and ends its turn."""
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
        """Begins a chunk on a worker; returns how many of its minibatches are in the model.

        With bounded staleness, nobody waits any more for a former worker of the chunk.

        Args:
            worker: index of the worker that trains the chunk from here on.
            chunk: number of the chunk.
        """
        turns = self.turns
        if turns is None:
            return self.done(chunk)
        worker, chunk = _sent(self.first, (worker, chunk))
        begun = self._locked(self.first, (worker, chunk), lambda: turns.begin(worker, chunk))
        with tf.control_dependencies([begun]):
            return self.done(chunk)

    def halted(self) -> tf.Tensor:
        """Returns whether workers have to stop."""
        with tf.device(self.first.device):
            return self.books.halted.read_value()

    def done(self, chunk: tf.Tensor) -> tf.Tensor:
        """Returns how many minibatches of a chunk of this epoch are in the model on all servers."""
        counts = []
        for shard in self.shards:
            with tf.device(shard.device):
                counts.append(tf.gather(shard.progress.done.read_value(), chunk))
        return tf.reduce_min(tf.stack(counts))

    def finish(self, epoch: tf.Tensor, chunk: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
        """Marks a chunk as finished if it has `ended`; returns `ended`.

        A chunk of another epoch than the open one is not marked.
        """
        epoch, chunk, ended = _sent(self.first, (epoch, chunk, ended))
        return self._locked(
            self.first,
            (epoch, chunk, ended),
            lambda: self.books.finish(
                chunk, tf.logical_and(ended, self.first.progress.is_of(epoch)), ended
            ),
        )

    # Methods for the chief.

    def divide(self, num_chunks: int) -> None:
        """Sets the number of chunks of the next epochs; call it before graphs are made."""
        for shard in self.shards:
            shard.divide(num_chunks)
        with tf.device(self.first.device):
            self.books.divide(num_chunks, self.first.progress)

    def measure(self, model: keras.Model) -> None:
        """Makes the variables of the model's metrics; call it before graphs are made."""
        with tf.device(self.first.device):
            self.metrics = [variable(tf.zeros_like(v.value)) for v in metric_variables(model)]

    def open_epoch(self, epoch: int, anew: bool) -> None:
        """Accepts the minibatches of an epoch, and ends a halt; no worker may be training.

        Args:
            epoch: the epoch, from 0.
            anew: whether the epoch begins now; otherwise it continues.
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

    def close(self) -> None:
        """Takes no push from here on, until `open_epoch`; each is taken in whole or not at all.

        So the servers' state stays as it is, though workers may be between a pull and a push. On
        several servers a push may be on some of them; the next one of the same minibatches is then
        taken on the others alone.
        """
        for shard in self.shards:
            with tf.device(shard.device):
                shard.lock.execute(shard.progress.close)

    def forget(self, worker: int) -> None:
        """Ends the pull and push of a lost worker, so that nobody waits for it.

        Args:
            worker: index of the worker.
        """
        turns = self.turns
        if turns is not None:
            with tf.device(self.first.device):
                self.first.lock.execute(lambda: turns.leave(tf.constant(worker, tf.int64)))

    def global_weights(self) -> list[tf.Tensor]:
        """Returns the weights, in the model's order."""
        return self.weights_at_once(["global"]).weights["global"]

    def average_weights(self, name: str) -> list[tf.Tensor]:
        """Returns the weights of an average, in the model's order."""
        return self.weights_at_once([name]).weights[name]

    def weights_at_once(self, names: Sequence[str]) -> Moment:
        """Reads several models between two pushes, on each server.

        Args:
            names: "global", or names of averages.
        """

        def of(shard: Shard) -> list[tf.Tensor]:
            held = [shard.weights if n == "global" else shard.average(n) for n in names]
            rest = [*self.state, shard.version] if shard is self.first else []
            return [tf.identity(v) for v in [*itertools.chain(*held), *rest]]

        found: dict[str, Any] = {name: [None] * len(self.names) for name in names}
        rest: list[tf.Tensor] = []
        for shard in self.shards:
            with tf.device(shard.device):
                values = iter(shard.lock.execute(functools.partial(of, shard)))
            for name in names:
                for index in shard.indices:
                    found[name][index] = next(values)
            rest += values  # of the first server
        *state, version = rest
        return Moment(found, state, int(version))

    def set_weights(self, weights: Sequence[tf.Tensor]) -> None:
        """Replaces the weights; averages, the rule's state but for what lasts, and the workers'
        local models and optimizers start anew.

        No worker may be between a pull and a push.

        Args:
            weights: the new weights, in the model's order.
        """
        self.generation += 1
        for shard in self.shards:
            for place, index in enumerate(shard.indices):
                with tf.device(shard.device):
                    value = tf.identity(weights[index])
                    shard.weights[place].assign(value)
                    if shard.kept:
                        rule: Any = self.rule
                        for name, new in rule.init(value)._asdict().items():
                            kept = getattr(shard.kept[place], name)
                            if name not in rule.lasting:
                                kept.assign(tf.cast(new, kept.dtype))
                    for name, average in self.averages.items():
                        started = average.init(precise(value))
                        for kept, new in zip(shard.averages[name][place], started, strict=True):
                            kept.assign(tf.cast(new, kept.dtype))

    def set_state(self, state: Sequence[tf.Tensor]) -> None:
        """Replaces the moving statistics, given in the order of the attribute `state`."""
        for shared, value in zip(self.state, state, strict=True):
            shared.assign(tf.identity(value))

    def snapshot(self) -> Callable[[], None]:
        """Keeps weights, moving statistics, averages, and the optimizers' slots and steps.

        Returns:
            A function that restores them; workers' local models and optimizers then start anew. It
            does not change the learning rate, nor whether an average has become a mean.
        """
        left_out = {id(rate) for _, rate in self._rates()}
        left_out |= {
            id(state.mean)
            for shard in self.shards
            for states in shard.averages.values()
            for state in states
            if hasattr(state, "mean")
        }
        kinds = ("weight", "state", "average", "optimizer", "rule")
        held = [v for name, v in self.variables().items() if name.split("/")[0] in kinds]
        held.append(self.books.minibatches)  # the steps of workers' optimizers, for a schedule
        kept = [(v, tf.identity(v)) for v in held if id(v) not in left_out]

        def restore() -> None:
            self.generation += 1
            for held, value in kept:
                held.assign(value)

        return restore

    def start_mean(self, name: str) -> None:
        """Makes the running average `name` continue as a mean."""
        for shard in self.shards:
            shard.start_mean(name)

    def mean_started(self, name: str) -> bool:
        """Returns whether the running average `name` has become a mean on all servers."""
        held = [shard.averages[name] for shard in self.shards if shard.averages[name]]
        return all(bool(states[0].mean) for states in held)

    @property
    def learning_rate(self) -> float | None:
        """The servers' learning rate; None if it is a schedule."""
        rates = self._rates()
        return float(rates[0][1]) if rates else None

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.set_rate(tf.constant(rate))

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that a checkpoint must hold, by name."""
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
    """Sends tensors to a server. Only such tensors may be used while its lock is held.

    Otherwise the lock would be held while tensors travel over the network.
    """
    with tf.device(shard.device):
        return tf.nest.map_structure(tf.identity, values)


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model's metrics, including those of the loss."""
    return [variable for metric in model.metrics for variable in metric.variables]
