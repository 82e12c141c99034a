"""BMUF with local Adam: the first and second moments are filtered along with the weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tfpara.algorithms.arithmetic import check_number, positive_part
from tfpara.algorithms.bmuf import BMUF
from tfpara.typing import Array, Scalar

if TYPE_CHECKING:
    import keras


class MomentState(NamedTuple):
    """The replicas' moments at the start of a block, and the length of the filter in steps."""

    momentum: Array  # Adam's m at the start of the block
    velocity: Array  # Adam's v at the start of the block
    equivalent_steps: Scalar  # ρ: the last update Δ corresponds to this number of local steps
    blocks: Scalar  # number of blocks so far; a block with a share f of the steps counts f


@dataclasses.dataclass(frozen=True)
class BMUFAdam(BMUF):
    """BMUF for replicas that train with Adam or AdamW.

    The weights follow `tfpara.BMUF`. Block momentum moves the replicas beyond their average w̄, to
    a point where no replica has been. So neither the replicas' moments nor their average fit this
    point. This rule estimates the moments that Adam would have at this point. With τ steps in the
    block, m the moment at its start, and m̄ the average of the replicas' moments at its end,

        g = (m̄ − β^τ m) / (1 − β^τ)                the block's mean gradient (squared, for v)
        ρ ← ηρ + ζτ                                 Δ in steps, as Δ ← ηΔ + ζG
        a = ηρ + (ζ − 1)τ  (Nesterov),  ρ − τ  (classical)     steps from w̄ to the broadcast point
        m ← β^a m̄ + (1 − β^a) g                     as if `a` more steps had seen g

    for both moments, where β is β₁ or β₂. With ζ = 1, as published, a = ηρ and

        m ← [(1 − β^(τ+a)) m̄ − (β^τ − β^(τ+a)) m] / (1 − β^τ).

    Adam's bias correction divides by 1 − β^t for t steps. The authors raise t by `a` as well. A
    Keras optimizer has one counter for bias correction and schedules. So this rule leaves t as it
    is, and multiplies the new moment by (1 − β^t) / (1 − β^(t+a)): the corrected moments are the
    same, and unbiased in all later steps.

    With η = 0 and ζ = 1 the moments are simply averaged. In a shorter block, with a share f of the
    minibatches of a whole block, ρ follows Δ of `tfpara.BMUF`, ρ' = (1 − f(1−η))ρ + ζτ, and so do
    the steps from w̄ to the broadcast point, a = η'ρ' + (ζ − 1)τ − (1−f)ηρ (Nesterov), ρ' − τ −
    (1−f)ρ (classical). During a warm-up, η is the momentum before the block, and η' the momentum
    after the block.

    Args:
        block_momentum: η, as in `tfpara.BMUF`.
        block_learning_rate: ζ, as in `tfpara.BMUF`.
        nesterov: the form of block momentum; the default, True, is the authors'.
        compat: None only; the forms of CNTK and fairseq have no rule for moments.
        warmup: as in `tfpara.BMUF`.
        beta_1: β₁ of the local optimizer.
        beta_2: β₂ of the local optimizer.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value outside its range.

    Source: Chen, Ding & Huo, "Parallelizing Adam optimizer with blockwise model-update filtering"
    (ICASSP 2020). The general ζ and the classical form follow from the same argument.

    Example:
        >>> rule = BMUFAdam(block_momentum=0.0)
        >>> moments = rule.init_moments(0.0, 0.0)
        >>> moments = rule.update_moments(moments, 0.5, 0.25, steps=4, iterations=4, num_replicas=2)
        >>> moments.momentum, moments.velocity
        (0.5, 0.25)
    """

    beta_1: float = 0.9
    beta_2: float = 0.999

    # None: syncs cannot overlap training. A sync computes Adam's moments for the weights that it
    # broadcasts. If a replica trained during the sync, its own moments would change meanwhile, and
    # there is no equation that combines these with the moments that the sync computes.
    restart_delayed: ClassVar[None] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat is not None:
            raise ValueError(
                f"compat={self.compat!r}: BMUFAdam has no such form. Leave compat out, or use "
                "tfpara.BMUF."
            )
        for name, beta in (("beta_1", self.beta_1), ("beta_2", self.beta_2)):
            check_number(name, beta, "Keras' default, 0.9 or 0.999")
            if not 0.0 < beta < 1.0:
                raise ValueError(
                    f"{name}={beta!r} is outside (0, 1). Give the local optimizer's; 0.9 and 0.999 "
                    "are Keras' defaults."
                )

    def check_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Refuses a local optimizer whose moments this rule would filter wrongly.

        Raises:
            ValueError: the optimizer is not Adam or AdamW, has amsgrad, accumulates gradients, or
                has other betas than the rule.
        """
        names = {kind.__name__ for kind in type(optimizer).__mro__}
        if "Adam" not in names or getattr(optimizer, "amsgrad", False):
            shown = f"{type(optimizer).__name__}(amsgrad=True)" if "Adam" in names else optimizer
            raise ValueError(
                f"BMUFAdam filters the moments of keras.optimizers.Adam and AdamW (without "
                f"amsgrad), but the model is compiled with {shown!s}. Compile it with one of them, "
                "or use tfpara.BMUF."
            )
        cycle = getattr(optimizer, "gradient_accumulation_steps", None)
        if cycle and cycle > 1:
            raise ValueError(
                f"gradient_accumulation_steps={cycle!r}: BMUFAdam takes each minibatch of a block "
                "for a step of the moments. Leave it out and choose larger minibatches, or use "
                "tfpara.BMUF."
            )
        for name in ("beta_1", "beta_2"):
            if getattr(optimizer, name) != getattr(self, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} in BMUFAdam and "
                    f"{getattr(optimizer, name)!r} in the local optimizer. Give both the same."
                )

    def init_moments(self, momentum: Array, velocity: Array) -> MomentState:
        """Returns the state of a run whose replicas start with these moments, flat vectors."""
        return MomentState(momentum, velocity, equivalent_steps=0.0, blocks=0.0)

    def update_moments(
        self,
        state: MomentState,
        momentum: Array,
        velocity: Array,
        *,
        steps: Scalar,
        iterations: Scalar,
        num_replicas: int,
        share: Scalar = 1.0,
    ) -> MomentState:
        """Returns the moments for the next block, at the point that `broadcast` gives.

        Args:
            state: the state of the block that has ended.
            momentum: mean of the replicas' first moments at the end of the block, weighted as w̄.
            velocity: mean of the replicas' second moments, in the same way.
            steps: τ ≥ 1, minibatches of the block (of the replica with the most): a number, or a
                scalar tensor of the moments' dtype.
            iterations: t ≥ τ, minibatches since the moments were zero, as the local optimizer
                counts them; of the same types as `steps`.
            num_replicas: N.
            share: f, the part of a whole block that these steps are.

        Returns:
            The new state, with which all replicas continue. The second moment is never negative.
        """
        eta, zeta = self.momentum_after(state.blocks, num_replicas), self.block_learning_rate
        blocks = state.blocks + share
        rest = (1.0 - share) * state.equivalent_steps
        equivalent = eta * state.equivalent_steps + (1.0 - eta) * rest + zeta * steps
        # `ahead` is the distance, in steps, from w̄ to the weights that are broadcast. These are
        # B = W + ηΔ with Nesterov momentum, and W with classical momentum.
        if self.nesterov:
            ahead = self.momentum_after(blocks, num_replicas) * equivalent
            ahead += (zeta - 1.0) * steps - eta * rest
        else:
            ahead = equivalent - rest - steps
        gradient = _block_mean(self.beta_1, state.momentum, momentum, steps)
        next_momentum = _go_on(self.beta_1, momentum, gradient, ahead, iterations)
        # Only rounding errors can make this mean negative: without them, `velocity` is at least
        # beta_2**steps times `state.velocity`.
        square = positive_part(_block_mean(self.beta_2, state.velocity, velocity, steps))
        next_velocity = _go_on(self.beta_2, velocity, square, ahead, iterations)
        return MomentState(next_momentum, positive_part(next_velocity), equivalent, blocks)


def _block_mean(beta: float, start: Array, end: Array, steps: Scalar) -> Array:
    """Returns the g for which end = β^τ start + (1 − β^τ) g."""
    kept = beta**steps
    return (end - kept * start) / (1.0 - kept)


def _go_on(beta: float, moment: Array, gradient: Array, ahead: Scalar, iterations: Scalar) -> Array:
    """Returns the moment after `ahead` more steps with this gradient."""
    kept = beta**ahead
    # The optimizer's counter does not change, so the result keeps the bias of `iterations` steps.
    bias = (1.0 - beta**iterations) / (1.0 - beta ** (iterations + ahead))
    return bias * (kept * moment + (1.0 - kept) * gradient)
