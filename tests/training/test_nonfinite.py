"""`nonfinite="skip"`: a run equals the one in which the bad minibatches have no rows."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.bad_minibatches import BAD, adam, by_epoch, compiled, net, sgd, state
from tests.lib.small import strategy_of
from tfpara.sync.tensorflow import nonfinite

pytestmark = pytest.mark.latest

REPLICAS = 2
NAMES = "minibatch 2 of replica 1, 8 of replica 0, 8 of replica 1"


class TwoOptimizers(keras.Model):
    """Its first optimizer never sees what is bad in the gradients of the second."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)
        self.other = keras.optimizers.Adam(0.01)
        self.normal = keras.layers.BatchNormalization()
        for layer, width in ((self.first, 6), (self.normal, 5), (self.second, 5)):
            layer.build((None, width))

    def call(self, x, training=False):
        return self.second(self.normal(self.first(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            finite = tf.where(tf.math.is_finite(x), x, 0.0)
            of_first = tf.reduce_sum(self.first(finite) ** 2)
            loss = self.compute_loss(x, y, self(x, training=True))
        ours, others = self.first.trainable_variables, self.second.trainable_variables
        self.optimizer.apply(tape.gradient(of_first, ours), ours)
        self.other.apply(tape.gradient(loss, others), others)
        self._loss_tracker.update_state(loss)
        return self.get_metrics_result()


def trained(kind, optimizer, rule, *, compile=None, model=net, epochs=2, **options):
    if kind != "empty":
        options |= {"nonfinite": "skip", "nonfinite_share": 0.2}
    strategy = strategy_of(REPLICAS, rule=rule, **{"sync_period": 5, **options})
    network = compiled(strategy, optimizer, model, **(compile or {}))
    log = network.fit(by_epoch(strategy, kind), epochs=epochs, verbose=0).history
    log |= network.fit(by_epoch(strategy, kind), epochs=1, verbose=0).history  # the second fit
    return state(strategy, network), log, strategy


CASES = {
    "sgd, BSP": (sgd, tfpara.BSP(), {}),
    "adam, BMUF": (adam, tfpara.BMUF(), {"kind": "inf"}),
    "xla": (adam, tfpara.BMUF(), {"compile": {"jit_compile": True}}),
    "several steps": (sgd, tfpara.BMUF(), {"compile": {"steps_per_execution": 4}}),
    "several compiled steps": (
        sgd,
        tfpara.BSP(),
        {"compile": {"steps_per_execution": 4, "jit_compile": True}},
    ),
    "eager": (adam, tfpara.BSP(), {"compile": {"run_eagerly": True}, "epochs": 1}),
    "accumulation": (lambda: adam(gradient_accumulation_steps=3), tfpara.BSP(), {}),
    "overlap": (sgd, tfpara.BMUF(), {"overlap": True}),
    "fragments": (sgd, tfpara.BMUF(), {"fragments": 2}),
    "devices": (adam, tfpara.BSP(), {"device_sync_period": 1}),
    "two optimizers": (sgd, tfpara.BSP(), {"model": TwoOptimizers}),
}


@pytest.mark.nightly_cases(
    "accumulation",
    "devices",
    "eager",
    "fragments",
    "overlap",
    "several compiled steps",
    "several steps",
    "sgd, BSP",
    "two optimizers",
    "xla",
)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_run_without_them(case, capfd):
    optimizer, rule, options = CASES[case]
    kind = {"kind": "nan", **options}.pop("kind")
    options = {name: value for name, value in options.items() if name != "kind"}
    values, log, strategy = trained(kind, optimizer, rule, **options)
    said = capfd.readouterr().err
    others, expected, _ = trained("empty", optimizer, rule, **options)
    fits = options.get("epochs", 2) + 1
    assert strategy.statistics().left_out == len(BAD) * fits
    assert log.pop("left_out") == [len(BAD)]
    assert (
        said.count(
            f"epoch 1 left out 3 minibatches whose loss or gradient had NaN or Inf: {NAMES}\n"
        )
        == 2
    )
    assert len(values) == len(others)
    for one, other in zip(values, others, strict=True):
        assert np.isfinite(one).all()
        # Equal but for rounding: graphs with a branch may be optimised otherwise.
        np.testing.assert_allclose(one, other, rtol=0.0, atol=2e-6)
    for name in expected:
        np.testing.assert_allclose(log[name], expected[name], rtol=1e-6)


def test_a_sync_has_no_nan_for_checks_of_tensorflow():
    """TensorFlow's checks fail at every NaN of a float type, also at an unused constant."""
    strategy = strategy_of(1)
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse")
    tf.debugging.enable_check_numerics()
    try:
        model.fit(np.ones((8, 6)), np.ones((8, 3)), batch_size=4, verbose=0)
    finally:
        tf.debugging.disable_check_numerics()
    assert strategy.statistics().syncs == 1


@pytest.mark.nightly
def test_a_gpu_chooses_values_without_a_branch(monkeypatch, capfd):
    """The host would wait for a branch; here the same operations run on CPUs."""
    monkeypatch.setattr(nonfinite, "compiles_on", lambda device: True)
    test_equals_the_run_without_them("adam, BMUF", capfd)


class Stop(Exception):
    pass


def stop_at(number):
    def stop(batch, logs=None):
        if batch == number:
            raise Stop

    return keras.callbacks.LambdaCallback(on_train_batch_end=stop)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_resumed_epoch_goes_on_counting(tmp_path, capfd):
    def fit(*callbacks):
        strategy = strategy_of(REPLICAS, nonfinite="skip", nonfinite_share=0.2)
        model = compiled(strategy, adam)
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run", every_syncs=1)
        try:
            log = model.fit(
                by_epoch(strategy, "nan"), epochs=1, verbose=0, callbacks=[checkpoint, *callbacks]
            ).history
        finally:
            checkpoint._checkpoints.store.release()
        return strategy.statistics().left_out, log

    with pytest.raises(Stop):
        fit(stop_at(4))  # minibatch 2 of replica 1 is before it
    total, log = fit()
    assert (total, log["left_out"]) == (len(BAD), [len(BAD)])
    assert f"epoch 1 left out 3 minibatches whose loss or gradient had NaN or Inf: {NAMES}\n" in (
        capfd.readouterr().err
    )


@pytest.mark.nightly
@pytest.mark.one_version
def test_rows_are_named_where_other_replicas_go_on(tmp_path, capfd):
    x, y = np.random.default_rng(0).normal(size=(48, 6)).astype("float32"), np.zeros(48)
    x[46] = np.nan

    def fit(replicas, *callbacks):
        strategy = strategy_of(replicas, nonfinite="skip", nonfinite_share=1.0)
        model = compiled(strategy, sgd)
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run", every_syncs=1)
        try:
            callbacks = [checkpoint, *callbacks]
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0, callbacks=callbacks)
        finally:
            checkpoint._checkpoints.store.release()

    with pytest.raises(Stop):
        fit(2, stop_at(2))
    fit(3)
    assert "minibatch 4 of replica 2 (rows 44, 45, 46, 47)\n" in capfd.readouterr().err


@pytest.mark.one_version
@pytest.mark.nightly_cases("0.0", "0.2")
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2])
def test_above_a_share_of_the_epoch_the_run_ends(share):
    strategy = strategy_of(REPLICAS, nonfinite="skip", nonfinite_share=share)
    model = compiled(strategy, sgd)
    fit = lambda: model.fit(by_epoch(strategy, "nan"), epochs=1, verbose=0)  # noqa: E731
    if share == 0.2:  # 3 of 24 are less
        fit()
        return
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=(
            rf"3 of 24 minibatches of this epoch had NaN or Inf .* nonfinite_share={share:g} "
            r"allows; 2 of them were of replica 1 \(worker 0\). Lower the learning rate"
        ),
    ):
        fit()


