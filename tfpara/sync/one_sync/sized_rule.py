"""The rule in graphs that are not made anew when the number of replicas changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpara.algorithms.rule import Rule
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.typing import Array, State

# A hyper-parameter follows the number of replicas if it is not the same for all of these numbers.
_SIZES = (1, 2, 3, 5, 8)
# The numbers of workers for which a rule is checked if the run has no largest number of workers.
_LARGE = [*range(1, 33), 64, 128, 256, 512, 1024]


class SizedRule:
    """A rule whose hyper-parameters are those for the present number of replicas.

    If hyper-parameters follow that number (`Elastic.rule_follows`), the values that `Rule.resolve`
    gives for N are variables, in two versions. The *present* values, for the present N, are used in
    the next global step. The *last* values were used in the last global step, and give the point
    from which the replicas started the block. If hyper-parameters do not follow N, both versions
    are the rule itself.

    `rule` is the result of `resolve` at the start; `asked` is the user's rule, if its
    hyper-parameters follow N, else None.
    """

    def __init__(
        self, rule: Rule, asked: Rule | None, make: Callable[[Array, str], tf.Variable]
    ) -> None:
        self._rule, self._asked = rule, asked
        self._present: dict[str, tf.Variable] = {}
        self._last: dict[str, tf.Variable] = {}
        with tf.device("CPU:0"):
            for name in sized_fields(asked) if asked is not None else ():
                value = tf.constant(getattr(rule, name), tf.float32)
                self._present[name] = make(value, f"rule/{name}")
                self._last[name] = make(value, f"rule/last_{name}")

    def present(self) -> Any:
        """Returns the rule for the next global step; a graph reads its values when it runs."""
        return self._with(self._present)

    def last(self) -> Any:
        """Returns the rule of the last global step."""
        return self._with(self._last)

    def _with(self, variables: dict[str, tf.Variable]) -> Any:
        if not variables:
            return self._rule
        rule = copy.copy(self._rule)
        for name, variable in variables.items():
            # The attribute is set in this way because the rule's class is frozen. The constructor
            # is not called, because it would check the values, which are tensors here.
            object.__setattr__(rule, name, variable.read_value())
        return rule

    def carried(self, state: State) -> State:
        """Returns a state after the last step, converted for the rule `present`."""
        return self.present().carry(state, self.last()) if self._present else state

    def commit(self) -> None:
        """Notes that a step was taken with the present hyper-parameters."""
        for name, variable in self._last.items():
            variable.assign(self._present[name])

    def change(self, num_replicas: int) -> None:
        """Sets the hyper-parameters for this number of replicas, from the next step on."""
        if self._asked is not None and self._present:
            rule = self._asked.resolve(num_replicas)
            for name, variable in self._present.items():
                variable.assign(getattr(rule, name))

    def slots(self) -> Iterator[Slot]:
        """Yields the values of the last step, for a worker that takes over the state."""
        for name, variable in self._last.items():
            yield Slot(f"rule/last_{name}", Kind.SHARED, variable)


def sized_fields(rule: Rule) -> list[str]:
    """Returns the hyper-parameters that `resolve` changes; ValueError: one of them is no number."""
    if not dataclasses.is_dataclass(rule):
        return []
    rules = []
    for number in _SIZES:
        try:
            rules.append(rule.resolve(number))
        except ValueError:  # the rule is unstable for this number of replicas
            continue
    names = []
    for field in dataclasses.fields(rule):
        values = [getattr(each, field.name) for each in rules]
        if all(value == values[0] for value in values):
            continue
        if not all(isinstance(value, int | float) for value in values):
            raise ValueError(
                f"{rule!r}: resolve gives {field.name} otherwise for other numbers of replicas, "
                "and it is no number, so it cannot follow them in a graph. Give "
                "tfpara.Elastic(rule_follows=False)."
            )
        names.append(field.name)
    return names


def check_sizes(rule: Rule, max_workers: int | None, devices: int) -> Rule:
    """Checks a rule for each number of workers that may train; returns it for the largest one.

    `max_workers` is that number; None: there is none. `devices` is that of each worker.
    """
    numbers = range(1, max_workers + 1) if max_workers else _LARGE
    for workers in numbers:
        try:
            largest = rule.resolve(workers * devices)
        except ValueError as error:
            raise ValueError(
                f"rule={rule!r} and elastic= contradict each other where {workers} workers train: "
                f"{error} Give tfpara.Elastic(max_workers=...) below that, or another value."
            ) from None
    return largest
