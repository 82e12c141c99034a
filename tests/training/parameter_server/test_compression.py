"""compression="bf16": large tensors are rounded in pulls and pushes, but not on the servers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara

SIZE, STEPS, RATE = 300, 4, 0.5


def rounded(array):
    return array.astype(tf.bfloat16.as_numpy_dtype).astype("float32")


@pytest.mark.parametrize(
    ("rule", "period"), [(tfpara.ASGD(), 1), (tfpara.Downpour(), 2)], ids=["asgd", "downpour"]
)
def test_pulls_and_pushes_are_rounded_and_the_servers_weights_are_not(rule, period):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(STEPS * 8, SIZE)).astype("float32")
    y = draw.normal(size=(STEPS * 8, SIZE)).astype("float32")
    strategy = tfpara.simulate_async(1, rule, sync_period=period, compression="bf16")
    with strategy.scope():
        model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(SIZE)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    kernel, bias = model.get_weights()
    bias += np.float32(1.0) / 3
    model.set_weights([kernel, bias])
    strategy.fit(model, x, y, batch_size=8, shuffle=False, chunks=1, verbose=0)

    for block in range(STEPS // period):
        pulled = rounded(kernel), bias
        local = pulled
        for step in range(block * period, (block + 1) * period):
            rows = slice(8 * step, 8 * step + 8)
            error = (x[rows] @ local[0] + local[1] - y[rows]) * np.float32(2 / y[rows].size)
            gradients = x[rows].T @ error, error.sum(0)
            local = tuple(w - np.float32(RATE) * g for w, g in zip(local, gradients, strict=True))
        if rule.local_steps:
            kernel = kernel + rounded(local[0] - pulled[0])
            bias = bias + (local[1] - pulled[1])
        else:
            kernel = kernel - np.float32(RATE) * rounded(gradients[0])
            bias = bias - np.float32(RATE) * gradients[1]
    found = model.get_weights()
    assert np.abs(found[0] - rounded(found[0])).max() > 1e-4
    # a number on the edge between two of bfloat16's may be rounded to either
    np.testing.assert_allclose(found[0], kernel, atol=5e-5)
    np.testing.assert_allclose(found[1], bias, atol=1e-6)


def test_what_is_no_compression_is_refused():
    with pytest.raises(ValueError, match='compression=\'int4\' must be "none", or "bf16"'):
        tfpara.simulate_async(2, tfpara.ASGD(), compression="int4")