@pytest.mark.one_version
def test_many_in_a_row_end_the_run_within_the_epoch():
    strategy = strategy_of(REPLICAS, nonfinite="skip", nonfinite_share=0.2)
    model = compiled(strategy, sgd)
    seen = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    x = np.full([400, 6], np.nan, "float32")
    with pytest.raises(tf.errors.InvalidArgumentError, match="12 of 12 minibatches of this epoch"):
        model.fit(x, np.zeros(400), batch_size=8, verbose=0, callbacks=[count])
    assert len(seen) == 5  # the sixth has the third sync


@pytest.mark.nightly
def test_rows_of_arrays_and_batches_of_a_py_dataset_are_named(capfd):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]

    x, y = np.random.default_rng(0).normal(size=(80, 6)).astype("float32"), np.zeros(80)
    x[[13, 77]] = np.nan
    strategy = strategy_of(REPLICAS, nonfinite="skip", nonfinite_share=0.2)
    model = compiled(strategy, sgd)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert "minibatch 2 of replica 1 (rows 12, 13, 14, 15), 10 of replica 1 (rows 76, " in (
        capfd.readouterr().err
    )
    model.fit(x, y, batch_size=8, verbose=0)
    rows = re.findall(r"\(rows ([\d, ]+)\)", capfd.readouterr().err)
    assert {13, 77} <= {int(row) for of_one in rows for row in of_one.split(",")}
    assert len(rows) <= 2
    model.fit(Batches(), shuffle=True, verbose=0)
    assert set(re.findall(r"of batch (\d+)\)", capfd.readouterr().err)) == {"1", "9"}


