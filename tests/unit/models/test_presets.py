"""The papers' shapes: parameters counted by hand."""

import json

import keras
import numpy as np
import pytest

from models import presets
from models.cldnn import cldnn
from models.lstm import lstm

# Affine layers, from the papers' figures; LSTM layers have 4 parts, each with input, recurrence and
# bias; those with projection also three peepholes and a projection matrix.
HAND_COUNTED = {
    "dnn-000": (924 + 1) * 2048 + 7 * (2048 + 1) * 2048 + (2048 + 1) * 11088,
    "dnn-001": (440 + 1) * 2048 + 5 * (2048 + 1) * 2048 + (2048 + 1) * 8806,
    "dnn-002": (429 + 1) * 2048 + 6 * (2048 + 1) * 2048 + (2048 + 1) * 10217,
    "dnn-003": 12_466_779,
    "dnn-003-7": 12_466_779 + (1024 + 1) * 1024,
    "lstm-000": 4 * (252 + 1024 + 1) * 1024
    + 4 * (1024 + 1024 + 1) * 1024
    + (1024 + 1) * 1024
    + (1024 + 1) * 11088,
    "cldnn-003": (22 * 8 + 1) * 128
    + (11 * 128 + 1) * 192
    + 4 * (192 + 256 + 1) * 1024
    + 4 * (512 + 256 + 1) * 1024
    + 2 * (3 * 1024 + 1024 * 512)
    + (512 + 1) * 1024
    + (1024 + 1) * 1024
    + (1024 + 1) * 5723,
}


@pytest.mark.parametrize("name", presets.PRESETS)
def test_parameters_are_those_counted_by_hand(name):
    model = presets.build(name)
    assert model.count_params() == HAND_COUNTED[name]
    assert model.output_shape[-1] == presets.get(name).num_classes


def test_parameters_that_the_papers_give():
    """Li et al. (2017): about 13.5 million for the DNN, 13.8 for the CLDNN."""
    assert round(HAND_COUNTED["dnn-003-7"] / 1e6, 1) == 13.5
    assert round(HAND_COUNTED["cldnn-003"] / 1e6, 1) == 13.8


def test_all_512_projections_recurring_cannot_be_the_papers_cldnn():
    """Even with nothing at all before the first LSTM layer."""
    lstm_layers = 4 * (512 + 1) * 1024 + 4 * (512 + 512 + 1) * 1024 + 2 * (3 + 512) * 1024
    dense = (512 + 1) * 1024 + (1024 + 1) * 1024 + (1024 + 1) * 5723
    assert lstm_layers + dense > 14.7e6
    other = presets.build("cldnn-003", projection=512, output_projection=0)
    assert other.count_params() > 14.7e6


@pytest.mark.parametrize("name", presets.PRESETS)
def test_scale_shrinks_widths_alone(name):
    full, small = presets.get(name).resolve(), presets.get(name).resolve(0.125)
    assert full.keys() == small.keys()
    for argument, value in full.items():
        scaled = value / 8 if argument in presets.WIDTHS else value
        assert small[argument] == scaled
    assert json.loads(json.dumps(small)) == small


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_small_one_runs_on_other_data(name):
    preset = presets.get(name)
    dim = preset.input_dim(120)
    model = preset.build(0.01, dim, 7, seed=1)
    frames = np.ones([2, 4, dim] if preset.recurrent else [2, dim], np.float32)
    assert model(frames).shape == (*frames.shape[:-1], 7)


def test_presets_take_the_papers_frames():
    widths = {name: presets.get(name).input_dim() for name in ("dnn-003", "lstm-000", "cldnn-003")}
    assert widths == {"dnn-003": 1320, "lstm-000": 252, "cldnn-003": 880}
    assert presets.build("lstm-000", 0.01).input_shape == (None, None, 252)


def test_changes_are_taken_as_they_are():
    model = presets.build("dnn-001", 0.1, num_classes=9, width=33, layers=2, seed=0)
    assert [w.shape for w in model.get_weights()[::2]] == [(440, 33), (33, 33), (33, 9)]


@pytest.mark.parametrize("name", ["lstm-000", "cldnn-003"])
def test_seed_decides_the_weights(name):
    first, same, other = (
        presets.build(name, 0.02, num_classes=5, seed=seed).get_weights() for seed in (1, 1, 2)
    )
    for a, b, c in zip(first, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.ndim == 1 or not a.any() or not np.allclose(a, c)
    shapes = [w.shape for w in first if w.ndim == 2]
    repeated = [w for w in first if w.ndim == 2 and w.any() and shapes.count(w.shape) > 1]
    for number, w in enumerate(repeated):
        assert not any(np.array_equal(w, other) for other in repeated[:number])


def test_the_convolution_sees_every_block_of_neighbouring_bands():
    """A filter that copies one band of one spliced frame finds it, wherever the band is."""
    model = cldnn(6 * 40, 3, maps=1, band_filter=8, band_pool=3, reduction=0, layers=1, cells=2)
    convolution, pooling, maps = (model.get_layer(n) for n in ("convolution", "pooling", "maps"))
    kernel = np.zeros((1, 8, 6, 1))
    kernel[0, 2, 4, 0] = 1.0  # the third of the filter's bands, in the fifth of the six blocks
    convolution.set_weights([kernel, np.zeros(1)])
    part = keras.Model(model.input, maps.output)
    frames = np.random.default_rng(0).uniform(size=(2, 5, 6, 40)).astype("float32")
    found = part(frames.reshape(2, 5, 240)).numpy()
    expected = frames[:, :, 4, 2 : 2 + 33].reshape(2, 5, 11, 3).max(-1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert pooling.output.shape[2:] == (11, 1)


def test_logits_stay_float32_under_mixed_precision():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        for name in ("lstm-000", "cldnn-003"):
            model = presets.build(name, 0.01, num_classes=4, streams=2)
            dim = presets.get(name).input_dim()
            taken = {"frames": np.ones([2, 3, dim], np.float32), "reset": np.array([True, False])}
            assert model(taken).dtype == "float32"
            assert model.get_layer("dense1").compute_dtype == "bfloat16"
    finally:
        keras.config.set_dtype_policy(policy)


def test_an_unknown_name_is_refused_with_a_list():
    with pytest.raises(ValueError, match="no preset 'dnn-004'.*dnn-000.*lstm-000, cldnn-003"):
        presets.build("dnn-004")


@pytest.mark.parametrize(
    ("build", "change", "message"),
    [
        (lstm, {"layers": 0}, "layers=0"),
        (lstm, {"cells": 0}, "cells=0"),
        (lstm, {"projection": -1}, "projection=-1"),
        (lstm, {"num_classes": 1}, "num_classes=1"),
        (lstm, {"streams": 0}, "streams=0"),
        (cldnn, {"input_dim": 90}, "input_dim=90, bands=40"),
        (cldnn, {"band_filter": 39}, "band_filter=39"),
        (cldnn, {"maps": 0}, "maps=0"),
    ],
)
def test_bad_arguments(build, change, message):
    with pytest.raises(ValueError, match=message):
        build(**{"input_dim": 80, "num_classes": 3, "cells": 2, "width": 2, **change})


def test_bad_scale():
    with pytest.raises(ValueError, match="scale=0"):
        presets.build("dnn-003", 0)
