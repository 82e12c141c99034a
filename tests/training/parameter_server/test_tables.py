"""Large tables of which only the rows that are used are pulled, stepped and pushed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import tfpara
from tfpara.algorithms.keras_step import step_of_rows
from tfpara.keras_model import lookups
from tfpara.parameter_server import tables
from tfpara.parameter_server.exchange import Exchange
from tfpara.parameter_server.messages import Place, Push
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.worker_step import WorkerStep

pytestmark = pytest.mark.latest

IDS, WIDTH = 50, 4
DRAW = np.random.default_rng(0)
# Ids below 0 count from the end; the ids from 30 to 46 are never used, and many come twice.
X = {"a": DRAW.integers(-3, 30, (96, 3)), "b": DRAW.integers(0, 9, (96, 5)).astype("float32")}
Y = DRAW.normal(size=(96, 1)).astype("float32")


@pytest.fixture(autouse=True)
def small_tables_are_large(monkeypatch):
    monkeypatch.setattr(tables, "LARGE_BYTES", 128)


def model_of(optimizer):
    """Two tables: one is looked up twice, one is in a model within; their ids are computed."""
    keras.utils.set_random_seed(1)
    a, b = keras.Input((3,), dtype="int64", name="a"), keras.Input((5,), name="b")
    table = layers.Embedding(IDS, WIDTH)
    inner = keras.Sequential([layers.Embedding(30, 6), layers.GlobalAveragePooling1D()])
    parts = [
        layers.Flatten()(table(a)),
        layers.Flatten()(table(a[:, ::-2])),
        inner(keras.ops.cast(b, "int32") * 2),
    ]
    y = layers.Dense(1)(layers.Dropout(0.2)(layers.Concatenate()(parts)))
    model = keras.Model({"a": a, "b": b}, y)
    model.compile(optimizer, "mse")
    return model


def trained(rule, optimizer, by_rows, period=1, workers=3, epochs=1, data=(X, Y), **options):
    """Trains; returns the strategy, the model, and all that a checkpoint would hold."""
    given = {k: options.pop(k) for k in ("callbacks", "search_rate") if k in options}
    options = {"averages": {"ema": tfpara.EMA(0.9)}} | options
    strategy = tfpara.simulate_async(
        workers, rule, sync_period=period, sparse_embeddings=by_rows, **options
    )
    with strategy.scope():
        model = model_of(optimizer())
    given |= {
        "batch_size": 8 if len(data) > 1 else None,
        "epochs": epochs,
        "chunks": 4,
        "shuffle": False,
        "verbose": 0,
    }
    strategy.fit(model, *data, **given)
    held = strategy._models.of(model).server.variables()
    return strategy, model, {name: v.numpy() for name, v in held.items()}


def is_equal(some, others, **close):
    assert some.keys() == others.keys()
    for name, value in some.items():
        np.testing.assert_allclose(value, others[name], err_msg=name, **close)


@pytest.mark.nightly_cases("AsyncBMUF(*", "Downpour(*", "ASGD(*'mean'*")
@pytest.mark.parametrize(
    ("rule", "period", "options"),
    [
        (tfpara.ASGD(delay_compensation=0.3, max_staleness=1), 1, {}),
        (tfpara.ASGD(delay_compensation=0.3, reduction="mean"), 3, {"nonfinite": "skip"}),
        (tfpara.Downpour(rate_by_staleness=True), 2, {}),
        (tfpara.AsyncBMUF(0.5), 2, {}),
    ],
    ids=str,
)
def test_rows_train_as_whole_tables_do(rule, period, options, capfd, monkeypatch):
    """SGD leaves a row without a gradient alone, so it is the same to the last bit."""
    add, traced = WorkerStep.add, []
    monkeypatch.setattr(WorkerStep, "add", lambda *given: traced.append(given) or add(*given))

    def sgd():
        return optimizers.SGD(0.1, clipvalue=0.01)

    strategy, model, found = trained(rule, sgd, True, period, **options)
    assert strategy._models.of(model).work.tables.indices == [0, 1]
    assert len(traced) <= 2  # not once more for each number of rows
    assert "plain Keras" not in capfd.readouterr().err
    is_equal(found, trained(rule, sgd, False, period, **options)[-1], rtol=0)
    start = model_of("sgd").get_weights()[0]
    np.testing.assert_array_equal(found["weight/0"][30:47], start[30:47])
    assert (found["weight/0"][:30] != start[:30]).any(-1).sum() > 20


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [tfpara.ASGD(), tfpara.Downpour()], ids=str)
@pytest.mark.one_version
def test_adagrad_of_rows_is_that_of_whole_tables(rule):
    """Here the slots count: on the server (ASGD), or on the worker (Downpour)."""

    def adagrad():
        return optimizers.Adagrad(0.1)

    *_, found = trained(rule, adagrad, True, 2)
    is_equal(found, trained(rule, adagrad, False, 2)[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.one_version
def test_only_the_rows_of_a_block_travel(monkeypatch):
    seen = []
    push = WorkerStep.push

    def looked_at(self, block, pulled, *others):
        seen.append((pulled.weights, push(self, block, pulled, *others)))
        return seen[-1][-1]

    monkeypatch.setattr(WorkerStep, "push", looked_at)
    tf.config.run_functions_eagerly(True)
    try:
        trained(tfpara.ASGD(), lambda: optimizers.SGD(0.1), True, 2, workers=1, averages=None)
    finally:
        tf.config.run_functions_eagerly(False)
    # four chunks of three minibatches, in pushes of two and of one
    blocks = [slice(24 * k + a, 24 * k + b) for k in range(4) for a, b in ((0, 16), (16, 24))]
    for block, (pulled, made) in zip(blocks, seen, strict=True):
        for index, used in ((0, X["a"] % IDS), (1, X["b"] * 2)):
            rows = np.unique(used[block])
            np.testing.assert_array_equal(made.rows[index], rows)
            assert len(pulled[index]) == len(made.values[index]) == len(rows)


def push_rows(optimizer, pushes, rule=None, times=1):
    """Pushes gradients of rows of a table [6, 2] that starts at 1; returns table and slots.

    times: how often each push is sent, as by a worker that takes the minibatches of another over.
    """
    x = keras.Input((1,), dtype="int64")
    y = layers.Flatten()(layers.Embedding(6, 2, embeddings_initializer="ones")(x))
    model = keras.Model(x, y)
    model.compile(optimizer, "mse")
    rule = rule or tfpara.ASGD()
    server = Server(model, [], rule, {}, ["CPU:0", "CPU:1"], num_workers=1, lazy=[0])
    server.divide(1)
    server.open_epoch(0, anew=True)
    exchange, zero = Exchange(server), tf.zeros([], tf.int64)
    for number, (ids, gradient) in enumerate(pushes):
        rows = {0: tf.constant(ids, tf.int64)}
        pulled = exchange.read(rows)
        assert pulled.weights[0].shape == (len(ids), 2)
        place = Place(zero, zero, tf.constant(number, tf.int64))
        metrics = [tf.zeros_like(m) for m in server.metrics]
        one = tf.ones([], tf.int64)
        push = Push(
            *([tf.constant(gradient, tf.float32)], [], [], metrics, zero, place, one, one),
            *(tf.constant(-1.0), rows),
        )
        for _ in range(times):
            assert exchange.push(push, pulled).included
    (shard,) = (s for s in server.shards if s.weights)
    slots = [
        v.numpy()
        for v, owner in zip(shard.optimizer, shard.steps.owners, strict=True)
        if owner == 0
    ]
    return shard.weights[0].numpy(), slots


PUSHES = [
    ([0, 2, 5], [[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]]),
    ([2, 3], [[-2.0, 1.0], [1.5, 1.0]]),
    ([0, 2], [[0.5, -1.0], [1.0, 2.0]]),
]


def sgd(w, g, slots, t):
    return w - 0.1 * g, slots


def momentum(w, g, slots, t):
    m = 0.9 * slots[0] - 0.1 * g
    return w + m, [m]


def adagrad(w, g, slots, t):
    a = slots[0] + g * g
    return w - 0.1 * g / np.sqrt(a + 1e-7), [a]


def adam(w, g, slots, t):
    """t counts the pushes, not those of the row: the bias is corrected as for whole tables."""
    m, v = 0.9 * slots[0] + 0.1 * g, 0.999 * slots[1] + 0.001 * g * g
    rate = 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * m / (np.sqrt(v) + 1e-7), [m, v]


STEPS = {
    "sgd": (sgd, lambda: optimizers.SGD(0.1), []),
    "momentum": (momentum, lambda: optimizers.SGD(0.1, momentum=0.9), [0.0]),
    "adagrad": (adagrad, lambda: optimizers.Adagrad(0.1), [0.1]),
    "adam": (adam, lambda: optimizers.Adam(0.1), [0.0, 0.0]),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_push_steps_its_rows_by_the_equation_and_no_other(kind):
    step, optimizer, start = STEPS[kind]
    w, slots = np.ones((6, 2)), [np.full((6, 2), value) for value in start]
    for number, (ids, gradient) in enumerate(PUSHES, 1):
        w[ids], after = step(w[ids], np.asarray(gradient), [s[ids] for s in slots], number)
        for slot, new in zip(slots, after, strict=True):
            slot[ids] = new
    found, found_slots = push_rows(optimizer(), PUSHES)
    np.testing.assert_allclose(found, w, rtol=1e-5)
    for slot, wanted in zip(found_slots, slots, strict=True):
        np.testing.assert_allclose(slot, wanted, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(found[[1, 4]], 1.0)


def test_a_push_of_rows_that_is_in_already_is_left_out():
    _, optimizer, _ = STEPS["adam"]
    once, twice = (push_rows(optimizer(), PUSHES, times=times) for times in (1, 2))
    np.testing.assert_array_equal(twice[0], once[0])
    np.testing.assert_array_equal(twice[1], once[1])


@pytest.mark.parametrize("kind", STEPS)
def test_a_push_of_rows_is_keras_own_step_with_indexed_slices(kind):
    """All rows agree for SGD and Adagrad; else row 2, which each push has, as Keras moves all."""
    _, optimizer, _ = STEPS[kind]
    table, kerass = keras.Variable(np.ones((6, 2)), name="table"), optimizer()
    for ids, gradient in PUSHES:
        kerass.apply([tf.IndexedSlices(tf.constant(gradient), tf.constant(ids), (6, 2))], [table])
    found, _ = push_rows(optimizer(), PUSHES)
    same = slice(None) if kind in ("sgd", "adagrad") else [2]
    np.testing.assert_allclose(found[same], table.numpy()[same], rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.one_version
def test_the_user_is_told_where_rows_alone_are_another_step(capfd):
    rule, adam = tfpara.ASGD(), lambda: optimizers.Adam(0.01)
    *_, found = trained(rule, adam, True, averages=None)
    told = capfd.readouterr().err
    assert "only the rows that a push uses take a step of Adam" in told
    assert "sparse_embeddings=False" in told
    *_, whole = trained(rule, adam, False, averages=None)
    assert "only the rows" not in capfd.readouterr().err
    assert np.abs(found["weight/0"] - whole["weight/0"]).max() > 1e-3


def slow_start():
    """After three steps of it no weight has moved by a bit that shows."""
    return optimizers.schedules.PolynomialDecay(0.0, 10**6, 1.0)


def test_what_a_step_does_to_rows_is_found_whatever_the_rate():
    """By rows; and without a gradient a row stays, from the beginning on."""
    path = "embedding/embeddings"
    assert step_of_rows(optimizers.SGD(slow_start()), path) == (True, True)
    assert step_of_rows(optimizers.SGD(slow_start(), weight_decay=0.1), path) == (True, False)
    assert step_of_rows(optimizers.Lamb(slow_start()), path) == (False, False)
    assert step_of_rows(optimizers.Ftrl(0.1), path) == (True, False)  # it clears unused rows


def test_a_function_that_gives_a_rate_of_0_hides_nothing():
    assert step_of_rows(optimizers.SGD(lambda: 0.0), "embedding/embeddings") == (True, True)
    assert step_of_rows(optimizers.Lamb(lambda: 0.0), "embedding/embeddings") == (False, False)


@pytest.mark.nightly
@pytest.mark.parametrize("period", [3, 1])
def test_elements_may_have_none_in_place_of_sample_weights(period):
    """A period of 3 leaves a shorter block at the end of each chunk."""

    def of(*parts):
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).map(lambda x, y: (x, y, *parts))

    def found(data):
        return trained(tfpara.Downpour(), optimizers.SGD, True, period, data=(data,))[-1]

    is_equal(found(of(None)), found(of()), rtol=0)


def plain(inputs, table):
    return layers.Flatten()(table(inputs))


def tied(inputs, table):
    """The table is the output layer, too."""

    class Output(layers.Layer):
        def call(self, x):
            return tf.matmul(x, table.embeddings, transpose_b=True)

    return Output()(layers.GlobalAveragePooling1D()(table(inputs)))


def learned(inputs, table):
    """The ids are computed by weights."""
    scores = layers.Dense(IDS)(keras.ops.cast(inputs, "float32"))
    return layers.Flatten()(table(layers.Lambda(lambda s: tf.argmax(s, -1)[:, None])(scores)))


def bucket(x):
    """The step may compute x / 0.1 as x * 10, and the input pipeline does not."""
    return tf.cast(tf.floor(x / 0.1), tf.int64)


def divided(inputs, table, of=bucket):
    return layers.Flatten()(table(layers.Lambda(of)(keras.ops.cast(inputs, "float32"))))


def divided_in_a_function(inputs, table):
    return divided(inputs, table, tf.function(bucket))


def drawn(inputs, table):
    """The ids are drawn anew in each call."""
    noise = layers.Lambda(lambda x: x + tf.random.uniform(tf.shape(x), 0, 2, x.dtype))
    return layers.Flatten()(table(noise(inputs)))


def mapped(inputs, table):
    """The layer is called within a loop."""

    class Loop(layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = table

        def call(self, x):
            rows = tf.map_fn(self.table, x, fn_output_signature=tf.float32)
            return tf.ensure_shape(rows, [None, 3, WIDTH])

    return layers.Flatten()(Loop()(inputs))


@pytest.mark.parametrize(
    ("call", "settings", "rule", "optimizer", "why"),
    [
        (tied, {}, "ASGD", "sgd", "the model reads more of it than the rows of ids"),
        (plain, {"embeddings_regularizer": "l2"}, "ASGD", "sgd", "reads more of it than the rows"),
        (plain, {"embeddings_constraint": "max_norm"}, "ASGD", "sgd", "it has a constraint"),
        (learned, {}, "ASGD", "sgd", "its ids depend on more than the data"),
        (divided, {}, "ASGD", "sgd", "its ids are computed with floating-point numbers"),
        (divided_in_a_function, {}, "ASGD", "sgd", "or in a tf.function"),
        (drawn, {}, "ASGD", "sgd", "its ids depend on more than the data"),
        (mapped, {}, "ASGD", "sgd", "its ids depend on more than the data"),
        (plain, {}, "AsyncEASGD", "sgd", "under AsyncEASGD each worker has a table of its own"),
        (plain, {}, "Downpour", "adafactor", "the step of Adafactor needs all rows"),
        (plain, {"jit_compile": True}, "ASGD", "sgd", "with jit_compile=True, XLA would"),
    ],
)
def test_a_table_that_is_needed_whole_travels_whole_and_the_user_is_told(
    call, settings, rule, optimizer, why
):
    settings = dict(settings)
    jit_compile = settings.pop("jit_compile", False)
    inputs = keras.Input((3,), dtype="int64")
    table = layers.Embedding(IDS, WIDTH, **settings)
    model = keras.Model(inputs, layers.Dense(1)(call(inputs, table)))
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    spec = (tf.TensorSpec([None, 3], tf.int64), tf.TensorSpec([None, 1]))
    work = WorkerStep(model, getattr(tfpara, rule)(), spec, 1)
    assert work.tables.indices == []
    (note,) = work.tables.notes
    assert "/embeddings' (0 MB) travels whole: " in note
    assert why in note


@pytest.mark.nightly
@pytest.mark.one_version
def test_an_optimizer_that_needs_all_rows_steps_the_whole_table_on_the_server():
    """Adafactor's step depends on all rows; the rest of a gradient is zero."""
    rule, adafactor = tfpara.ASGD(), lambda: optimizers.Adafactor(0.05)
    strategy, model, found = trained(rule, adafactor, True, 2)
    work = strategy._models.of(model).work
    assert (work.tables.indices, work.tables.lazy) == ([0, 1], [])
    is_equal(found, trained(rule, adafactor, False, 2)[-1], rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [tfpara.AveragedASGD(), tfpara.ASGD()], ids=str)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(rule, tmp_path):
    def adam():
        return optimizers.Adam(0.01)

    options = {"workers": 1, "period": 2}
    *_, wanted = trained(rule, adam, True, epochs=2, **options)
    for epochs in (1, 2):
        callbacks = [tfpara.AsyncCheckpoint(tmp_path)]
        *_, found = trained(rule, adam, True, epochs=epochs, callbacks=callbacks, **options)
    is_equal(found, wanted, rtol=0)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_minibatch_that_is_left_out_leaves_its_rows_alone():
    y = Y.copy()
    y[:16] = np.nan  # all of the first push
    options = {"nonfinite": "skip", "nonfinite_share": 0.9, "data": (X, y), "workers": 1}
    strategy, model, found = trained(
        tfpara.ASGD(), lambda: optimizers.Adam(0.01), True, 2, averages=None, **options
    )
    assert int(strategy._models.of(model).server.counters.left_out) == 2
    used = np.unique(X["a"][16:] % IDS)
    start = model_of("sgd").get_weights()[0]
    moved = (found["weight/0"] != start).any(-1)
    assert set(np.flatnonzero(moved)) == set(used)
    assert len(used) < len(np.unique(X["a"] % IDS))
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.nightly
@pytest.mark.one_version
def test_other_data_and_a_search_of_the_rate():
    """The search pulls whole tables; a second fit has longer inputs."""
    search = tfpara.ChunkRateSearch((0.5, 1.0), minibatches=1)
    sgd = lambda: optimizers.SGD(0.1)  # noqa: E731
    *_, found = trained(tfpara.ASGD(), sgd, True, search_rate=search)
    is_equal(found, trained(tfpara.ASGD(), sgd, False, search_rate=search)[-1], rtol=0)
    strategy = tfpara.simulate_async(2, tfpara.ASGD())
    with strategy.scope():
        x = keras.Input((None,), dtype="int64")
        y = layers.GlobalAveragePooling1D()(layers.Embedding(IDS, WIDTH)(x))
        model = keras.Model(x, layers.Dense(1)(y))
        model.compile(optimizers.SGD(0.1), "mse")
    for width in (3, 6):
        strategy.fit(model, np.tile(X["a"], (1, width // 3)), Y, batch_size=8, verbose=0)
    assert strategy.statistics(model).samples == 2 * 96


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_ids_may_be_selected_among_other_numbers(kind):
    """Floating-point numbers that are moved, but not computed, are ids as they are."""
    inputs = keras.Input((4,), dtype=kind)
    table = layers.Embedding(IDS, WIDTH)
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(table(inputs[:, :3]))))
    model.compile("sgd", "mse")
    spec = (tf.TensorSpec([None, 4], kind), tf.TensorSpec([None, 1]))
    assert WorkerStep(model, tfpara.ASGD(), spec, 1).tables.indices == [0]


@pytest.mark.nightly
@pytest.mark.one_version
def test_the_simulation_traces_the_ids_once(monkeypatch):
    traced = []
    program = tables.Tables._program
    monkeypatch.setattr(
        tables.Tables, "_program", lambda *given: traced.append(given) or program(*given)
    )
    trained(tfpara.ASGD(), lambda: optimizers.SGD(0.1), True, 2, epochs=2)
    assert len(traced) == 1


def test_a_layer_whose_call_was_replaced_is_let_alone():
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layers.Embedding(IDS, WIDTH)])
    assert lookups(model) == [model.layers[0]]
    model.layers[0].call = lambda ids: ids
    assert lookups(model) == []


