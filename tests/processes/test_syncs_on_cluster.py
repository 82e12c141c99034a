"""Faults and checkpoints where syncs run beside the training; see test_rules_on_cluster.py."""

import pytest

from tests.lib.cluster_of_processes import Workers
from tests.lib.resumable_runs import Run, assert_same

pytestmark = pytest.mark.latest


@pytest.mark.one_version
@pytest.mark.nightly_cases("kill-*")
@pytest.mark.parametrize(
    ("fault", "message"), [("nan", "replica 2 (worker 1) has NaN or Inf"), ("kill", "worker 1 (")]
)
def test_faults_are_named_where_syncs_run_beside_the_training(fault, message):
    """Also to who looks at the model afterwards, which is one more sync."""
    options = {"overlap": True, "look": True, "local_devices": 2 if fault == "nan" else 1}
    with Workers("faults.py", [options, {**options, "fault": fault}]) as workers:
        results = workers.results()
    for result in results[: 1 if fault == "kill" else 2]:
        assert result.returncode != 0
        assert "trained" not in result.output and "global model seen" not in result.output
        assert f"tfpara: {message}" in result.output or f"because {message}" in result.output


@pytest.mark.nightly
@pytest.mark.long
def test_a_sync_in_the_air_is_part_of_a_checkpoint(tmp_path):
    """Resumed from it, a run ends as one without checkpoints inside its epochs, bit for bit."""
    options = {"overlap": True, "fragments": 3, "compression": "int4", "epochs": 2}
    whole = Run(tmp_path / "whole", 2, every_syncs=1000, **options)
    broken = Run(tmp_path / "broken", 2, every_syncs=1, **options)
    broken.kill_at("renamed", 4, [0])
    assert_same(broken.to_the_end(), whole.to_the_end())
