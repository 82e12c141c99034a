"""Asynchronous rules: how a worker's push changes the model on the parameter servers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple, TypeAlias

from tfpara.algorithms.arithmetic import check_number, minimum, positive_part
from tfpara.algorithms.bmuf import BMUF
from tfpara.algorithms.rule import Average
from tfpara.typing import Array, Scalar
from tfpara.whole_number import checked_whole


class _Rule:
    """The common part of asynchronous rules."""

    local_steps: ClassVar[bool] = True  # whether each worker has its own optimizer
    local_models: ClassVar[bool] = False  # whether each worker keeps its own model
    keeps_state: ClassVar[bool] = False  # whether servers keep a state besides the weights

    def difference(self, local: Array, pulled: Array) -> Array:
        """Returns what a worker pushes if it has its own optimizer, but no model of its own."""
        return local - pulled


@dataclasses.dataclass(frozen=True)
class ASGD(_Rule):
    """Asynchronous SGD: a worker pulls the model, sends a gradient, and does not wait for others.

        W ← W − lr · g(W_pulled)

    g is the gradient of one minibatch at the weights that the worker pulled, or the sum of the
    gradients of `sync_period` minibatches. The *staleness* k of a push is the number of other
    workers' pushes between the pull and the push. The optimizer with which the model is compiled
    takes the step, on the server; W − lr·g is the step of plain SGD.

    Args:
        max_staleness: s ≥ 0, the highest staleness of a push. Workers wait before a pull or a push
            if the staleness of some worker's push would otherwise exceed s. With s = 0 only one
            worker computes at a time. None: unbounded.
        delay_compensation: λ ≥ 0 of DC-ASGD, which uses g + λ g⊙g⊙(W − W_pulled) in place of each
            minibatch's gradient g. 0: none.
        rate_by_staleness: whether the step's learning rate is divided by 1 + k.
        reduction: how the gradients of `sync_period` minibatches become one: "sum" (each has the
            same effect as if it were pushed alone) or "mean".

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range.

    Source: paper 003, section 2.2, eq. 2; Zheng et al., "Asynchronous stochastic gradient descent
    with delay compensation" (2017), eq. 10; Ho et al., "More effective distributed ML via a stale
    synchronous parallel parameter server" (2013) for bounds on staleness.

    Example:
        >>> rule = ASGD(delay_compensation=0.5)
        >>> rule.gradient(2.0, pulled=1.0, current=2.0)
        4.0
    """

    max_staleness: int | None = None
    delay_compensation: float = 0.0
    rate_by_staleness: bool = False
    reduction: str = "sum"

    local_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_bound(self.max_staleness)
        check_number("delay_compensation", self.delay_compensation, "0.04")
        if not 0.0 <= self.delay_compensation < float("inf"):
            raise ValueError(
                f"delay_compensation={self.delay_compensation!r} must be 0 (off) or positive; the "
                "paper's values are 0.04 to 2."
            )
        if self.reduction not in ("sum", "mean"):
            raise ValueError(f"reduction={self.reduction!r} is unknown. There are: sum, mean.")

    def gradient(
        self, gradient: Array, pulled: Array, current: Array, squares: Array | None = None
    ) -> Array:
        """Returns the gradient that is applied to the `current` weights.

        Args:
            gradient: the pushed gradient: that of a minibatch, g, or the sum or mean of several.
            pulled: the weights at which the gradient was computed.
            current: the weights to which the gradient is applied.
            squares: the sum or mean of g⊙g over the minibatches, if there are several. (The square
                of the summed gradient would grow with the square of their number.) None: the square
                of `gradient`.
        """
        if self.delay_compensation == 0.0:
            return gradient
        squares = gradient * gradient if squares is None else squares
        return gradient + self.delay_compensation * squares * (current - pulled)

    def rate_factor(self, staleness: Scalar) -> Scalar:
        """Returns the factor by which the learning rate of a push is multiplied."""
        return 1.0 / (1.0 + staleness) if self.rate_by_staleness else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AveragedASGD(ASGD):
    """ASGD whose server keeps an average of the models beside the model: `RunningThenMean`.

    The average does not affect training. Export it under the name "average". All arguments are
    keyword-only.

    Args:
        running_rate: r, the rate of the running average in the first part of the training.
        max_staleness: s, as of `ASGD`.
        delay_compensation: λ, as of `ASGD`.
        rate_by_staleness: as of `ASGD`.
        reduction: as of `ASGD`.

    Raises:
        TypeError: a positional argument, or a value that is not a number.
        ValueError: a value outside its range.

    Source: paper 002, sections 2.3 and 2.4.
    """

    # The fields of `ASGD` are declared here once more, because `kw_only=True` applies only to
    # fields that this class itself declares.
    max_staleness: int | None = None
    delay_compensation: float = 0.0
    rate_by_staleness: bool = False
    reduction: str = "sum"
    running_rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        RunningThenMean(self.running_rate)

    @property
    def average(self) -> RunningThenMean:
        """The average that the server keeps."""
        return RunningThenMean(self.running_rate)


class RunningState(NamedTuple):
    """State of RunningThenMean."""

    average: Array  # W̄, the average so far
    weight: Scalar  # the weight in W̄ that the next model will get
    mean: Scalar  # 0 while W̄ is the running average, 1 after `start_mean`


@dataclasses.dataclass(frozen=True)
class RunningThenMean:
    """An average that is a running average of the models at first, and their mean later.

        W̄ ← (1 − r) W̄ + r W;   after `start_mean`:   W̄ ← (1 − 1/n) W̄ + (1/n) W
        with n = 1/r, 1/r + 1, …

    The mean continues from the running average, which has the weight of 1/r − 1 models. (Paper 002
    does not say whether the mean starts from the running average.)

    Args:
        rate: r, 0 < r ≤ 1.

    Raises:
        TypeError: a value is not a number.
        ValueError: r outside (0, 1].

    Source: paper 002, section 2.3.

    Example:
        >>> rule = RunningThenMean(0.5)
        >>> rule.value(rule.update(rule.init(4.0), 8.0))
        6.0
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        check_number("running_rate", self.rate, "0.01")
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"running_rate={self.rate!r} is outside (0, 1]. The paper's is 0.01.")

    def init(self, weights: Array) -> RunningState:
        """Returns the state of a run that starts at `weights`."""
        return RunningState(average=weights, weight=self.rate, mean=0.0)

    def update(self, state: RunningState, global_model: Array) -> RunningState:
        """Returns the state after a push, with the model included."""
        return RunningState(
            average=state.average + state.weight * (global_model - state.average),
            weight=state.weight / (1.0 + state.mean * state.weight),
            mean=state.mean,
        )

    def start_mean(self, state: RunningState) -> RunningState:
        """Returns a state whose average is the mean from now on."""
        return state._replace(mean=1.0 + 0.0 * state.mean)

    def value(self, state: RunningState) -> Array:
        return state.average


