"""Bulk synchronous parallel training: model averaging."""

from __future__ import annotations

import dataclasses

from tfpara.algorithms.rule import GlobalModel, Rule
from tfpara.typing import Array, Scalar


@dataclasses.dataclass(frozen=True)
class BSP(Rule):
    """Model averaging: every replica continues from the mean of the local models.

        W = w_i = w̄ = Σ_i (n_i / Σ_j n_j) w_i

    with n_i the samples that replica i processed since the last sync.

    Source: Li et al., "Empirical Evaluation of Parallel Training Algorithms on Acoustic
    Modeling" (2017), eq. 1.

    Example:
        >>> rule = BSP()
        >>> state = rule.update(rule.init(0.0), average=2.0, num_replicas=4)
        >>> rule.restart(local=3.0, broadcast=rule.broadcast(None, state))
        2.0
    """

    def init(self, weights: Array) -> GlobalModel:
        return GlobalModel(weights)

    def update(
        self, state: GlobalModel, average: Array, num_replicas: int, share: Scalar = 1.0
    ) -> GlobalModel:
        """Returns the state with the average as global model, whatever the block's `share` is."""
        return GlobalModel(average)
