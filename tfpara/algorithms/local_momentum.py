"""The local momentum within a block, if the rule has a momentum, too."""

from __future__ import annotations

from tfpara.algorithms.arithmetic import minimum, positive_part
from tfpara.typing import Scalar

# `in_a_block` explains both numbers.
_MEMORIES = 5.0
_WHOLE = 20.0


def in_a_block(momentum: float, steps: Scalar, delayed: bool = False) -> tuple[Scalar, Scalar]:
    """Returns the momentum for blocks of `steps` steps, and the factor of the learning rate.

    With momentum m, a gradient moves the weights for about 1/(1 − m) steps: the memory of m. The
    local and the block momentum together are stable only at far smaller learning rates than each
    alone. So the memory is shortened, to a fifth of the block, and steps become longer in return:

        m' = min(m, max(0, 1 − 5/τ));  rate' = max(1, c (1 − m') / (1 − m)) · rate
        c = min(1, max(½, τ/20))

    Adam's β₁ is such an m. But the weights in Adam's average of gradients add up to one for every
    β₁, so Adam's learning rate does not change.

    A gradient moves the weights of SGD by rate/(1 − m) in the end. The factor restores all of that
    movement in blocks of at least 20 steps, and half of it in blocks of up to 10 steps: with all of
    it the shortest blocks diverged at learning rates that one replica tolerates (docs/study.md). If
    updates come late, which acts as one more momentum, half of the movement is restored in all
    blocks. In blocks of at least 5/(1 − m) steps, momentum and rate do not change.

    Args:
        momentum: m, the momentum of the optimizer, 0 ≤ m < 1.
        steps: τ > 0, the optimizer's steps in a block.
        delayed: whether updates come late, as in an asynchronous run: c = ½.

    Example:
        >>> in_a_block(0.75, 10.0), in_a_block(0.75, 1.0), in_a_block(0.75, 20.0)
        ((0.5, 1.0), (0.0, 2.0), (0.75, 1.0))
    """
    shorter = minimum(momentum, positive_part(1.0 - _MEMORIES / steps))
    restored = 0.5 if delayed else 0.5 + minimum(0.5, positive_part(steps / _WHOLE - 0.5))
    return shorter, 1.0 + positive_part(restored * (1.0 - shorter) / (1.0 - momentum) - 1.0)