@dataclasses.dataclass(frozen=True)
class Downpour(_Rule):
    """Asynchronous local steps: a worker trains the model it pulled, and pushes the difference.

        w ← W_pulled;   τ steps of w;   W ← W + ζ (w − W_pulled)

    The worker takes τ = `sync_period` steps with the optimizer with which the model is compiled. So
    each gradient is computed at the weights after the step before, whereas `ASGD` computes all τ
    gradients at W_pulled. With τ = 1 and plain SGD both rules are the same. With one worker,
    `Downpour` equals training without servers, for every τ.

    The state of the optimizer, such as momentum, belongs to the worker: it continues from block to
    block, and is lost when the worker is restarted.

    Args:
        max_staleness: s ≥ 0, the highest staleness of a push, as for `ASGD`.
        rate_by_staleness: whether a push is divided by 1 + k, with k its staleness.
        block_learning_rate: ζ > 0. If N workers with a long period diverge, lower ζ: with 1/N, one
            push of each worker moves the model by the mean of their blocks.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range.

    Source: Dean et al., "Large scale distributed deep networks" (2012), section 4.1 and algorithm
    7.1 with n_fetch = n_push = τ, and plain SGD on the server (ζ = 1); paper 003, sections 2.5
    ("each worker computes gradients and updates its local model") and 3.2.3. ζ is that of `BMUF`.

    Example:
        >>> rule = Downpour(rate_by_staleness=True)
        >>> rule.update(10.0, rule.difference(5.0, pulled=3.0), staleness=3)
        10.5
    """

    max_staleness: int | None = None
    rate_by_staleness: bool = False
    block_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        _check_bound(self.max_staleness)
        check_number("block_learning_rate", self.block_learning_rate, "1")
        if not 0.0 < self.block_learning_rate < float("inf"):
            raise ValueError(
                f"block_learning_rate={self.block_learning_rate!r} must be positive. 1 adds what a "
                "worker has trained, 1/N a worker's share of the mean."
            )

    def update(self, global_model: Array, difference: Array, staleness: Scalar) -> Array:
        """Returns the global model after a push."""
        rate: Scalar = self.block_learning_rate
        if self.rate_by_staleness:
            rate = rate / (1.0 + staleness)
        return global_model + difference * rate


