"""A worker that stays does not grow while others are lost and come."""

import time

import pytest

from tests.lib import elastic_runs
from tfpara.chaos import processes


@pytest.mark.nightly
@pytest.mark.latest
@pytest.mark.parametrize("replacements", [2, 50])
@pytest.mark.one_version
def test_changes_of_members_cost_no_descriptors_and_hardly_memory(replacements, tmp_path):
    """Each replacement is two changes: a new process is let in, and is killed."""
    options = {"epochs": 10_000, "minibatches": 400, "step_seconds": 0.02}
    with elastic_runs.Run(tmp_path, 1, **options) as run:
        stays = run.processes[0].pid

        def wait_for_generation(number):
            until = time.monotonic() + elastic_runs.DEADLINE
            while len(run.meeting.state.history) < number:
                assert run.processes[0].poll() is None, run.processes[0].communicate()[0]
                assert time.monotonic() < until, run.meeting.state.history
                time.sleep(0.02)

        def wait_for_syncs():
            synced = sum(event[0] == "synced" for event in run.events(0))
            run.wait_until(0, "synced", count=synced + 2)

        run.wait_until(0, "synced", count=2)
        sizes = [processes.size(stays)]
        for replacement in range(replacements):
            number = run.start()
            wait_for_generation(2 * replacement + 2)
            run.wait_until(number, "synced", count=2)
            run.processes[number].kill()
            wait_for_generation(2 * replacement + 3)
            wait_for_syncs()
            sizes.append(processes.size(stays))
        assert [len(each.members) for each in run.meeting.state.history] == [
            1,
            *[2, 1] * replacements,
        ]
        assert sizes[-1].descriptors == sizes[0].descriptors, sizes
        # TensorFlow's own threads come and go.
        assert sizes[-1].threads < sizes[0].threads + 10, sizes
        if replacements > 10:
            # What stays reachable grows by some 25 kB a change: gRPC's channel to each new process.
            assert sizes[-1].bytes < 1.03 * sizes[5].bytes, sizes
