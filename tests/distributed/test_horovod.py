"""Real Horovod between real processes gives what TensorFlow's collectives do, and NumPy."""

import numpy as np
import pytest
import test_rules_on_cluster as rules
from cluster_of_processes import run_all_well
from horovod_here import needs_horovod

pytestmark = needs_horovod

# Each rule, in one of the ways in which it can be used.
SIMULATED = {
    "bsp": {"local_state": "average", "steps_per_execution": 2},
    "bmuf": {"minibatches": rules.UNEVEN, "epochs": 2, "aggregation": "sharded"},
    "bmuf-classical": {"averages": "{'ema': tfpara.EMA(0.8), 'ma': tfpara.MA()}"},
    "bmuf-cntk": {"aggregation": "sharded"},
    "easgd": {"minibatches": rules.UNEVEN},
}
TRAININGS = {
    **{name: {"rule": rules.RULES[name][0], **options} for name, options in SIMULATED.items()},
    "diloco": {"rule": "tfpara.DiLoCo()", "aggregation": "sharded"},
    "slowmo": {"rule": "tfpara.SlowMo()", "local_state": "reset"},
    "bmuf_adam": {
        "rule": "tfpara.BMUFAdam()",
        "optimizer": "keras.optimizers.Adam(0.01)",
        "aggregation": "sharded",
        "minibatches": rules.UNEVEN,
    },
}
COMMON = {
    "sync_period": 3,
    "local_devices": 2,
    "optimizer": rules.MOMENTUM,
    "minibatches": rules.EVEN,
}
DEADLINE = 500.0  # seconds; reached only by a hang


def train_all(path, start):
    """Of each training what its two workers saved."""
    path.mkdir()

    def of_worker(rank):
        return [
            {**COMMON, **training, "out": str(path / f"{name}-{rank}.npz")}
            for name, training in TRAININGS.items()
        ]

    options = [of_worker(0), of_worker(1)]
    run_all_well("train_small.py", options, start=start, timeout=DEADLINE)
    return {
        name: [dict(np.load(path / f"{name}-{rank}.npz")) for rank in range(2)]
        for name in TRAININGS
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    return {start: train_all(path / start, start) for start in ("horovod", "TF_CONFIG")}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRAININGS)
def test_every_rule_gives_what_it_gives_on_tensorflow(trained, name):
    for mine, theirs in zip(trained["horovod"][name], trained["TF_CONFIG"][name], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(mine[key], value, atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SIMULATED)
def test_rule_equals_simulation(trained, name):
    workers = trained["horovod"][name]
    _, kind, settings = rules.RULES[name]
    options = {k: v for k, v in SIMULATED[name].items() if k in ("local_state", "epochs")}
    minibatches = SIMULATED[name].get("minibatches", rules.EVEN)
    results = {**workers[1], **workers[0]}
    rules.check(results, workers, kind, minibatches, settings, **options)


@pytest.mark.parametrize(("start", "size"), [("horovod", 2), ("TF_CONFIG", 2), ("horovod", 3)])
def test_operations(tmp_path, start, size):
    outs = [tmp_path / f"{rank}.npz" for rank in range(size)]
    moved = ["float32", "float16", "int64"]
    if start == "horovod":
        moved += ["int8", "uint8", "uint32"]
    run_all_well("operate.py", [{"out": str(out), "moved": moved} for out in outs], start=start)
    all_ranks = sum(range(1, size + 1))
    for rank, out in enumerate(outs):
        found = dict(np.load(out))
        loop = 0
        for _ in range(3):
            loop += size * loop + all_ranks
        assert found.pop("loop") == [loop]
        waited = [found.pop(f"waited/{number}") for number in range(2)]
        if rank == 0:
            assert min(waited) > 1.0  # for worker 1, which comes two seconds later
        for key, value in found.items():
            operation, dtype, *_, number = key.split("/")
            if operation in ("all_reduce", "reduce_scatter"):
                expected = all_ranks * np.arange(1, 1 + size * (6, 2)[int(number)])
                if operation == "reduce_scatter":
                    expected = np.split(expected, size)[rank]
            elif operation == "all_to_all":
                mine = np.split(np.arange(1, 1 + size * 6), size)[rank]
                expected = np.multiply.outer(np.arange(1, size + 1), mine)
            else:
                one = np.arange(1, 1 + value.size // (size if operation == "all_gather" else 1))
                expected = np.multiply.outer(np.arange(1, size + 1), one)
                expected = expected if operation == "all_gather" else one
            assert value.dtype == dtype
            np.testing.assert_array_equal(value.ravel(), np.ravel(expected), err_msg=key)
