"""`nonfinite="skip"` on two workers of two devices."""

import numpy as np
import pytest

from tests.lib.bad_minibatches import BAD
from tests.lib.cluster_of_processes import run, run_all_well
from tests.lib.elastic_runs import Run

# The graph is another one, and is optimised otherwise, so that some sums are rounded otherwise.
RUNS = [["BMUF", "adam"]]
# Minibatch k is of replica k mod 4.
NAMES = "minibatch 1 of replica 3, 4 of replica 2, 4 of replica 3\n"


@pytest.mark.nightly
def test_two_workers_train_as_without_the_bad_minibatches(tmp_path):
    options = {"runs": RUNS, "out": str(tmp_path / "{kind}-{rank}.npz"), "kinds": ["nan", "empty"]}
    said = run_all_well("train_with_bad.py", [options] * 2)
    for epoch in (1, 2):
        line = f"epoch {epoch} left out 3 minibatches whose loss or gradient had NaN or Inf: "
        assert said[0].output.count(line + NAMES) == len(RUNS)
    assert "left out" not in said[1].output
    for rank in range(2):
        found, expected = (np.load(tmp_path / f"{kind}-{rank}.npz") for kind in ("nan", "empty"))
        logged = [name for name in found if name.endswith("log left_out")]
        assert sorted(expected) == sorted(set(found) - set(logged))
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-6, err_msg=name)
        assert [found[name].tolist() for name in logged] == [[len(BAD)] * 2] * len(RUNS)


@pytest.mark.nightly
def test_all_workers_end_with_one_sentence_above_the_share(tmp_path):
    options = {"runs": RUNS, "out": str(tmp_path / "{rank}.npz"), "kinds": ["nan"], "share": 0.1}
    for each in run("train_with_bad.py", [options] * 2):
        assert each.returncode == 1
        assert "3 of 24 minibatches of this epoch had NaN or Inf" in each.output
        assert "2 of them were of replica 3 (worker 1)" in each.output


@pytest.mark.nightly
def test_an_elastic_run_leaves_them_out(tmp_path):
    options = {"runs": RUNS, "out": str(tmp_path / "{rank}.npz"), "kinds": ["nan"], "elastic": True}
    with Run(tmp_path, 2, program="train_with_bad.py", **options) as elastic:
        codes, outputs = elastic.ends()
    assert codes == [0, 0], outputs
    said = "".join(outputs)
    for epoch in (1, 2):
        assert said.count(f"epoch {epoch} left out 3 minibatches") == 1
    for rank in range(2):
        found = np.load(tmp_path / f"{rank}.npz")
        assert found["BMUF, adam, log left_out"].tolist() == [len(BAD)] * 2
        assert all(np.isfinite(found[name]).all() for name in found)
