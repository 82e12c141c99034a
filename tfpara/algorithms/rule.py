"""The base classes of synchronisation rules and averages, from which users may derive others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfpara.typing import Array, Scalar, State


class Rule:
    """A synchronisation rule: the global step that a sync takes with the mean of the local models.

    To write a rule of your own, derive a frozen dataclass from this class, with the methods `init`
    and `update`. Both must be plain arithmetic on flat arrays, element by element. They run on
    NumPy arrays for checks, on TensorFlow tensors in training, and on any part of the weights,
    since each worker may keep only a part of the state. The replicas continue with the global
    model, unless `broadcast` or `restart` say otherwise. The defaults of the other methods suit
    both kinds of rules: those that overwrite the replicas, and those whose `restart` leaves each
    replica different weights.

    Example:
        >>> import dataclasses
        >>> from typing import Any, NamedTuple
        >>> class State(NamedTuple):
        ...     global_model: Any
        >>> @dataclasses.dataclass(frozen=True)
        ... class Part(Rule):
        ...     rate: float
        ...     def init(self, weights):
        ...         return State(weights)
        ...     def update(self, state, average, num_replicas, share=1.0):
        ...         return State(state.global_model + self.rate * (average - state.global_model))
        >>> rule = Part(0.5)
        >>> rule.update(rule.init(0.0), average=2.0, num_replicas=4)
        State(global_model=1.0)

    Attributes:
        absent: by name, the values of state fields that checkpoints of earlier versions of the rule
            do not have.
        lasting: names of state fields that are numbers and keep their values when a script sets
            some of the weights. If the state has other fields that are numbers, the whole state
            then restarts from the weights that the rule broadcasts.
    """

    absent: ClassVar[Mapping[str, float]] = {}
    lasting: ClassVar[tuple[str, ...]] = ()

    def resolve(self, num_replicas: int) -> Rule:
        """Returns the rule for N replicas, checked, with defaults that depend on N filled in.

        Raises:
            ValueError: a hyper-parameter is unstable for N replicas.
        """
        return self

    def init(self, weights: Array) -> State:
        """Returns the state of a run that starts at the flat vector `weights`.

        Returns:
            A NamedTuple. Its field `global_model` is the global model; the other fields have the
            shape of the weights, too, or are numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no init(weights).")

    def update(self, state: State, average: Array, num_replicas: int, share: Scalar = 1.0) -> State:
        """Returns the state after the global step.

        Args:
            state: a result of `init` or `update`.
            average: w̄, the sample-weighted mean of the local models.
            num_replicas: N.
            share: f, 0 < f ≤ 1: the part of a whole block that this block was.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no update(state, average, num_replicas, share=1.0)."
        )

    def broadcast(self, before: State, after: State) -> Array:
        """Returns what all replicas receive, given the state before and after the global step."""
        return after.global_model

    def restart(self, local: Array, broadcast: Array) -> Array:
        """Returns the weights from which a replica continues: by default the received ones."""
        return broadcast

    def carry(self, state: State, former: Rule) -> State:
        """Returns the state from which this rule continues after a change of N in an elastic run.

        The point from which the replicas started the block must stay what `former.broadcast` gave,
        since their progress is measured from it. By default the state stays, which suits rules
        whose broadcast point depends on no hyper-parameter that follows N.

        Args:
            state: the state after the last step of `former`.
            former: the same rule as `resolve` gave it for the former N.
        """
        return state

    def has_momentum(self) -> bool:
        """Returns whether the global step has a momentum of its own.

        If so, `local_state="auto"` fits the momentum of local SGD to the block: both momenta
        together are stable only at far smaller learning rates than each alone.
        """
        return False

    def measured_from(self, state: State, received: Array) -> Array:
        """Returns the point to which the mean of the local models' differences is added.

        With `compression=` only the differences of the local models from `received` are sent. If
        the rule overwrites the replicas, they started the block at `received`, which is the
        broadcast point after rounding. The differences are then the progress of the replicas, and
        are added to the exact broadcast point. Otherwise the replicas did not start at `received`,
        and their mean is `received` plus the mean of the differences.
        """
        return self.broadcast(state, state) if self.overwrites else received

    # A rule has `restart_delayed = None` if it cannot restart a replica that has trained on during
    # the sync. The syncs of such a rule cannot overlap the training.
    def restart_delayed(self, local: Array, snapshot: Array, broadcast: Array) -> Array:
        """Returns what `restart` does, for a replica that has kept training since the sync began.

            w_i ← B + (w_i − s_i),  or  w_i ← w_i + (restart(s_i) − s_i)

        with B the broadcast point and s_i the replica's weights when the sync began. The first form
        is for rules that overwrite the replicas: it keeps the progress w_i − s_i of a replica, and
        the next sync measures this progress from B, too, so the rule's equations still hold. The
        second form is for other rules: the replica makes the move that `restart` gives for s_i,
        only later. Source: Shen et al., "Faster distributed deep net training:
        computation and communication decoupled stochastic gradient descent" (CoCoD-SGD, 2019), for
        model averaging.
        """
        if self.overwrites:
            return self.restart(local, broadcast) + (local - snapshot)
        return local + (self.restart(snapshot, broadcast) - snapshot)

    @property
    def overwrites(self) -> bool:
        """Whether replicas continue from the broadcast point alone."""
        return type(self).restart is Rule.restart


class GlobalModel(NamedTuple):
    """The state of rules that keep the global model W alone."""

    global_model: Array


class Average:
    """An average of the global model after each sync, which training never sees.

    To write an average of your own, derive a frozen dataclass from this class, with all three
    methods. They work element by element, like those of a `Rule`.
    """

    def init(self, weights: Array) -> State:
        """Returns the state of a run that starts at the flat vector `weights`.

        Returns:
            A NamedTuple of arrays with the shape of `weights`, and of numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} has no init(weights).")

    def update(self, state: State, global_model: Array, share: Scalar = 1.0) -> State:
        """Returns the state after a sync; `share` is f, 0 < f ≤ 1."""
        raise NotImplementedError(
            f"{type(self).__name__} has no update(state, global_model, share=1.0)."
        )

    def value(self, state: State) -> Array:
        """Returns the averaged model, as a flat vector."""
        raise NotImplementedError(f"{type(self).__name__} has no value(state).")


