"""Trainings on two processes, over each backend, against NumPy and the simulator of replicas.

All trainings of a backend share a pair of processes: to start one costs as much as to train.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from tests.lib import simulation, stepwise_simulation
from tests.lib.cluster_of_processes import run_all_well
from tests.lib.horovod_here import needs_horovod

# The first test of each backend waits for all its trainings.
pytestmark = [pytest.mark.latest, pytest.mark.timeout(600), pytest.mark.all_cases]

# Every replica has ten minibatches; and an uneven variant in which one worker's data end early, one
# replica has a short minibatch and another one fewer.
EVEN = [[4] * 10] * 4
UNEVEN = [[4] * 10, [4] * 9 + [2], [4] * 7, [4] * 6]
ONE_EACH = UNEVEN[::2]  # a replica for each worker
AVERAGES = "{'ema': tfpara.EMA(0.8, False, zero_debias=True), 'ma': tfpara.MA()}"
HALVES = [(0, 1), (1, 4)]  # variables of the two fragments


class Training(NamedTuple):
    """`kind` and `settings` say which rule NumPy applies; None: it is compared with others only.
    `stepwise`: what `stepwise_simulation` is told, for syncs that do not stop the training."""

    rule: str
    kind: str | None
    settings: dict
    options: dict
    stepwise: dict | None = None


BMUF = ("tfpara.BMUF()", "nesterov", {"eta": 0.75, "warmup": True})
BLOCK = ("tfpara.BMUF(0.6)", "nesterov", {"eta": 0.6})
EASGD = ("tfpara.EASGD(0.2)", "elastic", {"alpha": 0.2})
FITTED = {"optimizer": "keras.optimizers.SGD(0.04, momentum=0.9)", "local_state": "auto"}
SHARDED = {"aggregation": "sharded", "averages": AVERAGES, "minibatches": UNEVEN, "epochs": 2}
UNEVEN_TWICE = {"minibatches": UNEVEN, "epochs": 2, "steps_per_execution": 2}
OVERLAPPED = {"minibatches": ONE_EACH, "epochs": 2, "aggregation": "sharded"}
# Its 89 weights, and 7 zeros, travel with the reports of two workers; or the weights after them.
APART = {
    "optimizer": "keras.optimizers.Adam(0.01)",
    "minibatches": ONE_EACH,
    "epochs": 2,
    "averages": AVERAGES,
}

# Every kind of broadcast and every option once, in pairs: what a rule computes does not depend on
# how the weights came. One process has the rest of the product: test_strategy.py, test_syncs.py.
TRAININGS = {
    # One worker closes its epoch from Python while the other syncs in its compiled step.
    "bsp-uneven": Training(
        "tfpara.BSP()", "bsp", {}, {"minibatches": ONE_EACH, "epochs": 2, "local_state": "reset"}
    ),
    "bmuf-sharded": Training(*BMUF, {**SHARDED, **FITTED, "evaluated": True}),
    "bmuf-cntk": Training(
        "tfpara.BMUF(0.6, compat='cntk')",
        "lookahead_anchor",
        {"eta": 0.6, "gain": 0.4 * 4},
        {"local_state": "average"},
    ),
    "easgd-uneven": Training(*EASGD, {**UNEVEN_TWICE, "averages": AVERAGES}),
    "bmuf_adam": Training(
        "tfpara.BMUFAdam()",
        None,
        {},
        {"optimizer": "keras.optimizers.Adam(0.01)", **SHARDED},
    ),
    # A constraint needs a whole weight, of which each replica keeps a part of the global one.
    "constrained": Training(
        *BMUF,
        {**SHARDED, **FITTED, "averages": "None", "constrained": True},
        {"within": simulation.within},
    ),
    "easgd-overlap": Training(*EASGD, {**OVERLAPPED, "overlap": True}, {"delay": 3}),
    # Two workers of two devices: overlap, fragments, hierarchy, several steps an execution.
    "all-at-once": Training(
        *BLOCK,
        {**UNEVEN_TWICE, "overlap": 2, "fragments": 2, "device_sync_period": 1},
        {"delay": 2, "runs": HALVES, "device_period": 1, "devices": 2},
    ),
    # XLA compiles each replica's step, and the smaller last minibatch anew.
    "compiled": Training(*BMUF, {**UNEVEN_TWICE, "jit_compile": True}),
    "int8": Training(BLOCK[0], None, {}, {**OVERLAPPED, "compression": "int8"}),
    "int8-replicated": Training(
        BLOCK[0], None, {}, {**OVERLAPPED, "compression": "int8", "aggregation": "replicated"}
    ),
    "int4": Training(
        BLOCK[0],
        None,
        {},
        {**FITTED, "minibatches": UNEVEN, "epochs": 2, "compression": "int4", "overlap": True},
    ),
    "together": Training(BMUF[0], None, {}, {**APART, "with_reports": 4 * 2 * 96}),
    "apart": Training(BMUF[0], None, {}, {**APART, "with_reports": 4 * 2 * 96 - 1}),
}
# One of each way in which weights and reports travel.
ON_HOROVOD = ("bsp-uneven", "bmuf-sharded", "easgd-uneven", "bmuf_adam", "all-at-once", "int8")
# Also of replicas that one process simulates on as many devices.
SIMULATED = ("bmuf-sharded", "easgd-overlap", "int8", "int8-replicated")
# Where only TensorFlow is another one.
ON_EVERY_VERSION = ("bsp-uneven", "bmuf-sharded", "all-at-once")
WEIGHTS = 4
# By TensorFlow's graph optimiser; see scripts/test.sh.
OPTIMISED = {"TFPARA_TEST_GRAPPLER": "1"}


def of_worker(name, workers, out):
    """The options of programs/train_small.py."""
    training = TRAININGS[name]
    options = {
        "sync_period": 3,
        "optimizer": "keras.optimizers.SGD(0.2, momentum=0.9)",
        "minibatches": EVEN,
        "timeout_seconds": 100,
        **training.options,
    }
    devices = len(options["minibatches"]) // workers
    return {**options, "rule": training.rule, "local_devices": devices, "out": str(out)}


def train(path, names, workers, **options):
    """Of each training what its workers saved."""
    path.mkdir(exist_ok=True)  # a test may have been skipped here
    outs = {name: [path / f"{name}-{rank}.npz" for rank in range(workers)] for name in names}
    given = [[of_worker(n, workers, outs[n][rank]) for n in names] for rank in range(workers)]
    run_all_well("train_small.py", given, timeout=500, **options)
    return {name: [dict(np.load(out)) for out in outs[name]] for name in names}


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """A function: what came of the trainings on "TF_CONFIG", on "horovod" or "simulated".

    Those of all tests that are to run are trained at once.
    """
    path = tmp_path_factory.mktemp("trained")
    wanted = {"TF_CONFIG": set(), "horovod": set(), "simulated": set()}
    for item in request.session.items:
        if item.path == request.path:
            name, backend = (item.callspec.params[of] for of in ("name", "backend"))
            wanted[backend].add(name)
            wanted["TF_CONFIG"].add(name)
    found = {}

    def of(backend):
        if backend not in found:
            names = [name for name in TRAININGS if name in wanted[backend]]
            if backend == "simulated":
                alone = {"environ": [{"TF_CONFIG": "", **OPTIMISED}]}
                found[backend] = train(path / backend, names, 1, **alone)
            else:
                both = {"environ": [OPTIMISED] * 2, "start": backend}
                found[backend] = train(path / backend, names, 2, **both)
        return found[backend]

    return of


def cases(backend, names):
    """Names with a backend, as parameters of a test."""
    for name in names:
        marks = [needs_horovod] if backend == "horovod" else []
        if name not in ON_EVERY_VERSION:
            marks.append(pytest.mark.one_version)
        yield pytest.param(name, backend, marks=marks)


def known_to_numpy(names):
    return [name for name in names if TRAININGS[name].kind]


def model(results, prefix):
    return simulation.flat([results[f"{prefix}_{i}"] for i in range(WEIGHTS)])


@pytest.mark.nightly_cases(
    "bmuf-cntk-*", "bsp-uneven-horovod*", "compiled-*", "constrained-*", "easgd-*"
)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *cases("TF_CONFIG", known_to_numpy(TRAININGS)),
        *cases("horovod", known_to_numpy(ON_HOROVOD)),
    ],
)
def test_it_is_what_numpy_computes(trained, name, backend):
    training, workers = TRAININGS[name], trained(backend)[name]
    stepwise = training.stepwise or {}
    results = {**workers[1], **workers[0]}
    options = of_worker(name, 2, "")
    for worker in workers:
        for key in {"initial_0", "global_0", "loss", "accuracy", "evaluation", "syncs"} & set(
            worker
        ):
            np.testing.assert_array_equal(worker[key], results[key], err_msg=key)
    initial = [results[f"initial_{i}"] for i in range(WEIGHTS)]
    settings = {"epochs": options.get("epochs", 1), **training.settings}
    arguments = (training.kind, initial, options["minibatches"], options["sync_period"])

    def optimizer():
        # In blocks of 3 steps "auto" leaves no momentum, and half of the rate / (1 - 0.9).
        return simulation.Momentum(0.2, 0.0 if options.get("local_state") == "auto" else 0.9)

    if training.stepwise:
        local, (w, _), loss = stepwise_simulation.simulate(
            *arguments, optimizer, **stepwise, **settings
        )
    else:
        state = options.get("local_state", "keep")
        local, center, loss = simulation.simulate(
            *arguments, optimizer, local_state=state, **settings
        )
        w = center.w
        assert results["syncs"] == len(center.history) - 1
        if "averages" in options:
            check_averages(results, center.history, center.parts)
    for replica, expected in enumerate(local):
        np.testing.assert_allclose(model(results, f"replica{replica}"), expected, atol=1e-5)
    if "within" in stepwise:
        w = simulation.flat(stepwise["within"](simulation.unflat(w, initial)))
    for which in ("global", "saved"):
        np.testing.assert_allclose(model(results, which), w, atol=1e-5, err_msg=which)
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-5)


def check_averages(results, history, parts):
    """Of the initial model and those after each sync, of blocks or parts of a block."""
    ema, weight = np.zeros_like(history[0]), 0.0
    for w, part in zip(history[1:], parts, strict=True):
        ema += part * 0.2 * (w - ema)
        weight += part * 0.2 * (1 - weight)
    np.testing.assert_allclose(model(results, "ema"), ema / weight, atol=1e-5)
    mean = np.average(history[1:], 0, parts)
    np.testing.assert_allclose(model(results, "ma"), mean, atol=1e-5)


@pytest.mark.nightly_cases("bmuf_adam*", "bsp-*", "easgd-*")
@pytest.mark.parametrize(("name", "backend"), cases("horovod", ON_HOROVOD))
def test_horovod_gives_what_tensorflow_gives(trained, name, backend):
    for mine, theirs in zip(trained(backend)[name], trained("TF_CONFIG")[name], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            np.testing.assert_allclose(mine[key], value, atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.one_version
@pytest.mark.parametrize(("name", "backend"), [("together", "TF_CONFIG"), ("apart", "TF_CONFIG")])
def test_weights_may_travel_with_the_reports(trained, name, backend):
    of_name, others = trained(backend)[name], trained(backend)["together"]
    for mine, theirs in zip(of_name, others, strict=True):
        assert mine.keys() == theirs.keys()
        sent = {"together": 96, "apart": 89}[name]  # which also shows how they have travelled
        assert mine["bytes_sent"] == mine["syncs"] * 4 * sent
        for key in theirs.keys() - {"bytes_sent"}:
            value = theirs[key]
            np.testing.assert_array_equal(mine[key], value, err_msg=key)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.nightly_cases("easgd-*", "int8*")
@pytest.mark.parametrize(("name", "backend"), cases("simulated", SIMULATED))
def test_simulated_replicas_compute_what_real_workers_do(trained, name, backend):
    workers, (simulated,) = trained("TF_CONFIG")[name], trained(backend)[name]
    # The same initial weights: those of the chief, with its seed.
    real = {**workers[1], **workers[0]}
    assert set(simulated) == set(real)
    assert not simulated.get("bytes_sent")
    for key, value in real.items():
        if key != "bytes_sent":
            np.testing.assert_allclose(simulated[key], value, atol=1e-5, err_msg=key)


@pytest.mark.nightly_cases("int4*")  # in one process: test_error_feedback in test_syncs.py
@pytest.mark.parametrize(
    ("name", "backend"), cases("TF_CONFIG", ["int8", "int8-replicated", "int4"])
)
def test_few_bytes_are_sent_and_leave_equal_replicas(trained, name, backend):
    workers = trained(backend)[name]
    replicas = len(TRAININGS[name].options["minibatches"])
    each = {**workers[0], **workers[1]}
    for i, replica in itertools.product(range(WEIGHTS), range(replicas)):
        np.testing.assert_array_equal(each[f"replica{replica}_{i}"], each[f"replica0_{i}"])
    # Two legs to the other worker. Each is of half of the 89 weights, which fill a group of 256
    # numbers of a byte, or of 64 of half a byte; and a scale of 4 bytes.
    bytes_of_half = {"int8": 260, "int8-replicated": 260, "int4": 36}[name]
    assert workers[0]["bytes_sent"] == workers[0]["syncs"] * 2 * bytes_of_half
