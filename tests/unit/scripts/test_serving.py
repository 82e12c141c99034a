"""Features that a served model makes are those of its corpus."""

import numpy as np
import pytest

from input import features
from scripts import serving


@pytest.mark.parametrize(
    ("made", "dim", "about"),
    [
        ({}, 2, "2 log-mel energies"),
        ({"features": "mfcc", "deltas": 1, "cmvn": "utterance", "norm_vars": True}, 3, "3 MFCC"),
        ({"features": "fbank", "deltas": 1, "cmvn": "utterance"}, 3, "3 log-mel energies"),
        (
            {"features": "plp", "deltas": 0, "pitch": True},
            6,
            "3 PLP coefficients and 3 pitch features",
        ),
        ({"features": "given", "deltas": 0}, 6, "6 features as in the feats.scp of the corpus"),
        (
            {"features": "mfcc", "deltas": 0, "cmvn": "speaker"},
            6,
            "6 MFCC, from which the mean has been taken as --cmvn=speaker does",
        ),
    ],
)
def test_served_features_are_made_as_those_of_the_corpus(made, dim, about):
    class Corpus:
        feature_dim, options = 6, made
        mean, stddev = np.arange(6.0), np.arange(1.0, 7.0)

    raw = np.random.default_rng(0).normal(size=(9, dim)).astype(np.float32)
    ends = serving.serving(
        Corpus(), {"kind": "dnn", "context": 2, "stack": 1, "coefficients": None}
    )
    assert (ends.frame_dim, ends.about) == (dim, about)
    expected = raw
    if made.get("cmvn") == "utterance":
        expected = raw - raw.mean(0)
        expected = expected / raw.std(0) if made.get("norm_vars") else expected
    expected = features.add_deltas(expected, made.get("deltas", 2)).numpy()
    expected = (expected - np.arange(6)) / np.arange(1, 7)
    padded = np.concatenate([expected[:1], expected[:1], expected, expected[-1:], expected[-1:]])
    expected = np.concatenate([padded[i : i + 9] for i in range(5)], axis=1)
    np.testing.assert_allclose(ends.preprocessing(raw), expected, rtol=1e-4, atol=1e-4)


def test_frames_are_normalised_as_in_training():
    class Corpus:
        mean, stddev = np.full(2, 3.0), np.full(2, 0.5)

    raw = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    wanted = {
        "none": raw,
        "utterance": (raw - raw.mean(0)) / raw.std(0),
        "global": (raw - 3.0) / 0.5,
    }
    for kind, expected in wanted.items():
        description = {"kind": "lstm", "context": 0, "normalisation": kind}
        found = serving.model_input(Corpus(), description)(raw)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
