"""The supervisor of a run's processes: each row of its table by hand, and random events."""

import random
import signal

import pytest

from tfpara.launch.supervisor import Note, Policy, Process, Send, Start, Supervisor

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def fixed(count, **policy):
    """A run of a chief and workers that all are needed; all have started at 0."""
    names = ["chief", *(f"worker {rank}" for rank in range(1, count))]
    return begun([Process(name, {}) for name in names], **policy)


def elastic(count, **policy):
    return begun([worker(rank) for rank in range(count)], **policy)


def with_evaluator(processes, **policy):
    return begun([*processes, Process("evaluator", {}, beside=True)], **policy)


def asynchronous(workers, **policy):
    """A run of a chief, expendable workers, and a parameter server."""
    others = [Process(f"worker {rank}", {}, True) for rank in range(workers)]
    return begun([Process("chief", {}), *others, Process("ps 0", {})], **policy)


def worker(rank):
    return Process(f"worker {rank}", {}, expendable=True)


def begun(processes, **policy):
    run = Supervisor(processes, Policy(**policy))
    for rank in range(len(processes)):
        run.started(rank, 0.0)
    assert run.phase == "running" and run.due == float("inf") and not run.is_over
    return run


def to(number, *ranks):
    return [Send(rank, number) for rank in ranks]


def end(run, code=0, *ranks, now=9.0):
    for rank in ranks:
        run.ended(rank, code, now)
    assert run.is_over
    return run.outcome(5.0)


# -- running -------------------------------------------------------------------------------------


def test_all_come_to_their_end():
    run = fixed(12)
    for rank in range(11, 0, -1):
        assert run.ended(rank, 0, 1.0) == [] and not run.is_over
    assert end(run, 0, 0) == (0, None, "all 12 workers done after 5.0 s")
    assert end(fixed(1), 0, 0).text == "worker done after 5.0 s"
    assert end(asynchronous(1), 0, 0, 1, 2).text == "all 3 processes done after 5.0 s"


def test_a_failure_is_followed_by_time_to_report_then_sigterm_then_sigkill():
    run = fixed(12, grace=7.0)
    assert run.ended(11, 3, 1.0) == []
    assert (run.phase, run.due) == ("settling", 3.0)
    assert run.ended(10, 1, 2.5) == [] and run.due == 3.0
    assert run.tick(2.9) == []
    assert run.tick(3.0) == to(TERM, *range(10))
    assert (run.phase, run.due) == ("stopping", 10.0)
    run.ended(4, -TERM, 4.0)
    assert run.tick(10.0) == to(KILL, 0, 1, 2, 3, 5, 6, 7, 8, 9)
    assert (run.phase, run.due) == ("stopping", float("inf"))
    assert run.tick(99.0) == []
    outcome = end(run, -KILL, 0, 1, 2, 3, 5, 6, 7, 8, 9)
    assert outcome == (
        3,
        None,
        "worker 11 failed first: exit code 3; all workers ended after 5.0 s",
    )


@pytest.mark.parametrize(("status", "code", "how"), [(-6, 134, "SIGABRT"), (-40, 168, "signal 40")])
def test_an_end_by_a_signal(status, code, how):
    run = fixed(1)
    assert end(run, status, 0) == (
        code,
        None,
        f"chief failed first: killed by {how}; ended after 5.0 s",
    )


@pytest.mark.parametrize(("status", "named"), [(-KILL, 1), (-TERM, 0), (5, 0)])
def test_one_that_was_killed_is_the_cause_though_others_have_ended_before(status, named):
    run = fixed(2)
    run.ended(0, 1, 1.0)
    outcome = end(run, status, 1, now=1.5)
    assert outcome.text.startswith(["chief failed", "worker 1 failed"][named])
    # Not where its predecessor was killed too, nor where the supervisor itself has killed it.
    for begins in (-KILL, 1):
        run = fixed(2)
        run.ended(0, begins, 1.0)
        run.tick(3.0)
        assert end(run, -KILL, 1).text.startswith("chief failed")


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, -KILL])
def test_the_end_of_an_evaluator_is_no_event_of_the_run(status):
    run = with_evaluator([Process("chief", {}), Process("worker 1", {})])
    how = "killed by SIGKILL" if status < 0 else f"exit code {status}"
    note = [Note(f"evaluator failed: {how}; the run goes on without")] if status else []
    assert run.ended(2, status, 1.0) == note
    assert (run.phase, run.due) == ("running", float("inf"))
    run.ended(1, 0, 2.0)
    assert end(run, 0, 0) == (0, None, "all 2 workers done after 5.0 s")