def test_ids_below_0_count_from_the_end_of_a_table_that_two_layers_share():
    """The second layer has another `input_dim`, which Keras ignores when it looks ids up."""
    first = layers.Embedding(IDS, WIDTH)

    class Sharing(layers.Embedding):
        def build(self, shape=None):
            self._embeddings = first._embeddings
            self.built = True

    x = keras.Input((3,), dtype="int64")
    first.build()
    parts = [layers.Flatten()(layer(x - 4)) for layer in (first, Sharing(30, WIDTH))]
    model = keras.Model(x, layers.Dense(1)(layers.Concatenate()(parts)))
    model.compile("sgd", "mse")
    spec = (tf.TensorSpec([None, 3], tf.int64), tf.TensorSpec([None, 1]))
    work = WorkerStep(model, tfpara.ASGD(), spec, 1)
    assert work.tables.indices == [0]
    data = tf.data.Dataset.from_tensors((X["a"], Y))
    (_, rows) = next(iter(work.tables.ahead(data, 1)))
    np.testing.assert_array_equal(rows[0], np.unique((X["a"] - 4) % IDS))


@pytest.mark.nightly
@pytest.mark.one_version
def test_an_id_outside_of_the_table_is_named():
    x = {"a": X["a"].copy(), "b": X["b"]}
    x["a"][20] = IDS
    with pytest.raises(Exception, match=rf"= {IDS} is not in \[0, {IDS}\)"):
        trained(tfpara.ASGD(), lambda: optimizers.SGD(0.1), True, data=(x, Y))
