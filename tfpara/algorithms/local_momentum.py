"""The local momentum within a block, if the rule has a momentum, too."""

from __future__ import annotations

from tfpara.algorithms.arithmetic import minimum, positive_part
from tfpara.typing import Scalar

# The 5 and the 20 of the equation of `in_a_block`.
_MEMORIES = 5.0
_WHOLE = 20.0


def in_a_block(momentum: float, steps: Scalar, delayed: bool = False) -> tuple[Scalar, Scalar]:
    """Returns the momentum for blocks of `steps` steps, and the factor of the learning rate.

        m' = min(m, max(0, 1 − 5/τ));  rate' = max(1, c (1 − m') / (1 − m)) · rate
        c = min(1, max(½, τ/20))

    docs/rules.md, "Fitted momentum", has the reasons. Adam's learning rate does not change.

    Args:
        momentum: m, the momentum of the optimizer (β₁ of Adam), 0 ≤ m < 1.
        steps: τ > 0, the optimizer's steps in a block.
        delayed: whether updates come late, as in an asynchronous run. Lateness acts as one more
            momentum, so then c = ½.

    Example:
        >>> in_a_block(0.75, 10.0), in_a_block(0.75, 1.0), in_a_block(0.75, 20.0)
        ((0.5, 1.0), (0.0, 2.0), (0.75, 1.0))
    """
    shorter = minimum(momentum, positive_part(1.0 - _MEMORIES / steps))
    restored = 0.5 if delayed else 0.5 + minimum(0.5, positive_part(steps / _WHOLE - 0.5))
    return shorter, 1.0 + positive_part(restored * (1.0 - shorter) / (1.0 - momentum) - 1.0)
