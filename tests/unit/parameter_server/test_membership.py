"""The state machine of the control channel, without processes: each row of its tables, and more."""

import random

import pytest

from tfpara import version
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.parameter_server.control.membership import (
    Admit,
    Drop,
    Exit,
    Membership,
    Note,
    Send,
)

WORKERS, PS = 12, 11  # numbers of two digits: worker 10 comes after worker 9
JOBS = {
    "chief": ("c:1",),
    "worker": tuple(f"w{k}:1" for k in range(WORKERS)),
    "ps": tuple(f"p{k}:1" for k in range(PS)),
}
CLUSTER = AsyncCluster(JOBS, "chief", 0)
STARTUP, TIMEOUT, BEAT = 100.0, 10.0, 2.0
GONE = "its connection ended"


class Run:
    """A machine and its clock; what it says is kept by the event."""

    def __init__(self):
        self.now = 1000.0
        self.state = Membership(CLUSTER, "c:2", STARTUP, TIMEOUT, self.now)

    def hello(self, task, view=None, number=version.__version__):
        return self.state.hello(task, view or CLUSTER.spec(), number, self.now)

    def gone(self, task):
        return self.state.gone(task, GONE, self.now)

    def tick(self, seconds, *silent, turned_away=""):
        """The clock goes on by steps of 1 s, while all but the silent are heard."""
        said = []
        for _ in range(round(seconds)):
            self.now += 1.0
            heard = {task: self.now for task in CLUSTER.members if task not in silent}
            said += self.state.tick(self.now, heard, turned_away)
        return [each for each in said if each != Send(each[0], {})]  # signs of life

    def gather(self):
        for task in CLUSTER.members:
            self.hello(task)
            assert self.state.serves(task) == []
        self.state.reached(None)
        assert self.state.phase == "training"
        return self


def sentence(actions):
    (found,) = [each for each in actions if isinstance(each, Note)]
    return found.sentence


def ends(actions, how="end"):
    """The exit code and the sentence that tasks are sent, by task."""
    return {
        each.task: (each.message[how]["code"], each.message[how]["sentence"])
        for each in actions
        if isinstance(each, Send) and how in each.message
    }


WORKER, TENTH, SERVER = ("worker", 2), ("worker", 10), ("ps", 10)


# -- a task: the rows of the first table ----------------------------------------------------------


@pytest.mark.parametrize("task", [WORKER, TENTH, SERVER])
def test_a_hello_that_fits_is_welcome(task):
    run = Run()
    welcome = {"welcome": CLUSTER.spec("c:2"), "timeout_seconds": TIMEOUT}
    assert run.hello(task) == [Admit(task), Send(task, welcome)]
    assert run.state.serving == [] and CLUSTER.describe(*task) in run.state.missing


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize(
    ("task", "view", "number", "words"),
    [
        (WORKER, {"chief": ["c:9"]}, version.__version__, "TF_CONFIG differs between processes"),
        (("worker", 12), None, version.__version__, "TF_CONFIG differs between processes"),
        (("evaluator", 0), None, version.__version__, "TF_CONFIG differs between processes"),
        (TENTH, None, "0.0.1", "worker 10 (w10:1) has 0.0.1. Install the same version"),
    ],
)
def test_a_hello_that_does_not_fit_is_a_problem_of_the_gathering(
    task, view, number, words, present
):
    run = Run()
    if present and task in CLUSTER.members:
        run.hello(task)
        run.now += 3 * BEAT
    ((_, message),) = run.hello(task, view, number)
    assert message["end"]["code"] == 1 and words in message["end"]["sentence"]
    assert run.state.problem == message["end"]["sentence"]
    run = Run().gather()
    (answer,) = run.hello(task, view, number)
    assert answer.task is None and words in answer.message["end"]["sentence"]
    assert run.state.problem is None and run.state.phase == "training"


