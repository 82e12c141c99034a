"""Workers with unlike numbers and kinds of devices: as many workers of one device do the same."""

import functools
import signal

import numpy as np
import pytest

from tests.lib import counting
from tests.lib.cluster_of_processes import run, run_all_well
from tests.lib.horovod_here import needs_horovod
from tests.lib.programs import train_unlike

pytestmark = [pytest.mark.latest, pytest.mark.timeout(600)]

BSP = {
    "name": "bsp",
    "rule": "tfpara.BSP()",
    "optimizer": "keras.optimizers.SGD(0.1, momentum=0.9)",
}
BMUF = {
    "name": "bmuf",
    "rule": "tfpara.BMUF()",
    "optimizer": "keras.optimizers.Adam(0.01)",
    "options": {"aggregation": "sharded"},
}
MORE = [
    {
        "name": "easgd",
        "rule": "tfpara.EASGD()",
        "optimizer": "keras.optimizers.Adam(0.01)",
        "options": {"overlap": 1},
    },
    {
        "name": "bmuf_adam",
        "rule": "tfpara.BMUFAdam()",
        "optimizer": "keras.optimizers.Adam(0.01)",
        "options": {"aggregation": "sharded"},
    },
    {
        "name": "fragments",
        "rule": "tfpara.EASGD()",
        "optimizer": "keras.optimizers.SGD(0.1)",
        "options": {"fragments": 2, "nonfinite": "skip", "aggregation": "sharded"},
    },
]


def train(path, devices, trainings, kinds=None, start="TF_CONFIG", **options):
    """Returns what workers with these numbers of devices end with, by name; and what they said."""
    path.mkdir(exist_ok=True)
    given = {"trainings": trainings, "out": str(path / "{rank}.npz"), **options}
    of_each = [
        {**given, "devices": count, "kind": kind}
        for count, kind in zip(devices, kinds or [None] * len(devices), strict=True)
    ]
    ends = run_all_well("train_unlike.py", of_each, start=start, timeout=500)
    said = [each.output for each in ends]
    found = [dict(np.load(path / f"{rank}.npz")) for rank in range(len(devices))]
    for each in found[1:]:
        for name in each.keys() & found[0].keys():
            np.testing.assert_array_equal(each[name], found[0][name], err_msg=name)
    return functools.reduce(lambda one, other: one | other, found), said


