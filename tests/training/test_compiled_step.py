"""`jit_compile`: XLA compiles each replica's step. The run is that of the step as it is.

What a run comes to without it is compared with NumPy elsewhere.
"""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfpara
from tfpara.sync.keras import compiling
from tfpara.sync.one_sync import graph_ops
from tfpara.sync.workers.worker import Worker

pytestmark = pytest.mark.latest

L = keras.layers
ROWS = 50
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 6)).astype("float32")
Y = X[:, :3].argmax(1)
SERIES = rng.normal(size=(ROWS, 5, 4)).astype("float32")
IMAGES = rng.normal(size=(ROWS, 6, 6, 2)).astype("float32")
WORDS = rng.integers(0, 9, (ROWS, 5))


def dense(*layers, x=X):
    return keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype), *layers, L.Dense(3)])


def attention():
    entry = keras.Input((5, 4))
    hidden = L.LayerNormalization()(entry + L.MultiHeadAttention(2, 3)(entry, entry))
    return keras.Model(entry, L.Dense(3)(L.GlobalAveragePooling1D()(hidden)))


def frozen():
    model = dense(L.Dense(7, "tanh"), L.Dense(7, "tanh"))
    model.layers[0].trainable = False
    return model


class TwoOptimizers(keras.Model):
    """A `train_step` of its own, in which each layer has an optimizer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = L.Dense(7, "tanh"), L.Dense(3)
        self.first.build((None, 6))
        self.second.build((None, 7))
        self.other = keras.optimizers.Adam(0.01)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        ours, others = self.first.trainable_variables, self.second.trainable_variables
        gradients = tape.gradient(loss, [*ours, *others])
        self.optimizer.apply(gradients[:2], ours)
        self.other.apply(gradients[2:], others)
        self._loss_tracker.update_state(loss)
        return self.get_metrics_result()


class Case:
    def __init__(self, make, *, x=X, optimizer=None, fit=None, compile=None, atol=2e-5, **options):
        self.make, self.x, self.atol = make, x, atol
        self.optimizer = optimizer or (lambda: keras.optimizers.SGD(0.02, momentum=0.9))
        self.fit, self.compile, self.options = fit or {}, compile or {}, options


def hidden():
    return dense(L.Dense(7, "tanh"))


CASES = {
    "dense": Case(hidden),
    "batch normalisation": Case(lambda: dense(L.Dense(7), L.BatchNormalization())),
    "adam, steps in one execution": Case(
        hidden, optimizer=lambda: keras.optimizers.Adam(0.01), compile={"steps_per_execution": 3}
    ),
    "overlap, fragments": Case(hidden, overlap=True, fragments=2),
    "accumulation, clipping, a schedule": Case(
        hidden,
        optimizer=lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.7),
            clipnorm=0.5,
            gradient_accumulation_steps=2,
        ),
    ),
    "convolution": Case(lambda: dense(L.Conv2D(3, 3), L.Flatten(), x=IMAGES), x=IMAGES),
    "lstm": Case(lambda: dense(L.LSTM(4), x=SERIES), x=SERIES),
    "gru": Case(lambda: dense(L.GRU(4), x=SERIES), x=SERIES),
    "attention": Case(attention, x=SERIES),
    "embedding with a mask": Case(
        lambda: dense(L.Embedding(9, 4, mask_zero=True), L.LSTM(3), x=WORDS), x=WORDS
    ),
    "regularizer": Case(lambda: dense(L.Dense(7, kernel_regularizer="l2"))),
    "sample weights": Case(hidden, fit={"sample_weight": rng.uniform(0, 2, ROWS)}),
    "frozen": Case(frozen),
    "two optimizers": Case(TwoOptimizers),
    "easgd, sharded": Case(hidden, rule=tfpara.EASGD(), aggregation="sharded"),
    "moments of Adam too": Case(
        hidden, rule=tfpara.BMUFAdam(), optimizer=lambda: keras.optimizers.Adam(0.01)
    ),
    "slots averaged": Case(
        hidden, optimizer=lambda: keras.optimizers.Adam(0.01), local_state="average"
    ),
}


def fitted(case, jit_compile, callbacks=(), epochs=2, devices=2):
    keras.utils.set_random_seed(1)
    strategy = tfpara.PeriodicSyncStrategy(
        **{
            "rule": tfpara.BMUF(0.6),
            "sync_period": 2,
            "devices": [f"CPU:{d}" for d in range(devices)],
            **case.options,
        }
    )
    with strategy.scope():
        model = case.make()
        model.compile(
            case.optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=jit_compile,
            **case.compile,
        )
    # The last minibatches are of two rows on one replica, and of none on the other.
    history = model.fit(
        case.x,
        Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        validation_data=(case.x, Y),
        callbacks=list(callbacks),
        verbose=0,
        **case.fit,
    )
    return strategy, model, history.history


def weights_of(strategy, model):
    """Returns the variables of all replicas, and the global model."""
    local = [
        part.numpy()
        for variable in [*model.variables, *model.optimizer.variables]
        if variable.dtype != "string"
        for part in strategy.experimental_local_results(variable.value)
    ]
    with strategy.weights(model, "global"):
        return local + model.get_weights()


@contextlib.contextmanager
def compilations(monkeypatch):
    """Notes the names of the steps that XLA compiles."""
    names = []
    call = compiling.CompiledStep.__call__

    def noted(step, *args):
        names.append(step.__name__)
        return call(step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(compiling.CompiledStep, "__call__", noted)
        yield names


@pytest.mark.nightly_cases("batch normalisation", "dense", "lstm", "two optimizers")
@pytest.mark.nightly_cases(
    "accumulation*",
    "attention*",
    "convolution*",
    "easgd*",
    "embedding*",
    "frozen*",
    "gru*",
    "moments of Adam*",
    "overlap, fragments*",
    "regularizer*",
    "sample weights*",
    "slots averaged*",
)
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_run_is_the_run_but_for_rounding(name, monkeypatch):
    case = CASES[name]
    with compilations(monkeypatch) as none:
        expected = fitted(case, jit_compile=False)
    with compilations(monkeypatch) as compiled:
        found = fitted(case, jit_compile=True)
    assert not none
    assert set(compiled) == {"train_step", "test_step"}
    for one, other in zip(weights_of(*found[:2]), weights_of(*expected[:2]), strict=True):
        np.testing.assert_allclose(one, other, atol=case.atol, rtol=1e-4)
    for key, values in expected[2].items():
        np.testing.assert_allclose(found[2][key], values, rtol=1e-4, err_msg=key)
    assert found[1].jit_compile is True  # as it is saved with the model
    np.testing.assert_allclose(
        found[1].predict(case.x, verbose=0), expected[1].predict(case.x, verbose=0), atol=1e-4
    )


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_policy_of_float16_with_its_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        case = Case(hidden, optimizer=lambda: keras.optimizers.SGD(0.02, momentum=0.9))
        expected, found = fitted(case, jit_compile=False), fitted(case, jit_compile=True)
    finally:
        keras.config.set_dtype_policy("float32")
    for one, other in zip(weights_of(*found[:2]), weights_of(*expected[:2]), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-2)


def test_dropout_draws_other_numbers_on_each_replica_and_in_each_step():
    seen = []

    class Noted(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop, self.scale = L.Dropout(0.5, seed=1), self.add_weight(name="w")
            self.built = True

        def train_step(self, data):
            kept = tf.reduce_mean(self.drop(tf.ones((100,)), training=True))
            self.optimizer.apply([kept], [self.scale])  # w becomes −Σ of what was kept
            return {"kept": kept}

    case = Case(Noted, optimizer=lambda: keras.optimizers.SGD(1.0), sync_period=100)
    for steps in (1, 2):
        strategy, model = fitted_steps(case, steps)
        seen += [float(v) for v in strategy.experimental_local_results(model.scale.value)]
    assert seen[0] != seen[1]
    assert seen[2] - seen[0] != seen[0]


def fitted_steps(case, steps):
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.EASGD(), sync_period=case.options["sync_period"], devices=["CPU:0", "CPU:1"]
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = case.make()
        model.compile(case.optimizer(), jit_compile=True)
        strategy.track(model)
    function = model.make_train_function() or model.train_function
    function(iter(strategy.experimental_distribute_dataset(rows(4 * steps))))
    return strategy, model


def rows(count):
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(4)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_resumed_run_has_the_same_bits(tmp_path):
    case = CASES["batch normalisation"]
    whole = fitted(case, True, epochs=3)
    for epochs in (1, 3):
        resumed = fitted(case, True, [tfpara.callbacks.Checkpoint(tmp_path)], epochs)
    for one, other in zip(weights_of(*resumed[:2]), weights_of(*whole[:2]), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.warns(UserWarning, match=r"written with jit_compile True; numbers may differ"):
        fitted(case, False, [tfpara.callbacks.Checkpoint(tmp_path)], 4)


@pytest.mark.nightly
def test_workers_on_unlike_kinds_of_devices_make_slots_at_one_place(monkeypatch):
    """With "auto", XLA compiles the step of a worker on a GPU, and not that of one on a CPU."""
    made = []
    build = compiling.build_optimizers
    monkeypatch.setattr(compiling, "build_optimizers", lambda model: made.append(build(model)))
    for kinds, count in (({"CPU"}, 0), ({"CPU", "GPU"}, 1)):
        monkeypatch.setattr(Worker, "kinds", kinds)
        _, model, _ = fitted(CASES["two optimizers"], "auto", epochs=1)
        assert len(made) == count and model.other.built and not model.jit_compile


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_checkpoint_has_the_jit_compile_of_the_chief(tmp_path, monkeypatch, recwarn):
    """Workers on CPUs may have another one, and it says nothing of the run that was."""
    callbacks = [tfpara.callbacks.Checkpoint(tmp_path)]
    fitted(CASES["dense"], True, callbacks, epochs=1)
    monkeypatch.setattr(tfpara.PeriodicSyncStrategy, "is_chief", False)
    fitted(CASES["dense"], False, [tfpara.callbacks.Checkpoint(tmp_path)], epochs=1)
    assert not [each for each in recwarn if "written with" in str(each.message)]


@pytest.mark.nightly
@pytest.mark.one_version
def test_train_on_batch_is_compiled():
    expected, found = [], []
    for jit_compile, results in ((False, expected), (True, found)):
        strategy, model, _ = fitted(CASES["dense"], jit_compile)
        results += [model.train_on_batch(X[:8], Y[:8]), model.test_on_batch(X, Y)]
        results.append(np.concatenate([np.ravel(w) for w in weights_of(strategy, model)]))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.nightly
def test_what_runs_eagerly_is_not_compiled(monkeypatch):
    case = Case(hidden, compile={"run_eagerly": True})
    with compilations(monkeypatch) as compiled, pytest.warns(UserWarning, match="run_eagerly"):
        fitted(case, jit_compile=True, epochs=1)
    assert not compiled


def test_a_layer_that_cannot_be_compiled_gets_keras_warning_once(monkeypatch):
    def make():
        model = hidden()
        model.layers[0].supports_jit = False
        return model

    with compilations(monkeypatch) as compiled, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fitted(Case(make), jit_compile=True, epochs=1)
    assert not compiled
    assert len([w for w in seen if "doesn't support `jit_compile=True`" in str(w.message)]) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [tfpara.BMUF(0.6), tfpara.EASGD()])
def test_a_global_step_compiled_by_xla_is_the_same_but_for_rounding(rule, monkeypatch):
    """It is compiled on GPUs alone, so here the CPU is made one that compiles."""
    case = Case(hidden, rule=rule, averages={"ema": tfpara.EMA(0.8), "ma": tfpara.MA()})
    expected = fitted(case, jit_compile=False)
    monkeypatch.setattr(graph_ops, "compiles_on", lambda device: True)
    found = fitted(case, jit_compile=False)
    for one, other in zip(weights_of(*found[:2]), weights_of(*expected[:2]), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    for which in case.options["averages"]:
        averages = []
        for strategy, model, _ in (found, expected):
            with strategy.weights(model, which):
                averages.append(model.get_weights())
        for one, other in zip(*averages, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.one_version
def test_a_sync_brings_one_vector_to_the_host(monkeypatch):
    """A GPU is waited for at each value that the host needs, and weights must stay there.

    The second CPU device stands for the GPU, and what is compiled there is compiled.
    """
    monkeypatch.setattr(graph_ops, "compiles_on", lambda device: "CPU:1" in device)
    options = {"sync_period": 2, "devices": ["CPU:1"], "averages": {"ema": tfpara.EMA(0.8)}}
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), **options)
    with strategy.scope():
        model = dense(L.Dense(7), L.BatchNormalization())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, steps_per_execution=5)
    with context.collect_graphs(optimized=True) as graphs:
        model.fit(X, Y, batch_size=10, verbose=0)
    (sync,) = {
        frozenset(crossing(graph, "CPU:1", "CPU:0"))
        for graph in graphs
        if any(node.name.startswith("sync/check") for node in graph.node)
    }
    assert len(sync) == 1
    assert next(iter(sync)).startswith("sync/check/")


def crossing(graph, source, target):
    """Yields the nodes on one device whose values nodes on another one take; no resources."""
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        for name in node.input:
            giver = nodes.get(name.split(":")[0])  # None for a control dependency
            if giver is None or not giver.device.endswith(source):
                continue
            if (
                node.device.endswith(target)
                and giver.attr["T"].type != tf.resource.as_datatype_enum
            ):
                yield giver.name


@pytest.mark.one_version
def test_what_xla_cannot_take_is_named():
    odd = L.Lambda(lambda x: tf.ensure_shape(tf.numpy_function(np.tanh, [x], tf.float32), x.shape))
    odd.name = "odd"
    with pytest.raises(ValueError, match=r"XLA cannot compile operation PyFunc of '.*odd.*'\. "):
        fitted(Case(lambda: dense(odd)), jit_compile=True, epochs=1)


@pytest.mark.parametrize(
    ("devices", "supported", "compiles"),
    [(["GPU:0", "GPU:1"], True, True), (["GPU:0"], False, False), (["CPU:0"], True, False)],
)
def test_auto_is_as_without_a_strategy(devices, supported, compiles, monkeypatch):
    """There is no GPU here, so both TensorFlow's list and the strategy's devices are made up."""
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0"])
    names = [f"/job:localhost/replica:0/task:0/device:{d}" for d in devices]
    monkeypatch.setattr(type(strategy.extended), "worker_devices", names)
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [gpu])
    with strategy.scope():
        model = hidden()
        model.layers[0].supports_jit = supported
    assert model.jit_compile is compiles
    assert model.distribute_strategy is strategy
