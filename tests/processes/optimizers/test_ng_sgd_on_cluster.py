"""NG-SGD under model averaging: two processes against NumPy, and against simulated replicas."""

import numpy as np
import pytest

from tests.lib import simulation
from tests.lib.cluster_of_processes import run_all_well
from tests.lib.natural_gradient_reference import Reference

STATES = ("keep", "average")
RATE, MOMENTUM, PERIOD = 0.1, 0.9, 3
MINIBATCHES = [[32] * 12, [32] * 12]
SCALES = [3.0, 2.0, 1.0, 0.5, 0.3, 0.2]  # of the inputs, for scatters that have directions
OPTIONS = {
    "rule": "tfpara.BSP()",
    "sync_period": PERIOD,
    "optimizer": f"tfpara.optimizers.NGSGD({RATE}, {MOMENTUM}, input_rank=3, output_rank=2, "
    "max_change=None).attach(model)",
    "minibatches": MINIBATCHES,
    "scales": SCALES,
    # Not a softmax, whose derivatives have a null direction in which rounding alone decides.
    "loss": "lambda y, p: keras.ops.mean((p - keras.ops.one_hot(y, 5)) ** 2, -1)",
}


class NaturalMomentum(simulation.Momentum):
    """Momentum on natural gradients: x̄ and e of each layer preconditioned, then their product."""

    made = []  # in the order of the replicas

    def __init__(self):
        super().__init__(RATE, MOMENTUM)
        self.sides = [(Reference(3), Reference(2)) for _ in range(2)]
        self.made.append(self)

    def gradients(self, weights, x, y):
        w1, b1, w2, b2 = weights
        x, ones = x * np.array(SCALES), np.ones((len(x), 1))
        hidden = np.tanh(x @ w1 + b1)
        missed = hidden @ w2 + b2 - np.eye(5)[y]
        errors = 2 * missed / 5  # of each frame's own loss, a mean over 5 outputs
        layers = [(x, errors @ w2.T * (1 - hidden**2)), (hidden, errors)]
        found = []
        for (inputs, outputs), (input_side, output_side) in zip(layers, self.sides, strict=True):
            rows = input_side.step(np.hstack([inputs, ones])), output_side.step(outputs)
            natural = rows[0].T @ rows[1] / len(x)
            found += [natural[:-1], natural[-1]]
        return np.mean(missed**2), found


def fisher(results, replica, side):
    """F = Rᵀ D R + ρ I of a side, as a worker has left it."""
    basis, diagonal, rho = (
        next(v for k, v in results.items() if k.startswith(f"optimizer{replica}") and end in k)
        for end in (f"{side}_{part}_of_scatter" for part in ("basis", "diagonal", "rho"))
    )
    return basis.T @ (diagonal[:, None] * basis) + rho * np.eye(basis.shape[1])


def run(directory, workers, devices):
    """What each of some processes ends with, by local_state."""
    outs = {
        state: [directory / f"{state}-{rank}.npz" for rank in range(workers)] for state in STATES
    }
    options = [
        [
            {
                **OPTIONS,
                "local_devices": devices,
                "local_state": state,
                "out": str(outs[state][rank]),
            }
            for state in STATES
        ]
        for rank in range(workers)
    ]
    run_all_well("train_small.py", options)
    return {state: [dict(np.load(out)) for out in outs[state]] for state in STATES}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Results of two processes, by local_state."""
    return run(tmp_path_factory.mktemp("real"), workers=2, devices=1)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Results of one process with two replicas, by local_state."""
    return run(tmp_path_factory.mktemp("simulated"), workers=1, devices=2)


@pytest.mark.nightly
@pytest.mark.parametrize("local_state", STATES)
def test_two_processes_equal_numpy(real, local_state):
    workers = real[local_state]
    NaturalMomentum.made = []
    initial = [workers[0][f"initial_{i}"] for i in range(4)]
    local, _, _ = simulation.simulate(
        "bsp", initial, MINIBATCHES, PERIOD, NaturalMomentum, local_state=local_state
    )
    for replica, results in enumerate(workers):
        found = simulation.flat([results[f"replica{replica}_{i}"] for i in range(4)])
        np.testing.assert_allclose(found, local[replica], atol=1e-5)
        sides = NaturalMomentum.made[replica].sides
        for layer, pair in enumerate(sides):
            for name, reference in zip(("input", "output"), pair, strict=True):
                expected = reference.fisher()
                got = fisher(results, replica, f"layer{layer}_{name}")
                np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.nightly
@pytest.mark.parametrize("local_state", STATES)
def test_a_sync_averages_momentum_as_told_and_leaves_scatters_to_their_replicas(real, local_state):
    workers = real[local_state]
    first, second = (
        {k.split(":")[1]: v for k, v in results.items() if k.startswith(f"optimizer{replica}:")}
        for replica, results in enumerate(workers)
    )
    momentum = [k for k in first if "momentum" in k]
    scatters = [k for k in first if "basis_of_scatter" in k]
    assert (len(momentum), len(scatters)) == (4, 4)
    for name in momentum:
        assert np.array_equal(first[name], second[name]) == (local_state == "average"), name
    for name in scatters:
        assert not np.array_equal(first[name], second[name])
    for i in range(4):
        np.testing.assert_array_equal(workers[0][f"replica0_{i}"], workers[1][f"replica1_{i}"])


@pytest.mark.nightly
@pytest.mark.parametrize("local_state", STATES)
def test_simulated_replicas_compute_what_two_processes_do(real, simulated, local_state):
    workers, (found,) = real[local_state], simulated[local_state]
    expected = {**workers[1], **workers[0]}
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=1e-5, err_msg=key)