def assert_alike(found, expected):
    """The sums have another order, and what that rounds grows where replicas stay apart."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4, rtol=1e-4, err_msg=name)


def check_by_keras(found, name):
    """Checks evaluations and predictions by plain Keras with the weights of the global model."""
    model = train_unlike.network()
    train_unlike.compile_with(model, "sgd")
    count = len(model.get_weights())
    model.set_weights([found[f"{name}: global {k}"] for k in range(count)])
    evaluated = found[f"{name}: evaluated"]
    expected = train_unlike.evaluations(model, len(evaluated) > 1)
    np.testing.assert_allclose(evaluated, expected, rtol=1e-5)
    rows = model.predict(train_unlike.arrays()[0], verbose=0)
    np.testing.assert_allclose(found[f"{name}: predicted"], rows, atol=1e-5)


def check(tmp_path, devices, trainings, others, of_others=(), **options):
    """Compares workers with others, and with plain Keras; returns what they said.

    `others` are the numbers of devices of the others, and `of_others` their options.
    """
    replicas = sum(devices)
    expected, _ = train(tmp_path / "others", others, trainings, **dict(of_others))
    found, said = train(tmp_path / "unlike", devices, trainings, **options)
    assert_alike(found, expected)
    for training in trainings:
        name = training["name"]
        check_by_keras(found, name)
        assert found[f"{name}: sum of replicas"] == replicas * (replicas + 1) // 2
        assert found[f"{name}: numbers"].tolist() == list(range(replicas))
    assert f"{len(devices)} workers, {replicas} replicas: each batch is divided" in said[0]
    return said


@pytest.mark.nightly
def test_a_cpu_beside_two_gpus(tmp_path):
    """The devices of the first worker are said to be GPUs: TensorFlow connects no CPU with one.

    One worker of three devices does the same.
    """
    said = check(tmp_path, [2, 1], [BMUF], [3], kinds=["GPU", "CPU"])
    assert "workers on GPUs and on CPUs are connected by a ring over gRPC" in said[0]
    assert "worker 0 on CPU:0, CPU:1, worker 1 on 1 device, CPUs and GPUs connected by" in said[0]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("devices", "trainings", "start"),
    [
        pytest.param([2, 1], [BSP, BMUF, *MORE], "TF_CONFIG", id="2-1"),
        pytest.param([3, 1, 2], MORE[1:], "TF_CONFIG", id="3-1-2"),
        pytest.param([1, 2], [BSP, BMUF], "horovod", id="1-2-horovod", marks=needs_horovod),
    ],
)
def test_as_many_workers_of_one_device_do_the_same(devices, trainings, start, tmp_path):
    """Several calls of `fit` on data of several kinds, evaluations, predictions, all state."""
    ones = [1] * sum(devices)
    check(tmp_path, devices, trainings, ones, {"whole": True}, start=start, whole=True)


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [[2, 1], [1, 1, 1]], ids=["unlike", "ones"])
def test_a_run_goes_on_with_its_replicas_on_other_workers(devices, tmp_path):
    """It is killed within its second epoch, of 5 steps and 3 syncs, with two workers or three."""
    former = [1, 1, 1] if len(devices) == 2 else [2, 1]
    directory = str(tmp_path / "checkpoints")
    whole, _ = train(tmp_path / "whole", [1, 1, 1], [BSP], directory=str(tmp_path / "other"))
    killed = {"trainings": [BSP], "out": "", "directory": directory, "killed": 5}
    ends = run("train_unlike.py", [{**killed, "devices": count} for count in former])
    assert all(end.returncode for end in ends), ends
    assert any(end.returncode == -signal.SIGKILL for end in ends), ends
    found, _ = train(tmp_path / "rest", devices, [BSP], directory=directory)
    history = "bsp: loss 0"
    np.testing.assert_allclose(found.pop(history)[-1], whole.pop(history)[-1], rtol=1e-5)
    assert_alike(found, whole)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "of_strategy", [{}, {"aggregation": "sharded"}], ids=["replicated", "sharded"]
)
def test_twelve_replicas_count_each_minibatch_once(of_strategy, tmp_path):
    """In a run that is killed, and goes on with its replicas on other workers."""
    given = {
        "minibatches": 125,
        "period": 1,
        "uneven": True,
        "options": of_strategy,
        "out": str(tmp_path / "{rank}.npz"),
        "checkpoints": str(tmp_path / "run"),
    }

    def of(devices, **options):
        return [{**given, "devices": count, **options} for count in devices]

    killed = dict.fromkeys(range(5), 4)
    ends = run("count_minibatches.py", of([5, 1, 3, 1, 2], killed=killed))
    assert all(end.returncode for end in ends), ends
    run_all_well("count_minibatches.py", of([1, 7, 2, 2]))
    expected = counting.shares(125, 12, 1, True)
    for rank in range(4):
        found = np.load(tmp_path / f"{rank}.npz")
        for which in ("global", "local"):
            np.testing.assert_allclose(found[which], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"balance": True},
            "workers of one device, and this run has 3 devices on 2 workers. Start",
        ),
        ({"communication": "NCCL"}, "NCCL' connects GPUs, and the workers train on CPU devices"),
    ],
)
def test_what_unlike_workers_cannot_do_is_refused_by_all(options, words, tmp_path):
    trainings = [{**BSP, "options": options}]
    given = [{"devices": count, "trainings": trainings, "out": ""} for count in (2, 1)]
    for each in run("train_unlike.py", given):
        assert each.returncode != 0 and words in each.output, each.output


@pytest.mark.nightly
def test_workers_that_wait_for_one_that_cannot_start_say_who_it_is(tmp_path):
    """They wait for `timeout_seconds`, which may be longer than TensorFlow's start may take."""
    given = {"devices": 1, "trainings": [BSP], "out": "", "connect_seconds": 5}
    chief, other = run("train_unlike.py", [{**given, "timeout_seconds": 15}, {**given, "first": 5}])
    assert other.returncode == 1 and "devices=['CPU:5']: this process has" in other.output
    assert chief.returncode == 1 and "Timeout (" not in chief.output, chief.output
    assert "a sync failed because worker 1 (127.0.0.1:" in chief.output, chief.output