def test_a_run_that_ends_well_leaves_its_evaluator_time():
    run = with_evaluator([Process("chief", {}), Process("worker 1", {})])
    run.ended(0, 0, 1.0)
    run.ended(1, 0, 1.0)
    assert not run.is_over and run.due == float("inf")
    assert end(run, 0, 2).code == 0
    workers = [Process("worker 0", {}, True), Process("ps 0", {})]
    run = with_evaluator([Process("chief", {}), *workers], grace=7.0)
    run.ended(0, 0, 1.0)  # without the chief the others have nothing to do
    assert run.tick(8.0) == to(TERM, 1, 2)
    run.ended(1, -TERM, 8.0)
    run.ended(2, 0, 8.0)
    assert run.tick(15.0) == []
    assert not run.is_over and run.due == float("inf")
    assert end(run, 0, 3) == (0, None, "all 3 processes done after 5.0 s")


def test_a_failure_or_a_signal_ends_an_evaluator_too():
    run = with_evaluator([Process("chief", {}), Process("worker 1", {})])
    run.ended(1, 3, 1.0)
    assert run.tick(3.0) == to(TERM, 0, 2)
    run.ended(2, 75, 3.0)
    assert end(run, -TERM, 0).code == 3
    run = with_evaluator([Process("chief", {})])
    assert run.signalled(TERM, 1.0) == to(TERM, 0, 1)
    run.ended(1, 75, 1.0)
    assert (
        end(run, 75, 0).text == "got SIGTERM; chief failed first: exit code 75; ended after 5.0 s"
    )


def test_workers_come_and_go_beside_an_evaluator():
    another = lambda rank: Process(f"worker {rank}", {}, True)  # noqa: E731
    run = with_evaluator([worker(0), worker(1)], another=another, restart_workers=9)
    assert run.signalled(signal.SIGUSR2, 1.0)[1] == Send(1, TERM)
    run.ended(1, 0, 1.0)
    assert run.signalled(signal.SIGUSR2, 2.0) == [
        Note("no worker is removed: there is no other. SIGTERM ends the run")
    ]
    assert run.signalled(signal.SIGUSR1, 3.0) == [Note("worker 3 is added"), Start(3)]
    run.started(3, 3.0)
    run.ended(3, 1, 4.0)  # it would be started again
    run.ended(0, 0, 4.0)  # but training is done
    assert run.due == float("inf") and not run.is_over
    assert end(run, 0, 2).code == 0


def test_a_signal_is_passed_on_and_a_second_one_kills():
    run = fixed(12, grace=7.0)
    run.ended(5, 0, 0.5)
    rest = [rank for rank in range(12) if rank != 5]
    assert run.signalled(INT, 1.0) == to(INT, *rest)
    assert (run.phase, run.due) == ("asked", 8.0)
    run.ended(11, 75, 2.0)
    assert run.due == 8.0  # all have the whole grace
    assert run.signalled(TERM, 3.0) == to(KILL, *rest[:-1])
    assert run.tick(10.0) == to(KILL, *rest[:-1]) and run.phase == "stopping"
    outcome = end(run, -KILL, *rest[:-1])
    assert outcome.code == 75 and outcome.signal == INT
    assert outcome.text.startswith("got SIGINT; worker 11 failed first: exit code 75; all")


def test_after_a_signal_sigkill_follows():
    run = fixed(2, grace=7.0)
    run.signalled(TERM, 1.0)
    assert run.tick(8.0) == to(KILL, 0, 1)
    assert end(run, -KILL, 0, 1).code == 137


def test_a_signal_while_others_settle_or_stop():
    run = fixed(3, grace=7.0)
    run.ended(2, 3, 1.0)
    assert run.signalled(INT, 2.0) == to(INT, 0, 1) and (run.phase, run.due) == ("asked", 9.0)
    run = fixed(3, grace=7.0)
    run.ended(2, 3, 1.0)
    run.tick(3.0)
    assert run.signalled(INT, 4.0) == to(INT, 0, 1) and (run.phase, run.due) == ("stopping", 11.0)
    assert run.signalled(INT, 5.0) == to(KILL, 0, 1)
    assert run.tick(12.0) == to(KILL, 0, 1) and run.phase == "stopping"
    assert end(run, -KILL, 0, 1).code == 3


