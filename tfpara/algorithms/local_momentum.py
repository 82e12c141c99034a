"""The local momentum within a block, if the rule has a momentum, too."""

from __future__ import annotations

from tfpara.algorithms.arithmetic import minimum, positive_part
from tfpara.typing import Scalar

_MEMORIES = 5.0  # the length of a block, in memories of the local momentum
_WHOLE = 20.0  # from so many steps on, a larger rate makes up for all of it: c = 1 below


def in_a_block(momentum: float, steps: Scalar, delayed: bool = False) -> tuple[Scalar, Scalar]:
    """Returns the momentum for blocks of `steps` steps, and the factor of the learning rate.

    Momentum m moves the weights on for about 1/(1 − m) steps, its memory. If a block is not much
    longer, its update contains what earlier blocks began, and the momentum of blocks repeats
    that: the two together are stable only at far smaller learning rates than each alone. So the
    memory is shortened, to a fifth of the block, and steps become longer in return:

        m' = min(m, max(0, 1 − 5/τ));  rate' = max(1, c (1 − m') / (1 − m)) · rate
        c = min(1, max(½, τ/20))

    Adam's β₁ is such an m. Its average of gradients has weights that add up to one, whatever β₁ is,
    so its rate stays.

    A gradient moves the weights of SGD by rate/(1 − m) in the end. The factor restores all of that
    movement in blocks of at least 20 steps, and half of it in blocks of up to 10 steps: with all of
    it the shortest blocks diverged at learning rates that one replica tolerates (docs/study.md). It
    is half in all blocks if updates come late, since that acts as one more momentum. Blocks of at
    least 5/(1 − m) steps change nothing.

    Args:
        momentum: m of the optimizer, 0 ≤ m < 1.
        steps: τ > 0, the optimizer's steps in a block.
        delayed: whether updates come late, as in an asynchronous run: c = ½.

    Example:
        >>> in_a_block(0.75, 10.0), in_a_block(0.75, 1.0), in_a_block(0.75, 20.0)
        ((0.5, 1.0), (0.0, 2.0), (0.75, 1.0))
    """
    shorter = minimum(momentum, positive_part(1.0 - _MEMORIES / steps))
    restored = 0.5 if delayed else 0.5 + minimum(0.5, positive_part(steps / _WHOLE - 0.5))
    return shorter, 1.0 + positive_part(restored * (1.0 - shorter) / (1.0 - momentum) - 1.0)
