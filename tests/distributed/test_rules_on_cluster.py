"""Two processes of two devices each, against the NumPy simulation."""

import numpy as np
import pytest
import simulation
from cluster_of_processes import run_all_well

MOMENTUM = "keras.optimizers.SGD(0.2, momentum=0.9)"

RULES = {
    "bsp": ("tfpara.BSP()", "bsp", {}),
    "bmuf": ("tfpara.BMUF()", "nesterov", {"eta": 0.75}),
    "bmuf-classical": (
        "tfpara.BMUF(0.5, block_learning_rate=1.2, nesterov=False)",
        "classical",
        {"eta": 0.5, "zeta": 1.2},
    ),
    "bmuf-cntk": (
        "tfpara.BMUF(0.6, compat='cntk')",
        "lookahead_anchor",
        {"eta": 0.6, "gain": 0.4 * 4},
    ),
    "bmuf-fairseq": (
        "tfpara.BMUF(0.6, compat='fairseq')",
        "lookahead_anchor",
        {"eta": 0.6, "gain": 1.0},
    ),
    "easgd": ("tfpara.EASGD(0.2)", "elastic", {"alpha": 0.2}),
}
# Every replica has ten minibatches; and an uneven variant in which one worker's data end early, one
# replica has a short minibatch and another one fewer.
EVEN = [[4] * 10] * 4
UNEVEN = [[4] * 10, [4] * 9 + [2], [4] * 7, [4] * 6]


def train(tmp_path, rule, minibatches, **options):
    """Runs the cluster; returns the results of both workers merged, and each worker's."""
    outs = [tmp_path / f"{rank}.npz" for rank in range(2)]
    common = {
        "rule": rule,
        "sync_period": 3,
        "local_devices": 2,
        "optimizer": MOMENTUM,
        "minibatches": minibatches,
        **options,
    }
    run_all_well("train_small.py", [{**common, "out": str(out)} for out in outs])
    workers = [dict(np.load(out)) for out in outs]
    return {**workers[1], **workers[0]}, workers


def model(results, prefix):
    return simulation.flat([results[f"{prefix}_{i}"] for i in range(4)])


def check(results, workers, kind, minibatches, settings, **options):
    initial = [results[f"initial_{i}"] for i in range(4)]
    local, center, loss = simulation.simulate(
        kind,
        initial,
        minibatches,
        3,
        lambda: simulation.Momentum(0.2, 0.9),
        **options,
        **settings,
    )
    for replica in range(4):
        np.testing.assert_allclose(model(results, f"replica{replica}"), local[replica], atol=1e-5)
    for worker in workers:
        np.testing.assert_array_equal(model(worker, "initial"), model(results, "initial"))
        np.testing.assert_allclose(model(worker, "global"), center.w, atol=1e-5)
        for name in ("loss", "accuracy", "evaluation"):
            np.testing.assert_array_equal(worker[name], workers[0][name])
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-5)
    assert workers[0]["syncs"] == len(center.history) - 1
    return center


@pytest.mark.parametrize("name", RULES)
def test_rule_equals_simulation(tmp_path, name):
    rule, kind, settings = RULES[name]
    check(*train(tmp_path, rule, EVEN), kind, EVEN, settings)


@pytest.mark.parametrize("name", ["bsp", "bmuf", "easgd"])
def test_sharded_state_gives_the_same(tmp_path, name):
    rule, kind, settings = RULES[name]
    averages = "{'ema': tfpara.EMA(0.8, zero_debias=True), 'ma': tfpara.MA()}"
    options = {"averages": averages, "epochs": 2, "aggregation": "sharded"}
    results, workers = train(tmp_path, rule, UNEVEN, **options)
    center = check(results, workers, kind, UNEVEN, settings, epochs=2)
    ema = np.zeros_like(center.history[0])
    for w in center.history[1:]:
        ema = 0.8 * ema + 0.2 * w
    ema /= 1 - 0.8 ** (len(center.history) - 1)
    np.testing.assert_allclose(model(results, "ema"), ema, atol=1e-5)
    np.testing.assert_allclose(model(results, "ma"), np.mean(center.history[1:], 0), atol=1e-5)


@pytest.mark.parametrize("name", ["bmuf", "easgd"])
def test_uneven_data_are_weighted_and_nobody_waits_for_ever(tmp_path, name):
    rule, kind, settings = RULES[name]
    results, workers = train(tmp_path, rule, UNEVEN, epochs=2, steps_per_execution=2)
    check(results, workers, kind, UNEVEN, settings, epochs=2)


@pytest.mark.parametrize("local_state", ["reset", "average"])
def test_optimizer_state_at_a_sync(tmp_path, local_state):
    results, workers = train(tmp_path, "tfpara.BSP()", EVEN, local_state=local_state)
    check(results, workers, "bsp", EVEN, {}, local_state=local_state)


def test_averages_follow_the_global_model_and_do_not_touch_it(tmp_path):
    rule, kind, settings = RULES["bmuf"]
    averages = "{'ema': tfpara.EMA(0.8), 'ma': tfpara.MA()}"
    results, workers = train(tmp_path, rule, EVEN, averages=averages)
    center = check(results, workers, kind, EVEN, settings)
    ema = center.history[0]
    for w in center.history[1:]:
        ema = 0.8 * ema + 0.2 * w
    np.testing.assert_allclose(model(results, "ema"), ema, atol=1e-5)
    np.testing.assert_allclose(model(results, "ma"), np.mean(center.history[1:], 0), atol=1e-5)


@pytest.mark.parametrize("name", ["bmuf", "easgd"])
def test_simulated_replicas_compute_what_real_workers_do(tmp_path, name):
    averages = "{'ema': tfpara.EMA(0.8), 'ma': tfpara.MA()}"
    options = {"averages": averages, "epochs": 2, "aggregation": "sharded"}
    real, _ = train(tmp_path, RULES[name][0], UNEVEN, **options)
    out = tmp_path / "simulated.npz"
    common = {"rule": RULES[name][0], "sync_period": 3, "optimizer": MOMENTUM, **options}
    simulated = {"minibatches": UNEVEN, "local_devices": 4, "out": str(out)}
    run_all_well("train_small.py", [{**common, **simulated}])
    found = dict(np.load(out))
    # The same initial weights: those of the chief, with its seed.
    assert set(found) == set(real)
    for key, value in real.items():
        np.testing.assert_allclose(found[key], value, atol=1e-5, err_msg=key)
