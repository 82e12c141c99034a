"""A worker's minibatches beside Keras' own training step on the same weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfpara.algorithms import ASGD, AsyncEASGD, Downpour
from tfpara.parameter_server.messages import Place, Pulled
from tfpara.parameter_server.worker_step import WorkerStep, clipped

pytestmark = pytest.mark.latest

SAMPLES = 8


class Penalty(layers.Layer):
    """Adds to the loss what it is given."""

    def call(self, x):
        self.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
        return x


def dense():
    regular = {"kernel_regularizer": "l2", "activity_regularizer": keras.regularizers.L2(0.1)}
    x = keras.Input((4,))
    y = Penalty()(layers.Dense(5, "tanh", **regular)(x))
    return keras.Model(x, layers.Dense(3, "softmax")(y))


def normed():
    x = keras.Input((4,))
    y = layers.BatchNormalization(momentum=0.8)(layers.Dense(5, "relu")(x))
    return keras.Model(x, layers.Dense(3, "softmax")(y))


def recurrent():
    x = keras.Input((4,))
    y = layers.LSTM(3)(layers.Reshape((2, 2))(x))
    return keras.Model(x, layers.Dense(3, "softmax")(y))


def carried():
    x = keras.Input((4,), batch_size=SAMPLES)
    y = layers.GRU(3, stateful=True)(layers.Reshape((2, 2))(x))
    return keras.Model(x, layers.Dense(3, "softmax")(y))


def frozen():
    x = keras.Input((4,))
    first = layers.Dense(5, "tanh")
    first.trainable = False
    return keras.Model(x, layers.Dense(3, "softmax")(first(x)))


def half():
    x = keras.Input((4,))
    y = layers.Dense(5, "tanh", dtype="mixed_bfloat16")(x)
    return keras.Model(x, layers.Dense(3, "softmax", dtype="float32")(y))


MODELS = [dense, normed, recurrent, carried, frozen, half]


def compiled(make, optimizer=None):
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(
        optimizer or keras.optimizers.SGD(1.0),
        "categorical_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")],
        weighted_metrics=[keras.metrics.CategoricalCrossentropy(name="ce")],
    )
    return model


def minibatches(count=2, weighted=True):
    draw = np.random.default_rng(0)
    found = []
    for _ in range(count):
        x = draw.normal(size=(SAMPLES, 4)).astype(np.float32)
        y = np.eye(3, dtype=np.float32)[draw.integers(0, 3, SAMPLES)]
        weight = draw.uniform(0.5, 2.0, SAMPLES).astype(np.float32)
        found.append(tuple(map(tf.constant, (x, y, weight) if weighted else (x, y))))
    return found


def spec(data):
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), data)


def pulled_from(model, work):
    return Pulled(
        weights=[tf.identity(v.value) for v in model.trainable_variables],
        state=[tf.identity(v.value) for v in work.state],
        versions=[tf.zeros([], tf.int64)],
        halted=tf.constant(False),
    )


def own(work, stream=0):
    return work.own_start(tf.constant(stream, tf.int64))


def compute(model, rule, data, stream=0):
    """The block of these minibatches, and its push."""
    work = WorkerStep(model, rule, spec(data[0]), len(data))
    pulled = pulled_from(model, work)
    optimizer = [tf.convert_to_tensor(value) for value in work.optimizer_start]
    block = work.begin(pulled, own(work, stream), optimizer=optimizer)
    add = tf.function(work.add, autograph=False, reduce_retracing=True)
    for minibatch in data:
        block = add(block, minibatch)
    zero = tf.zeros([], tf.int64)
    return work, block, work.push(block, pulled, zero, Place(zero, zero, zero), tf.constant(-1.0))


def normalised(trainable=True):
    x = keras.Input((4,))
    first = layers.SpectralNormalization(layers.Dense(5, "tanh", trainable=trainable))
    return keras.Model(x, layers.Dense(3, "softmax")(first(x)))


@pytest.mark.nightly
def test_what_a_layer_assigns_to_a_weight_is_trained_from_as_in_keras():
    data = minibatches(3)
    model, wanted = (compiled(normalised, keras.optimizers.SGD(0.5, 0.9)) for _ in "ab")
    work, _, push = compute(model, Downpour(), data)
    for minibatch in data:
        wanted.train_on_batch(*minibatch)
    pulled = pulled_from(model, work)
    after = [w + d for w, d in zip(pulled.weights, push.values, strict=True)]
    after += [k * s + a for k, s, a in zip(push.kept, pulled.state, push.state, strict=True)]
    state = [v for v in wanted.non_trainable_variables if v.dtype == "float32"]
    for got, expected in zip(after, [*wanted.trainable_variables, *state], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_what_a_layer_assigns_to_a_weight_is_refused_where_it_would_be_lost():
    data = minibatches(1)
    with pytest.raises(ValueError, match="assigns to the trained weight .*kernel.* ASGD sends"):
        compute(compiled(normalised), ASGD(), data)
    with pytest.raises(ValueError, match="assigns to the frozen weight .*kernel"):
        compute(compiled(lambda: normalised(trainable=False)), Downpour(), data)


class WithFunction(layers.Dense):
    @tf.function
    def call(self, x):
        return super().call(x)


def test_a_weight_that_a_function_of_a_layer_reads_is_refused():
    """The function's graph has the chief's variable, so the weight did not change."""
    model = keras.Sequential([keras.Input((4,)), WithFunction(5), layers.Dense(3, "softmax")])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="reads the weight '.*kernel' in a tf.function"):
        compute(model, ASGD(), minibatches(1))


@pytest.mark.parametrize(
    "options,told",
    [
        *(({"aggregation": a}, f"has aggregation='{a}'") for a in ("mean", "none")),
        ({"aggregation": "only_first_replica"}, "has aggregation='only_first_replica'"),
        ({"dtype": "bool"}, "is of bool"),
    ],
)
def test_a_metric_whose_state_is_no_sum_is_refused(options, told):
    """A running maximum of 6 read 90: that of each push was added."""

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value", **options)

        def update_state(self, y_true, y_pred, sample_weight=None):
            largest = tf.maximum(tf.cast(self.value, tf.float32), tf.reduce_max(y_pred))
            self.value.assign(tf.cast(largest, self.value.dtype))

        def result(self):
            return self.value

    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", "mse", metrics=[Largest()])
    with pytest.raises(ValueError, match=f"largest/value' {told}, (but|and) parameter servers add"):
        WorkerStep(model, ASGD(), spec(minibatches(1)[0]), 1)


@pytest.mark.nightly_cases(
    *("carried-*", "dense-False", "frozen-*", "half-*", "normed-False", "recurrent-True")
)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("make", MODELS)
def test_a_minibatch_is_that_of_keras(make, weighted):
    (data,) = minibatches(1, weighted)
    model, wanted = compiled(make), compiled(make)
    before = [v.numpy() for v in model.variables]
    work, block, push = compute(model, ASGD(), [data])
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)  # the chief's model is left alone
    start = [v.numpy() for v in wanted.trainable_variables]
    logs = wanted.train_on_batch(*data, return_dict=True)
    close = {"rtol": 2e-2, "atol": 1e-3} if make is half else {"rtol": 1e-4, "atol": 1e-6}
    for gradient, old, new in zip(push.values, start, wanted.trainable_variables, strict=True):
        np.testing.assert_allclose(gradient, old - new.numpy(), **close)
    named = {v.path.split("/", 1)[-1]: v.numpy() for v in wanted.non_trainable_variables}
    for variable, kept, added in zip(work.state, push.kept, push.state, strict=True):
        after = kept.numpy() * variable.numpy() + added.numpy()
        np.testing.assert_allclose(after, named[variable.path.split("/", 1)[-1]], rtol=1e-5)
    assert len(push.state) == (2 if make is normed else 0)
    assert (int(push.samples), int(push.minibatches)) == (SAMPLES, 1)
    for variable, value in zip(
        (v for m in model.metrics for v in m.variables), push.metrics, strict=True
    ):
        variable.assign(value)
    for name, value in model.get_metrics_result().items():
        assert float(value) == pytest.approx(
            float(logs[name]), **{"rel": 1e-2 if make is half else 1e-5}
        )


@pytest.mark.one_version
def test_gradients_and_metrics_add_up_over_a_block():
    data = minibatches(3)
    model = compiled(dense)
    singles = [compute(model, ASGD(), [d])[2] for d in data]
    _, _, total = compute(model, ASGD(), data)
    _, _, mean = compute(model, ASGD(reduction="mean"), data)
    for k, value in enumerate(total.values):
        added = sum(push.values[k].numpy() for push in singles)
        np.testing.assert_allclose(value, added, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mean.values[k], added / 3, rtol=1e-5, atol=1e-6)
    for k, value in enumerate(total.metrics):
        np.testing.assert_allclose(value, sum(p.metrics[k].numpy() for p in singles), rtol=1e-5)
    assert (int(total.samples), int(total.minibatches)) == (3 * SAMPLES, 3)


def test_local_steps_are_those_of_keras():
    data = minibatches(3)
    make = lambda: compiled(normed, keras.optimizers.Adam(0.05, global_clipnorm=0.1))  # noqa: E731
    model, wanted = make(), make()
    work = WorkerStep(model, AsyncEASGD(0.5), spec(data[0]), len(data))
    pulled = pulled_from(model, work)
    start = [tf.convert_to_tensor(value) for value in work.optimizer_start]
    block = work.begin(pulled, own(work), pulled.weights, start)
    for minibatch in data:
        block = work.add(block, minibatch)
        wanted.train_on_batch(*minibatch)
    for weight, variable in zip(block.weights, wanted.trainable_variables, strict=True):
        np.testing.assert_allclose(weight, variable.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_states_are_carried_within_a_chunk_and_start_anew_in_the_next():
    data = minibatches(2)
    model, wanted = compiled(carried), compiled(carried)
    work, block, _ = compute(model, ASGD(), data)
    at = next(k for k, value in enumerate(block.own) if value.shape == (SAMPLES, 3))
    np.testing.assert_array_equal(own(work)[at], np.zeros((SAMPLES, 3)))
    # Keras, at the same weights: the second minibatch begins with the state of the first.
    wanted(data[0][0])
    wanted(data[1][0])
    state = wanted.layers[2].states[0].numpy()
    assert np.abs(state).max() > 0
    np.testing.assert_allclose(block.own[at], state, rtol=1e-5, atol=1e-6)


@pytest.mark.one_version
def test_a_graph_has_no_copy_of_weights_that_are_not_trained():
    """A graph would hold several copies, and could not have 2 GB."""

    def large():
        x = keras.Input((4,))
        first, second = layers.Dense(2000, trainable=False), layers.Dense(2000)
        second.build((None, 2000))
        second.quantize("int8")
        return keras.Model(x, layers.Dense(3, "softmax")(second(first(x))))

    (data,) = minibatches(1)
    work, block, _ = compute(compiled(large), ASGD(), [data])

    @tf.function(autograph=False)
    def chunk(begun, minibatch):
        return work.add(begun._replace(own=own(work)), minibatch)

    assert [v.shape.num_elements() for v in work.integers] == [2000 * 2000]
    graph = chunk.get_concrete_function(block._replace(gradients=[]), data).graph
    assert graph.as_graph_def().ByteSize() < 1 << 20


@pytest.mark.one_version
def test_random_numbers_differ_between_chunks_and_repeat():
    x = keras.Input((4,))

    def make():
        return keras.Model(x, layers.Dense(3, "softmax")(layers.Dropout(0.5)(x)))

    model = compiled(make)
    data = minibatches(2)
    first, same, other = (
        compute(model, ASGD(), data[:1], stream)[2].values[0].numpy() for stream in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 1e-3
    _, block, _ = compute(model, ASGD(), data[:1])
    ((seed, counter),) = (value.numpy() for value in block.own)
    assert 0 <= seed < 2**31
    assert counter == 1  # the next minibatch of the chunk has other numbers


def test_several_outputs():
    x = keras.Input((4,))
    keras.utils.set_random_seed(0)

    def make():
        keras.utils.set_random_seed(0)
        outputs = {"a": layers.Dense(1, name="a")(x), "b": layers.Dense(2, name="b")(x)}
        model = keras.Model(x, outputs)
        model.compile(
            "sgd",
            {"a": "mse", "b": "mae"},
            loss_weights={"a": 1.0, "b": 3.0},
            metrics={"b": ["mse"]},
        )
        return model

    draw = np.random.default_rng(0)
    y = {"a": draw.normal(size=(SAMPLES, 1)), "b": draw.normal(size=(SAMPLES, 2))}
    data = tf.nest.map_structure(
        lambda a: tf.constant(a, tf.float32), (draw.normal(size=(SAMPLES, 4)), y)
    )
    model, wanted = make(), make()
    start = [v.numpy() for v in wanted.trainable_variables]
    _, _, push = compute(model, ASGD(), [data])
    logs = wanted.train_on_batch(*data, return_dict=True)
    for gradient, old, new in zip(push.values, start, wanted.trainable_variables, strict=True):
        np.testing.assert_allclose(0.01 * gradient, old - new.numpy(), rtol=1e-3, atol=1e-6)
    for variable, value in zip(
        (v for m in model.metrics for v in m.variables), push.metrics, strict=True
    ):
        variable.assign(value)
    for name, value in model.get_metrics_result().items():
        assert float(value) == pytest.approx(float(logs[name]), rel=1e-5)


@pytest.mark.parametrize(
    "settings", [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.1}, {}], ids=str
)
def test_clipping_is_that_of_keras(settings):
    draw = np.random.default_rng(0)
    gradients = [tf.constant(draw.normal(size=s), tf.float32) for s in ((3, 2), (4,))]
    variables = [keras.Variable(tf.zeros_like(g)) for g in gradients]
    optimizer = keras.optimizers.SGD(1.0, **settings)
    optimizer.build(variables)
    optimizer.apply(gradients)
    for got, variable in zip(clipped(optimizer, gradients), variables, strict=True):
        np.testing.assert_allclose(got, -variable.numpy(), rtol=1e-5)


class Own(keras.Model):
    """A training step of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