@pytest.mark.parametrize("serves", [False, True])
def test_two_of_one_task_are_a_problem_of_the_gathering(serves):
    run = Run()
    run.hello(TENTH)
    if serves:
        run.state.serves(TENTH)
    run.now += 3 * BEAT - 0.1
    (answer,) = run.hello(TENTH)
    assert answer.task is None and "both are worker 10 (w10:1)." in run.state.problem
    assert answer.message["end"]["sentence"] == run.state.problem
    assert (TENTH in run.state.serving) is serves
    run = Run().gather()
    (answer,) = run.hello(TENTH)
    assert "both are worker 10 (w10:1)." in answer.message["end"]["sentence"]
    assert run.state.problem is None


def test_one_that_is_silent_for_three_beats_is_replaced():
    run = Run().gather()
    run.now += 3 * BEAT
    drop, admit, welcome = run.hello(TENTH)
    assert (drop, admit) == (Drop(TENTH), Admit(TENTH)) and "welcome" in welcome.message
    assert TENTH not in run.state.serving
    assert run.state.serves(TENTH) == [Note("worker 10 (w10:1) is back.")]
    assert run.state.lost == []


def test_who_serves_in_training_is_back_once():
    run = Run().gather()
    run.gone(WORKER)
    run.hello(WORKER)
    assert run.state.serves(WORKER) == [Note("worker 2 (w2:1) is back.")]
    assert run.state.serves(WORKER) == []
    run.gone(WORKER)
    run.hello(WORKER)
    run.state.end(0, "")
    assert run.state.serves(WORKER) == [] and WORKER in run.state.serving


def test_the_first_that_cannot_serve_is_the_problem():
    run = Run()
    for task in (SERVER, WORKER):
        run.hello(task)
        assert run.state.fails_to_serve(f"no port for {task[0]}") == []
    assert run.state.problem == "no port for ps"
    run = Run().gather()
    assert run.state.fails_to_serve("no port") == [Note("no port")]
    assert run.state.problem is None and run.state.phase == "training"
    run.state.end(0, "")
    assert run.state.fails_to_serve("no port") == []


@pytest.mark.parametrize("code", [None, 75])
@pytest.mark.parametrize("serves", [False, True])
def test_a_worker_that_leaves_is_told_the_code(code, serves):
    run = Run().gather() if serves else Run()
    if not serves:
        run.hello(TENTH)
    run.state.restart_code = code
    assert run.state.leaves(TENTH, "SIGTERM") == [Send(TENTH, {"leave": code})]
    assert run.state.asked_to_end is None
    said = run.gone(TENTH)
    end = "the chief has given worker 10 (w10:1) up: it was asked to end (SIGTERM)."
    assert ends(said) == {TENTH: (1, end)}
    assert run.state.lost == ([10] if serves else [])
    if serves:
        told = "worker 10 (w10:1) is lost: it was asked to end (SIGTERM). Training goes on "
        assert sentence(said) == told + "without it."


def test_a_parameter_server_that_leaves_asks_for_the_end():
    run = Run().gather()
    assert run.state.leaves(SERVER, "SIGINT") == []
    assert run.state.asked_to_end == "ps 10 (p10:1) was asked to end (SIGINT)."
    assert SERVER in run.state.serving


def test_one_that_is_gone_before_it_serves_is_dropped():
    for run in (Run(), Run().gather()):
        if run.state.phase == "training":
            run.gone(WORKER)
        run.hello(WORKER)
        told, dropped = run.gone(WORKER)
        assert ends([told])[WORKER][0] == 1 and dropped == Drop(WORKER)


@pytest.mark.parametrize("phase", ["gathering", "ended"])
@pytest.mark.parametrize("task", [TENTH, SERVER])
def test_one_that_is_gone_while_gathering_or_at_the_end_is_dropped(phase, task):
    run = Run()
    if phase == "gathering":
        run.hello(task)
        run.state.serves(task)
    else:
        run.gather().state.end(0, "")
    _, dropped = run.gone(task)
    assert dropped == Drop(task) and run.state.failure is None
    assert CLUSTER.describe(*task) in run.state.missing


def test_training_goes_on_without_a_worker():
    run = Run().gather()
    end, drop, note = run.gone(TENTH)
    given_up = f"the chief has given worker 10 (w10:1) up: {GONE}."
    assert ends([end]) == {TENTH: (1, given_up)}
    assert drop == Drop(TENTH) and run.state.lost == [10]
    wanted = f"worker 10 (w10:1) is lost: {GONE}. Training goes on without it."
    assert note.sentence == wanted
    assert run.state.failure is None and run.state.phase == "training"


