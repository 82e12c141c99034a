"""Elastic runs: workers of real processes are killed, stopped, asked to leave, and come."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.lib import elastic_runs, warm
from tests.lib.cluster_of_processes import DEAD_PROXY
from tests.lib.launched import Launched, launch
from tfpara.elastic.meeting import ADDRESS

KILLED, AGAIN = -signal.SIGKILL, 75
OVERLAPPED = {"overlap": True, "compression": "int8"}
MIXED = {"devices": 2, "adam": True, "norm": True, "dropout": True, "rule": "tfpara.BMUF()"}


# What engines say of processes, which the meeting point goes before. The addresses are nobody's.
TASKS = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 2}}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_ID": "0"}
TOLD = {
    0: {"TF_CONFIG": json.dumps(TASKS)},
    1: {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "7"},
    2: SLURM | {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "x[1-7]"},
}


@pytest.mark.latest
@pytest.mark.nightly_cases("metric-*", "reports-*", "step-*", "written-*", "commit-2-1-told3")
@pytest.mark.parametrize(
    "place,times,rank,told",
    [
        ("weights", 2, 0, {}),
        ("step", 5, 1, TOLD),
        ("reports", 2, 0, {}),
        ("commit", 2, 1, {}),
        ("written", 2, 0, {}),
        ("metric", 3, 1, {}),
    ],
)
def test_a_killed_worker_is_done_without(place, times, rank, told, tmp_path):
    faults = {rank: [place, times, "SIGKILL"]}
    environment = {n: {"https_proxy": DEAD_PROXY, **told.get(n, {})} for n in range(3)}
    with elastic_runs.Run(tmp_path, 3, faults, environment=environment) as run:
        last = run.check([KILLED])
        assert len(last) == 2
        generations = [(each.number, len(each.members)) for each in run.meeting.state.history]
        assert generations == [(1, 3), (2, 2)]
        assert run.meeting.state.phase == "ended"


@pytest.mark.nightly
def test_founders_without_the_first_numbers(tmp_path):
    """Two were lost, and replaced, before the run began: numbers of tasks are not ranks."""
    options = {"checkpoints": str(tmp_path / "run"), "epochs": 2, **MIXED}
    with elastic_runs.Run(tmp_path, 3, before=2, **options) as run:
        assert len(run.check([])) == 3
        assert [each.members for each in run.meeting.state.history] == [(2, 3, 4)]
        epochs = [e for rank in range(3) for e in run.events(run.of_rank(rank)) if e[0] == "epoch"]
        assert {workers for *_, workers in epochs} == {3}
    assert (tmp_path / "run" / "generations.jsonl").read_text().count("\n") == 1
    assert list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.latest
@pytest.mark.nightly
@pytest.mark.parametrize("place,times", [("build", 3), ("anew", 1)])
def test_a_worker_is_killed_before_the_first_step(place, times, tmp_path):
    """Another was lost before all were connected. The others begin without them."""
    options = {"lost": True, "minibatches": 61, **MIXED}
    if place == "build":
        options["checkpoints"] = str(tmp_path / "run")
    with elastic_runs.Run(tmp_path, 3, {0: [place, times, "SIGKILL"]}, **options) as run:
        assert len(run.check([KILLED], minibatches=61)) == 2
        assert [len(each.members) for each in run.meeting.state.history] == [4, 3, 2]


def test_too_few_before_the_first_step(tmp_path):
    fewest = {"min_workers": 2, "grace_seconds": 0.5}
    with elastic_runs.Run(tmp_path, 2, {0: ["build", 3, "SIGKILL"]}, **fewest) as run:
        codes, outputs = run.ends()
        assert sorted(codes) == [KILLED, AGAIN], outputs
        why = "1 of at least 2 workers are left, and none has trained. Exit code 75."
        assert any(why in output for output in outputs)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, MIXED])
def test_a_spare_comes_in_within_a_block(options, tmp_path):
    """The others do not train to the block's end first, and the spare trains only the rest of it.

    The period is longer than an epoch, so blocks end with the epochs.
    """
    options = {**options, "period": 50, "max_workers": 2, "step_seconds": 0.1, "validate": True}
    options["holds"] = {"1": f"exists({str(tmp_path / 'go')!r})"}
    steps = 60 // (2 * options.get("devices", 1))  # of a worker in an epoch
    with elastic_runs.Run(tmp_path, 2, {1: ["step", steps + 5, "SIGKILL"]}, **options) as run:
        stays, spare = run.of_rank(0), run.start()
        run.wait_until(stays, "epoch", 0)
        run.until(lambda: run.meeting.state.waiting)
        (tmp_path / "go").touch()
        assert len(run.check([KILLED])) == 2
        names = [event[0] for event in run.events(stays)]
        regrouped = len(names) - names[::-1].index("generation")
        assert names[:regrouped].count("trained") < 60
        names = [event[0] for event in run.events(spare)]
        alone = len(names) - names[::-1].index("generation")
        whole = names[alone:].index("synced")
        assert names[alone:][:whole].count("trained") > 10


@pytest.mark.nightly
@pytest.mark.parametrize("overlap", [False, True, 1])
def test_two_are_killed_at_once_and_one_goes_on(overlap, tmp_path):
    faults = {0: ["step", 8, "SIGKILL"], 2: ["step", 8, "SIGKILL"]}
    options = {**MIXED, "of_strategy": {"overlap": overlap}}
    with elastic_runs.Run(tmp_path, 3, faults, **options) as run:
        assert len(run.check([KILLED, KILLED])) == 1


@pytest.mark.parametrize("of_strategy", [{"compression": "int4"}, OVERLAPPED])
def test_a_sync_that_only_some_have_committed(of_strategy, tmp_path):
    # The others are at their next sync when they hear of it.
    options = {"rule": "tfpara.DiLoCo()", "of_strategy": of_strategy}
    with elastic_runs.Run(tmp_path, 3, {1: ["commit", 2, "FAIL"]}, **options) as run:
        assert len(run.check([])) == 3


@pytest.mark.nightly
def test_an_exchange_that_has_failed_on_one_alone(tmp_path):
    """The other is in the next epoch when it hears of it."""
    with elastic_runs.Run(tmp_path, 2, {0: ["exchange", 1, "FAIL"]}, step_seconds=0.05) as run:
        assert len(run.check([])) == 2
        assert [each.why for each in run.meeting.state.history[1:]] == ["an exchange has failed"]


@pytest.mark.nightly
def test_a_worker_joins_where_epochs_end_unevenly(tmp_path):
    options = {"minibatches": 5, "epochs": 30, "step_seconds": 0.1}
    options["holds"] = {"20": "len(tasks) > 2 or comes"}
    with elastic_runs.Run(tmp_path, 2, **options) as run:
        for _ in range(4):
            run.line().close()  # so many came before, and the number of the next is above 5
        run.start()
        assert len(run.check([], epochs=30, minibatches=5)) == 3


@pytest.mark.latest
@pytest.mark.nightly_cases("options1")  # with its options: a spare that comes in within a block
@pytest.mark.parametrize(
    "options",
    [
        {
            "steps_per_execution": 4,
            "rule": "tfpara.EASGD()",
            "of_strategy": OVERLAPPED,
        },
        MIXED,
    ],
)
def test_a_worker_joins(options, tmp_path):
    faults = {0: ["step", 3, "SIGKILL"]}
    options = {**options, "epochs": 6, "holds": {"3": "len(tasks) > 2 or comes"}}
    with elastic_runs.Run(tmp_path, 3, faults, step_seconds=0.02, **options) as run:
        number = run.start()
        last = run.check([KILLED], epochs=6)
        assert len(last) == 3
        trained = [event for event in run.events(number) if event[0] == "trained"]
        assert len(trained) > 4, "it came too late"
        if "devices" not in options:
            names = [event[0] for event in run.events(number)]
            alone = len(names) - names[::-1].index("dropped")  # before it joins
            (steps,) = [event[1] for event in run.events(number) if event[0] == "steps"]
            assert steps == names[alone:].count("trained")


@pytest.mark.nightly
def test_faults_while_a_worker_joins(tmp_path):
    """A worker that has just come dies, then the chief, while another is coming."""
    holds = {"3": "generation > 1 or comes", "6": "4 in tasks or comes"}
    with elastic_runs.Run(tmp_path, 3, epochs=8, step_seconds=0.1, holds=holds) as run:
        dies = run.start(faults={"joins": ["step", 1, "SIGKILL"]})
        run.wait_until(dies, "rank")
        chief = run.of_rank(0)
        run.start()
        run.processes[dies].wait()
        run.processes[chief].kill()
        assert len(run.check([KILLED, KILLED], epochs=8)) == 3


@pytest.mark.nightly
def test_the_chief_dies_as_it_lets_a_worker_in(tmp_path):
    """It dies while it connects itself to the generation that has the newcomer."""
    holds = {"3": "generation > 1 or comes"}
    faults = {0: ["enabling", 1, "SIGKILL"]}
    with elastic_runs.Run(tmp_path, 2, faults, epochs=6, step_seconds=0.02, holds=holds) as run:
        joins = run.start()
        assert len(run.check([KILLED], epochs=6)) == 2
        assert [each.members for each in run.meeting.state.history] == [(0, 1), (0, 1, 2), (1, 2)]
        assert ["trained"] in [event[:1] for event in run.events(joins)]


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("where", ["training", "enabling"])
def test_who_is_asked_to_end_leaves_and_who_is_silent_comes_back(where, tmp_path):
    options = {"epochs": 8, "step_seconds": 0.1, "silence_seconds": 4.0, **MIXED}
    options["checkpoints"] = str(tmp_path / "run")  # which a stopped chief has locked
    options["holds"] = {"6": "len(tasks) > 1 or comes"}
    faults = {0: ["enabling", 1, "SIGSTOP"]} if where == "enabling" else {}
    with elastic_runs.Run(tmp_path, 3, faults, **options) as run:
        run.wait_until(run.of_rank(1), "synced", count=2)
        run.processes[run.of_rank(1)].terminate()
        assert run.processes[run.of_rank(1)].wait() == AGAIN
        stopped = run.of_rank(0)
        if where == "training":
            run.processes[stopped].send_signal(signal.SIGSTOP)
        run.wait_until(run.of_rank(2), "epoch", 3)
        run.processes[stopped].send_signal(signal.SIGCONT)
        assert len(run.check([AGAIN], epochs=8)) == 2
        whys = [each.why for each in run.meeting.state.history[1:]]
        assert re.fullmatch(r"worker \d has left", whys[0])
        assert re.fullmatch(r"worker \d was silent for 4 s", whys[1])
        assert re.fullmatch(r"worker \d has come", whys[2])
        assert len(run.meeting.state.history) == 4


def test_all_workers_are_stopped_for_a_while_and_go_on(tmp_path):
    options = {"epochs": 4, "step_seconds": 0.05, "silence_seconds": 4.0, "grace_seconds": 60.0}
    with elastic_runs.Run(tmp_path, 2, **options) as run:
        for number in range(2):
            run.wait_until(number, "synced", count=2)
        for process in run.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(8.0)
        for process in run.processes:
            process.send_signal(signal.SIGCONT)
        assert len(run.check([], epochs=4)) == 2
        assert [len(each.members) for each in run.meeting.state.history] == [2, 2]
        assert run.meeting.state.history[1].why.endswith("all were awaited")


@pytest.mark.nightly
@pytest.mark.parametrize("of_strategy", [{}, OVERLAPPED], ids=["plain", "overlapped"])
@pytest.mark.parametrize("ask", ["lose", "terminate"])
def test_too_few_write_a_checkpoint_and_others_go_on_from_it(ask, of_strategy, tmp_path):
    options = {"checkpoints": str(tmp_path / "run"), "epochs": 4, "step_seconds": 0.05}
    options["of_strategy"] = of_strategy
    fewest = {"min_workers": 2, "grace_seconds": 0.5}
    faults = {0: ["step", 9, "SIGKILL"]} if ask == "lose" else {}
    with elastic_runs.Run(tmp_path, 2, faults, **options, **fewest) as run:
        if ask == "terminate":
            run.wait_until(run.of_rank(0), "synced", count=3)
            for process in run.processes:
                process.terminate()
        codes, outputs = run.ends()
        assert sorted(codes) == ([KILLED, AGAIN] if ask == "lose" else [AGAIN, AGAIN]), outputs
        why = "1 of at least 2 workers are left" if ask == "lose" else "asked to end"
        assert any(why in output and "checkpoint written" in output for output in outputs)
        lost = {codes.index(KILLED)} if ask == "lose" else set()
        before, doubtful = run.synced(), run.left_open(lost)
    (tmp_path / "again").mkdir()
    with elastic_runs.Run(tmp_path / "again", 3, min_workers=1, **options) as again:
        codes, outputs = again.ends()
        assert codes == [0, 0, 0], outputs
        after = again.synced()
        for epoch in range(4):
            for number in range(60):
                own = epoch * 1000 + number
                count = before.get(own, 0) + after.get(own, 0)
                assert count in ({0, 1} if own in doubtful else {1}), own


@pytest.mark.nightly
def test_a_worker_joins_a_resumed_run_of_another_number_of_workers(tmp_path):
    """Minibatches stay those of the three that began: each row is trained once in each epoch."""
    options = {"checkpoints": str(tmp_path / "run"), "epochs": 4, "arrays": 3, "step_seconds": 0.1}
    with elastic_runs.Run(tmp_path, 3, **options) as run:
        run.wait_until(run.of_rank(0), "synced", count=3)
        before = run.stop()
    assert 0 < sum(before.values()) < 240
    (tmp_path / "again").mkdir()
    with elastic_runs.Run(tmp_path / "again", 2, **options, holds={"2": "comes"}) as again:
        again.start()
        codes, outputs = again.ends()
        assert codes == [0, 0, 0], outputs
        after = again.synced()
    assert {row: before.get(row, 0) + after.get(row, 0) for row in range(60)} == dict.fromkeys(
        range(60), 4
    )


@pytest.mark.nightly
def test_a_second_fit_goes_on_from_a_checkpoint(tmp_path):
    """All are asked to end in it, and another number of workers goes on."""
    options = {"checkpoints": str(tmp_path / "run"), "fits": 2, "epochs": 1}
    with elastic_runs.Run(tmp_path, 2, step_seconds=0.05, **options) as run:
        run.wait_until(run.of_rank(0), "history", 0)
        done = len([event for event in run.events(run.of_rank(0)) if event[0] == "synced"])
        run.wait_until(run.of_rank(0), "synced", count=done + 2)
        before = run.stop()
    (tmp_path / "again").mkdir()
    with elastic_runs.Run(tmp_path / "again", 3, **options) as again:
        codes, outputs = again.ends()
        assert codes == [0, 0, 0], outputs
        after = again.synced()
    assert any(own >= 1000 for own in before) and min(after) >= 1000
    for own in (*range(60), *range(1000, 1060)):
        assert before.get(own, 0) + after.get(own, 0) == 1, own


@pytest.mark.latest
@pytest.mark.nightly
@pytest.mark.parametrize("place,times", [("checkpoint", 4), ("validation", 3), ("begin", 2)])
def test_a_worker_is_killed_beside_the_training(place, times, tmp_path):
    options = {"checkpoints": str(tmp_path / "run"), "validate": True}
    with elastic_runs.Run(tmp_path, 3, {0: [place, times, "SIGKILL"]}, **options) as run:
        run.check([KILLED])
        record = (tmp_path / "run" / "generations.jsonl").read_text().splitlines()
        assert [json.loads(line)["generation"] for line in record] == [1, 2]
        logs = [event[2] for n in range(3) for event in run.events(n) if event[:2] == ["epoch", 1]]
        assert len(logs) == 2 and logs[0] == logs[1]
        assert logs[0]["val_loss"] > 0.0


@pytest.mark.latest
@pytest.mark.nightly
def test_callbacks_that_decide_decide_alike(tmp_path):
    options = {"callbacks": ["newbob", "plateau", "stopping", "together", "period"]}
    options["holds"] = {"2": "len(tasks) > 2 or comes"}
    with elastic_runs.Run(tmp_path, 2, epochs=6, step_seconds=0.1, **options) as run:
        number = run.start()
        codes, outputs = run.ends()
        assert codes == [0, 0, 0], outputs
        last = [run.events(each)[-1] for each in range(3)]
        assert len({each[1] for each in last}) == 1  # who came has never had the best weights
        logs = {
            (event[1], json_of(event[2]))
            for each in range(3)
            for event in run.events(each)
            if event[0] == "epoch"
        }
        assert len(logs) == 4 == len({epoch for epoch, _ in logs}), "the logs of an epoch differ"
        assert any(event[0] == "epoch" for event in run.events(number)), "it came too late"


@pytest.mark.nightly
def test_epochs_are_rejected_and_scored_within_where_workers_come_and_go(tmp_path):
    """One is killed in the second epoch, which another comes within: all go back to its begin."""
    options = {"callbacks": ["rejecting", "rate"], "scores": str(tmp_path / "scores.csv")}
    options |= {**MIXED, "dropout": False}
    options |= {"epochs": 4, "step_seconds": 0.1, "holds": {"1": "comes"}}
    with elastic_runs.Run(tmp_path, 3, {2: ["weights", 9, "SIGKILL"]}, **options) as run:
        run.wait_until(run.of_rank(0), "epoch", 0)
        number = run.start()
        last = run.check([KILLED], epochs=4)
        assert len(last) == 3 and all(each[3] == 2 for each in last)
        begins = [[e[1:] for e in run.events(n) if e[0] == "begins"] for n in range(4)]
        rates = [e[1] for e in run.events(run.of_rank(0)) if e[0] in ("rate", "epoch")]
    assert begins[number][0][0] == 1, "it came too late"
    lost = next(n for n in range(3) if len(begins[n]) < 4)
    others = [begins[n] for n in range(3) if n != lost]
    of_run = dict(others[0])
    assert len(set(of_run.values())) == 2, "an epoch was trained and not given up"
    assert of_run[1] == of_run[2] == of_run[3]
    assert all(dict(each) == of_run for each in others)
    assert dict(begins[number][1:]) == {2: of_run[1], 3: of_run[1]}
    for epoch in range(4):  # the rate falls with what all have trained, however many they are
        own = rates[: rates.index(epoch)]
        rates = rates[len(own) + 1 :]
        first, last = (8.0 * (1.0 - own[k] / 0.003) - epoch for k in (0, -1))
        assert own == sorted(own, reverse=True) and len(own) > 5
        assert abs(first) < 1e-4 and 0.85 < last < 1.0, (epoch, own)
    with open(options["scores"]) as file:
        rows = [float(row["epoch"]) for row in csv.DictReader(file)]
    assert [int(3.0 * passes + 1e-9) for passes in rows] == list(range(1, 13)), rows


def json_of(logs):
    return tuple(sorted(logs.items()))


@pytest.mark.nightly
def test_who_differs_is_refused_and_who_is_too_many_waits(tmp_path):
    options = {"epochs": 6, "step_seconds": 0.1, "max_workers": 2}
    killed = tmp_path / "killed"
    options["holds"] = {"3": f"exists({str(killed)!r})"}
    with elastic_runs.Run(tmp_path, 2, **options) as run:
        other = run.start(width=5)
        rule = run.start(rule="tfpara.EASGD()")
        spare = run.start()
        for number, what in ((other, "weights: the run has"), (rule, "rule: the run has 'BSP()'")):
            output = run.processes[number].communicate(timeout=elastic_runs.DEADLINE)[0]
            assert run.processes[number].returncode == 1
            assert "tfpara: this worker cannot take part" in output and what in output
        run.wait_until(spare, "dropped")  # it has warmed up
        run.processes[run.of_rank(1)].kill()
        killed.touch()
        run.check([KILLED, 1, 1], epochs=6)
        assert [len(each.members) for each in run.meeting.state.history] == [2, 1, 2] or [
            len(each.members) for each in run.meeting.state.history
        ] == [2, 2]


def histories(run, number):
    """What calls of `fit` have returned to a worker."""
    return [event[1:] for event in run.events(number) if event[0] == "history"]


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.latest
@pytest.mark.parametrize("place,times", [("between", 1), ("anew", 2), ("step", 47)])
def test_a_second_fit_goes_on_without_who_is_lost_and_takes_in_who_comes(place, times, tmp_path):
    """Who comes passes by the first call, and does itself what its script does between the two."""
    options = {"fits": 2, "step_seconds": 0.02, "rule": "tfpara.BMUF()"}
    options["holds"] = {"3": "len(tasks) > 2 or comes"}
    with elastic_runs.Run(tmp_path, 3, {0: [place, times, "SIGKILL"]}, **options) as run:
        run.wait_until(run.of_rank(1), "history", 0)
        number = run.start()
        assert len(run.check([KILLED], epochs=4)) == 3
        told = [histories(run, each) for each in range(4) if run.processes[each].returncode == 0]
        assert [each[0] for each in told] == [told[0][0]] * 3  # of the first call of fit
        trained = [event for event in run.events(number) if event[0] == "trained"]
        assert len(trained) > 4, "it came too late"


@pytest.mark.nightly
def test_who_was_given_up_in_one_fit_comes_back_in_the_next(tmp_path):
    options = {"fits": 2, "step_seconds": 0.05, "silence_seconds": 3.0, "arrays": 3}
    options["holds"] = {"3": "len(tasks) > 1 or comes"}
    with elastic_runs.Run(tmp_path, 2, **options) as run:
        stopped, other = run.of_rank(0), run.of_rank(1)
        run.wait_until(stopped, "synced", count=2)
        run.processes[stopped].send_signal(signal.SIGSTOP)
        run.wait_until(other, "epoch", 2)
        run.processes[stopped].send_signal(signal.SIGCONT)
        codes, outputs = run.ends()
        assert codes == [0, 0], outputs
        assert "call 1 of fit is over; the others are in call 2" in outputs[stopped]
        assert histories(run, stopped) == histories(run, other)
        assert run.events(stopped)[-1][1] == run.events(other)[-1][1]
        assert [len(each.members) for each in run.meeting.state.history] == [2, 1, 2]


@pytest.mark.nightly
def test_who_waits_in_one_fit_comes_in_the_next(tmp_path):
    options = {"fits": 2, "step_seconds": 0.05, "max_workers": 2}
    options["holds"] = {"3": "len(tasks) > 1 or comes"}
    with elastic_runs.Run(tmp_path, 2, {0: ["between", 1, "SIGKILL"]}, **options) as run:
        spare = run.start()
        assert len(run.check([KILLED], epochs=4)) == 2
        assert histories(run, spare)[0] == histories(run, run.of_rank(1))[0]
        assert [len(each.members) for each in run.meeting.state.history] == [2, 1, 2]


@pytest.mark.nightly
def test_chiefs_that_are_lost_after_fit_are_done_without(tmp_path):
    """One before it saves, one while it writes what all have called for."""
    faults = {0: ["after", 1, "SIGKILL"], 1: ["write", 1, "SIGKILL"]}
    saved = tmp_path / "saved"
    with elastic_runs.Run(tmp_path, 3, faults, epochs=1, saves=str(saved)) as run:
        assert len(run.check([KILLED, KILLED], epochs=1)) == 1
    assert saved.with_suffix(".weights.h5").exists()
    assert saved.with_suffix(".chief").read_text() == "1"
    assert saved.with_suffix(".all").read_text() == "2"


@pytest.mark.nightly
def test_the_meeting_point_dies_and_is_started_again(tmp_path):
    holds = {"6": "len(tasks) > 2 or comes"}
    with elastic_runs.Run(tmp_path, 3, epochs=8, step_seconds=0.1, holds=holds) as run:
        first = run.of_rank(0)
        run.wait_until(first, "synced", count=2)
        run.close_meeting()
        run.wait_until(first, "epoch", 1)  # nobody needs it
        run.processes[run.of_rank(1)].kill()
        run.open_meeting()
        run.wait_until(first, "epoch", 3)
        run.start()
        assert len(run.check([KILLED], epochs=8)) == 3
        assert [(each.number, len(each.members)) for each in run.meeting.state.history] == [
            (1, 3),
            (2, 2),
            (3, 3),
        ]


@pytest.mark.nightly
@pytest.mark.latest
@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("ends", 0, "the run has come to its end"),
        ("raises", 75, "no member of it is left"),
        ("fails", 75, "no member of it is left"),
    ],
)
@pytest.mark.one_version
def test_a_meeting_point_by_itself_knows_how_scripts_without_run_end(how, code, says, tmp_path):
    environment = {**os.environ, "TFPARA_SECRET": elastic_runs.SECRET}
    meet = [sys.executable, "-m", "tfpara.launch.meet", "-n", "2"]
    options = {"log": str(tmp_path / "{pid}.jsonl"), "epochs": 1, "plain": how}
    options |= {"grace_seconds": 2.0}
    with subprocess.Popen(meet, env=environment, stdout=subprocess.PIPE, text=True) as meeting:
        try:
            environment[ADDRESS] = meeting.stdout.readline().strip().partition("=")[2]
            command = [str(elastic_runs.PROGRAM), json.dumps(options)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            workers = [warm.Popen(command, environment, **pipes) for _ in range(2)]
            outputs = [worker.communicate(timeout=elastic_runs.DEADLINE)[0] for worker in workers]
            codes = {worker.returncode for worker in workers}
            # One may end while the other still reads, which then goes on and is one too few.
            assert codes == {0} if how == "ends" else codes - {75} == {1}, outputs
            told = meeting.communicate(timeout=elastic_runs.DEADLINE)[0]
        finally:
            meeting.kill()
    assert meeting.returncode == code and says in told


# Daily: without TensorFlow, in test_launch.py.
@pytest.mark.nightly
def test_the_launcher_starts_workers_again_that_join(tmp_path):
    options = {"epochs": 6, "step_seconds": 0.1, "log": str(tmp_path / "{pid}.jsonl")}
    options |= {"faults": {"1": ["step", 5, "SIGKILL"]}, "max_workers": 2}
    options["holds"] = {"3": "len(tasks) > 1 or comes"}
    arguments = ("-n", 2, "--spares=1", "--elastic", elastic_runs.PROGRAM, json.dumps(options))
    code, output, errors = launch(*arguments)
    assert code == 0, errors
    assert re.search(r"worker \d is lost.*: \d workers? trains? on \(generation \d\)", errors)
    assert "failed: killed by SIGKILL; restart 1 of 100" in errors
    logs = [path.read_text().splitlines() for path in tmp_path.glob("*.jsonl")]
    ends = [json.loads(lines[-1]) for lines in logs]
    assert [end[0] for end in ends].count("end") == 2
    assert len({end[1] for end in ends if end[0] == "end"}) == 1


@pytest.mark.nightly
def test_the_meeting_point_names_a_worker_for_which_the_others_wait(tmp_path, caplog):
    """It stands still for less than silence_seconds, and then all go on."""
    faults, options = {1: ["step", 5, "SIGSTOP"]}, {"epochs": 2, "silence_seconds": 100.0}
    with elastic_runs.Run(tmp_path, 3, faults, **options) as run:
        until = time.monotonic() + elastic_runs.DEADLINE
        while "have waited" not in caplog.text and time.monotonic() < until:
            time.sleep(0.1)
        assert caplog.text.count("the other workers have waited for worker 1 (") == 1
        os.kill(run.processes[run.of_rank(1)].pid, signal.SIGCONT)
        assert len(run.check([])) == 3
        assert len(run.meeting.state.history) == 1


@pytest.mark.nightly
def test_a_run_that_others_complete_ends_well(tmp_path):
    """A worker that is killed just before the end is not started again, and not missed."""
    options = {"log": str(tmp_path / "{pid}.jsonl"), "faults": {"1": ["step", 57, "SIGKILL"]}}
    code, output, errors = launch("-n", 2, "--elastic", elastic_runs.PROGRAM, json.dumps(options))
    assert code == 0, errors
    assert "restart" not in errors and "1 worker trains on" in errors


@pytest.mark.nightly
def test_workers_that_have_all_been_killed_are_not_awaited(tmp_path):
    faults = {rank: ["step", 5, "SIGKILL"] for rank in "01"}
    options = {"log": str(tmp_path / "{pid}.jsonl"), "faults": faults, "grace_seconds": 3600.0}
    code, output, errors = launch("-n", 2, "--elastic", elastic_runs.PROGRAM, json.dumps(options))
    assert code == AGAIN, errors
    assert "restart" not in errors and "failed first: killed by SIGKILL" in errors


@pytest.mark.nightly
def test_the_launcher_does_not_start_again_what_fails_before_training(tmp_path):
    options = json.dumps({"log": str(tmp_path / "{pid}.jsonl"), "rule": "tfpara.NoSuchRule()"})
    code, output, errors = launch("-n", 2, "--elastic", elastic_runs.PROGRAM, options)
    assert code == 1
    assert "restart" not in errors and "NoSuchRule" in errors


@pytest.mark.nightly
def test_the_launcher_adds_and_removes_workers(tmp_path):
    """SIGUSR1 adds one, SIGUSR2 has the last one leave; it is not started again."""
    options = {"epochs": 12, "step_seconds": 0.1, "log": str(tmp_path / "{pid}.jsonl")}
    options["holds"] = {"4": "generation > 1 or comes"}
    arguments = ("-n", 2, "--elastic", elastic_runs.PROGRAM, json.dumps(options))
    with Launched(*arguments, stderr=subprocess.STDOUT) as launched:
        while not any('"synced"' in path.read_text() for path in tmp_path.glob("*.jsonl")):
            time.sleep(0.1)
        launched.process.send_signal(signal.SIGUSR1)
        launched.read_until("worker 2 is added", "worker 2 has come: 3 workers train on")
        launched.process.send_signal(signal.SIGUSR2)
        launched.read_until("worker 2 is removed", "worker 2 has left: 2 workers train on")
        code, output, _ = launched.finish()
    assert code == 0, output
    assert "tfpara-launch: worker 2 has left: exit code 75" in output
    assert "restart" not in output


@pytest.mark.nightly_cases("dataset", "py_dataset")
@pytest.mark.parametrize("kind", ["arrays", "dataset", "py_dataset"])
def test_rows_are_dealt_out_anew(kind, tmp_path):
    """Each row of an epoch is trained once, shuffled if that was said, whoever is lost or comes."""
    options = {"epochs": 5, "step_seconds": 0.1, "arrays": 3, "checkpoints": str(tmp_path / "run")}
    options |= {"kind": kind, "every_syncs": 9, "holds": {"3": "len(tasks) > 2 or comes"}}
    with elastic_runs.Run(tmp_path, 3, {0: ["weights", 2, "SIGKILL"]}, **options) as run:
        run.start()
        codes, outputs = run.ends()
        assert sorted(codes) == [KILLED, 0, 0, 0], outputs
        ended = [number for number, code in enumerate(codes) if code == 0]
        assert len({run.events(number)[-1][1] for number in ended}) == 1
        counts, lost = run.synced(), run.left_open({codes.index(KILLED)})
        for row in range(60):
            assert counts[row] in ({4, 5} if row in lost else {5}), row
        orders = [[e[1] for e in run.events(n) if e[0] == "trained"] for n in ended]
        if kind != "dataset":
            assert all(order != sorted(order) for order in orders)


@pytest.mark.nightly
def test_data_call_tensorflow_while_members_change(tmp_path):
    """Threads that read data call TensorFlow; a change of members waits for the end of a call.

    Without that, TensorFlow fails to find what it has prepared, or the process crashes.
    """
    options = {"epochs": 10_000, "minibatches": 3000, "arrays": 3, "step_seconds": 0.02}
    with elastic_runs.Run(tmp_path, 2, **options, kind="calling_tensorflow") as run:
        for number in range(2):
            run.wait_until(number, "synced", count=2)
        for change in range(4):
            number = run.start()
            run.wait_until(number, "synced", count=2)
            run.processes[number].kill()
            members = 2 * (change + 1) + 1
            run.until(lambda count=members: len(run.meeting.state.history) >= count)
            for stays in range(2):
                synced = sum(event[0] == "synced" for event in run.events(stays))
                run.wait_until(stays, "synced", count=synced + 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"rule": "tfpara.BMUF()", **MIXED, "dropout": False},
        pytest.param(
            {"rule": "tfpara.EASGD()", "arrays": 3, "kind": "py_dataset"},
            marks=pytest.mark.one_version,
        ),
        pytest.param(
            {"rule": "tfpara.EASGD()", "follows": False, "max_workers": 3},
            marks=pytest.mark.one_version,
        ),
        pytest.param(
            {"rule": "tfpara.BMUFAdam()", "adam": True, "devices": 2},
            marks=pytest.mark.one_version,
        ),
    ],
)
def test_the_record_is_replayed_in_one_process(options, tmp_path):
    """Simulated replicas train what the workers did; they know nothing of groups that change."""
    options = {"epochs": 6, **options}
    workers = {"checkpoints": str(tmp_path / "run"), "step_seconds": 0.1, "every_syncs": 100}
    workers["weights"] = str(tmp_path / "{pid}.npz")
    workers["holds"] = {"2": "3 in tasks or comes", "4": "4 in tasks or comes"}
    faults = {0: ["weights", 2, "SIGKILL"]}
    with elastic_runs.Run(tmp_path, 3, faults, **options, **workers) as run:
        run.start()
        run.wait_until(run.of_rank(1), "epoch", 2)
        run.processes[run.of_rank(1)].kill()
        run.start()
        if "arrays" in options:
            assert sorted(run.ends()[0]) == [KILLED, KILLED, 0, 0, 0]
        else:
            assert len(run.check([KILLED, KILLED], epochs=6)) == 3
        sizes = [len(each.members) for each in run.meeting.state.history]
        assert min(sizes) < 3 and len(sizes) > 2
    trained = [np.load(path) for path in tmp_path.glob("*.npz")]
    record = tmp_path / "run" / "generations.jsonl"
    options |= {"replay": str(record), "weights": str(tmp_path / "replayed.npz")}
    options["log"] = str(tmp_path / "replay.jsonl")
    output = warm.Popen(
        [str(elastic_runs.PROGRAM), json.dumps(options)],
        {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).communicate(timeout=elastic_runs.DEADLINE)[0]
    assert (tmp_path / "replayed.npz").exists(), output
    replayed = np.load(tmp_path / "replayed.npz")
    for name in replayed.files:
        np.testing.assert_allclose(trained[0][name], replayed[name], rtol=2e-4, atol=2e-5)


@pytest.mark.nightly
def test_each_worker_evaluates_all_validation_data_of_any_kind(tmp_path):
    found = []
    for kind in (True, "py_dataset"):
        (directory := tmp_path / str(kind)).mkdir()
        with elastic_runs.Run(directory, 2, validate=kind) as run:
            run.check([])
            logs = [e[2] for n in range(2) for e in run.events(n) if e[:2] == ["epoch", 1]]
        assert logs[0] == logs[1]
        found.append(logs[0]["val_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.nightly
def test_a_worker_is_lost_where_a_rate_falls_with_the_position_in_the_epoch(tmp_path):
    """One waits at the end of the block, and the others are some steps behind."""
    options = {"callbacks": ["rate"], "period": 10, "epochs": 2}
    options["paces"] = {"0": 0.02, "1": 0.2, "2": 0.2}
    with elastic_runs.Run(tmp_path, 3, {2: ["step", 5, "SIGKILL"]}, **options) as run:
        assert len(run.check([KILLED])) == 2


_ASKED = """
import os, signal, sys
from tfpara.cluster import parent
from tfpara.elastic.meeting_point import Meeting
reports = parent.Reports()
meeting = Meeting("127.0.0.1", 0, 1, 60.0, b"")
os.environ.update(parent.variables(reports.writer), TFPARA_MEETING=f"127.0.0.1:{meeting.port}")
import keras, numpy as np, tfpara
strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=5, elastic=tfpara.Elastic())
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.zeros((640, 8), "float32")
def ask(batch, logs):
    if batch == 12: os.kill(os.getpid(), signal.SIGTERM)
callbacks = [keras.callbacks.LambdaCallback(on_train_batch_begin=ask)]
if sys.argv[2] == "saves": callbacks.append(tfpara.callbacks.Checkpoint(sys.argv[1] + "/run"))
try: model.fit(x, x[:, :1], batch_size=32, verbose=0, callbacks=callbacks)
except (SystemExit, RuntimeError): pass
print("SAID", reports.read().get("saves"), flush=True)
os._exit(0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("what,saves", [("saves", True), ("does not save", None)])
def test_the_launcher_is_told_that_a_worker_that_leaves_may_write_a_checkpoint(
    what, saves, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(_ASKED)
    with warm.Popen(
        [str(script), str(tmp_path), what], stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        said, _ = process.communicate(timeout=120)
    assert f"SAID {saves}\n" in said
    assert (tmp_path / "run" / "checkpoint-00000001").exists() == bool(saves)