class Stepping(Own):
    def train_step(self, data):
        return {}


class OfOldKeras(Own):
    """A loss of its own, as Keras before 3.3 called it, with other names."""

    def compute_loss(self, inputs=None, targets=None, outputs=None, weights=None):
        return tf.reduce_mean((targets - outputs) ** 2)


def test_a_loss_of_ones_own_without_the_argument_training():
    x, y = data = minibatches(1, weighted=False)[0]
    model = OfOldKeras()
    model.build((None, 4))
    model.compile("sgd")
    work, block, _ = compute(model, ASGD(), [data])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((y - model(x)) ** 2)
    wanted = tape.gradient(loss, model.trainable_variables)
    for got, gradient in zip(block.gradients, wanted, strict=True):
        np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-7)
    own_loss, _ = work.loss(block.weights, [], [], data)
    assert float(own_loss) == pytest.approx(float(loss))


def test_models_that_workers_cannot_train_are_refused():
    one = spec(minibatches(1)[0])
    model = Own()
    with pytest.raises(ValueError, match="not compiled"):
        WorkerStep(model, ASGD(), one, 1)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="not built"):
        WorkerStep(model, ASGD(), one, 1)
    for model in (Stepping(), Own()):
        model.build((None, 4))
        model.compile("sgd", "mse")
        if type(model) is Own:
            model.train_step = lambda data: {}
        with pytest.raises(ValueError, match=f"{type(model).__name__} has a train_step"):
            WorkerStep(model, ASGD(), one, 1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.quantize("float8")
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="by which float8 values are scaled"):
        WorkerStep(model, ASGD(), one, 1)