@dataclasses.dataclass(frozen=True)
class AsyncEASGD(_Rule):
    """Asynchronous elastic averaging: a worker's model and the server's model attract each other.

        w_i ← w_i − α(w_i − W);   W ← W + α(w_i − W)

    Both equations use the values before the exchange. Worker i makes the exchange after every
    `sync_period` local steps, without waiting for other workers. The model's optimizer runs on the
    workers, each of which keeps its own model.

    Args:
        elasticity: α, 0 ≤ α ≤ 1. None: 0.9 divided by the number of workers. 0 leaves the workers
            independent and the server's model unchanged.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range.

    Source: paper 003, eq. 9; Zhang, Choromanska & LeCun, "Deep learning with elastic averaging SGD"
    (2015), algorithm 1.

    Example:
        >>> AsyncEASGD(0.25).move(4.0, 2.0)
        0.5
    """

    elasticity: float | None = None

    local_models: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.elasticity is None:
            return
        check_number("elasticity", self.elasticity, "0.9/N, which is the default")
        if not 0.0 <= self.elasticity <= 1.0:
            raise ValueError(
                f"elasticity={self.elasticity!r} is outside [0, 1]: a worker would move past the "
                "server's model. The usual value is 0.9/N; None chooses it."
            )

    def resolve(self, num_workers: int) -> AsyncEASGD:
        """Returns this rule with the default α."""
        if self.elasticity is not None:
            return self
        return dataclasses.replace(self, elasticity=0.9 / num_workers)

    def move(self, local: Array, global_model: Array) -> Array:
        """Returns α(w − W), which the local model loses and the global one gains."""
        return self.elasticity * (local - global_model)


_LARGEST_BLOCK_MOMENTUM = 0.75  # the largest default of η; docs/study.md has measurements


class AsyncBMUFState(NamedTuple):
    """The state that a server keeps for each weight."""

    delta: Array  # Δ; it is zero before the first round has ended
    gathered: Array  # the sum of the differences of this round so far
    pushes: Scalar  # number of pushes in this round so far, a float
    rounds: Scalar  # number of rounds so far, a float


