"""Steps, loops and GANs of a user's, on devices of a process and on two workers.

A sync after each minibatch is plain Keras on whole batches.
"""

import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.cluster_of_processes import run_all_well
from tests.lib.programs import train_loops  # noqa: E402

pytestmark = pytest.mark.timeout(600)
DEVICES = [f"CPU:{k}" for k in range(2)]


@pytest.fixture(scope="module")
def plain():
    """A function: what a case gives with plain Keras."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = train_loops.CASES[name](tf.distribute.get_strategy())
        return found[name]

    return of


@pytest.fixture(scope="module")
def workers(request, tmp_path_factory):
    """What two workers, of one device or two, found: of metrics alone where no test is nightly."""
    place = tmp_path_factory.mktemp("loops")
    outs = [place / f"{rank}.npz" for rank in range(2)]
    tests = [item for item in request.session.items if item.path == request.path]
    whole = any(item.get_closest_marker("nightly") for item in tests)
    options = [{"out": str(out), "folder": str(place / "run"), "whole": whole} for out in outs]
    run_all_well("train_loops.py", options, timeout=400)
    return [dict(np.load(out)) for out in outs]


def assert_alike(found, expected, name):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        close = {"rtol": 0.02, "atol": 0.02} if name == "mixed" else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(found[key], value, err_msg=f"{name}: {key}", **close)


@pytest.mark.nightly_cases("tutorial")
@pytest.mark.latest
@pytest.mark.parametrize("name", ["own_step", "tutorial"])
def test_devices_of_a_process_do_what_plain_keras_does(plain, name):
    two = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1, devices=DEVICES)
    assert_alike(train_loops.CASES[name](two), plain(name), name)


@pytest.mark.nightly
def test_the_run_of_a_gan_is_resumed_exactly(workers):
    for found in workers:
        np.testing.assert_array_equal(found["whole"], found["resumed"])
        assert np.ptp(found["whole"]) > 0.1


@pytest.mark.nightly
def test_a_log_without_metrics_waits_for_workers_that_have_more_data(workers):
    """Each has two replicas, which take a minibatch each: the last ones are 2 and 3, or 4 and 5."""
    minibatches = train_loops.X.reshape(train_loops.STEPS, -1)
    for worker in workers:
        np.testing.assert_allclose(worker["first"], [minibatches[2:6].mean()] * 2, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["reduce", "gather"])
def test_workers_do_not_exchange_values_inside_a_tf_function(workers, method):
    text = f"strategy.{method} inside a tf.function would have the workers wait for each other"
    for worker in workers:
        assert text in str(worker[method])


@pytest.mark.nightly
def test_metrics_are_aggregated_as_they_say_on_all_workers(workers):
    """Of four replicas, the first has the first four of the 16 rows of each minibatch."""
    labels = train_loops.Y[:, 0].reshape(train_loops.STEPS, train_loops.BATCH)
    expected = dict.fromkeys(train_loops.AGGREGATIONS, labels.mean())
    expected["only_first_replica"] = labels[:, :4].mean()
    for worker in workers:
        for name, value in expected.items():
            for call in ("fit", "evaluate"):
                np.testing.assert_allclose(worker[f"aggregated/{call}/{name}"], value, rtol=1e-5)
        np.testing.assert_allclose(worker["aggregated/total"], labels[:, :4].sum(), rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", train_loops.CASES)
def test_two_workers_do_what_plain_keras_does(workers, plain, name):
    for worker in workers:
        mine = {k.split("/", 1)[1]: v for k, v in worker.items() if k.startswith(f"{name}/")}
        assert_alike(mine, plain(name), name)
