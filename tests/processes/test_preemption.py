"""Runs that are asked to end by SIGTERM, and what the launcher makes of ends and failures."""

import pytest

from tests.lib.resumable_runs import DEADLINE, Run, assert_same

pytestmark = pytest.mark.timeout(900)
SHORT = {"epochs": 3, "every_syncs": 4}  # it is asked to end in the first epoch


def test_sigterm_to_one_worker_has_all_write_a_checkpoint_and_leave(tmp_path):
    run = Run(tmp_path / "run", 2, **SHORT)
    with run.start_slowly() as workers:
        run.wait_for_steps(workers.processes)
        workers.processes[1].terminate()
        chief, worker = workers.results(DEADLINE)
    assert (chief.returncode, worker.returncode) == (75, 75), chief.output + worker.output
    assert "checkpoint written, exit code 75" in chief.output
    assert "trained" not in chief.output + worker.output
    assert_same(run.to_the_end(), Run(tmp_path / "whole", 2, **SHORT).to_the_end())