def test_output_that_nobody_reads_is_as_a_sigterm_and_counts_once():
    run = fixed(2)
    assert run.signalled(signal.SIGPIPE, 1.0) == to(TERM, 0, 1)
    assert run.signalled(signal.SIGPIPE, 2.0) == []
    assert end(run, -TERM, 0, 1).signal == signal.SIGPIPE
    assert run.signalled(INT, 9.0) == [] and run.signalled(signal.SIGUSR1, 9.0) == []
    assert run.outcome(5.0).signal == signal.SIGPIPE


def test_a_signal_after_the_end_is_told():
    run = fixed(1)
    run.ended(0, 0, 1.0)
    assert run.signalled(TERM, 1.1) == []
    assert run.outcome(1.0) == (0, TERM, "got SIGTERM; worker done after 1.0 s")


def test_one_that_writes_a_checkpoint_has_more_time_than_the_grace():
    run = fixed(2)
    run.said(1, {"saves": True})
    run.signalled(TERM, 1.0)
    for now in (11.0, 12.0, 300.5):
        assert run.tick(now) == [] and run.due == now + 1.0
    assert run.tick(301.5) == to(KILL, 0, 1)
    for said, grace, asked in (
        ({"saves": 1}, None, True),
        ({"saves": True}, 10.0, True),
        ({"saves": True}, None, False),
    ):
        run = fixed(2, grace=grace)
        run.said(0, said)
        run.signalled(TERM, 1.0) if asked else run.ended(1, 3, -1.0)
        killed = to(KILL, 0, 1) if asked else to(KILL, 0)
        assert (run.tick(1.0) + run.tick(11.0))[-len(killed) :] == killed
    run = fixed(1)
    run.said(0, {"saves": True})
    run.signalled(TERM, 1.0)
    assert run.signalled(TERM, 2.0) == to(KILL, 0)  # and a second signal ends the wait
    assert run.tick(12.0) == to(KILL, 0)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_elastic_runs_are_ignored_in_others(number):
    [note] = fixed(2).signalled(number, 1.0)
    assert note.text.startswith(f"{number.name} is ignored: workers come and go")


# -- the cause -----------------------------------------------------------------------------------


def test_the_cause_is_the_one_that_others_name():
    run = fixed(12)
    run.said(0, {"because": ["worker 10"]})
    run.said(10, {"because": ["worker 11", "worker 3"]})
    for rank, code in ((0, 1), (10, 1), (11, 7)):
        run.ended(rank, code, 1.0)
    outcome = end(run, 1, *range(1, 10))
    assert outcome.code == 1 and outcome.text.startswith("worker 3 failed first: exit code 1")
    run.said(10, {"because": ["worker 11"]})
    assert run.outcome(5.0).text.startswith("worker 11 failed first: exit code 7")
    assert run.outcome(5.0).code == 7
    # One that has not ended, or is none, is no cause.
    for odd in (["worker 99"], "chief", None, [["chief"]], {"chief": 1}, 10**400):
        run.said(0, {"because": odd})
        assert run.outcome(5.0).text.startswith("chief failed first: exit code 1")


@pytest.mark.parametrize("first", [0, 1, 2])
def test_in_a_circle_it_is_the_one_whom_the_first_has_named(first):
    run = fixed(3)
    for rank in range(3):
        at = 1.0 if rank == first else 2.0
        run.said(rank, {"because": [["chief", "worker 1", "worker 2"][(rank + 1) % 3]], "at": at})
        run.ended(rank, 10 + rank, 1.0)
    assert run.outcome(1.0).code == 10 + (first + 1) % 3
    for odd in (None, "1", 10**400, float("nan"), []):
        run.said(first, {"because": ["chief"], "at": odd})
        run.outcome(1.0)


def test_one_that_does_not_answer_and_one_that_ends_too_early():
    run = fixed(2)
    run.said(1, {"because": ["chief"]})
    run.ended(1, 3, 1.0)
    run.tick(3.0)
    outcome = end(run, -TERM, 0)
    assert outcome.code == 3
    assert outcome.text.startswith("chief did not answer, and was ended; worker 1 failed: exit co")
    run = fixed(2)
    run.said(0, {"because": ["worker 1"]})
    run.ended(1, 0, 1.0)
    outcome = end(run, 4, 0)
    text = "worker 1 ended first, with exit code 0 while others went on; then chief failed: exit"
    assert outcome.code == 4 and outcome.text.startswith(text)


