"""Which aggregation is taken where none is asked for; what each does: see test_strategy."""

import math
import types

import pytest

from tfpara.sync.one_sync import placement

LARGE, HUGE = placement.SHARDED_FROM_BYTES // 4, placement.ALWAYS_SHARDED_FROM_BYTES // 4
SMALL = 1000


@pytest.mark.parametrize(
    ("workers", "devices", "elements", "scatters_well", "expected"),
    [
        (1, 1, LARGE, True, placement.Replicated),
        (1, 2, LARGE, True, placement.Sharded),
        (2, 1, LARGE, True, placement.Sharded),
        (2, 1, LARGE - 1, True, placement.Replicated),
        (2, 1, LARGE, False, placement.Replicated),
        (2, 2, LARGE, False, placement.Replicated),
        (12, 1, HUGE - 1, False, placement.Replicated),
        (12, 1, HUGE, False, placement.Sharded),
    ],
)
def test_large_models_are_sharded_unless_that_takes_longer(
    workers, devices, elements, scatters_well, expected
):
    collectives = types.SimpleNamespace(size=workers, rank=0, scatters_well=scatters_well)
    names = [f"CPU:{number}" for number in range(devices)]
    buckets = [elements - SMALL, SMALL]
    assert type(placement.choose("auto", buckets, collectives, names)) is expected
    for asked, kind in (("sharded", placement.Sharded), ("replicated", placement.Replicated)):
        assert type(placement.choose(asked, buckets, collectives, names)) is kind


@pytest.mark.parametrize("unlike", [(2, 1), (3, 1, 2), (1, 4, 6)])
def test_parts_of_unlike_workers_cover_each_bucket_once(unlike):
    sizes, of_workers = [1000, 7, 1], []
    for rank, devices in enumerate(unlike):
        collectives = types.SimpleNamespace(size=len(unlike), rank=rank)
        names = [f"CPU:{number}" for number in range(devices)]
        made = placement.choose("sharded", sizes, collectives, names, unlike)
        of_workers.append([made.parts(holder) for holder in range(devices)])
    for bucket, size in enumerate(sizes):
        lengths, at = [], 0
        for of_devices in of_workers:
            began = at
            for parts in of_devices:
                assert parts[bucket][:2] == (bucket, at)
                at = parts[bucket].stop
            lengths.append(at - began)
        assert size <= at < size + math.lcm(*unlike) * len(unlike)
        assert len(set(lengths)) == 1  # as a reduce-scatter needs
