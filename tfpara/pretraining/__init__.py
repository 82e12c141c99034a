"""Initial weights without labels: greedy RBM pretraining."""

from tfpara.pretraining.greedy import Pretrained, pretrain
from tfpara.pretraining.rbm import BERNOULLI, GAUSSIAN, RBM, Statistics, cd1
from tfpara.pretraining.stack import hidden_layers

__all__ = [
    "BERNOULLI",
    "GAUSSIAN",
    "RBM",
    "Pretrained",
    "Statistics",
    "cd1",
    "hidden_layers",
    "pretrain",
]
