"""Processes that die while they train. The weights count the minibatches that are in the model."""

import contextlib
import random
import re
import signal
import time

import pytest

from tests.lib.lobby_processes import DEADLINE, Processes
from tfpara.chaos import processes
from tfpara.cluster import ports

pytestmark = pytest.mark.latest

MINIBATCHES = 200  # of an epoch
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the first bytes of a connection of gRPC
SILENCE = 5.0  # seconds after which a process that is stopped is given up


def start(directory, epochs=2, workers=2, servers=1, timeout=60.0):
    arguments = [str(directory), str(epochs), "40"]
    run = Processes(workers, servers, 120.0, timeout, "train_async.py", arguments)
    run.start_all()
    return run


def stop(process):
    """Stops a process by SIGSTOP, and waits until it stands still."""
    process.signal(signal.SIGSTOP)
    until = time.monotonic() + DEADLINE
    while processes.state(process.popen.pid) != "T":
        assert time.monotonic() < until
        time.sleep(0.02)


def pushes_of_worker_0(line):
    return int(re.search(r"workers \[(\d+),", line)[1])


def counts(output):
    """(count of all minibatches, least and most of one, pushes, staleness) after each epoch."""
    line = r"epoch \d+ count (\d+) each (\d+) to (\d+) pushes (\d+) staleness (\d+)"
    return [tuple(map(int, found)) for found in re.findall(line, output)]


def check_counts(output):
    """Checks that after each epoch every minibatch of it is in the model once."""
    each = [((n + 1) * MINIBATCHES, n + 1) for n in range(len(counts(output)))]
    assert counts(output) == [(all_, own, own, all_, all_) for all_, own in each], output


@pytest.mark.one_version
def test_a_worker_that_dies_loses_no_minibatch_and_may_come_back(tmp_path):
    with start(tmp_path, 1000) as run:
        run["chief"].wait_for("minibatch")
        run["worker 0"].signal(signal.SIGKILL)
        run["worker 0"].end()
        alone = pushes_of_worker_0(run["chief"].wait_for("epoch 0"))
        run.start("worker 0")
        while pushes_of_worker_0(run["chief"].wait_for("epoch")) == alone:
            pass
        (tmp_path / "enough").touch()
        ends = run.ends()
    output = ends["chief"][1]
    for name, (code, _) in ends.items():
        assert code == 0, (name, output)
    check_counts(output)
    assert f"weight {len(counts(output)) * MINIBATCHES}" in output


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_worker_that_is_stopped_holds_no_checkpoint_and_no_end_of_an_epoch(tmp_path):
    """Each epoch ends with a checkpoint, for which the workers pause; the chief evaluates often."""
    (tmp_path / "evaluate").touch()
    with start(tmp_path, 1000, timeout=SILENCE) as run:
        run["chief"].wait_for("minibatch")
        stopped = run["worker 0"]
        stop(stopped)
        alone = [pushes_of_worker_0(run["chief"].wait_for(f"epoch {k} ")) for k in range(3)]
        assert processes.state(stopped.popen.pid) == "T"  # all this time
        assert alone[1] == alone[2]
        stopped.signal(signal.SIGCONT)
        code, output = stopped.end()
        assert code == 1 and "the chief has given worker 0" in output
        run.start("worker 0")
        while pushes_of_worker_0(run["chief"].wait_for("epoch")) == alone[-1]:
            pass
        (tmp_path / "enough").touch()
        ends = run.ends()
    output = ends["chief"][1]
    assert [code for code, _ in ends.values()] == [0] * 4, output
    assert "Training goes on without it." in output and "is back." in output
    check_counts(output)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["ps 0", "chief"])
def test_a_server_or_chief_that_is_stopped_is_named_by_all_and_ends_too(name, tmp_path):
    with start(tmp_path, 1000, timeout=SILENCE) as run:
        run["chief"].wait_for("minibatch")
        stop(run[name])
        ends = run.ends(name)
        assert processes.state(run[name].popen.pid) == "T"
        run[name].signal(signal.SIGCONT)
        last = run[name].end()
    for other, (code, output) in ends.items():
        assert code == 1, (other, output)
        assert re.search(rf"{name} \(127.0.0.1:\d+\)", output), (other, output)
        assert f"silent for longer than timeout_seconds={SILENCE:g}" in output, (other, output)
    assert last[0] == 1, last[1]


