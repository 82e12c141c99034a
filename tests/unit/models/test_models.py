"""Tests of models/."""

import keras
import numpy as np
import pytest

from models.dnn import dnn


def test_the_papers_model_has_the_parameters_counted_by_hand():
    # 1320·1024 + 1024, five times 1024·1024 + 1024, and 1024·5723 + 5723.
    expected = 1_352_704 + 5 * 1_049_600 + 5_866_075
    assert expected == 12_466_779
    assert dnn(1320, 5723).count_params() == expected


def test_output_is_the_composition_of_its_layers():
    model = dnn(3, 4, layers=2, width=5, activation="sigmoid", seed=1)
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    hidden = x
    weights = model.get_weights()
    for kernel, bias in zip(weights[0:4:2], weights[1:4:2], strict=True):
        hidden = 1 / (1 + np.exp(-(hidden @ kernel + bias)))
    np.testing.assert_allclose(model(x), hidden @ weights[4] + weights[5], atol=1e-6)


def test_seed_decides_the_weights():
    first, same, other = (dnn(3, 4, layers=2, width=5, seed=s).get_weights() for s in (1, 1, 2))
    for a, b, c in zip(first[::2], same[::2], other[::2], strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.allclose(a, c)
    assert not np.allclose(first[2], dnn(5, 5, layers=0, seed=1).get_weights()[0])


def test_logits_stay_float32_under_mixed_precision():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = dnn(3, 4, layers=1, width=5, dropout=0.1)
    finally:
        keras.config.set_dtype_policy(policy)
    assert model.get_layer("hidden1").compute_dtype == "bfloat16"
    assert model(np.zeros([1, 3], np.float32)).dtype == "float32"


@pytest.mark.parametrize(
    "change", [{"layers": -1}, {"width": 0}, {"num_classes": 1}, {"dropout": 1.0}]
)
def test_a_value_out_of_range_is_named(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.*{next(iter(change.values()))}"):
        dnn(**{"input_dim": 3, "num_classes": 4, **change})