def test_all_end_without_a_parameter_server():
    run = Run().gather()
    said = run.gone(SERVER)
    wanted = (
        f"ps 10 (p10:1) is lost with its part of the model: {GONE}. Start all processes again, "
        "from the last checkpoint."
    )
    assert run.state.failure == wanted and run.state.phase == "ended"
    assert said[1] == Drop(SERVER)
    others = set(CLUSTER.members) - {SERVER}
    assert ends(said[2:]) == dict.fromkeys(others, (1, wanted))


@pytest.mark.parametrize("task", [TENTH, SERVER])
def test_silence_is_as_an_end_of_the_connection(task):
    run = Run().gather()
    assert run.tick(TIMEOUT, task) == []
    said = run.tick(1, task)
    assert said[1] == Drop(task) and task not in run.state.serving
    why = "it was silent for longer than timeout_seconds=10"
    assert why in (run.state.failure or sentence(said))
    run = Run()
    run.hello(task)  # one that only starts TensorFlow's server may take its time
    assert run.tick(2 * TIMEOUT, task) == [] and run.state.problem is None


# -- the run: the rows of the second table --------------------------------------------------------


def test_training_begins_where_all_serve_and_were_reached():
    run = Run()
    for task in CLUSTER.members:
        assert CLUSTER.describe(*task) in run.state.missing
        run.state.reached(None)
        assert run.state.phase == "gathering"
        run.hello(task)
        run.state.serves(task)
    assert run.state.missing == ""
    run.state.reached("p10:1 leads nowhere")
    assert (run.state.phase, run.state.problem) == ("gathering", "p10:1 leads nowhere")


def test_one_that_goes_while_addresses_are_tried_may_come_back():
    run = Run()
    for task in CLUSTER.members:
        run.hello(task)
        run.state.serves(task)
    run.gone(TENTH)
    run.state.reached("w10:1 leads nowhere")
    assert run.state.phase == "gathering" and run.state.problem is None
    run.hello(TENTH)
    assert run.state.serves(TENTH) == []
    run.state.reached(None)
    assert run.state.phase == "training"


def test_who_has_not_come_in_time_is_named():
    run = Run()
    for task in CLUSTER.members:
        if task not in (WORKER, TENTH, SERVER):
            run.hello(task)
            run.state.serves(task)
    run.hello(TENTH)
    notes = run.tick(STARTUP - 1, turned_away=" And b came.")
    names = "ps 10 (p10:1), worker 2 (w2:1), worker 10 (w10:1)"
    assert notes == [Note(f"Waiting for {names}.")] * 3 and run.state.problem is None
    run.tick(1, turned_away=" And b came.")
    assert run.state.problem.startswith(f"after 100 s these processes have not started: {names}.")
    assert run.state.problem.endswith("the chief at c:1. And b came.")
    assert run.state.phase == "gathering"  # until the chief's program ends it


@pytest.mark.parametrize("asked", ["a ps", "the chief"])
def test_a_run_without_a_worker_ends_unless_it_ends_with_a_checkpoint(asked):
    run = Run().gather()
    for index in range(WORKERS):
        assert run.state.failure is None
        run.gone(("worker", index))
    assert run.tick(TIMEOUT) == []
    run.hello(TENTH)
    run.state.serves(TENTH)  # just in time
    assert run.tick(5 * TIMEOUT) == []
    run.state.restart_code = 75
    if asked == "a ps":
        run.state.leaves(SERVER, "SIGTERM")
    else:
        run.state.asked_to_end = "the chief was asked to end."
    assert len(run.gone(TENTH)) == 2 and run.state.lost[-1] == 10  # it is not noted
    assert run.tick(5 * TIMEOUT) == []
    run.state.restart_code = None
    said = run.tick(1)
    wanted = "all workers are gone, and none has come back for timeout_seconds=10; start all "
    assert run.state.failure == wanted + "processes again."
    servers = [("ps", k) for k in range(PS)]
    assert ends(said) == dict.fromkeys(servers, (1, run.state.failure))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("how", ["end", "finishing"])
