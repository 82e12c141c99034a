"""TensorFlow's servers, with one thread each, in processes that the control channel joins."""

import re
import signal

import pytest

from tests.lib.lobby_processes import Processes

pytestmark = pytest.mark.latest


def start(workers):
    run = Processes(workers, 2, program="tensorflow_process.py", arguments=["go on"])
    run.start()
    return run


def test_a_worker_that_is_killed_rejoins():
    with start(2) as run:
        run["chief"].wait_for("counted 200 200")
        run["chief"].wait_for("alive 0 1")
        run["worker 0"].signal(signal.SIGKILL)
        run["worker 0"].end()
        run["chief"].wait_for("alive 1")
        run.start("worker 0")
        run["chief"].wait_for("alive 0 1")
        run["ps 1"].signal(signal.SIGTERM)  # which asks the chief to end
        for code, output in run.ends().values():
            assert code == 0, output


def test_all_end_with_a_parameter_server():
    with start(1) as run:
        run["chief"].wait_for("alive")
        run["ps 1"].signal(signal.SIGKILL)
        for code, output in run.ends("ps 1").values():
            assert code == 1, output
            assert re.search(r"ps 1 \(127.0.0.1:\d+\) is lost with its part of the", output)
