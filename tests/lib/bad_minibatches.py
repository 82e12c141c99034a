"""Minibatches of which some have NaN or Inf or, for the run without these, no rows; and a net."""

import keras
import numpy as np
import tensorflow as tf

import tfpara

COUNT, ROWS = 24, 4  # minibatches of an epoch, rows of one
# Minibatch k is of replica k mod N: of 2 replicas number 2 of replica 1, and two of one step.
BAD = (3, 14, 15)
KINDS = {"nan": np.nan, "inf": np.inf, "empty": 0.0}


def by_epoch(strategy, kind):
    """Returns the minibatches for `fit`; the bad ones are as `kind` says, one of `KINDS`."""

    def of_epoch(epoch):
        rng = np.random.default_rng(epoch)
        x = rng.normal(size=(COUNT, ROWS, 6)).astype("float32")
        y = rng.integers(0, 3, (COUNT, ROWS))
        x[list(BAD), 1, 2] = KINDS[kind]
        rows = np.full(COUNT, ROWS)
        rows[list(BAD)] = 0 if kind == "empty" else ROWS
        x, y, rows = map(tf.constant, (x, y, rows))
        return tf.data.Dataset.range(COUNT).map(lambda k: (x[k, : rows[k]], y[k, : rows[k]]))

    return strategy.minibatches_by_epoch(of_epoch)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam(**options):
    # Clipping makes a finite gradient of an infinite one.
    return keras.optimizers.Adam(0.01, clipvalue=0.5, **options)


RULES = {"BSP": tfpara.BSP(), "BMUF": tfpara.BMUF()}
OPTIMIZERS = {"sgd": sgd, "adam": adam}


def net():
    """Returns a net with batch normalisation."""
    layers = keras.layers
    hidden = [layers.Dense(7, "relu"), layers.BatchNormalization(momentum=0.8)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])


def compiled(strategy, optimizer, make=net, **options):
    """Returns a model that is made and compiled in the scope."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], **options)
    return model


def state(strategy, model):
    """Returns each replica's variables, but for seeds, and the global model's."""
    values = [
        part.numpy()
        for variable in [*model.variables, *model.optimizer.variables]
        if "seed" not in variable.path
        for part in strategy.experimental_local_results(variable.value)
    ]
    with strategy.weights(model, "global"):
        return values + model.get_weights()
