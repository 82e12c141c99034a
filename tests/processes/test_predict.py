"""`strategy.predict`: the rows of workers of two devices are those of one process."""

import numpy as np
import pytest

from tests.lib.cluster_of_processes import run
from tests.lib.elastic_runs import Run


def outputs(found, name):
    return [found[f"{name}, {k}"] for k in range(3)]


@pytest.mark.nightly_cases("3")
@pytest.mark.parametrize("workers", [2, 3])
def test_all_workers_have_all_rows_in_order(workers, tmp_path):
    options = {"out": str(tmp_path / "{rank}.npz")}
    for each in run("predict.py", [options] * workers):
        assert each.returncode == 1
        assert "the workers have different data" in each.output
        assert "strategy.predict divides them" in each.output
    of_all = [np.load(tmp_path / f"{rank}.npz") for rank in range(workers)]
    for found in of_all:
        assert found["structure"] == "{'rows': 0, 'more': (0, 0)}"
        for name in ("arrays", "dataset", "generator", "py dataset", "ema", "shown", "one row"):
            which = "ema" if name in ("ema", "shown") else "global"
            rows = 1 if name == "one row" else 23
            for one, expected in zip(
                outputs(found, name), outputs(found, f"alone {which}"), strict=True
            ):
                assert one.dtype == expected.dtype
                np.testing.assert_allclose(one, expected[:rows], atol=1e-6, err_msg=name)
        # Under EASGD each worker has its own weights.
        np.testing.assert_array_equal(found["local, 2"], of_all[0]["local, 2"])
        assert np.abs(found["local, 2"] - found["arrays, 2"]).max() > 1e-4
        assert ("of the chief, 2" in found) == (found is of_all[0])
    chief = of_all[0]
    np.testing.assert_array_equal(chief["of the chief, 2"], chief["arrays, 2"])
    # Keras reads some batches more, to see their shapes.
    assert all(found["read"] <= 6 // workers + 3 for found in of_all)


@pytest.mark.nightly
def test_the_rows_of_a_lost_worker_are_predicted_by_the_others(tmp_path):
    options = {"out": str(tmp_path / "{rank}.npz"), "elastic": True, "killed": 1}
    with Run(tmp_path, 3, program="predict.py", **options) as elastic:
        codes, said = elastic.ends()
    assert sorted(codes) == [-9, 0, 0], said
    found = [np.load(path) for path in sorted(tmp_path.glob("*.npz"))]
    assert len(found) == 2
    for each in found:
        np.testing.assert_allclose(each["arrays, 2"], each["alone global, 2"], atol=1e-6)
