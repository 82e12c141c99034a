"""Bulk synchronous parallel training: model averaging."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class BSPState(NamedTuple):
    """`global_model`: the mean of the local models at the last sync, W."""

    global_model: Any


@dataclasses.dataclass(frozen=True)
class BSP:
    """Model averaging: every replica goes on from the mean of the local models.

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

    def resolve(self, num_replicas: int) -> BSP:
        """Returns this rule: nothing in it depends on the number of replicas."""
        del num_replicas
        return self

    def init(self, weights: Any) -> BSPState:
        """State of a run that starts at the flat vector `weights`."""
        return BSPState(global_model=weights)

    def update(
        self, state: BSPState, average: Any, num_replicas: int, share: Any = 1.0
    ) -> BSPState:
        """The global step: the average becomes the global model, whatever the block's `share`."""
        del state, num_replicas, share
        return BSPState(global_model=average)

    def broadcast(self, before: BSPState | None, after: BSPState) -> Any:
        """What the replicas need: the global model."""
        del before
        return after.global_model

    def restart(self, local: Any, broadcast: Any) -> Any:
        """The weights that a replica goes on from: the global model."""
        del local
        return broadcast

    def measured_from(self, state: Any, received: Any) -> Any:
        """What the replicas' differences from `received` are added to: the exact broadcast point.

        The replicas were put where they have `received`, which rounding has moved; the equations
        speak of what they have learned since.
        """
        del received
        return self.broadcast(None, state)

    def restart_delayed(self, local: Any, snapshot: Any, broadcast: Any) -> Any:
        """The same for a replica that has trained on since the sync began at `snapshot`.

            w_i ← B + (w_i − s_i)

        with B the broadcast point: what it has learned since is kept. The next sync measures the
        replicas from B too, so the rule's equations stay as they are. Shen et al., "Faster
        distributed deep net training: computation and communication decoupled stochastic gradient
        descent" (CoCoD-SGD, 2019), for model averaging.
        """
        return self.restart(local, broadcast) + (local - snapshot)