@pytest.mark.parametrize("bad", [False, True])
def test_what_loss_scaling_handles_is_not_counted(bad):
    """The first scales are too large, and gradients overflow."""
    strategy = strategy_of(1, nonfinite="skip", nonfinite_share=1.0)
    model = compiled(strategy, lambda: keras.optimizers.LossScaleOptimizer(sgd(), 2.0**127))
    before = model.get_weights()
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32") * 100
    x[3] = np.nan if bad else 0
    log = model.fit(x, np.zeros(8), batch_size=8, verbose=0).history
    scale = 2.0**127 if bad else 2.0**126
    assert (log["left_out"], float(model.optimizer.dynamic_scale)) == ([float(bad)], scale)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


@pytest.mark.nightly
def test_a_loop_of_ones_own():
    def looped(kind):
        options = {} if kind == "empty" else {"nonfinite": "skip"}
        strategy = strategy_of(REPLICAS, **options)
        model = compiled(strategy, sgd)
        strategy.track(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(value, weights), weights)

        run = tf.function(lambda minibatch: strategy.run(step, args=minibatch))
        for minibatch in by_epoch(strategy, kind):
            run(minibatch)
        strategy.synchronize()
        return model.get_weights(), strategy.statistics()

    weights, statistics = looped("nan")
    expected, others = looped("empty")
    assert (statistics.left_out, statistics.samples) == (3, others.samples)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loops_optimizer_must_be_known_before_its_step():
    strategy = strategy_of(REPLICAS, nonfinite="skip")
    model = compiled(strategy, sgd)
    with strategy.scope():
        optimizer = adam()
    strategy.track(model, optimizer)

    def step(x):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(model(x) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(value, weights), weights)

    with pytest.raises(ValueError, match=r"first step .* makes \d+ variables .* optimizer.build"):
        tf.function(lambda: strategy.run(step, args=(tf.ones([2, 6]),)))()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "ignore"}, "nonfinite='ignore' must be"),
        (
            {"nonfinite": "skip", "nonfinite_share": 1.5},
            "nonfinite_share=1.5 must be a number from",
        ),
        ({"nonfinite": "skip", "nonfinite_share": float("nan")}, "nonfinite_share=nan must be"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        strategy_of(1, **options)