_WEIGHTS = np.array([0.5, -1.0, 2.0], np.float32)
_MEANS = _WEIGHTS + np.array([[1e-3, 0.2, -3.0], [-0.7, 0.1, 4.0], [0.3, 0.0, 1.0]], np.float32)
_SHARES = (1.0, 0.5, 1.0)


def check_rule(rule: Rule, num_replicas: int) -> None:
    """Tests a rule on three weights, together and one by one.

    Args:
        rule: the rule as `resolve` returns it for `num_replicas`.
        num_replicas: the number of replicas.

    Raises:
        TypeError: the rule lacks a method, or a method does not return a state.
        ValueError: a result has another shape, is not finite, or mixes the weights.
    """

    def run(part: slice) -> list[NDArray[np.float32]]:
        weights = _WEIGHTS[part]
        state = _state(rule, "init", rule.init(weights), weights)
        if "global_model" not in state._fields:
            raise TypeError(
                f"{rule!r}: init returns {type(state).__name__} without a field `global_model`, "
                "which is what averages, exports and checkpoints take."
            )
        found = []
        for mean, share in zip(_MEANS, _SHARES, strict=True):
            before = state
            # For a whole block the argument `share` is omitted, to test its default value, too.
            shares = () if share == 1.0 else (np.float32(share),)
            after = rule.update(before, mean[part], num_replicas, *shares)
            state = _state(rule, "update", after, weights, before)
            sent = _array(rule, "broadcast", rule.broadcast(before, state), weights)
            local = weights + mean[part]
            found += [sent, _array(rule, "restart", rule.restart(local, sent), weights)]
            base = rule.measured_from(state, sent)
            found.append(_array(rule, "measured_from", base, weights))
            if rule.restart_delayed is not None:
                late = rule.restart_delayed(local, weights, sent)
                found.append(_array(rule, "restart_delayed", late, weights))
        return found + [np.broadcast_to(np.asarray(v), weights.shape) for v in state]

    _check(rule, run)


def check_average(average: Average) -> None:
    """Tests an average on three weights, together and one by one; raises as `check_rule`.

    Args:
        average: the average.
    """

    def run(part: slice) -> list[NDArray[np.float32]]:
        weights = _WEIGHTS[part]
        state = _state(average, "init", average.init(weights), weights)
        found = []
        for model, share in zip(_MEANS, _SHARES, strict=True):
            new = average.update(state, model[part], np.float32(share))
            state = _state(average, "update", new, weights, state)
            found.append(_array(average, "value", average.value(state), weights))
        return found

    _check(average, run)


def mixes_weights(run: Callable[[slice], list[Any]]) -> bool:
    """Returns whether `run` gives other arrays for three weights together than for each alone."""
    each = [run(slice(k, k + 1)) for k in range(3)]
    alone = [np.concatenate(values) for values in zip(*each, strict=True)]
    return not np.allclose(run(slice(None)), alone, rtol=1e-5, atol=1e-6)


def _check(given: Rule | Average, run: Callable[[slice], list[NDArray[np.float32]]]) -> None:
    if " object at 0x" in repr(given):
        raise TypeError(
            f"{type(given).__name__}: workers and checkpoints compare what it prints, and it "
            "prints an address. Write @dataclasses.dataclass(frozen=True) above the class."
        )
    if mixes_weights(run):
        raise ValueError(
            f"{given!r} mixes weights: three of them together give other results than each alone. "
            "Every worker may keep a part of the weights, so work element by element, without "
            "norms, means or sorting over the vector."
        )


def _state(
    given: Rule | Average,
    method: str,
    state: State,
    weights: NDArray[np.float32],
    former: State = None,
) -> State:
    """Returns the state that a method returned; raises an error if its form is wrong."""
    if not (isinstance(state, tuple) and hasattr(state, "_fields")):
        raise TypeError(
            f"{given!r}: {method} returns {type(state).__name__}, and must return a NamedTuple of "
            "arrays."
        )
    if former is not None and state._fields != former._fields:
        raise TypeError(
            f"{given!r}: {method} returns the fields {', '.join(state._fields)}; init returns "
            f"{', '.join(former._fields)}. Return the same."
        )
    for name, value in zip(state._fields, state, strict=True):
        was = value if former is None else getattr(former, name)
        if name == "global_model" or np.ndim(value) or np.ndim(was):
            _array(given, f"{method}'s {name}", value, weights)
    return state


def _array(
    given: Rule | Average, what: str, value: Any, weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    found = np.asarray(value)
    if found.shape != weights.shape:
        raise ValueError(
            f"{given!r}: {what} has the shape {found.shape} for weights of the shape "
            f"{weights.shape}. It must be the same."
        )
    if not np.all(np.isfinite(found)):
        raise ValueError(f"{given!r}: {what} is not finite for weights of ordinary size.")
    return found