# -- expendable processes ------------------------------------------------------------------------


def test_a_worker_is_started_again_after_a_pause_that_grows():
    run, now = elastic(2, restart_workers=100), 0.0
    for number, pause in enumerate([2.0, 4.0, 8.0, 16.0, 30.0, 30.0], 1):
        assert run.ended(1, 3, now) == [] and run.due == now + pause
        assert run.tick(now + pause - 0.1) == []
        now += pause
        note = Note(f"worker 1 failed: exit code 3; restart {number} of 100")
        assert run.tick(now) == [note, Start(1)]
        run.started(1, now)
    run.ended(1, 3, now + 60.1)  # it has run long enough
    assert run.due == now + 62.1


def test_a_worker_that_cannot_be_started_is_tried_again():
    run = elastic(2, restart_workers=2)
    run.ended(0, -KILL, 1.0)
    run.tick(3.0)
    assert run.not_started(0, "no memory", 3.0) == [Note("worker 0 cannot be started: no memory")]
    assert run.due == 7.0
    note = Note("worker 0 failed: killed by SIGKILL; restart 2 of 2")
    assert run.tick(7.0) == [note, Start(0)]
    run.started(0, 7.0)
    run.ended(0, 1, 8.0)
    assert run.tick(16.0) == [Note("worker 0 failed: exit code 1; the others go on")]
    assert end(run, 0, 1).code == 0


def test_the_failure_of_the_last_worker_is_that_of_the_run():
    run = asynchronous(1)
    run.ended(1, -KILL, 1.0)
    assert run.tick(3.0) == [] and (run.phase, run.due) == ("settling", 5.0)
    assert run.tick(5.0) == to(TERM, 0, 2)
    outcome = end(run, -TERM, 0, 2)
    assert outcome.code == 137
    assert outcome.text.startswith("worker 0 failed first: killed by SIGKILL; all processes ended")


def test_the_end_of_a_run_takes_back_restarts():
    run = asynchronous(12, restart_workers=5)
    run.ended(11, 3, 1.0)
    run.ended(12, 3, 1.5)
    run.ended(13, 9, 1.6)  # the parameter server
    assert run.due == 3.6  # there is no restart before
    assert run.tick(3.6) == to(TERM, *range(11))
    run = asynchronous(2, restart_workers=5, grace=4.0)
    run.ended(1, 3, 1.0)
    run.ended(0, 0, 1.5)  # the chief, without which the others have nothing to do
    assert (run.phase, run.due) == ("settling", 5.5)
    run.ended(2, 0, 2.0)
    assert run.tick(5.5) == to(TERM, 3)
    outcome = end(run, -TERM, 3)
    assert outcome.code == 143 and outcome.text.startswith("ps 0 failed first: killed by SIGTERM")


def test_the_chief_of_an_asynchronous_run_is_the_cause_though_it_ends_last():
    run = asynchronous(2)
    run.ended(3, 1, 1.0)
    run.ended(0, 3, 1.1)
    assert end(run, 1, 1, 2).text.startswith("chief failed first: exit code 3")


def test_a_failure_before_training_ends_an_elastic_run_unless_the_worker_was_killed():
    run = elastic(3, takes_in=lambda killed: killed, follow=lambda name: lambda: False)
    run.ended(2, -KILL, 1.0)
    assert run.phase == "running"
    run.ended(1, 1, 1.0)
    assert run.phase == "settling" and end(run, -TERM, 0).code == 1


@pytest.mark.parametrize("went_on", [True, False])
def test_an_elastic_run_is_no_success_unless_it_went_on_without_those_that_failed(went_on):
    names = []

    def follow(name):
        names.append(name)
        return lambda: went_on

    run = elastic(12, restart_workers=0, follow=follow)
    run.ended(11, 3, 1.0)
    run.tick(3.0)
    outcome = end(run, 0, *range(11))
    assert names == ["worker 11"]
    assert outcome.code == (0 if went_on else 3)


