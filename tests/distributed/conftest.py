"""Fixtures that the tests of real processes share."""

import pytest
import resumable_runs


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A function of the number of workers: what each ends with in a run without interruption."""
    ends = {}

    def of(workers):
        if workers not in ends:
            run = resumable_runs.Run(tmp_path_factory.mktemp("whole") / "run", workers)
            ends[workers] = run.to_the_end()
        return ends[workers]

    return of
