"""Which aggregation is taken where none is asked for; what each does: see test_strategy."""

import types

import pytest

from tfpara.sync import aggregation

LARGE, SMALL = aggregation.SHARDED_FROM_BYTES // 4, 1000


@pytest.mark.parametrize(
    ("workers", "devices", "elements", "full_duplex", "expected"),
    [
        (1, 1, LARGE, True, aggregation.Replicated),
        (1, 2, LARGE, True, aggregation.Sharded),
        (2, 1, LARGE, True, aggregation.Sharded),
        (2, 1, LARGE - 1, True, aggregation.Replicated),
        (2, 1, LARGE, False, aggregation.Replicated),
        (2, 2, LARGE, False, aggregation.Replicated),
        (3, 1, LARGE, False, aggregation.Sharded),
        (1, 2, LARGE, False, aggregation.Sharded),
    ],
)
def test_large_models_are_sharded_unless_two_workers_take_turns(
    workers, devices, elements, full_duplex, expected
):
    collectives = types.SimpleNamespace(size=workers, rank=0, full_duplex=full_duplex)
    names = [f"CPU:{number}" for number in range(devices)]
    buckets = [elements - SMALL, SMALL]
    assert type(aggregation.choose("auto", buckets, collectives, names)) is expected
    for asked, kind in (("sharded", aggregation.Sharded), ("replicated", aggregation.Replicated)):
        assert type(aggregation.choose(asked, buckets, collectives, names)) is kind
