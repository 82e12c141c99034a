"""What a worker of an elastic run does, beside whatever needs others."""

import types

import pytest

from tests.lib.record import unit_of
from tfpara.elastic.meeting import Form
from tfpara.elastic.plan import begin
from tfpara.sync.elastic.company import Elastic
from tfpara.sync.elastic.connection import Connection
from tfpara.sync.elastic.rejoin import Progress, Rejoin, _how_far, _next_plan

pytestmark = pytest.mark.latest

EXTENDED = types.SimpleNamespace(
    worker_devices=["CPU:0"], models=types.SimpleNamespace(synchronizers=[])
)


def nothing(*_):
    return None


def test_a_joiner_ends_where_all_others_are_lost():
    def end(why):
        raise SystemExit(why)

    form = Form(2, (1,), ("a:1",), (None,), "worker 0 is lost")
    connection = types.SimpleNamespace(end=end, form=form)
    with pytest.raises(SystemExit, match="those that had the state of the run are lost"):
        Rejoin(EXTENDED, connection).reconcile(form)


def test_the_newest_plan_counts_if_a_worker_is_lost_while_it_is_adopted():
    """Rank 1 has adopted the plan with a third worker, and trained by it; rank 0 has not."""
    former = begin(0, (0, 1))
    newest = former.after([10, 10], [0, 0], (0, 1, 2))
    common = {"syncs": 5, "closed": (-1, -1), "operations": 3}
    old = {"plan": former.state(), "planned_in": 1, "dealt": [10, 10], "open": 0, "counted": 0}
    new = {"plan": newest.state(), "planned_in": 2, "dealt": [0, 0, 0], "open": 3, "counted": 3}
    reports = [{**common, **old}, {**common, **new}]
    form = Form(3, (0, 1), ("a:1", "b:1"), tuple(reports), "worker 2 is lost")
    plan = _next_plan(form, reports, [False, False], max(reports, key=_how_far))
    assert plan.carried == ((), tuple(unit_of(newest, 1, step) for step in range(3)))
    units = [unit_of(plan, rank, step) for rank in range(2) for step in range(40)]
    assert len(units) == len(set(units)) and set(range(20, 80)) <= set(units)


def test_the_state_is_that_of_the_worker_least_far_in_the_block():
    """With it goes the optimizer's step count, and the receiver closes the block from there."""
    common = {"syncs": 5, "plan": begin(0, (0, 1)).state(), "planned_in": 1}
    common |= {"closed": (-1, -1), "operations": 3}
    reports = [{**common, "counted": counted} for counted in (9, 3, 7)]
    assert max(reports, key=_how_far) is reports[1]


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


@pytest.mark.parametrize("in_fit,in_callbacks", [(False, False), (True, True), (True, False)])
def test_a_model_is_trained_in_the_steps_of_fit_alone(in_fit, in_callbacks):
    company = Elastic.__new__(Elastic)
    company.connection = types.SimpleNamespace(in_fit=in_fit)
    call_site = types.SimpleNamespace(is_in_callbacks=in_callbacks)
    company._extended = types.SimpleNamespace(call_site=call_site)
    if in_fit and not in_callbacks:
        company.check_in_fit()
    else:
        with pytest.raises(ValueError, match="outside of the steps of fit"):
            company.check_in_fit()


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_members_change_only_after_the_thread_that_prepares_a_sync(comes_back):
    order = []
    graph = types.SimpleNamespace(await_prepared=lambda: order.append("prepared"))
    models = types.SimpleNamespace(synchronizers=[types.SimpleNamespace(graph=graph)])

    def changes(*_):
        order.append("changes")
        raise InterruptedError

    connection = types.SimpleNamespace(
        form=Form(2, (0,), ("a:1",), (None,), ""), become=changes, come_back=changes
    )
    extended = types.SimpleNamespace(worker_devices=["CPU:0"], models=models)
    worker = Rejoin(extended, connection)
    with pytest.raises(InterruptedError):
        worker.come_back("why") if comes_back else worker._agree(connection.form)
    assert order == ["prepared", "changes"]
