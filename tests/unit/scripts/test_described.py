"""The check of a model.json, before a model is built from it."""

import json
from pathlib import Path

import pytest

from models import presets
from scripts import described, runs
from tests.lib import hostile, mutants

SIZES = {
    "dnn": {"input_dim": 33, "num_classes": 40, "layers": 3, "width": 64},
    "lstm": {"input_dim": 20, "num_classes": 30, "cells": 32, "projection": 8, "width": 24},
    "cldnn": {
        **{"input_dim": 88, "num_classes": 40, "bands": 11, "maps": 16, "band_filter": 3},
        **{"reduction": 24, "cells": 32, "projection": 8, "output_projection": 8, "width": 32},
    },
}
FRAMES = {
    **{"feature_dim": 3, "mean": [0.0, 1.0, -1.0], "stddev": [1.0, 2.0, 0.5], "classes": "ab"},
    "options": {"features": "fbank", "num_mel": 1, "deltas": 2, "norm_vars": False, "pitch": None},
}


def description(kind, **arguments):
    told = {"kind": kind, "arguments": {**SIZES[kind], **arguments}, "context": 1, "stack": 1}
    told |= {"coefficients": None, "streams": 4, "truncation": 20, "label_delay": 0}
    return told | {"normalisation": "global", "frames": FRAMES, "corpus": "c"}


@pytest.mark.parametrize("kind", presets.BUILDERS)
def test_as_many_weights_as_a_built_model_has_at_least(kind):
    model = runs.build(description(kind))
    described.check(description(kind), 4 * model.count_params())
    with pytest.raises(ValueError, match=r"weights or more, and the file of its weights has"):
        described.check(description(kind), model.count_params() // 8)


@pytest.mark.parametrize("kind", presets.BUILDERS)
def test_a_description_of_anything_is_refused_or_of_a_model_that_its_weights_fill(kind):
    taken = 0
    for case in mutants.of_json(description(kind), 1, mutants.count(300)):
        try:
            with hostile.watched(200_000):
                described.check(case, 200_000)
        except ValueError as error:
            assert len(str(error)) < 300
        else:
            arguments = case["arguments"]
            assert all(type(v) in (int, float, str) for v in arguments.values()), case
            assert described.least_weights(case["kind"], {**defaults(kind), **arguments}) <= 800_000
            taken += 1
    assert 0 < taken < 0.7 * mutants.count(300)


def defaults(kind):
    """The builders' own, as their signatures have them."""
    return {
        "dnn": {"layers": 6, "width": 1024},
        "lstm": {"layers": 2, "cells": 1024, "projection": 0, "dense": 1, "width": 1024},
        "cldnn": {
            **{"bands": 40, "maps": 128, "band_filter": 8, "band_pool": 3, "reduction": 192},
            **{"layers": 2, "cells": 1024, "projection": 256, "output_projection": 256},
            **{"dense": 2, "width": 1024},
        },
    }[kind]


@pytest.mark.parametrize(
    "written",
    [b"[" * 200_000, b"\xff", b"[]", b"{", {"layers": 10**9, "width": 1}, {"width": 10**7}],
    ids=["deep", "no UTF-8", "no object", "no JSON", "no end of layers", "wide"],
)
def test_a_hostile_run_is_refused_by_the_name_of_the_file(tmp_path, written):
    if isinstance(written, dict):
        written = json.dumps(description("dnn", **written)).encode()
    (tmp_path / "model.json").write_bytes(written)
    (tmp_path / "model.weights.h5").write_bytes(bytes(10_000))
    with pytest.raises(ValueError, match=r"model\.json is not the description of a run"):
        runs.load(Path(tmp_path))
