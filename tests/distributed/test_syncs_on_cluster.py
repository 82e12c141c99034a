"""Overlapped, fragmented and hierarchical syncs of two processes, against NumPy."""

import numpy as np
import pytest
import simulation
import stepwise_simulation
from cluster_of_processes import Workers, run_all_well
from resumable_runs import Run, assert_same

UNEVEN = [[4] * 10, [4] * 9 + [2], [4] * 7, [4] * 6]
RULES = {
    "bmuf": ("tfpara.BMUF(0.6)", "nesterov", {"eta": 0.6}),
    "easgd": ("tfpara.EASGD(0.2)", "elastic", {"alpha": 0.2}),
}
HALVES = [(0, 1), (1, 4)]


def train(tmp_path, workers, minibatches, **options):
    """The results of all workers, merged."""
    outs = [tmp_path / f"{workers}-{rank}.npz" for rank in range(workers)]
    common = {
        "sync_period": 3,
        "local_devices": len(minibatches) // workers,
        "optimizer": "keras.optimizers.SGD(0.2, momentum=0.9)",
        "minibatches": minibatches,
        "epochs": 2,
        "timeout_seconds": 100,
        **options,
    }
    environ = [{"TF_CONFIG": ""}] if workers == 1 else None
    run_all_well("train_small.py", [{**common, "out": str(out)} for out in outs], environ=environ)
    merged = {}
    for out in reversed(outs):
        merged |= dict(np.load(out))
    return merged


def check(results, kind, minibatches, settings, **options):
    initial = [results[f"initial_{i}"] for i in range(4)]
    local, points, loss = stepwise_simulation.simulate(
        kind,
        initial,
        minibatches,
        3,
        lambda: simulation.Momentum(0.2, 0.9),
        epochs=2,
        **options,
        **settings,
    )
    for replica in range(len(minibatches)):
        got = simulation.flat([results[f"replica{replica}_{i}"] for i in range(4)])
        np.testing.assert_allclose(got, local[replica], atol=1e-5)
    got = simulation.flat([results[f"global_{i}"] for i in range(4)])
    np.testing.assert_allclose(got, points[0], atol=1e-5)
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_overlap_with_uneven_data_equals_numpy_and_the_simulator(tmp_path, name):
    rule, kind, settings = RULES[name]
    minibatches = UNEVEN[::2]
    options = {"rule": rule, "overlap": True, "aggregation": "sharded"}
    real = train(tmp_path, 2, minibatches, **options)
    check(real, kind, minibatches, settings, delay=3)
    simulated = train(tmp_path, 1, minibatches, **options)
    for key, value in real.items():
        np.testing.assert_allclose(simulated[key], value, atol=1e-5, err_msg=key)


def test_all_at_once(tmp_path):
    """Two workers of two devices: overlap, fragments, hierarchy, several steps an execution."""
    rule, kind, settings = RULES["bmuf"]
    options = {"overlap": 2, "fragments": 2, "device_sync_period": 1, "steps_per_execution": 2}
    results = train(tmp_path, 2, UNEVEN, rule=rule, **options)
    simulated = {"delay": 2, "runs": HALVES, "device_period": 1, "devices": 2}
    check(results, kind, UNEVEN, settings, **simulated)


def test_int8_equals_the_simulator_and_sends_a_quarter(tmp_path):
    rule, minibatches = RULES["bmuf"][0], UNEVEN[::2]
    options = {"rule": rule, "compression": "int8", "aggregation": "sharded"}
    real = train(tmp_path, 2, minibatches, **options)
    simulated = train(tmp_path, 1, minibatches, **options)
    for key, value in real.items():
        if key != "bytes_sent":
            np.testing.assert_allclose(simulated[key], value, atol=1e-5, err_msg=key)
    for i in range(4):
        np.testing.assert_array_equal(real[f"replica0_{i}"], real[f"replica1_{i}"])
    # 256 numbers of a byte and a scale of 4, two legs, to the other worker; simulated: nothing.
    assert real["bytes_sent"] == real["syncs"] * 2 * 260
    assert simulated["bytes_sent"] == 0


@pytest.mark.parametrize(
    ("fault", "message"), [("nan", "replica 1 (worker 1) has NaN or Inf"), ("kill", "worker 1 (")]
)
def test_faults_are_named_where_syncs_run_beside_the_training(fault, message):
    with Workers("faults.py", [{"overlap": True}, {"overlap": True, "fault": fault}]) as workers:
        results = workers.results()
    for result in results[: 1 if fault == "kill" else 2]:
        assert result.returncode != 0
        assert "trained" not in result.output
        assert message in result.output


@pytest.mark.parametrize(("fragments", "compression"), [(1, "none"), (3, "int8")])
def test_a_sync_in_the_air_is_part_of_a_checkpoint(tmp_path, fragments, compression):
    """Resumed from it, a run ends as one without checkpoints inside its epochs, bit for bit."""
    options = {"overlap": True, "fragments": fragments, "compression": compression, "epochs": 2}
    whole = Run(tmp_path / "whole", 2, every_syncs=1000, **options)
    broken = Run(tmp_path / "broken", 2, every_syncs=1, **options)
    broken.kill_at("renamed", 4, [0])
    assert_same(broken.to_the_end(), whole.to_the_end())
