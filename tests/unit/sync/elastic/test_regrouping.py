"""What a worker of an elastic run does, beside whatever needs others."""

import types

import pytest

from tfpara.elastic.meeting import Form
from tfpara.sync.elastic.rejoin import Regrouping


def test_who_joins_ends_where_all_others_are_lost():
    def end(why):
        raise SystemExit(why)

    with pytest.raises(SystemExit, match="those that had the state of the run are lost"):
        Regrouping._reconcile(
            types.SimpleNamespace(_end=end), Form(2, (1,), ("a:1",), (None,), "worker 0 is lost")
        )


def test_who_comes_back_trains_an_epoch_that_it_had_closed_alone():
    def nothing(*_):
        return None

    worker = types.SimpleNamespace(
        line=types.SimpleNamespace(task=1, close=nothing),
        form=Form(4, (0, 1), ("a:1", "b:1"), (None, None), ""),
        _connect=lambda task: types.SimpleNamespace(task=task, founding=False),
        _leaves=False,
        _fit=0,
        _epoch=3,
        _closed_at=(0, 3),
        **dict.fromkeys(["_listen", "_become", "_take_place_of_joiner", "_deal_anew"], nothing),
        _alone=nothing,
    )
    assert Regrouping._closed.fget(worker)
    Regrouping._come_back(worker, "it was silent.")
    assert worker.joining and not Regrouping._closed.fget(worker)
