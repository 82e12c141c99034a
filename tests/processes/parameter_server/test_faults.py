"""Processes that die while they train. The weights count the minibatches that are in the model."""

import re
import signal

import pytest

from tests.lib.lobby_processes import Processes

pytestmark = pytest.mark.latest

MINIBATCHES = 200  # of an epoch


def start(directory, epochs=2, workers=2, servers=1):
    arguments = [str(directory), str(epochs), "40"]
    run = Processes(workers, servers, 120.0, 60.0, "train_async.py", arguments)
    run.start_all()
    return run


def pushes_of_worker_0(line):
    return int(re.search(r"workers \[(\d+),", line)[1])


def counts(output):
    """(count of all minibatches, least and most of one, pushes, staleness) after each epoch."""
    line = r"epoch \d+ count (\d+) each (\d+) to (\d+) pushes (\d+) staleness (\d+)"
    return [tuple(map(int, found)) for found in re.findall(line, output)]


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
    epochs = len(counts(output))
    each = [((n + 1) * MINIBATCHES, n + 1) for n in range(epochs)]
    assert counts(output) == [(all_, own, own, all_, all_) for all_, own in each], output
    assert f"weight {epochs * MINIBATCHES}" in output


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