@pytest.mark.parametrize("code", [1, -9])
@pytest.mark.parametrize("later", [False, True])
def test_an_elastic_run_ends_with_its_first_failure_where_nobody_is_taken_in_any_more(later, code):
    """An error of the program itself would come again at each new start."""
    goes_on = [True]
    run = elastic(
        2, restart_workers=9, takes_in=lambda killed: goes_on[0], goes_on_later=lambda: later
    )
    run.ended(0, code, 1.0)
    run.ended(1, 3, 1.5)
    goes_on[0] = False
    assert run.tick(3.0) == []
    outcome = end(run)
    ends = {1: ("exit code 1", 1), -9: ("killed by SIGKILL", 75 if later else 137)}
    why, expected = ends[code]
    assert outcome.code == expected
    assert outcome.text.startswith(f"worker 0 failed first: {why}")


def test_workers_are_added_and_removed():
    run = elastic(10, another=worker)
    assert run.signalled(signal.SIGUSR1, 1.0) == [Note("worker 10 is added"), Start(10)]
    run.started(10, 1.0)
    assert run.signalled(signal.SIGUSR1, 1.0) == [Note("worker 11 is added"), Start(11)]
    assert run.not_started(11, "no memory", 1.0) == [Note("worker 11 cannot be started: no memory")]
    assert len(run.processes) == 11
    assert run.signalled(signal.SIGUSR2, 2.0) == [Note("worker 10 is removed"), Send(10, TERM)]
    assert run.signalled(signal.SIGUSR2, 2.0) == [Note("worker 9 is removed"), Send(9, TERM)]
    assert run.ended(10, 75, 3.0) == [Note("worker 10 has left: exit code 75")]
    run.ended(8, 3, 3.0)
    assert run.signalled(signal.SIGUSR2, 3.0) == [Note("worker 8 is removed")]  # it waits
    assert run.due == float("inf")
    for rank in range(1, 8):
        run.ended(rank, 0, 4.0)
    [note] = run.signalled(signal.SIGUSR2, 5.0)
    assert note.text.startswith("no worker is removed: there is no other.")
    run.ended(9, 75, 6.0)
    assert end(run, 0, 0).code == 0


def test_no_worker_is_added_or_removed_where_the_run_does_not_take_in_or_ends():
    run = elastic(2, another=worker, takes_in=lambda killed: False)
    for number, word in ((signal.SIGUSR1, "added"), (signal.SIGUSR2, "removed")):
        [note] = run.signalled(number, 1.0)
        assert note.text == f"no worker is {word}: training has not begun, or comes to its end"
    run = elastic(2, another=worker)
    run.signalled(TERM, 1.0)
    assert len(run.signalled(signal.SIGUSR1, 1.0)) == 1


# -- random events -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_all_end(seed):
    draw = random.Random(seed)
    kinds = [fixed, elastic, asynchronous]
    many = {"restart_workers": draw.randrange(3), "grace": draw.choice([None, 3.0])}
    kind = draw.choice(kinds)
    if kind is elastic and draw.random() < 0.5:
        many["another"] = worker
    run, now, running = kind(draw.randrange(1, 13), **many), 0.0, set()
    running = set(range(len(run.processes)))
    odd = [{}, {"because": ["chief", 3]}, {"because": 7, "at": "x"}, {"saves": True}]

    def act(actions):
        for action in actions:
            match action:
                case Start(rank):
                    assert rank not in running
                    if draw.random() < 0.2:
                        act(run.not_started(rank, "why", now))
                    else:
                        run.started(rank, now)
                        running.add(rank)
                case Send(rank, number):
                    assert rank in running
                    if number == KILL:
                        killed.add(rank)

    killed = set()
    for step in range(2000):
        if run.is_over:
            break
        now = max(now, run.due if run.due < float("inf") and draw.random() < 0.5 else now + 0.3)
        chance, calm = draw.random(), step > 100
        if killed & running or (running and chance < (0.3 if not calm else 0.5)):
            rank = draw.choice(sorted(killed & running or running))
            running.discard(rank)
            killed.discard(rank)
            act(run.ended(rank, draw.choice([0, 0, 1, 75, -9, -15]), now))
        elif chance < 0.4 and not calm:
            act(run.signalled(draw.choice([INT, TERM, signal.SIGUSR1, signal.SIGUSR2]), now))
        elif chance < 0.5 and running:
            run.said(draw.choice(sorted(running)), draw.choice(odd))
        else:
            act(run.tick(now))
    assert run.is_over and not running
    outcome = run.outcome(now)
    assert 0 <= outcome.code < 256 and outcome.text.endswith(" s")