def test_the_end_is_said_once_and_to_those_that_come_late(gathered, how):
    run = Run().gather() if gathered else Run()
    run.hello(SERVER) if not gathered else run.gone(WORKER)
    present = set(CLUSTER.members) - {WORKER} if gathered else {SERVER}
    assert ends(run.state.end(75, "a checkpoint is written", how), how) == dict.fromkeys(
        present, (75, "a checkpoint is written")
    )
    assert run.state.end(1, "something else") == []
    end = {"code": 75, "sentence": "a checkpoint is written"}
    assert run.hello(WORKER) == [Send(None, {"end": end})]
    assert run.state.problem is None and run.state.failure is None


def test_a_process_whose_program_does_not_end_after_a_failure_ends():
    run = Run().gather()
    run.gone(SERVER)
    assert [each for each in run.tick(60) if isinstance(each, Exit)] == []
    exits = [each for each in run.tick(2) if isinstance(each, Exit)]
    assert exits[0] == Exit(f"tfpara: {run.state.failure}")


def test_so_does_one_whose_program_is_long_at_its_end_after_all_workers():
    run = Run().gather()
    run.state.end(0, "", "finishing")
    for index in range(WORKERS):
        run.gone(("worker", index))
    assert run.tick(TIMEOUT + 60) == []
    assert {type(each) for each in run.tick(3)} == {Exit}


# -- time, and odd orders -------------------------------------------------------------------------


def test_there_is_a_sign_of_life_every_beat():
    run = Run()
    run.hello(SERVER)
    run.hello(TENTH)
    said = []
    for _ in range(100):
        run.now += 0.1
        said += run.state.tick(run.now, {})
    assert said == [Send(SERVER, {}), Send(TENTH, {})] * 5


def test_a_chief_that_was_suspended_blames_nobody():
    run = Run().gather()
    run.now += 5 * TIMEOUT
    assert [each for each in run.state.tick(run.now, {}) if each != Send(each[0], {})] == []
    assert len(run.state.serving) == WORKERS + PS
    assert run.tick(TIMEOUT, TENTH) == []
    assert run.state.lost == []
    run.tick(1, TENTH)
    assert run.state.lost == [10]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_keeps_to_the_tables(seed):
    """Messages of those that are there, connections that end, silence, in any order."""
    draw = random.Random(seed)
    run = Run().gather() if seed % 2 else Run()
    there = {task: seed % 2 == 1 for task in CLUSTER.members if seed % 2}  # whether it serves
    for _ in range(400):
        task = draw.choice(CLUSTER.members if draw.random() < 0.2 else CLUSTER.members[:15])
        phase, failed = run.state.phase, run.state.failure
        if task not in there:
            said = run.hello(task)
            assert (Admit(task) in said) is (phase != "ended")
            if phase != "ended":
                there[task] = False
        else:
            event = draw.choice(["serves", "leaves", "fails", "gone", "tick", "hello", "reached"])
            if event == "serves":
                said = run.state.serves(task)
                back = phase == "training" and task[0] == "worker" and not there[task]
                assert bool(said) is back
                there[task] = True
            elif event == "leaves" and task[0] == "worker":
                assert run.state.leaves(task, "SIGTERM") == [Send(task, {"leave": None})]
            elif event == "fails" and draw.random() < 0.1:
                run.state.fails_to_serve("no port")
            elif event == "gone" and (task[0] == "worker" or draw.random() < 0.05):
                said = run.gone(task)
                served = there.pop(task)
                lost = served and phase == "training"
                assert run.state.lost == ([task[1]] if lost and task[0] == "worker" else [])
                run.state.lost.clear()
                if lost and task[0] == "ps":
                    assert run.state.failure and run.state.phase == "ended"
            elif event == "tick":
                run.tick(1)
                assert run.state.lost == []
            elif event == "hello":
                assert run.hello(task)[0].task is None
            elif event == "reached":
                run.state.reached(None)
        assert set(run.state.serving) == {task for task, serves in there.items() if serves}
        assert failed is None or run.state.failure == failed
        assert phase != "ended" or run.state.phase == "ended"
