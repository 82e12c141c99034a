"""What a worker of an elastic run does, beside whatever needs others."""

import types

import pytest

from tfpara.elastic.meeting import Form
from tfpara.sync.elastic.connection import Connection
from tfpara.sync.elastic.rejoin import Progress, Rejoin

pytestmark = pytest.mark.latest

EXTENDED = types.SimpleNamespace(worker_devices=["CPU:0"])


def nothing(*_):
    return None


def test_a_joiner_ends_where_all_others_are_lost():
    def end(why):
        raise SystemExit(why)

    form = Form(2, (1,), ("a:1",), (None,), "worker 0 is lost")
    connection = types.SimpleNamespace(end=end, form=form)
    with pytest.raises(SystemExit, match="those that had the state of the run are lost"):
        Rejoin(EXTENDED, connection).reconcile(form)


def test_a_worker_that_comes_back_trains_an_epoch_that_it_had_closed_alone():
    connection = Connection.__new__(Connection)
    vars(connection).update(
        line=types.SimpleNamespace(task=1, close=nothing),
        form=Form(4, (0, 1), ("a:1", "b:1"), (None, None), ""),
        leaves=False,
        _connect=lambda task: types.SimpleNamespace(task=task, founding=False),
        _own_address="b:1",
        **dict.fromkeys(["_listen", "become", "_take_place_of_joiner"], nothing),
    )
    data = types.SimpleNamespace(iterator=iter([]), forget_trained=nothing)
    worker = Rejoin(EXTENDED, connection)
    worker.data, worker.progress = data, Progress(fit=0, epoch=3, closed=(0, 3))
    assert worker.progress.epoch_is_closed
    worker.come_back("it was silent.")
    assert connection.joining and not worker.progress.epoch_is_closed and data.iterator is None