@pytest.mark.nightly
def test_all_end_with_a_parameter_server_and_go_on_from_the_checkpoint(tmp_path):
    """The second of two servers has no weight, so no weight of a push needs its pull."""
    with start(tmp_path, servers=2) as run:
        run["chief"].wait_for("epoch 0")
        run["chief"].wait_for("minibatch 1")
        run["ps 0"].signal(signal.SIGKILL)
        ends = run.ends("ps 0")
    for name, (code, output) in ends.items():
        assert code == 1, (name, output)
        assert re.search(r"ps 0 \(127.0.0.1:\d+\) is lost with its part of the model", output)
        assert "Traceback" not in output and "ERROR:tensorflow" not in output
    with start(tmp_path, servers=2) as run:
        code, output = run.ends()["chief"]
    assert code == 0, output
    assert "Resuming from checkpoint" in output
    assert f"weight {2 * MINIBATCHES}" in output


@pytest.mark.one_version
def test_all_end_with_the_chief(tmp_path):
    with start(tmp_path) as run:
        run["chief"].wait_for("minibatch")
        run["chief"].signal(signal.SIGKILL)
        ends = run.ends("chief")
    for name, (code, output) in ends.items():
        assert code == 1, (name, output)
        assert re.search(r"chief \(127.0.0.1:\d+\) is gone", output)


@pytest.mark.nightly
def test_garbage_at_the_ports_of_all_processes_changes_nothing(tmp_path):
    """A half of it begins as gRPC's connections do, and some connections stay open."""
    draw, sent = random.Random(0), 0
    with start(tmp_path, 1000) as run, contextlib.ExitStack() as still_open:
        run["chief"].wait_for("minibatch")
        # TensorFlow's port of the chief is another than its address.
        addresses = [run.address(name) for name in ("chief", "worker 0", "worker 1", "ps 0")]
        addresses.append(re.search(r"^gathered (\S+)", run["chief"].output, re.M)[1])
        assert len(set(addresses)) == 5
        for _ in range(400):
            guest = still_open.enter_context(ports.connect(draw.choice(addresses), DEADLINE))
            with contextlib.suppress(ConnectionError):
                guest.sendall(draw.choice([b"", PREFACE]) + draw.randbytes(draw.randrange(1, 9999)))
                sent += 1
            if draw.random() < 0.7:
                guest.close()
        run["chief"].wait_for("epoch")
        run["chief"].wait_for("epoch")
        (tmp_path / "enough").touch()
        ends = run.ends()
    output = ends["chief"][1]
    assert sent > 300
    assert [code for code, _ in ends.values()] == [0] * 4, output
    assert "lost" not in output
    check_counts(output)


@pytest.mark.one_version
@pytest.mark.nightly_cases("ps*", "the*")
@pytest.mark.parametrize(
    ("asked", "killed"),
    [
        (["worker 0", "worker 1", "ps 0", "ps 0", "chief"], []),
        (["chief"], []),
        (["ps 0"], ["worker 0", "worker 1"]),
    ],
    ids=["all", "the chief", "ps 0, as the workers die"],
)
def test_sigterm_gives_a_checkpoint_within_the_epoch_and_75_everywhere(tmp_path, asked, killed):
    """All get it at once, as from schedulers and the launcher, some twice; or one process does."""
    with start(tmp_path) as run:
        run["chief"].wait_for("minibatch")
        for number, names in ((signal.SIGTERM, asked), (signal.SIGKILL, killed)):
            for name in names:
                run[name].signal(number)
        ends = run.ends(*killed)
    for name, (code, output) in ends.items():
        assert code == 75, (name, output)
        notes = "SessionOptions|eager_service|grpc_server|preserve tf.data options"
        assert not re.search(notes, output), (name, output)
    assert "epoch 0" not in ends["chief"][1]
    with start(tmp_path, workers=1) as run:  # on another number of workers
        code, output = run.ends()["chief"]
    assert code == 0, output
    assert "epoch 1, within it" in output
    assert counts(output)[0] == (MINIBATCHES, 1, 1, MINIBATCHES, MINIBATCHES), output
    assert f"weight {2 * MINIBATCHES}" in output
