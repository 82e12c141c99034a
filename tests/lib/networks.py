"""Small models and data that the tests of NG-SGD share."""

import keras
import numpy as np

from tfpara.optimizers import NGSGD

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
layers = keras.layers


def dense_model(width=12, **options):
    hidden = layers.Dense(10, activation="tanh", **options)
    return keras.Sequential([keras.Input((width,)), hidden, layers.Dense(4, **options)])


def compiled(model, *arguments, loss=LOSS, **options):
    model.compile(NGSGD(*arguments, **options).attach(model), loss, metrics=["accuracy"])
    return model


def minibatches(steps, n=64, width=12, seed=0, scales=(0.5, -1.5), mean=0.5):
    """Returns inputs with very different scales by direction, and classes that depend on all."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(width, width)))[0]
    z = rng.normal(size=(steps, n, width))
    x = (z * np.logspace(*scales, width)) @ turn + mean
    y = np.argmax(z @ rng.normal(size=(width, 4)), -1)
    return x.astype("float32"), y.astype("int32")


def targets(classes):
    return np.eye(4, dtype="float32")[classes]


def fisher_variables(model):
    return [v for v in model.optimizer.variables if "scatter" in v.path]


def mixed_model():
    inner = keras.Sequential([keras.Input((9,)), layers.Dense(7, "relu"), layers.Dropout(0.1)])
    inputs = keras.Input((8, 3))
    x = layers.Conv1D(6, 3, padding="causal")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.LSTM(9)(x)
    x = inner(x)
    return keras.Model(inputs, layers.Dense(4, kernel_regularizer="l2")(x))


def mixed_data(n=128):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 8, 3)).astype("float32")
    return x, np.argmax(x[:, -1] @ rng.normal(size=(3, 4)), -1)
