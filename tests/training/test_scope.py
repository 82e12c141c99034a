"""What is made outside of the strategy's scope is refused, or said, before anything is trained."""

import warnings
import weakref

import keras
import numpy as np
import pytest

import tfpara
from tests.lib.small import net, strategy_of
from tfpara.sync.keras import scope as scopes
from tfpara.sync.start_line import start_line

pytestmark = pytest.mark.latest

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


@pytest.fixture(autouse=True)
def _no_other_strategies(monkeypatch):
    """Those of former tests may not have been collected yet."""
    monkeypatch.setattr(scopes, "_strategies", weakref.WeakSet())


def layers():
    return net(4, 3, 1)


def made_outside(scope):
    model = layers()
    with scope():
        model.compile("sgd", "mse")
    return model


def loaded_outside(scope, path):
    with scope():
        model = layers()
        model.compile("sgd", "mse")
    model.save(path)
    return keras.models.load_model(path)


def backbone_outside(scope):
    backbone = layers()
    with scope():
        model = keras.Sequential([keras.Input((4,)), backbone, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def adapted_outside(scope):
    normalization = keras.layers.Normalization()
    normalization.adapt(X)  # which makes its weights
    with scope():
        model = keras.Sequential([keras.Input((4,)), normalization, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def compiled_outside(scope):
    with scope():
        model = layers()
    model.compile("sgd", "mse")
    return model


def optimizer_outside(scope):
    optimizer = keras.optimizers.SGD()
    with scope():
        model = layers()
        model.compile(optimizer, "mse")
    return model


def metric_outside(scope):
    metric = keras.metrics.MeanAbsoluteError(name="mine")
    with scope():
        model = layers()
        model.compile("sgd", "mse", metrics=[metric])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (made_outside, "was made outside of the strategy's scope, and compiled inside"),
        (backbone_outside, r"its weight '.*dense.*/kernel' was made outside"),
        (adapted_outside, "its weight 'normalization.*/mean' was made outside"),
        (compiled_outside, "its optimizer .* was made outside"),
        (optimizer_outside, "its optimizer .* was made outside"),
        (metric_outside, "the metric 'mine' was made outside"),
    ],
)
def test_half_a_model_is_refused_before_a_step(make, message):
    own = strategy_of()
    with pytest.raises(ValueError, match=message) as refused:
        model = make(own.scope)
        before = model.get_weights()
        try:
            model.fit(X, Y, verbose=0)
        finally:
            assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert "with strategy.scope():" in str(refused.value) and "adapt(…)" in str(refused.value)
    assert own.statistics().steps == 0


def test_a_forgotten_scope_is_said_once():
    own = strategy_of()
    model = layers()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="outside of the strategy's scope: each worker trains it"):
        model.fit(X, Y, verbose=0)
    assert own.statistics().syncs == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y, verbose=0)


def test_a_model_that_is_loaded_outside_is_said(tmp_path):
    own = strategy_of()
    model = loaded_outside(own.scope, tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="load_model"):
        model.fit(X, Y, verbose=0)


def test_another_model_beside_one_that_is_trained_is_nobodys_business(recwarn):
    own = strategy_of()
    with own.scope():
        model = layers()
        model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    beside = layers()
    beside.compile("sgd", "mse")
    beside.fit(X, Y, verbose=0)
    assert not [w for w in recwarn if "scope" in str(w.message)]


def test_the_strategy_says_what_it_is(capfd):
    own = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(0.5), sync_period=7, averages={"ema": tfpara.EMA(0.9)}, devices=["CPU:0"]
    )
    assert capfd.readouterr().err == (
        "tfpara: 1 worker, 1 replica; BMUF (block_momentum=0.5, warmup=False) every 7 steps; "
        "average 'ema': EMA (decay=0.9); on CPU:0\n"
    )
    task = "/job:worker/replica:0/task:1/device:"
    rule = tfpara.BMUF().resolve(4)
    of_four = start_line(2, [f"{task}GPU:0", f"{task}GPU:1"], rule, 1, {}, "NCCL")
    assert of_four == (
        "2 workers, 4 replicas: each batch is divided, for example 64 rows into 16 each; "
        "BMUF (block_momentum=0.75, warmup=True) every step; workers on GPU:0, GPU:1 each, "
        "connected by NCCL"
    )
    for workers, unlike, kinds, others in [
        (3, (), "CPU GPU", "the others on 1 device each, CPUs and GPUs connected by RING"),
        (4, (1, 2, 2, 3), "GPU", "the others on 2, 2 and 3 devices, connected by RING"),
        (2, (1, 2), "GPU", "worker 1 on 2 devices, connected by RING"),
    ]:
        line = start_line(
            workers, [f"{task}GPU:0"], rule, 1, {}, "RING", unlike=unlike, kinds=kinds.split()
        )
        assert line.endswith(f"; worker 0 on GPU:0, {others}")
    third = tfpara.BMUF(1 / 3, warmup=True)
    settings = {"overlap": True, "fragments": 2, "compression": "int8"}
    every = "BMUF (block_momentum=0.3333, warmup=True) every 8 steps, overlap=True, fragments=2, "
    line = start_line(1, [f"{task}GPU:0"], third, 8, {}, "", options=settings)
    assert f"; {every}compression='int8'; on GPU:0" in line
    outer = tfpara.Outer(keras.optimizers.SGD(0.7))
    line = start_line(1, [f"{task}CPU:0"], outer, 20, {}, "")
    assert "; Outer(SGD(" in line
    assert "learning_rate=0.7" in line, line
    own.set_sync_period(None)
    assert "no syncs" in repr(own)
    tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=20, fragments=2, devices=["CPU:0"])
    assert "BSP every 20 steps, fragments=2; on" in capfd.readouterr().err
