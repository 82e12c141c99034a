"""Greedy RBM pretraining, which makes initial weights from data without labels."""

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