@dataclasses.dataclass(frozen=True)
class AsyncBMUF(_Rule):
    """Asynchronous block momentum: workers train locally, and the server adds momentum to their
    pushes.

        w ← W_pulled;  τ steps of w;  d = w − W_pulled
        each push:                 W ← W + ζ d / N
        each N-th push ends a round:  Δ ← ηΔ + ζG;  W ← W + ηΔ,  G the mean of the round's d

    N is the number of workers. If all workers pull at the beginning of a round and push within it,
    W after the round is the point from which the replicas of Nesterov `BMUF` with this η continue.
    With one worker, η = 0 and ζ = 1, the rule equals training without servers.

    Each worker has its own local optimizer, as for `Downpour`. Its momentum (SGD) or β₁ (Adam,
    Muon) is fitted to blocks of τ steps, as by `PeriodicSyncStrategy` under rules with a momentum.
    But for every τ, SGD's larger learning rate restores only half of the movement that the shorter
    momentum loses. A push of fewer minibatches, at the end of a chunk, counts as a whole push.

    Args:
        block_momentum: η, 0 ≤ η < 1, or "linear" or "sqrt", as for `BMUF`. None: 1 − 1/N, at most
            0.75, reached over the first rounds. 0.9 with ζ = 0.7 is an asynchronous `DiLoCo`.
        block_learning_rate: ζ > 0.
        warmup: number of rounds in which the gain 1/(1 − η) may rise by one, as for `BMUF`. None: 1
            if `block_momentum` is None; over a local optimizer like Adam 5, or 20 if the
            optimizer's average of gradients cannot be fitted to the block.
        max_staleness: s ≥ 0, the highest staleness of a push, as for `ASGD`.
        workers: N; None: the strategy's number of workers.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range.

    Source: Liu et al., "Asynchronous local-SGD training for language modeling" (2024), the delayed
    Nesterov update with c = 0; the warm-up of η is that of `BMUF`.

    Example:
        >>> rule = AsyncBMUF(0.5, workers=2)
        >>> w, state = rule.update(0.0, rule.init(0.0), difference=2.0)
        >>> w, state = rule.update(w, state, difference=4.0)
        >>> w, state.delta
        (4.5, 3.0)
    """

    block_momentum: float | str | None = None
    block_learning_rate: float = 1.0
    warmup: bool | float | None = None
    max_staleness: int | None = None
    workers: int | None = None

    keeps_state: ClassVar[bool] = True
    # If a script sets weights, their momentum becomes 0. But `rounds` keeps its value, so the
    # warm-up does not restart.
    lasting: ClassVar[tuple[str, ...]] = ("rounds",)

    def __post_init__(self) -> None:
        _check_bound(self.max_staleness)
        if self.workers is not None:
            checked_whole("workers", self.workers)
        self.filter.resolve(1)

    @property
    def filter(self) -> BMUF:
        """The synchronous rule with this momentum, for N replicas if N is known."""
        momentum, warmup = self.block_momentum, self.warmup
        if momentum is None:
            momentum = min(1.0 - 1.0 / (self.workers or 1), _LARGEST_BLOCK_MOMENTUM)
            warmup = 1.0 if warmup in (None, True) else warmup
        rule = BMUF(momentum, self.block_learning_rate, warmup=warmup)
        return rule if self.workers is None else rule.resolve(self.workers)

    def resolve(self, num_workers: int) -> AsyncBMUF:
        """Returns this rule with the number of workers."""
        return self if self.workers else dataclasses.replace(self, workers=num_workers)

    def for_optimizer(self, short: bool) -> AsyncBMUF:
        """Returns this rule for a local optimizer that divides by the size of gradients.

        Args:
            short: as for `BMUF.for_normalised`.
        """
        # The test is `is True`, because `== True` would also hold for the number 1. A 1 that the
        # user has given must stay.
        by_default = self.warmup is None or self.warmup is True
        if self.block_momentum is not None or not by_default:
            return self
        return dataclasses.replace(self, warmup=BMUF().for_normalised(short).resolve(1).warmup)

    def init(self, weights: Array) -> AsyncBMUFState:
        """Returns a server's state of a run that starts at `weights`."""
        return AsyncBMUFState(weights * 0.0, weights * 0.0, 0.0, 0.0)

    @property
    def has_momentum(self) -> bool:
        """Whether η > 0."""
        return self.filter.has_momentum()

    def update(
        self, global_model: Array, state: AsyncBMUFState, difference: Array
    ) -> tuple[Array, AsyncBMUFState]:
        """Returns the global model and the server's state after a push."""
        if self.workers is None:
            raise ValueError("Call resolve(num_workers) first: workers is still None.")
        rule, zeta = self.filter, self.block_learning_rate
        # `ends` is 1 if the push ends a round, and 0 if not. It has no other values, because
        # `pushes` is always a whole number.
        ends = minimum(1.0, positive_part(state.pushes + 2.0 - self.workers))
        gathered = state.gathered + difference
        # The mean is over the pushes of the round. The number of these pushes may differ from
        # `workers` if `workers` has changed within the round.
        mean = gathered / (state.pushes + 1.0)
        filtered = rule.momentum_after(state.rounds) * state.delta + zeta * mean
        delta = ends * filtered + (1.0 - ends) * state.delta
        rounds = state.rounds + ends
        momentum = ends * rule.momentum_after(rounds)
        after = AsyncBMUFState(
            delta=delta,
            gathered=(1.0 - ends) * gathered,
            pushes=(1.0 - ends) * (state.pushes + 1.0),
            rounds=rounds,
        )
        return global_model + zeta * difference / self.workers + momentum * delta, after


AsyncRule: TypeAlias = ASGD | Downpour | AsyncEASGD | AsyncBMUF
# An average that an asynchronous run can keep.
AsyncAverage: TypeAlias = Average | RunningThenMean


def _check_bound(bound: int | None) -> None:
    if bound is not None:
        checked_whole("max_staleness", bound, at_least=0, of="pushes")
