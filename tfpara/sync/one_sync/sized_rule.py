"""The rule in graphs that stay while the number of replicas changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpara.algorithms.rule import Rule
from tfpara.sync.one_sync.state_vars import Kind, Slot
from tfpara.typing import Array, State

_SIZES = (1, 2, 3, 5, 8)  # numbers of replicas for which rules are compared
_LARGE = [*range(1, 33), 64, 128, 256, 512, 1024]  # numbers of workers, where none is the largest


class SizedRule:
    """A rule whose hyper-parameters are those for the present number of replicas.

    Where they follow it (`Elastic.rule_follows`), the numbers that `Rule.resolve` gives for N are
    variables, in two versions: those for the *present* N, with which the next global step is taken,
    and those of the *last* step, by which the point is known from which the replicas started. A
    sync makes the present ones the last ones where it commits, so a state and the numbers that
    belong to it are never apart. Otherwise both versions are the rule itself.

    Args:
        rule: as `resolve` gives it for the number of replicas that begin.
        asked: as the user gave it, if its hyper-parameters follow; else None.
        make: creates a plain variable, `make(initial_value, name)`.
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
        """Returns the rule for the next global step; in a graph, as it is when the graph runs."""
        return self._with(self._present)

    def last(self) -> Any:
        """Returns the rule of the last global step."""
        return self._with(self._last)

    def _with(self, variables: dict[str, tf.Variable]) -> Any:
        if not variables:
            return self._rule
        rule = copy.copy(self._rule)
        for name, variable in variables.items():
            # The class is frozen, and the checks of its constructor are for numbers.
            object.__setattr__(rule, name, variable.read_value())
        return rule

    def carried(self, states: Sequence[State]) -> list[State]:
        """Returns the states after the last step as `present` continues from them."""
        if not self._present:
            return list(states)
        present, last = self.present(), self.last()
        return [present.carry(state, last) for state in states]

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
        """Yields the numbers of the last step, for a worker that takes over the state."""
        for name, variable in self._last.items():
            yield Slot(f"rule/last_{name}", Kind.SHARED, variable)


def sized_fields(rule: Rule) -> list[str]:
    """Returns the names of the hyper-parameters that `resolve` changes with N.

    Raises:
        ValueError: one of them is no number.
    """
    if not dataclasses.is_dataclass(rule):
        return []
    rules = []
    for number in _SIZES:
        try:
            rules.append(rule.resolve(number))
        except ValueError:  # unstable for so many
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
    """Checks a rule for every number of workers that may train.

    Args:
        rule: the rule.
        max_workers: largest number of workers; None: any number.
        devices: of each worker.

    Returns:
        The rule for the largest of these numbers.

    Raises:
        ValueError: it is unstable for one of them.
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
