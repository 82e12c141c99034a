"""Blockwise model-update filtering: classical, Nesterov, CNTK's and fairseq's block momentum."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

from tfpara.algorithms.arithmetic import check_number, minimum
from tfpara.algorithms.rule import Rule
from tfpara.typing import Array, Scalar

_COMPAT = (None, "cntk", "fairseq")
# Each name has two values. The first is a function of N, the number of replicas: it returns the
# steady gain 1/(1 − η). The second is the number of blocks in which the warm-up raises the gain by
# one.
_SCALINGS: Mapping[str, tuple[Callable[[int], float], float]] = {
    "linear": (float, 1.0),
    "sqrt": (math.sqrt, 20.0),
}
# The number of blocks in which the gain rises by one if the local optimizer is like Adam, and its
# average of gradients spans at most a block. docs/study.md has the measurements.
_ADAMS_WARMUP = 5.0
# With a warm-up, the default of η is at most this number, so the gain 1/(1 − η) is at most 10.
_LARGEST_DEFAULT = 0.9


class BMUFState(NamedTuple):
    """State of BMUF."""

    global_model: Array  # W
    delta: Array  # Δ, the update of W; it is zero before the first sync
    blocks: Scalar  # t, number of blocks so far; a share f of a block counts as f


@dataclasses.dataclass(frozen=True)
class BMUF(Rule):
    """Block momentum: momentum over blocks, where a block's update takes the place of a gradient.

    With w̄ the (sample-weighted) mean of the local models, η = `block_momentum` and
    ζ = `block_learning_rate`:

    * ``nesterov=True`` (default; Chen & Huo's NBM). G is measured from the point that was
      broadcast, B = W + ηΔ:

          G = w̄ − B;  Δ ← ηΔ + ζG;  W ← W + Δ;  every replica continues from W + ηΔ.

      On the pseudo-gradient −G this is SGD(ζ, momentum=η, nesterov=True).
    * ``nesterov=False`` (the papers' CBM):

          G = w̄ − W;  Δ ← ηΔ + ζG;  W ← W + Δ;  every replica continues from W.

    * ``compat="cntk"``: Δ ← ηΔ + (1−η)ζ Σ_i (w_i − W);  ``compat="fairseq"``:
      Δ ← ηΔ + ζ mean_i(w_i − W). Both then set W ← W + Δ and, with `nesterov`, W ← W + ηΔ; the
      next update is measured from the resulting W. So with `nesterov`, in a long run, each update
      moves W (1+η) times as far. These forms serve to continue or compare runs of CNTK and fairseq.

    A block that ends after a share f of its minibatches takes the share f of a whole block's step.
    The whole block's update is estimated by G/f:

        Δ' = Δ + f(ηΔ + ζG/f − Δ) = (1 − f(1−η))Δ + ζG;  W ← W + f(ηΔ + ζG/f) = W + fηΔ + ζG

    So every G moves the model by ζG/(1−η) in the end, as in whole blocks. With η = 0 and ζ = 1 the
    rule is BSP.

    With `warmup` = k the gain 1/(1−η) rises by at most one in k blocks. After t blocks (a shorter
    block counts f) the momentum is

        η_t = min(η, 1 − 1/(t/k + 1)),   a gain of t/k + 1

    In the equations above, B and the term ηΔ use η_t of the last sync. The point from which every
    replica continues uses η_t of the present sync.

    Args:
        block_momentum: η, 0 ≤ η < 1, or how the steady gain grows with the number N of replicas:
            "linear", η = 1 − 1/N (with ζ = 1 that is C = 1 in ζ / (N(1−η)) = C), or "sqrt", η = 1 −
            1/√N. With `warmup` these η are at most 0.9. None: "linear". But if the local optimizer
            divides by the size of gradients, as Adam does, and `warmup` is not False, then the
            default of `warmup` is 5, or, if the optimizer's average of gradients cannot be fitted
            to the block, η is "sqrt".
        block_learning_rate: ζ > 0.
        nesterov: which of the forms above.
        compat: None, "cntk" or "fairseq".
        warmup: k > 0, number of blocks in which the gain may rise by one. True: 1, and 20 with
            "sqrt". False: η from the first sync on, for any N, as published. None: True if
            `block_momentum` is not a number and `compat` is None, else False.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range, or `warmup` with `compat`.

    Source: Li et al. (2017), eqs. 3-6; Chen & Huo, "Scalable training of deep learning machines
    by incremental block training with intra-block parallel optimization and blockwise
    model-update filtering" (ICASSP 2016). Malladi et al., "On the SDEs and scaling rules for
    adaptive gradient algorithms" (2022), for √N.

    Example:
        >>> rule = BMUF(block_momentum=0.5, nesterov=False)
        >>> state = rule.update(rule.init(0.0), average=1.0, num_replicas=2)
        >>> state = rule.update(state, average=2.0, num_replicas=2)
        >>> state
        BMUFState(global_model=2.5, delta=1.5, blocks=2.0)
    """

    block_momentum: float | str | None = None
    block_learning_rate: float = 1.0
    nesterov: bool = True
    compat: str | None = None
    warmup: bool | float | None = None

    # If a script sets weights, their momentum becomes 0. But `blocks` keeps its value, so the
    # warm-up does not restart.
    lasting: ClassVar[tuple[str, ...]] = ("blocks",)

    def __post_init__(self) -> None:
        eta, zeta = self.block_momentum, self.block_learning_rate
        if isinstance(eta, str):
            if eta not in _SCALINGS:
                raise ValueError(
                    f"block_momentum={eta!r} is no number and none of {', '.join(_SCALINGS)}."
                )
        elif eta is not None:
            check_number("block_momentum", eta, "1 - 1/N, which is the default")
        if isinstance(eta, numbers.Real) and not 0.0 <= eta < 1.0:
            raise ValueError(
                f"block_momentum={eta!r} is outside [0, 1): at 1 or more the model update grows "
                "without bound. Give 0 ≤ block_momentum < 1, or None for 1 - 1/N."
            )
        if self.warmup is not None:
            check_number("warmup", self.warmup, "1")
        check_number("block_learning_rate", zeta, "1")
        if not (self.warmup is None or self.warmup is False or 0.0 < self.warmup < math.inf):
            raise ValueError(
                f"warmup={self.warmup!r} is no positive number of blocks in which the gain rises "
                "by one. Give True, False, or such a number."
            )
        if not 0.0 < zeta < math.inf:
            raise ValueError(
                f"block_learning_rate={zeta!r} must be positive and finite. The usual value is 1."
            )
        if self.compat not in _COMPAT:
            raise ValueError(f"compat={self.compat!r} is not one of {_COMPAT}.")
        if self.warmup and self.compat:
            raise ValueError(
                f"warmup=True and compat={self.compat!r} contradict each other: that toolkit has "
                "no warm-up. Leave one of them out."
            )

    def resolve(self, num_replicas: int) -> BMUF:
        """Returns this rule with the default η and `warmup`."""
        eta, blocks = self._steady_momentum(num_replicas), self._blocks_for_one
        return dataclasses.replace(
            self, block_momentum=eta, warmup=blocks if blocks not in (0.0, 1.0) else bool(blocks)
        )

    def for_normalised(self, short: bool) -> BMUF:
        """Returns the default for local optimizers that divide by the size of gradients, as Adam.

        If η is given, or with `compat` or without a warm-up, the rule is returned unchanged.

        Args:
            short: whether the optimizer's average of gradients spans at most a block.
        """
        if self.block_momentum is not None or self.compat or self.warmup is False:
            return self
        by_default = self.warmup is None or self.warmup is True
        warmup = _ADAMS_WARMUP if by_default and short else self.warmup
        scaling = "linear" if short else "sqrt"
        return dataclasses.replace(self, block_momentum=scaling, warmup=warmup)

    def init(self, weights: Array) -> BMUFState:
        return BMUFState(global_model=weights, delta=weights * 0.0, blocks=0.0)

    def update(
        self, state: BMUFState, average: Array, num_replicas: int, share: Scalar = 1.0
    ) -> BMUFState:
        """Returns the state after a sync; `average` is w̄, and `share` is f, 0 < f ≤ 1."""
        eta = self.momentum_after(state.blocks, num_replicas)
        update = average - self._anchor(state, eta)
        gain: Scalar = self.block_learning_rate
        if self.compat == "cntk":
            gain *= (1.0 - eta) * num_replicas
        rest = 1.0 - share
        delta = (eta + rest * (1.0 - eta)) * state.delta + gain * update
        # Most blocks are whole. For a whole block `rest` is 0, so `step` equals `delta`. To use
        # `delta` itself saves two passes over the weights.
        step = delta if isinstance(rest, float) and rest == 0.0 else delta - rest * state.delta
        global_model = state.global_model + step
        if self.compat and self.nesterov:
            global_model = global_model + eta * step
        return BMUFState(global_model=global_model, delta=delta, blocks=state.blocks + share)

    def broadcast(self, before: BMUFState | None, after: BMUFState) -> Array:
        """Returns the point from which the replicas continue: W or W + ηΔ."""
        if self._is_default:
            raise ValueError(
                f"Call resolve(num_replicas) first: block_momentum is {self.block_momentum!r}."
            )
        return self._anchor(after, self.momentum_after(after.blocks))

    def carry(self, state: BMUFState, former: Rule) -> BMUFState:
        """Returns the state after a change of η; the point that was broadcast does not change.

        W ← W + (η' − η)Δ,  with η' of `former`, so that W + ηΔ is the former W + η'Δ.
        """
        assert isinstance(former, BMUF)
        if not self.nesterov or self.compat:
            return state
        change = former.momentum_after(state.blocks) - self.momentum_after(state.blocks)
        return state._replace(global_model=state.global_model + change * state.delta)

    def momentum_after(self, blocks: Scalar, num_replicas: int = 1) -> Scalar:
        """Returns η_t, with t = `blocks`; a resolved rule needs no `num_replicas`."""
        eta, slowness = self._steady_momentum(num_replicas), self._blocks_for_one
        if not slowness:
            return eta
        return minimum(eta, 1.0 - slowness / (blocks + slowness))

    def has_momentum(self) -> bool:
        return bool(self.block_momentum)

    @property
    def _is_default(self) -> bool:
        """Whether η depends on the number of replicas."""
        return self.block_momentum is None or isinstance(self.block_momentum, str)

    @property
    def _scaling(self) -> tuple[Callable[[int], float], float]:
        name = self.block_momentum if isinstance(self.block_momentum, str) else "linear"
        return _SCALINGS[name]

    @property
    def _blocks_for_one(self) -> float:
        """Returns k, the number of blocks in which the gain may rise by one; 0 without warm-up."""
        given = self.warmup
        if given is None:
            given = self._is_default and self.compat is None
        return self._scaling[1] if given is True else float(given)

    def _steady_momentum(self, num_replicas: int) -> float:
        if not self._is_default:
            return self.block_momentum  # type: ignore[return-value]  # in graphs, η is a tensor
        eta = 1.0 - 1.0 / self._scaling[0](num_replicas)
        return min(eta, _LARGEST_DEFAULT) if self._blocks_for_one else eta

    def _anchor(self, state: BMUFState, eta: Scalar) -> Array:
        if self.nesterov and not self.compat:
            return state.global_model + eta * state.delta
        return state.global_model
