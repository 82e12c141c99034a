"""KerasSteps, beside Keras' own optimizers on variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

from tfpara.algorithms.keras_step import KerasSteps
from tfpara.schedules import Adapt

KINDS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.3),
    "global clip": lambda: optimizers.SGD(0.1, global_clipnorm=0.5),
    "Adam": lambda: optimizers.Adam(0.01, clipnorm=0.7),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Lion": lambda: optimizers.Lion(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.01, l1_regularization_strength=0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "schedule": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "Adapt": lambda: Adapt(0.1, memory=3),
}


def variables():
    draw = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "bias": (3,), "embeddings": (5, 2)}
    found = [
        keras.Variable(draw.normal(size=shape).astype(np.float32), name=name)
        for name, shape in shapes.items()
    ]
    found[0].constraint = keras.constraints.MaxNorm(1.5)
    return found


def gradients(steps):
    draw = np.random.default_rng(1)
    return [
        [draw.normal(size=v.shape).astype(np.float32) for v in variables()] for _ in range(steps)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_keras(kind):
    wanted, optimizer = variables(), KINDS[kind]()
    given = variables()
    other = KINDS[kind]()
    if kind == "AdamW":
        for each, weights in ((optimizer, wanted), (other, given)):
            each.exclude_from_weight_decay(var_list=[weights[1]])
    optimizer.build(wanted)
    step = KerasSteps(other, given)
    weights = [tf.convert_to_tensor(v.value) for v in given]
    state = [tf.convert_to_tensor(value) for value in step.initial]
    call = tf.function(step.__call__, autograph=False)
    for gradient in gradients(5):
        optimizer.apply([tf.constant(g) for g in gradient])
        weights, state = call(weights, state, [tf.constant(g) for g in gradient])
        for weight, variable in zip(weights, wanted, strict=True):
            np.testing.assert_allclose(weight, variable.numpy(), rtol=2e-5, atol=1e-6)
    before = variables()
    for variable, start in zip(given, before, strict=True):
        np.testing.assert_array_equal(variable, start)  # the variables themselves are left alone
    moved = [np.abs(w - b.numpy()).max() for w, b in zip(weights, before, strict=True)]
    assert min(moved) > 1e-4


def test_slots_of_float64_have_all_its_digits():
    start, gradient = np.array([1.0, -2.0]), tf.constant([0.1, 0.3], tf.float64)
    wanted, given = keras.Variable(start, dtype="float64"), keras.Variable(start, dtype="float64")
    optimizer = optimizers.Adam(0.01)
    optimizer.build([wanted])
    step = KerasSteps(optimizers.Adam(0.01), [given])
    weights, state = [given.value], [tf.convert_to_tensor(value) for value in step.initial]
    for _ in range(3):
        optimizer.apply([gradient])
        weights, state = step(weights, state, [gradient])
    np.testing.assert_allclose(weights[0], wanted.value, rtol=1e-12)


def test_the_rate_is_a_part_of_the_state():
    step = KerasSteps(optimizers.Adam(0.25), variables())
    assert step.initial[step.rate_index] == 0.25
    weights = [tf.convert_to_tensor(v.value) for v in variables()]
    state = [tf.convert_to_tensor(value) for value in step.initial]
    state[step.rate_index] = tf.constant(0.0)
    ones = [tf.ones_like(w) for w in weights[1:]]
    after, _ = step(weights, state, [tf.zeros_like(weights[0]), *ones])
    np.testing.assert_array_equal(after[1], weights[1])
    scheduled = optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    assert KerasSteps(scheduled, variables()).rate_index is None


def test_clipping_can_be_left_out():
    weights = [tf.convert_to_tensor(v.value) for v in variables()]
    ones = [tf.zeros_like(weights[0]), *(tf.ones_like(w) for w in weights[1:])]
    for clip, moved in ((True, 0.25), (False, 1.0)):
        step = KerasSteps(optimizers.SGD(1.0, clipvalue=0.25), variables(), clip=clip)
        after, _ = step(weights, [tf.convert_to_tensor(s) for s in step.initial], ones)
        np.testing.assert_allclose(weights[1] - after[1], np.full(3, moved), rtol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda: optimizers.SGD(0.1, use_ema=True), "use_ema=True.*averages="),
        (lambda: optimizers.SGD(0.1, gradient_accumulation_steps=4), "sync_period"),
        (lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), "another one, SGD.*bfloat16"),
        (lambda: optimizers.MultiOptimizer(lambda _: optimizers.SGD()), "one for all weights"),
    ],
)
def test_settings_that_reach_beyond_a_step_are_refused(optimizer, told):
    with pytest.raises(ValueError, match=told):
        KerasSteps(optimizer(), variables())
