"""The timeline that two real workers write."""

import json

import pytest

from tests.lib.cluster_of_processes import run_all_well

PHASES = {"step", "check", "wait", "pack", "reduce", "rule", "unpack"}


def recorded(folder, **options):
    """The timeline of steps 4 to 9 of two epochs of six, a sync every third; worker 1 is late."""
    options = {
        "log_dir": str(folder),
        "steps": [4, 9],
        "aggregation": "sharded",
        "late_step": 5,
        "late_seconds": 2.0,
        "minibatches": 6,
        "sync_period": 3,
        "epochs": 2,
        **options,
    }
    run_all_well("train_traced.py", [options] * 2)
    for worker in range(2):
        assert list(folder.glob(f"worker-{worker}/plugins/profile/*/*.xplane.pb"))
    return json.loads((folder / "timeline.json").read_text())["traceEvents"]


@pytest.fixture(
    scope="module", params=[pytest.param("replicated", marks=pytest.mark.nightly), "sharded"]
)
def events(request, tmp_path_factory):
    # The weights of a small model would travel with the reports, without phases of their own.
    width = 30_000 if request.param == "replicated" else 6
    folder = tmp_path_factory.mktemp("traced") / "trace"
    return recorded(folder, aggregation=request.param, width=width)


def spans(events, worker, *phases):
    """(begin, end, args) in milliseconds of a worker's spans of some phases, by time."""
    found = [e for e in events if e["ph"] == "X" and e["pid"] == worker and e["name"] in phases]
    times = [(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e["args"]) for e in found]
    return sorted(times, key=lambda t: t[:2])


@pytest.mark.nightly
def test_every_worker_has_all_phases_in_rows_with_names(events):
    for worker in range(2):
        mine = [e for e in events if e["pid"] == worker]
        assert {e["name"] for e in mine if e["ph"] == "X"} == PHASES
        names = {e["name"]: e["args"]["name"] for e in mine if e["name"] == "process_name"}
        assert names == {"process_name": f"worker {worker}"}
        rows = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert all(rows[e["tid"]] == e["name"] for e in mine if e["ph"] == "X")


@pytest.mark.nightly
def test_the_steps_asked_for_are_there(events):
    for worker in range(2):
        steps = [args["step"] for *_, args in spans(events, worker, "step")]
        assert steps == [4, 5, 6, 7, 8, 9]


@pytest.mark.nightly
def test_rules_and_travel_lie_in_the_steps_that_end_a_block(events):
    # Between epochs TensorFlow may build a graph, which runs an operation or two.
    for worker in range(2):
        steps = {args["step"]: (b, e) for b, e, args in spans(events, worker, "step")}
        for phase in ("pack", "reduce", "rule", "unpack"):
            inside = {
                number
                for began, _, _ in spans(events, worker, phase)
                for number, (first, last) in steps.items()
                if first <= began <= last
            }
            assert inside == {5, 8}, phase
        for number in (5, 8):
            spent = [e - b for b, e, _ in spans(events, worker, "reduce") if b >= steps[number][0]]
            assert 0 < sum(spent) < sum(e - b for b, e in steps.values())


def test_phases_of_a_sync_follow_each_other(events):
    for worker in range(2):
        (step,) = [s for s in spans(events, worker, "step") if s[2]["step"] == 8]
        # Small parts of a phase may run early, but it ends after those before it.
        ends = {
            phase: max(e for b, e, _ in spans(events, worker, phase) if step[0] <= b <= step[1])
            for phase in PHASES
        }
        order = ("check", "wait", "pack", "reduce", "unpack", "step")
        assert sorted(order, key=ends.get) == list(order)
        assert ends["pack"] < ends["rule"] < ends["unpack"]


def test_the_punctual_worker_waits_for_the_late_one(events):
    for number in (5, 8):
        waits = []
        for worker in range(2):
            (step,) = [s for s in spans(events, worker, "step") if s[2]["step"] == number]
            mine = [s for s in spans(events, worker, "wait") if step[0] <= s[0] <= step[1]]
            waits.append((min(s[0] for s in mine), max(s[1] for s in mine)))
        # Both lie on one time axis: nobody's wait ends before the other has come.
        assert max(began for began, _ in waits) < min(ended for _, ended in waits) + 50
        if number == 5:  # the late worker came that much later, or nearly
            assert waits[1][0] > waits[0][0] + 400


@pytest.mark.nightly
def test_a_sync_beside_the_training_does_not_hold_up_the_punctual_worker(tmp_path):
    # The sync that begins at the end of step 5 is merged at the end of step 8.
    events = recorded(tmp_path / "trace", overlap=True, minibatches=12, epochs=1, late_step=6)
    for worker in range(2):
        mine = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == worker}
        assert mine == PHASES
    steps = {args["step"]: (b, e) for b, e, args in spans(events, 0, "step")}
    (late,) = [s for s in spans(events, 1, "step") if s[2]["step"] == 6]
    # Worker 1 sleeps before step 6; worker 0 is through with it, and with step 7, meanwhile.
    assert steps[7][1] < late[1]
