"""Which aggregation is taken where none is asked for; what each does: see test_strategy."""

import types

import pytest

from tfpara.sync.one_sync import placement

LARGE, SMALL = placement.SHARDED_FROM_BYTES // 4, 1000


@pytest.mark.parametrize(
    ("workers", "devices", "elements", "full_duplex", "expected"),
    [
        (1, 1, LARGE, True, placement.Replicated),
        (1, 2, LARGE, True, placement.Sharded),
        (2, 1, LARGE, True, placement.Sharded),
        (2, 1, LARGE - 1, True, placement.Replicated),
        (2, 1, LARGE, False, placement.Replicated),
        (2, 2, LARGE, False, placement.Replicated),
        (3, 1, LARGE, False, placement.Sharded),
        (1, 2, LARGE, False, placement.Sharded),
    ],
)
def test_large_models_are_sharded_unless_two_workers_take_turns(
    workers, devices, elements, full_duplex, expected
):
    collectives = types.SimpleNamespace(size=workers, rank=0, full_duplex=full_duplex)
    names = [f"CPU:{number}" for number in range(devices)]
    buckets = [elements - SMALL, SMALL]
    assert type(placement.choose("auto", buckets, collectives, names)) is expected
    for asked, kind in (("sharded", placement.Sharded), ("replicated", placement.Replicated)):
        assert type(placement.choose(asked, buckets, collectives, names)) is kind
