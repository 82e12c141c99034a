"""Blockwise model-update filtering: classical and Nesterov block momentum, and other toolkits'."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tfpara.algorithms.rule import Rule
from tfpara.typing import Array, Scalar

_COMPAT = (None, "cntk", "fairseq")


class BMUFState(NamedTuple):
    """State of BMUF. `global_model`: W. `delta`: the update Δ of W, zero before the first sync."""

    global_model: Array
    delta: Array


@dataclasses.dataclass(frozen=True)
class BMUF(Rule):
    """Block momentum: the block's model update is filtered like a gradient with momentum.

    With w̄ the (sample-weighted) mean of the local models, η = `block_momentum` and
    ζ = `block_learning_rate`:

    * ``nesterov=True`` (default; Chen & Huo's NBM). G is measured from the point that was
      broadcast, B = W + ηΔ:

          G = w̄ − B;  Δ ← ηΔ + ζG;  W ← W + Δ;  every replica goes on from W + ηΔ.

      On the pseudo-gradient −G this is SGD(ζ, momentum=η, nesterov=True).
    * ``nesterov=False`` (the papers' CBM):

          G = w̄ − W;  Δ ← ηΔ + ζG;  W ← W + Δ;  every replica goes on from W.

    * ``compat="cntk"``: Δ ← ηΔ + (1−η)ζ Σ_i (w_i − W);  ``compat="fairseq"``:
      Δ ← ηΔ + ζ mean_i(w_i − W). Both then set W ← W + Δ and, with `nesterov`, W ← W + ηΔ, and
      measure the next update from that sum, which raises the steady gain by (1+η). For moving
      runs over from those toolkits.

    A block that is closed after a share f of its minibatches takes that share of the step, with
    the update that a whole block would have had at its pace, G/f:

        Δ' = Δ + f(ηΔ + ζG/f − Δ) = (1 − f(1−η))Δ + ζG;  W ← W + f(ηΔ + ζG/f) = W + fηΔ + ζG

    so every G moves the model by ζG/(1−η) in the end, as in a whole block, and η = 0, ζ = 1 is BSP.

    Args:
        block_momentum: η, 0 ≤ η < 1. None: 1 − 1/N for N replicas (with ζ = 1 that is C = 1 in
            ζ / (N(1−η)) = C).
        block_learning_rate: ζ > 0.
        nesterov: the form; see above.
        compat: None, "cntk" or "fairseq".

    Raises:
        ValueError: a value outside its range.

    Source: Li et al. (2017), eqs. 3-6; Chen & Huo, "Scalable training of deep learning machines
    by incremental block training with intra-block parallel optimization and blockwise
    model-update filtering" (ICASSP 2016).

    Example:
        >>> rule = BMUF(block_momentum=0.5, nesterov=False)
        >>> state = rule.update(rule.init(0.0), average=1.0, num_replicas=2)
        >>> state = rule.update(state, average=2.0, num_replicas=2)
        >>> state
        BMUFState(global_model=2.5, delta=1.5)
    """

    block_momentum: float | None = None
    block_learning_rate: float = 1.0
    nesterov: bool = True
    compat: str | None = None

    def __post_init__(self) -> None:
        eta, zeta = self.block_momentum, self.block_learning_rate
        if eta is not None and not 0.0 <= eta < 1.0:
            raise ValueError(
                f"block_momentum={eta!r} is outside [0, 1): at 1 or more the model update grows "
                "without bound. Give 0 ≤ block_momentum < 1, or None for 1 - 1/N."
            )
        if not zeta > 0.0:
            raise ValueError(
                f"block_learning_rate={zeta!r} must be positive. The usual value is 1."
            )
        if self.compat not in _COMPAT:
            raise ValueError(f"compat={self.compat!r} is not one of {_COMPAT}.")

    def resolve(self, num_replicas: int) -> BMUF:
        """Returns this rule with the default η = 1 − 1/N filled in."""
        return dataclasses.replace(self, block_momentum=self._momentum(num_replicas))

    def init(self, weights: Array) -> BMUFState:
        """Returns the state of a run that starts at the flat vector `weights`."""
        return BMUFState(global_model=weights, delta=weights * 0.0)

    def update(
        self, state: BMUFState, average: Array, num_replicas: int, share: Scalar = 1.0
    ) -> BMUFState:
        """Returns the state after a sync; `average` is w̄, and `share` is f, 0 < f ≤ 1."""
        eta = self._momentum(num_replicas)
        update = average - self._anchor(state, eta)
        gain = self.block_learning_rate
        if self.compat == "cntk":
            gain *= (1.0 - eta) * num_replicas
        rest = 1.0 - share
        delta = (eta + rest * (1.0 - eta)) * state.delta + gain * update
        step = delta - rest * state.delta
        global_model = state.global_model + step
        if self.compat and self.nesterov:
            global_model = global_model + eta * step
        return BMUFState(global_model=global_model, delta=delta)

    def broadcast(self, before: BMUFState | None, after: BMUFState) -> Array:
        """Returns the point from which the replicas go on: W or W + ηΔ."""
        del before
        if self.block_momentum is None:
            raise ValueError("Call resolve(num_replicas) first: block_momentum is still None.")
        return self._anchor(after, self.block_momentum)

    def carry(self, state: BMUFState, former: Rule) -> BMUFState:
        """Returns the state after a change of η, with the point that was broadcast as it was.

        W ← W + (η' − η)Δ,  with η' of `former`: so W + ηΔ is what W + η'Δ was.
        """
        assert isinstance(former, BMUF)
        assert self.block_momentum is not None and former.block_momentum is not None
        if not self.nesterov or self.compat:
            return state
        moved = (former.block_momentum - self.block_momentum) * state.delta
        return BMUFState(global_model=state.global_model + moved, delta=state.delta)

    def resets_momentum(self) -> bool:
        """Returns whether η > 1/2 in Nesterov's form, or η > 0 in the classical one; see `Rule`."""
        eta = self.block_momentum or 0.0
        return eta > 0.5 or (eta > 0.0 and not self.nesterov)

    def _momentum(self, num_replicas: int) -> float:
        eta = self.block_momentum
        return 1.0 - 1.0 / num_replicas if eta is None else eta

    def _anchor(self, state: BMUFState, eta: float) -> Array:
        if self.nesterov and not self.compat:
            return state.global_model + eta * state.delta
        return state.global_model
