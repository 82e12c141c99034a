"""Pretraining of a sigmoid DNN as a stack of restricted Boltzmann machines (RBMs).

Layer by layer from the input, each hidden layer of the DNN is trained as the hidden units of an
RBM on the outputs of the layers below it, without labels, by one step of contrastive divergence
(CD-1). The first RBM has Gaussian visible units, the others Bernoulli ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfpara.pretraining.rbm import BERNOULLI, FIRST_MOMENTUM, GAUSSIAN, RBM
from tfpara.pretraining.stack import hidden_layers
from tfpara.whole_number import checked_whole

# The initial bias of the visible units is computed from at most this number of minibatches.
_BIAS_MINIBATCHES = 100


class Pretrained(NamedTuple):
    """The result of pretraining for one layer.

    Attributes:
        layer: name of the layer.
        visible: the kind of the visible units of the layer's RBM.
        errors: for each epoch the mean squared reconstruction error of a visible unit.
    """

    layer: str
    visible: str
    errors: list[float]


def pretrain(
    model: keras.Model,
    dataset: tf.data.Dataset | Callable[[int], tf.data.Dataset],
    *,
    epochs: int = 1,
    gaussian_epochs: int | None = None,
    learning_rate: float = 0.4,
    gaussian_learning_rate: float = 0.01,
    momentum: float = 0.9,
    momentum_minibatches: int = 1000,
    weight_decay: float = 2e-4,
    initial_stddev: float = 0.1,
    seed: int = 0,
    verbose: int = 1,
) -> list[Pretrained]:
    """Sets the sigmoid hidden layers of `model` by greedy RBM pretraining.

    The layers' former weights are replaced; the layers above the sigmoid ones do not change. With
    velocity u and momentum m, which rises linearly from 0.5, a minibatch does

        u ← m u + (1 − m) · rate · (CD-1 − weight_decay · W),   W ← W + u

    where biases have no decay. The same seed and data give the same weights. Data for the first
    layer should have mean 0 and variance 1 in each dimension.

    With several workers, pretrain in one process and start all workers from its weights, or call
    `pretrain` on every worker, with the same whole data, before training.

    Args:
        model: a chain of layers. All its layers with weights are Dense, and all but the last of
            these have activation "sigmoid" and a bias. Between them there may be Dropout, which is
            inactive; before them there may be layers without weights. If the layers get sequences,
            each frame counts as a sample, also one of padding.
        dataset: a finite dataset of minibatches x or (x, labels, …), with x float [b, ...] as the
            model takes it. Or a function of the epoch's number, counted over all layers, that gives
            such a dataset.
        epochs: passes over the data for each Bernoulli-Bernoulli RBM.
        gaussian_epochs: the same for the Gaussian-Bernoulli RBM; 2 · epochs if not given.
        learning_rate: the factor of a minibatch's mean statistics, for Bernoulli-Bernoulli RBMs.
        gaussian_learning_rate: the same for the Gaussian-Bernoulli RBM, which becomes unstable
            already at lower rates.
        momentum: the highest m, in [0.5, 1), or 0 for no momentum.
        momentum_minibatches: the number of a layer's minibatches after which m is the highest.
        weight_decay: the decay of W, 0 or more.
        initial_stddev: the standard deviation of W's normal initial values, positive.
        seed: the seed of the initial values and of all samples.
        verbose: 0 is silent, 1 shows a progress bar for each epoch, 2 a line at its end.

    Returns:
        For each layer that was set, its name, the kind of its visible units, and its errors.

    Raises:
        TypeError: `model` is no Keras model, or elements of `dataset` are not tensors.
        ValueError: a model that is no such chain, a value out of range, a dataset without
            minibatches, or weights that are no longer finite.

    Source: Su and Chen (2015), section 5.1; defaults of Kaldi's pretrain_dbn.sh.
    """
    checked_whole("epochs", epochs)
    gaussian_epochs = 2 * epochs if gaussian_epochs is None else gaussian_epochs
    checked_whole("gaussian_epochs", gaussian_epochs)
    checked_whole("momentum_minibatches", momentum_minibatches)
    if momentum != 0 and not FIRST_MOMENTUM <= momentum < 1:
        raise ValueError(f"momentum must be 0 or lie in [0.5, 1). Received: {momentum!r}")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be 0 or more, and finite. Received: {weight_decay!r}")
    _check_positive("learning_rate", learning_rate)
    _check_positive("gaussian_learning_rate", gaussian_learning_rate)
    _check_positive("initial_stddev", initial_stddev)
    layers = hidden_layers(model)
    results: list[Pretrained] = []
    past = 0  # total number of epochs for which the layers below were trained
    for number, layer in enumerate(layers):
        first = number == 0
        rbm = RBM(
            layer.kernel.shape[0],
            layer.units,
            GAUSSIAN if first else BERNOULLI,
            learning_rate=gaussian_learning_rate if first else learning_rate,
            momentum=momentum,
            momentum_minibatches=momentum_minibatches,
            weight_decay=weight_decay,
            initial_stddev=initial_stddev,
            seed=(seed, number),
        )
        below = keras.Model(model.inputs, layer.input)
        data = _source(dataset, below)
        rbm.start_bias(itertools.islice(data(past), _BIAS_MINIBATCHES))
        title = (
            f"{layer.name}, layer {number + 1} of {len(layers)}, {rbm.visible_kind} visible units"
        )
        passes = gaussian_epochs if first else epochs
        errors = _train(rbm, data, range(past, past + passes), title, verbose)
        layer.kernel.assign(rbm.kernel)
        layer.bias.assign(rbm.hidden_bias)
        results.append(Pretrained(layer.name, rbm.visible_kind, errors))
        past += passes
    return results


def _source(
    dataset: tf.data.Dataset | Callable[[int], tf.data.Dataset], below: keras.Model
) -> Callable[[int], Iterator[tf.Tensor]]:
    """Returns a function from an epoch to its inputs of the layer, each float32 [b, visible]."""

    @tf.function(reduce_retracing=True)
    def outputs(x: tf.Tensor) -> tf.Tensor:
        found = tf.cast(below(x, training=False), tf.float32)
        return tf.reshape(found, [-1, found.shape[-1]])  # each frame of a sequence is a row

    def rows(epoch: int) -> Iterator[tf.Tensor]:
        data = dataset(epoch) if callable(dataset) else dataset
        if not isinstance(data, tf.data.Dataset):
            raise TypeError(
                "dataset must be a tf.data.Dataset, or a function that gives one. Received: "
                f"{type(data).__name__}"
            )
        for element in data:
            x = element[0] if isinstance(element, tuple) else element
            if not tf.is_tensor(x):
                raise TypeError(
                    "an element of the dataset must be a tensor x or a tuple (x, ...). Received: "
                    f"{type(x).__name__}"
                )
            if x.shape[0]:
                yield outputs(x)

    return rows


def _train(
    rbm: RBM,
    data: Callable[[int], Iterator[tf.Tensor]],
    epochs: range,
    title: str,
    verbose: int,
) -> list[float]:
    """Trains an RBM; returns the mean reconstruction error over each epoch."""
    errors = []
    minibatches = None  # number of minibatches in an epoch; known when the first epoch has ended
    for turn, epoch in enumerate(epochs, 1):
        if verbose:
            print(f"{title}: epoch {turn} of {len(epochs)}")
        shown = "reconstruction_error"
        bar = keras.utils.Progbar(minibatches, verbose=verbose, stateful_metrics=[shown])
        total, samples, number = 0.0, 0, 0
        for number, rows in enumerate(data(epoch), 1):
            total += float(rbm.learn(rows)) * int(rows.shape[0])
            samples += int(rows.shape[0])
            bar.update(number, [(shown, total / samples)], finalize=False)
        if not samples:
            raise ValueError(f"{title}: epoch {turn} has no minibatches of data.")
        bar.target = minibatches = number
        bar.update(number, finalize=True)
        if not math.isfinite(total) or not rbm.is_finite():
            kind = "gaussian_learning_rate" if rbm.visible_kind == GAUSSIAN else "learning_rate"
            raise ValueError(
                f"{title}: the weights are not finite any more. Lower {kind}, and make sure that "
                "the data are normalised to mean 0 and variance 1."
            )
        errors.append(total / samples)
    return errors


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite. Received: {value!r}")
