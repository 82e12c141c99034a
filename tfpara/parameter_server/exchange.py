"""Pull, push and the other operations of a worker on the global model.

Each parameter server has a shard of the model. A pull reads the shard, and a push changes it, while
holding the shard's lock. So a server applies pushes one after another. Tensors cross the network
before the lock is taken or after it is released. If the rule bounds the staleness, the first server
decides which worker may continue.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpara.parameter_server import messages
from tfpara.parameter_server.counters import Change
from tfpara.parameter_server.messages import NO_ROWS, Answer, Pulled, Push, Rows
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.shard import NOT_FINITE, Shard, commit, taken


def _read(variables: Sequence[tf.Variable], rows: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
    """Reads variables, of which the first ones have `rows`; None: all rows."""
    return [taken(*each) for each in itertools.zip_longest(variables, rows)]


class Exchange:
    """The operations on a `Server` that workers run, in graphs or eagerly."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._staleness: Any = server.staleness

    def pull(self, worker: tf.Tensor, rows: Rows = NO_ROWS) -> Pulled:
        """Waits if the bound on staleness requires it; then reads the model as `read` does."""
        if self._staleness is None:
            return self.read(rows)
        (may,) = self._until_settled(worker, 1, lambda: [self.ask_to_pull(worker)])
        with tf.control_dependencies([may]):
            return self.read(rows)

    def ask_to_pull(self, worker: tf.Tensor, waits: bool = True) -> tf.Tensor:
        """Returns whether a worker may pull now; arguments as of `Staleness.ask_to_pull`."""
        if self._staleness is None:
            return tf.constant(True)
        first = self.server.first
        worker = first.sent(worker)
        return first.locked(
            worker,
            lambda: self._staleness.ask_to_pull(worker, tf.identity(first.version), waits),
        )

    def read(self, rows: Rows = NO_ROWS) -> Pulled:
        """Reads the model; of each table in `rows` only those rows."""
        server = self.server
        weights: list[tf.Tensor] = [None] * len(server.names)
        held = list(weights) if getattr(server.rule, "delay_compensation", 0.0) else []
        versions: list[tf.Tensor] = [None] * len(server.shards)
        of_first: list[tf.Tensor] = []  # the first server's state, `halted` and `for_workers`
        for shard in server.order:
            variables = [shard.version, *shard.weights]
            sent = shard.sent({k: rows[k] for k in shard.indices if k in rows})
            ids = [None, *map(sent.get, shard.indices)]
            if shard is server.first:
                variables += [*server.state, server.counters.halted, *server.for_workers]
            there = shard.locked(sent, functools.partial(_read, variables, ids))
            versions[shard.number], *values = messages.sent(there, shard.device, None)
            for place, index in enumerate(shard.indices):
                weights[index] = values[place]
                if held:
                    held[index] = there[1 + place]
            of_first += values[len(shard.indices) :]
        state, numbers = of_first[: len(server.state)], of_first[len(server.state) :]
        return Pulled(weights, state, versions, *numbers)._replace(held=held)

    def push(self, push: Push, pulled: Pulled, waits: bool = True) -> Answer:
        """Applies a push on each server that has not applied it yet.

        If a weight would become infinite or NaN, the graph fails with
        `tf.errors.InvalidArgumentError` and `NOT_FINITE` in its message; nothing is written on the
        server that has the weight.

        `pulled` is the model from which the push was computed. If `waits`, this waits until the
        bound on staleness, if there is one, allows the push. Else the answer may not be `settled`.
        """
        server = self.server
        # Every part of the push waits until the pulls from all servers are over. A part could be
        # ready earlier, because its gradient may not depend on the weights of all servers. If it
        # took its lock then, it would keep this lock until the pull is over: TensorFlow releases a
        # graph's locks in the order in which the graph names them, and the graph names the pull's
        # locks first. But the pull may wait for a lock that another worker holds in the same way.
        # Then both workers would wait for each other forever.
        with tf.control_dependencies(pulled.versions):
            parts = [self.part(shard, push, pulled) for shard in server.shards]
        settled = accepted = tf.constant(True)
        if self._staleness is not None:
            settled, accepted = self._turn(parts[0], waits)
        answers: list[Any] = [None] * len(server.shards)
        for shard in server.order:
            turn: list[tf.Tensor] = []
            if self._staleness is not None and shard is server.first:
                # With a bound on staleness, the first server comes last. It applies the push only
                # if all other servers have done so. The push's turn (`_turn`) ends on this server.
                turn, everywhere = [accepted], [accepted, *(there for there, *_ in answers[1:])]
                accepted = tf.reduce_all(tf.stack(everywhere))
            part = parts[shard.number]
            answers[shard.number] = self.apply(shard, part, pulled.held, accepted, turn)
        moves: list[tf.Tensor] = [None] * len(server.names) if server.rule.local_models else []
        included = []
        for shard, (there, _, *own) in zip(server.shards, answers, strict=True):
            there, *own = messages.sent([there, *own], shard.device, None)
            included.append(there)
            for index, move in zip(shard.indices, own, strict=False):
                moves[index] = move
        versions = [version for _, version, *_ in answers]
        return Answer(versions, moves, settled, tf.reduce_all(tf.stack(included)))

    def part(self, shard: Shard, push: Push, pulled: Pulled) -> Push:
        """Returns the part of a push that belongs to a server, sent to that server."""
        first = shard is self.server.first
        of_shard = push._replace(
            values=[push.values[k] for k in shard.indices],
            rows={k: push.rows[k] for k in shard.indices if k in push.rows},
            squares=[push.squares[k] for k in shard.indices] if push.squares else [],
            state=list(push.state) if first else [],
            kept=list(push.kept) if first else [],
            metrics=list(push.metrics) if first else [],
            version=pulled.versions[shard.number],
        )
        return messages.sent(of_shard, None, shard.device)

    def apply(
        self,
        shard: Shard,
        part: Push,
        held: Sequence[tf.Tensor],
        accepted: tf.Tensor,
        turn: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """Applies a shard's part of a push, with its lock held, if it is `accepted` and due.

        If `turn` has an element, this tells whether the push's turn ends. Returns whether the
        push's minibatches are in the shard's weights now, the shard's version, and the moves
        (`Shard.changes`).
        """
        accepted, *turn = shard.sent([accepted, *turn])

        def write() -> list[tf.Tensor]:
            # The device is set again here, because the graphs of tf.cond's branches do not inherit
            # the device scope.
            with tf.device(shard.device):
                changes, moves, staleness = shard.changes(part, held)
                if shard is self.server.first:
                    changes += self._shared(part, staleness)
                    counters = self.server.counters
                    written = commit(changes, lambda: counters.record(part, staleness))
                else:
                    written = commit(changes)
                with tf.control_dependencies([written]):
                    return [tf.identity(shard.version), *map(tf.identity, moves)]

        def leave() -> list[tf.Tensor]:
            with tf.device(shard.device):
                local = part.values if self.server.rule.local_models else ()
                return [tf.identity(shard.version), *map(tf.zeros_like, local)]

        def inside() -> list[tf.Tensor]:
            result = tf.cond(accepted & shard.takes(part), write, leave)
            with tf.control_dependencies(result):
                answer = [shard.progress.includes(part), *result]
            with tf.control_dependencies(answer):
                ended = [self._staleness.leave(part.worker, goes) for goes in turn]
            with tf.control_dependencies(ended):
                return [tf.identity(tensor) for tensor in answer]

        return shard.locked((part, accepted, *turn), inside)

    def _shared(self, part: Push, staleness: tf.Tensor) -> list[Change]:
        """Returns the changes of the variables that only the first server has."""
        server = self.server
        # A NaN would stay in a moving statistic forever. So the graph fails before a NaN is added.
        added = [
            tf.debugging.check_numerics(d, f"{NOT_FINITE} {name!r}")
            for d, name in zip(part.state, server.state_names, strict=True)
        ]
        state = zip(server.state, part.kept, added, strict=True)
        metrics = zip(server.metrics, part.metrics, strict=True)
        return [
            *(Change(v, v * kept + s) for v, kept, s in state),
            *(Change(v, v + d) for v, d in metrics),
            *server.counters.changes(part, staleness),
        ]

    def _until_settled(
        self, worker: tf.Tensor, count: int, ask: Callable[[], list[tf.Tensor]]
    ) -> tuple[tf.Tensor, ...]:
        """Calls `ask` until the first of its `count` answers is true; returns the answers."""

        def again(*_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            settled, *rest = ask()
            token = tf.cond(settled, lambda: True, lambda: self._staleness.wait(worker))
            with tf.control_dependencies([token]):
                return (tf.identity(settled), *rest)

        with tf.device(self.server.first.device):
            no = (tf.constant(False),) * count
            return tuple(tf.while_loop(lambda settled, *_: ~settled, again, no))

    def _turn(self, part: Push, waits: bool) -> tuple[tf.Tensor, ...]:
        """Asks the first server to give a push the turn: then no other push is applied.

        Waits, if `waits`, until the push is settled. Returns as `Staleness.ask_to_push` does.
        """
        first, staleness = self.server.first, self._staleness

        def inside() -> list[tf.Tensor]:
            due, version = first.progress.next_is(part), tf.identity(first.version)
            return staleness.ask_to_push(part.worker, part.version, version, due, waits)

        def ask() -> list[tf.Tensor]:
            return first.locked(part, inside)

        return self._until_settled(part.worker, 2, ask) if waits else tuple(ask())

    def begin(self, worker: tf.Tensor, chunk: tf.Tensor) -> tf.Tensor:
        """Begins a chunk on a worker; returns how many of the chunk's minibatches are done.

        With bounded staleness, no worker waits any longer for an earlier worker of this chunk.
        """
        if self._staleness is None:
            return self.done(chunk)
        worker, chunk = self.server.first.sent((worker, chunk))
        begun = self.server.first.locked(
            (worker, chunk), lambda: self._staleness.begin(worker, chunk)
        )
        with tf.control_dependencies([begun]):
            return self.done(chunk)

    def halted(self) -> tf.Tensor:
        """Returns whether workers have to stop."""
        with tf.device(self.server.first.device):
            return self.server.counters.halted.read_value()

    def done(self, chunk: tf.Tensor) -> tf.Tensor:
        """Returns how many minibatches of a chunk of this epoch are in the model on all servers."""
        counts = []
        for shard in self.server.shards:
            with tf.device(shard.device):
                counts.append(tf.gather(shard.progress.done.read_value(), chunk))
        return tf.reduce_min(tf.stack(counts))

    def finish(self, epoch: tf.Tensor, chunk: tf.Tensor, ended: tf.Tensor) -> tf.Tensor:
        """Marks a chunk as finished if it has `ended` and is of the open epoch; returns `ended`."""
        first, counters = self.server.first, self.server.counters
        epoch, chunk, ended = first.sent((epoch, chunk, ended))
        return first.locked(
            (epoch, chunk, ended),
            lambda: counters.finish(chunk, ended & first.progress.is_of(epoch), ended),
        )
