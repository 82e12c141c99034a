"""The global model on the parameter servers, as the chief uses it; `exchange.py` has pull and push.

Each parameter server has a *shard*: some of the weights, with their optimizer slots and averages,
and a lock. The first server also has the moving statistics, metrics and counters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.algorithms.asgd import AsyncAverage, AsyncRule, RunningState
from tfpara.parameter_server.counters import Counters, Progress
from tfpara.parameter_server.messages import Moment
from tfpara.parameter_server.shard import Shard, precise, variable
from tfpara.parameter_server.staleness import Staleness

_numbers = itertools.count()


class Server:
    """The global model with its optimizer, averages and counters, on one or several devices.

    The initial weights are those of `model`, which is built and compiled. `state` has its variables
    that workers share: moving statistics. `devices` are those of the parameter servers.

    Attributes:
        number: a number that no other `Server` of this process has.
        generation: increases when the model is set from outside. Workers with local models or
            optimizers then start again from the servers' model.
        told_rate: the rate of the chief's optimizer that was last sent to the servers.
        order: the shards in the order in which every graph takes their locks. With different
            orders, two workers could each hold the lock for which the other waits.
        for_workers: variables that workers with optimizers pull: the number of minibatches in the
            model, and the learning rate if it is a number.
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
        lazy: Collection[int] = (),
    ) -> None:
        self.number = next(_numbers)
        self.generation = 0
        self.rule = rule
        self.averages = dict(averages)
        weights = model.trainable_variables
        self.names = [v.path for v in weights]
        self.state_names = [v.path for v in state]
        # Each weight, the largest first, goes to the device with the fewest elements so far.
        sizes = [v.value.shape.num_elements() for v in weights]
        loads, parts = [0] * len(devices), [list[int]() for _ in devices]
        for index in sorted(range(len(weights)), key=lambda k: -sizes[k]):
            number = loads.index(min(loads))
            loads[number] += sizes[index]
            parts[number].append(index)
        self.shards = [
            Shard(device, number, sorted(part), weights, rule, averages, model.optimizer, lazy)
            for number, (device, part) in enumerate(zip(devices, parts, strict=True))
        ]
        self.first = self.shards[0]
        bound = getattr(rule, "max_staleness", None)
        self.order = self.shards if bound is None else [*self.shards[1:], self.first]
        # The variables that hold the learning rate. If the servers have the optimizers, each server
        # has such a variable. If the workers have the optimizers, only the first server has one. If
        # the rate is a schedule, there is none.
        self._rates: dict[Shard, tf.Variable] = {}
        with tf.device(self.first.device):
            if rule.local_steps and isinstance(model.optimizer.learning_rate, keras.Variable):
                self._rates = {self.first: variable(model.optimizer.learning_rate.value)}
            self.state = [variable(v.value) for v in state]
            self.counters = Counters(num_workers, record)
            self.staleness = None if bound is None else Staleness(num_workers, bound)
        numbers = [self.counters.minibatches, *self._rates.values()]
        self.for_workers = numbers if rule.local_steps else []
        if self.first.steps is not None and self.first.steps.rate_index is not None:
            at = self.first.steps.rate_index
            self._rates = {shard: shard.optimizer[at] for shard in self.order}
        self.told_rate = self.learning_rate
        self.measure(model)

    def rate(self) -> tf.Tensor:
        """Returns the learning rate, which must not be a schedule."""
        with tf.device(self.first.device):
            return tf.identity(self._rates[self.first])

    def set_rate(self, rate: tf.Tensor) -> list[tf.Tensor]:
        """Sets the learning rate on all servers; returns tensors that are computed afterwards."""
        done = []
        for shard, kept in self._rates.items():
            value = shard.sent(tf.cast(rate, kept.dtype))
            done.append(shard.locked(value, functools.partial(_assigned, kept, value)))
        return done

    @property
    def learning_rate(self) -> float | None:
        """The servers' learning rate; None if it is a schedule."""
        return float(self.rate()) if self._rates else None

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.set_rate(tf.constant(rate, tf.float64))

    @property
    def steps(self) -> int:
        """The number of steps so far, from which a schedule computes the learning rate."""
        return int(self.counters.minibatches if self.rule.local_steps else self.first.optimizer[0])

    def divide(self, num_chunks: int) -> None:
        """Sets the number of chunks of the next epochs; call it before graphs are made."""
        for shard in self.shards:
            shard.progress.close()  # from now on, late pushes of earlier fits are refused
            with tf.device(shard.device):
                shard.progress = Progress(num_chunks)
        with tf.device(self.first.device):
            self.counters.divide(num_chunks)

    def measure(self, model: keras.Model) -> None:
        """Makes the variables of the model's metrics; call it before graphs are made."""
        with tf.device(self.first.device):
            self.metrics = [variable(tf.zeros_like(v.value)) for v in metric_variables(model)]

    def open_epoch(self, epoch: int, anew: bool) -> None:
        """Lets the servers accept the minibatches of an epoch, and ends a halt.

        `anew`: whether the epoch begins; False: it continues. No worker may be training.
        """
        for shard in self.shards:
            shard.progress.open(epoch, anew)
        counters = self.counters
        for started in [counters.finished, counters.left_out, *self.metrics] if anew else ():
            started.assign(tf.zeros_like(started))
        if self.staleness is not None:
            self.staleness.clear()
        counters.halted.assign(False)

    def close(self) -> None:
        """Makes the servers refuse all pushes until `open_epoch`."""
        for shard in self.shards:
            shard.locked((), shard.progress.close)

    def forget(self, worker: int) -> None:
        """Ends the pull and push of a lost worker, so that no other worker waits for it."""
        staleness = self.staleness
        if staleness is not None:
            self.first.locked((), lambda: staleness.leave(tf.constant(worker, tf.int64)))

    def trained(self) -> int:
        """Returns how many minibatches of this epoch are in the weights of the first server."""
        return sum(self.first.progress.done.numpy().tolist())

    def weights_at_once(self, names: Sequence[str]) -> Moment:
        """Reads the models `names` ("global" or averages), on each server between two pushes."""

        def of(shard: Shard) -> list[tf.Tensor]:
            held = [shard.weights if n == "global" else shard.average(n) for n in names]
            rest = [*self.state, shard.version] if shard is self.first else []
            return [tf.identity(v) for v in [*itertools.chain(*held), *rest]]

        found: dict[str, Any] = {name: [None] * len(self.names) for name in names}
        rest: list[tf.Tensor] = []
        for shard in self.shards:
            values = iter(shard.locked((), functools.partial(of, shard)))
            for name in names:
                for index in shard.indices:
                    found[name][index] = next(values)
            rest += values  # the variables that only the first server has
        *state, version = rest
        return Moment(found, state, int(version))

    def set_weights(self, weights: Sequence[tf.Tensor]) -> None:
        """Replaces the weights, given in the model's order.

        Averages, the rule's state except its `lasting` fields, and the workers' local models and
        optimizers restart. No worker may be between a pull and a push.
        """
        self.generation += 1
        rule: Any = self.rule
        for shard in self.shards:
            for place, index in enumerate(shard.indices):
                with tf.device(shard.device):
                    value = tf.identity(weights[index])
                    begun = [(shard.weights[place], value)]
                    if shard.kept:
                        kept, state = shard.kept[place], rule.init(value)._asdict()
                        begun += [(getattr(kept, k), state[k]) for k in {*state} - {*rule.lasting}]
                    for name, average in self.averages.items():
                        begun += zip(
                            shard.averages[name][place], average.init(precise(value)), strict=True
                        )
                    for held, new in begun:
                        held.assign(tf.cast(new, held.dtype))

    def set_state(self, state: Sequence[tf.Tensor]) -> None:
        """Replaces the moving statistics, given in the order of the attribute `state`."""
        for shared, value in zip(self.state, state, strict=True):
            shared.assign(tf.identity(value))

    def snapshot(self) -> Callable[[], None]:
        """Keeps weights, moving statistics, averages, and the optimizers' slots and step counts.

        Returns a function that restores all these; workers' local models and optimizers then
        restart. It changes neither the learning rate nor whether an average has become a mean.
        """
        left_out = {id(rate) for rate in self._rates.values()}
        left_out |= {
            id(state.mean)
            for shard in self.shards
            for states in shard.averages.values()
            for state in states
            if isinstance(state, RunningState)
        }
        kinds = ("weight", "state", "average", "optimizer", "rule")
        held = [v for name, v in self.variables().items() if name.split("/")[0] in kinds]
        # The number of minibatches is kept, too: it is the step of the workers' rate schedules.
        held.append(self.counters.minibatches)
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

    def variables(self) -> dict[str, tf.Variable]:
        """Returns the variables that a checkpoint must hold, by name."""
        found: dict[str, tf.Variable] = {}
        for shard in self.shards:
            found |= shard.variables()
        found |= {f"state/{k}": v for k, v in enumerate(self.state)}
        found |= {f"metric/{k}": v for k, v in enumerate(self.metrics)}
        found |= self.counters.variables()
        if self.for_workers[1:]:
            found["local_rate"] = self.for_workers[1]
        return found


def _assigned(kept: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    return tf.identity(kept.assign(value))


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model's metrics, including those of the loss."""
    return [variable for metric in model.metrics for variable in metric.variables]
