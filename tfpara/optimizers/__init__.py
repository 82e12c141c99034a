"""Local optimizers of the papers."""

from tfpara.optimizers.ng_sgd import NGSGD
from tfpara.optimizers.online_natural_gradient import OnlineNaturalGradient, Scatter

__all__ = ["NGSGD", "OnlineNaturalGradient", "Scatter"]
