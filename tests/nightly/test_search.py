"""Random runs beside NumPy written from the pages, see tests/search/__main__.py."""

import os
import sys

import pytest

from tests.lib.launched import launch

SEED = int(os.environ.get("TFPARA_TEST_SEED", "0"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("workers", "devices", "number"), [(1, 4, 80), (2, 2, 30), (12, 1, 6)])
def test_many_random_runs(workers, devices, number, tmp_path):
    code, out, err = launch(
        *("-n", workers, "--", sys.executable, "-W", "ignore", "-m", "tests.search"),
        *(f"--cases={number}", f"--devices={devices}", f"--seed={SEED}", f"--folder={tmp_path}"),
        seconds=1700,
    )
    assert code == 0, out + err
