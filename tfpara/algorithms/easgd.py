"""Synchronous elastic averaging SGD."""

from __future__ import annotations

import dataclasses

from tfpara.algorithms.arithmetic import check_number
from tfpara.algorithms.rule import GlobalModel, Rule
from tfpara.typing import Array, Scalar


@dataclasses.dataclass(frozen=True)
class EASGD(Rule):
    """Elastic averaging: local models and global model attract each other; none is overwritten.

        w_i ← w_i − α(w_i − W);  W ← W + α Σ_i (w_i − W)

    Both equations use the values before the sync. Σ_i (w_i − W) is N(w̄ − W), where w̄ is the
    sample-weighted mean if the replicas have different numbers of samples.

    Stability: each sync multiplies the distance between the mean of the replicas and W by
    1 − α(N+1). So α must be below 2/(N+1). Below 1/(N+1), the mean and W do not move past each
    other.

    Args:
        elasticity: α, 0 ≤ α < 2/(N+1). None: 0.9/N. 0 leaves the replicas independent.

    Raises:
        TypeError: a value is not a number.
        ValueError: at construction if α is negative or not below 1 (the bound for one replica), at
            `resolve` if α is unstable for the number of replicas.

    Source: Li et al. (2017), eq. 8; Zhang, Choromanska & LeCun, "Deep learning with elastic
    averaging SGD" (2015).

    Example:
        >>> rule = EASGD(elasticity=0.25)
        >>> before = rule.init(0.0)
        >>> after = rule.update(before, average=2.0, num_replicas=2)
        >>> after.global_model, rule.restart(4.0, rule.broadcast(before, after))
        (1.0, 3.0)
    """

    elasticity: float | None = None

    def __post_init__(self) -> None:
        if self.elasticity is None:
            return
        check_number("elasticity", self.elasticity, "0.9/N, which is the default")
        if not 0.0 <= self.elasticity < 1.0:
            raise ValueError(
                f"elasticity={self.elasticity!r} is outside [0, 1), the stable range of a single "
                "replica. The usual value is 0.9/N; None chooses it."
            )

    def resolve(self, num_replicas: int) -> EASGD:
        """Returns this rule with the default α, checked against the stability bound."""
        alpha, bound = self._alpha(num_replicas), 2.0 / (num_replicas + 1)
        if alpha >= bound:
            raise ValueError(
                f"elasticity={self.elasticity!r} is unstable with {num_replicas} replicas: it must "
                f"be below 2/(N+1) = {bound:.4g}. The usual value is 0.9/N = "
                f"{0.9 / num_replicas:.4g}."
            )
        return dataclasses.replace(self, elasticity=alpha)

    def init(self, weights: Array) -> GlobalModel:
        return GlobalModel(global_model=weights)

    def update(
        self, state: GlobalModel, average: Array, num_replicas: int, share: Scalar = 1.0
    ) -> GlobalModel:
        """Returns the state after a sync, with the same elasticity for any `share` of a block.

        No momentum lasts beyond the block, so a short block needs no smaller step.
        """
        gain = self._alpha(num_replicas) * num_replicas
        return GlobalModel(state.global_model + gain * (average - state.global_model))

    def _alpha(self, num_replicas: int) -> float:
        return 0.9 / num_replicas if self.elasticity is None else self.elasticity

    def broadcast(self, before: GlobalModel, after: GlobalModel) -> Array:
        """Returns the centre before the sync, towards which `restart` moves the replicas."""
        return before.global_model

    def restart(self, local: Array, broadcast: Array) -> Array:
        """Returns the replica's weights, moved towards the centre before the sync."""
        if self.elasticity is None:
            raise ValueError("Call resolve(num_replicas) first: elasticity is still None.")
        return local - self.elasticity * (local - broadcast)
