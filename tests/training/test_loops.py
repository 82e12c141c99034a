"""Custom loops and steps on two devices of one process."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara

pytestmark = pytest.mark.latest

BATCH, STEPS = 8, 7
X = np.random.default_rng(0).normal(size=(BATCH * STEPS, 4)).astype("float32")
Y = X[:, :2] - X[:, 2:]


def make(rule=None, sync_period=1, **options):
    devices = ["CPU:0", "CPU:1"]
    rule = rule or tfpara.BSP()
    return tfpara.PeriodicSyncStrategy(rule, sync_period=sync_period, devices=devices, **options)


def data(batch=BATCH):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)


def network(seed=0, units=2):
    kernel = keras.initializers.GlorotUniform(seed)
    layers = [keras.layers.Dense(units, kernel_initializer=kernel), keras.layers.Dense(2)]
    layers[1].kernel_initializer = kernel
    return keras.Sequential([keras.Input((4,)), *layers])


def weights_of(strategy, model):
    values = [strategy.experimental_local_results(v.value) for v in model.weights]
    return [[v[r].numpy() for v in values] for r in range(len(values[0]))]


def assert_same(found, expected, **close):
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, **({"rtol": 1e-5, "atol": 1e-6} | close))


def mse(y, made):
    return tf.reduce_mean((made - y) ** 2)


def step_of(models, optimizers, loss=mse):
    def step(x, y):
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(value, weights), weights)
        return value

    return step


# -- run -------------------------------------------------------------------------------------------


def trained(manner):
    strategy = make(tfpara.BMUF(0.5), sync_period=3)
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)  # which XLA cannot do
    strategy.track(model)
    step = step_of([model], [optimizer])
    compiled = tf.function(step, jit_compile=manner == "compiled by XLA")

    def train(batch):
        if manner == "function within":
            strategy.run(lambda *given: compiled(*given), args=batch)
        else:
            within = manner in ("function in run", "compiled by XLA")
            strategy.run(compiled if within else step, args=batch)

    if manner in ("run in function", "compiled by XLA"):
        train = tf.function(train)
    for batch in strategy.experimental_distribute_dataset(data()):
        train(batch)
    strategy.synchronize()
    assert strategy.statistics().steps == STEPS and strategy.statistics().syncs == 3
    return weights_of(strategy, model)


@pytest.mark.nightly
def test_steps_count_in_a_function_outside_of_one_and_around_one(monkeypatch):
    # What AutoGraph cannot convert is an error here, and a printed warning else.
    monkeypatch.setenv("AUTOGRAPH_STRICT_CONVERSION", "1")
    expected = trained("run in function")
    for manner in ("function in run", "function within", "eager", "compiled by XLA"):
        for found, of_replica in zip(trained(manner), expected, strict=True):
            assert_same(found, of_replica)


@pytest.mark.one_version
@pytest.mark.parametrize(("eagerly", "empty"), [(False, 1), (True, 0)])
def test_a_replica_without_rows_takes_no_step_and_gives_zeros(eagerly, empty):
    """The replicas' models are trained by plain Keras beside, and averaged by their rows."""
    strategy = make(sync_period=STEPS)
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.SGD(0.1, momentum=0.9)
        mean = keras.metrics.Mean()
    strategy.track(model)
    parts = [[range(8 * k, 8 * k + 4), range(8 * k + 4, 8 * k + 8)] for k in range(4)]
    parts.append([range(40, 41), range(0)] if empty else [range(0), range(40, 41)])

    def step(x, y):
        loss = step_of([model], [optimizer])(x, y)
        mean.update_state(loss)
        return loss, x[0]  # which a tensor of no rows lacks

    def train(batch):
        return strategy.run(step, args=batch)

    train = train if eagerly else tf.function(train)
    for of_step in parts:
        batch = strategy.experimental_distribute_values_from_function(
            lambda context, of=of_step: tuple(
                tf.constant(values[list(of[context.replica_id_in_sync_group])].reshape(-1, width))
                for values, width in ((X, 4), (Y, 2))
            )
        )
        returned = train(batch)
    assert_same([strategy.reduce("SUM", returned[1], axis=None)], [X[40]])
    counts = strategy.experimental_local_results(optimizer.iterations.value)
    assert [int(count) for count in counts] == ([5, 4] if empty else [4, 5])
    losses, replicas = [], []
    for of_replica in zip(*parts, strict=True):
        one, momentum = network(), keras.optimizers.SGD(0.1, momentum=0.9)
        rows = [list(part) for part in of_replica if len(part)]
        losses += [step_of([one], [momentum])(X[part], Y[part]) for part in rows]
        replicas.append(one.get_weights())
    assert_same([mean.result()], [np.mean(losses)])  # closes the block
    shares = [17 / 33, 16 / 33] if empty else [16 / 33, 17 / 33]
    expected = [np.tensordot(shares, np.stack(each), 1) for each in zip(*replicas, strict=True)]
    for found in weights_of(strategy, model):
        assert_same(found, expected)


# -- losses ----------------------------------------------------------------------------------------


def looped(strategy, batch, **options):
    """Weights and losses of TensorFlow's loop, which reduces inside its function."""
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.SGD(0.1)
    if hasattr(strategy, "track"):
        strategy.track(model)

    def loss(y, made):
        weights = model.trainable_variables
        average = tf.nn.compute_average_loss(
            tf.reduce_mean((made - y) ** 2, 1), sample_weight=tf.abs(y[:, 0]), **options
        )
        return average + tf.nn.scale_regularization_loss([tf.nn.l2_loss(w) for w in weights])

    step = step_of([model], [optimizer], loss)

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    batches = strategy.experimental_distribute_dataset(data(batch))
    losses = [float(train(batch)) for batch in batches]
    return model.get_weights(), losses


@pytest.mark.one_version
def test_average_losses_are_those_of_plain_tensorflow():
    found, expected = looped(make(), BATCH), looped(tf.distribute.get_strategy(), BATCH)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])


@pytest.mark.one_version
def test_unequal_parts_have_the_weights_of_plain_tensorflow():
    """56 rows in batches of 9: parts of 5 and 4, and at last of 1 and 1."""
    assert_same(looped(make(), 9)[0], looped(tf.distribute.get_strategy(), 9)[0])


def test_a_global_batch_size_is_refused_in_a_replica_of_ours_alone():
    with pytest.raises(ValueError, match="Leave out global_batch_size="):
        looped(make(), BATCH, global_batch_size=BATCH)
    _, losses = looped(tf.distribute.get_strategy(), BATCH, global_batch_size=2 * BATCH)
    assert len(losses) == STEPS
    value = tf.nn.compute_average_loss([2.0, 4.0], global_batch_size=4)
    assert float(value) == 1.5


def test_reduce_takes_structures_and_refuses_differing_shapes():
    strategy = make()
    (batch,) = list(strategy.experimental_distribute_dataset(data(5).take(1)))
    assert [len(part) for part in strategy.experimental_local_results(batch[0])] == [3, 2]
    assert_same([strategy.reduce("MEAN", batch[0], axis=0)], [X[:5].mean(0)])
    assert_same([strategy.reduce("SUM", batch[1], axis=0)], [Y[:5].sum(0)])
    with pytest.raises(ValueError, match=r"shapes \(3, 4\), \(2, 4\).*axis=0"):
        strategy.reduce("SUM", batch[0], axis=None)
    rows = strategy.run(lambda x, y: {"rows": tf.shape(x)[0], "none": None, "one": 1.0}, args=batch)
    total = strategy.reduce("SUM", rows, axis=None)
    assert (int(total["rows"]), total["none"], float(total["one"])) == (5, None, 2.0)
    assert float(strategy.reduce("MEAN", rows, axis=None)["rows"]) == 2.5


# -- several models --------------------------------------------------------------------------------


@pytest.mark.nightly
def test_models_that_are_tracked_together_have_one_global_model(tmp_path):
    strategy = make(tfpara.EASGD(0.3), 2, averages={"ema": tfpara.EMA(0.5)})
    with strategy.scope():
        models = network(0), network(1, 3)
        optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]
    for _ in range(2):
        strategy.track(models)  # as where a cell is run again
    step = step_of(models, optimizers)

    @tf.function
    def train(batch):
        strategy.run(step, args=batch)

    batches = strategy.experimental_distribute_dataset(data())
    for _ in range(2):
        for batch in batches:
            train(batch)
        strategy.synchronize()
        strategy.track(models)
    assert (
        strategy.statistics().steps == 2 * STEPS
        and len(strategy.extended.models.synchronizers) == 1
    )
    local = [weights_of(strategy, model) for model in models]
    shown = {}
    for which in ("global", "ema"):
        with strategy.weights(models[1], which):
            shown[which] = [weights_of(strategy, model) for model in models]
    for number, of_model in enumerate(local):
        one, two = of_model
        assert max(np.abs(a - b).max() for a, b in zip(one, two, strict=True)) > 1e-3
        for which in shown:
            first, second = shown[which][number]
            assert_same(first, second, rtol=0, atol=0)
            assert max(np.abs(a - b).max() for a, b in zip(first, one, strict=True)) > 1e-3
        assert_same(weights_of(strategy, models[number])[0], one, rtol=0, atol=0)
    tfpara.export(models[0], tmp_path / "model", which="ema")
    loaded = tf.saved_model.load(tmp_path / "model")
    with strategy.weights(models[0], "ema"):
        assert_same([loaded.serve(X[:3])], [models[0](X[:3])])
    assert sum(strategy.state_bytes(models[0])) == sum(strategy.state_bytes(models[1])) > 0
    strategy.broadcast_replica(models[0], 1)
    for (first, second), (_, chosen) in zip(
        (weights_of(strategy, model) for model in models), local, strict=True
    ):
        assert_same(first, chosen, rtol=0, atol=0)
        assert_same(second, chosen, rtol=0, atol=0)


@pytest.mark.nightly
def test_slots_of_a_later_function_leave_the_syncs_of_an_earlier_one_as_they_are():
    strategy = make(sync_period=4)
    with strategy.scope():
        models = network(0), network(1)
        optimizers = [keras.optimizers.SGD(0.01, momentum=0.9) for _ in models]
    strategy.track(models, optimizers=optimizers)
    steps = [step_of([models[k]], [optimizers[k]]) for k in range(2)]
    trains = [tf.function(lambda batch, k=k: strategy.run(steps[k], batch)) for k in range(2)]
    for batch in strategy.experimental_distribute_dataset(data().take(4)):
        for train in trains:
            train(batch)
    assert (strategy.statistics().steps, strategy.statistics().syncs) == (8, 2)


@pytest.mark.nightly
def test_slots_that_syncs_would_leave_out_are_refused():
    strategy = make(sync_period=4, local_state="reset")
    with strategy.scope():
        models = network(0), network(1)
        optimizers = [keras.optimizers.SGD(0.01, momentum=0.9) for _ in models]
    strategy.track(models, optimizers=optimizers)
    strategy.broadcast_replica(models[0], 0)

    def collects(*args):
        # The first step makes slots, so the models get a new synchronizer while it is traced. The
        # former one is gone before TensorFlow uses the trace.
        gc.collect()
        return mse(*args)

    steps = [step_of([models[k]], [optimizers[k]], loss=collects) for k in range(2)]
    first, second = (
        tf.function(lambda batch, k=k: strategy.run(steps[k], batch)) for k in range(2)
    )
    batch = next(iter(strategy.experimental_distribute_dataset(data())))
    first(batch)
    with pytest.raises(ValueError, match="makes its slots now, .* before the loop"):
        second(batch)


@pytest.mark.nightly
def test_the_optimizers_of_a_loop_are_reset_or_refused():
    strategy = make(sync_period=STEPS, local_state="reset")
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    step = step_of([model], [optimizer])
    train = tf.function(lambda batch: strategy.run(step, args=batch))
    batches = strategy.experimental_distribute_dataset(data())
    strategy.track(model)
    with pytest.raises(ValueError, match=r"track\(model, optimizers=\[...\]\)"):
        train(next(iter(batches)))
    strategy.track(model, optimizers=optimizer)
    moments = optimizer.variables[2:]
    moved = []
    for batch in batches:
        train(batch)
        moved.append(max(np.abs(m.numpy()).max() for m in moments))
    assert all(value > 0 for value in moved[:-1]) and moved[-1] == 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (([],), ValueError, "give the models that the loop trains"),
        ((["a"],), TypeError, "'a' is no keras Model"),
        (("model", ["sgd"]), TypeError, "'sgd' is no keras Optimizer"),
    ],
)
def test_what_cannot_be_tracked_is_refused(given, error, message):
    strategy = make()
    with strategy.scope():
        model = network()
    with pytest.raises(error, match=message):
        strategy.track(*[model if one == "model" else one for one in given])


# -- steps of fit ----------------------------------------------------------------------------------


class Returning(keras.Sequential):
    """Returns its loss by the name of Keras' metric, which it leaves alone, and numbers of rows."""

    def train_step(self, minibatch):
        x, y = minibatch
        loss = tf.reduce_mean((self(x) - y) ** 2)
        return {"loss": loss, "rows": tf.cast(tf.shape(x)[0], tf.float32)}


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_returned_value_is_averaged_over_the_replicas_that_had_samples(eagerly):
    strategy = make()
    with strategy.scope():
        model = Returning([keras.Input((4,)), *network().layers])
        model.compile("sgd", "mse", run_eagerly=eagerly)
    # The last minibatch is one row, on one replica, or two halves of all.
    for batch, rows, last in ((55, 1, slice(55, 56)), (56, 28, slice(0, 56))):
        history = model.fit(data(batch), verbose=0).history
        expected = np.mean((model(X[last]).numpy() - Y[last]) ** 2)
        assert history["rows"] == [rows]
        np.testing.assert_allclose(history["loss"], [expected], rtol=1e-5)


class ReturningMany(keras.Sequential):
    """Returns values of several dtypes."""

    def train_step(self, minibatch):
        rows = tf.shape(minibatch[0])[0]
        return {
            "rows": rows,
            "long": tf.cast(rows, tf.int64),
            "short": tf.cast(rows, tf.bfloat16),
            "most": rows > 3,
            "name": tf.constant("ä"),
            "names": tf.constant(["a", "b"]),
        }


@pytest.mark.nightly
def test_returned_values_of_other_dtypes():
    strategy = make()
    with strategy.scope():
        model = ReturningMany(network().layers)
        model.compile("sgd", "mse")
    texts = {"name": "ä", "names": ["a", "b"]}
    for rows, known, mean, share in ((7, False, 3.5, 0.5), (1, False, 1.0, 0.0), (8, True, 4.0, 1)):
        dataset = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(rows, known)
        log = {name: value for name, (value,) in model.fit(dataset, verbose=0).history.items()}
        assert log == {**dict.fromkeys(("rows", "long", "short"), mean), "most": share, **texts}


class ByTheNamesOfMetrics(keras.Sequential):
    """Returns numbers by the names of Keras' metrics, and nothing else; it updates none of them."""

    def train_step(self, minibatch):
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(minibatch[0]) - minibatch[1]) ** 2)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "mae": tf.reduce_mean(minibatch[0])}

    def test_step(self, minibatch):
        loss = tf.reduce_mean((self(minibatch[0]) - minibatch[1]) ** 2)
        return {"loss": loss, "mae": tf.reduce_mean(minibatch[0])}


@pytest.mark.nightly
def test_what_a_step_returns_by_the_names_of_metrics_alone_is_logged():
    strategy = make()
    with strategy.scope():
        model = ByTheNamesOfMetrics(network().layers)
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    last = slice(-BATCH, None)
    expected = [np.mean((model(X[last]).numpy() - Y[last]) ** 2), X[last].mean()]
    history = model.fit(data(), verbose=0, validation_data=data()).history
    for names in (["loss", "mae"], ["val_loss", "val_mae"]):
        np.testing.assert_allclose([history[name][0] for name in names], expected, rtol=1e-5)


class Rows(keras.metrics.Metric):
    """Counts rows, and returns a dict."""

    def __init__(self):
        super().__init__(name="rows")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self):
        return {"counted": self.count}


class WithExtra(keras.Sequential):
    def compute_metrics(self, *given, **named):
        return super().compute_metrics(*given, **named) | {"extra": 1.0}


@pytest.mark.nightly
def test_a_metric_that_returns_a_dict_covers_all_replicas_beside_values_that_are_none():
    strategy = make()
    with strategy.scope():
        model = WithExtra(network().layers)
        model.compile("sgd", "mse", metrics=[Rows()])
    history = model.fit(data(), verbose=0).history
    assert (history["counted"], history["extra"]) == ([len(X)], [1.0])


class Unready(keras.Model):
    """Has an optimizer that takes no step."""

    def __init__(self):
        super().__init__()
        self.head, self.other = network(), keras.optimizers.SGD(0.1)
        self.built = True

    def call(self, x):
        return self.head(x)


class WithOptimizersInLists(keras.Model):
    """Trains one network by optimizers that are in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.net = network()
        self.listed = [keras.optimizers.Adam(0.05)]
        self.named = {"one": (keras.optimizers.SGD(0.1, momentum=0.9),)}
        self.built = True

    def call(self, x):
        return self.net(x)

    def train_step(self, minibatch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(minibatch[0]) - minibatch[1]) ** 2)
        weights = self.net.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.listed[0].apply(gradients[:2], weights[:2])
        self.named["one"][0].apply(gradients[2:], weights[2:])
        return {"raw": loss}


@pytest.mark.nightly
def test_optimizers_in_lists_and_dicts_are_resumed(tmp_path):
    def trained(epochs, directory):
        strategy = make()
        with strategy.scope():
            model = WithOptimizersInLists()
            model.compile()
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path / directory)
        model.fit(data(), epochs=epochs, verbose=0, callbacks=[checkpoint])
        return strategy, model

    strategy, model = trained(2, "whole")
    trained(1, "parts")
    resumed_strategy, resumed = trained(2, "parts")
    assert resumed.listed[0].iterations == resumed.named["one"][0].iterations == 2 * STEPS
    found, expected = weights_of(resumed_strategy, resumed), weights_of(strategy, model)
    for own, whole in zip(found, expected, strict=True):
        assert_same(own, whole, rtol=0, atol=0)


class WithCompiledPart(WithOptimizersInLists):
    def train_step(self, minibatch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(minibatch[0]) - minibatch[1]) ** 2)
        weights = self.net.trainable_variables
        self.net.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"raw": loss}


@pytest.mark.nightly
@pytest.mark.parametrize("is_attribute", [False, True])
def test_an_optimizer_that_a_checkpoint_lacks_is_named(tmp_path, capfd, is_attribute):
    strategy = make()
    with strategy.scope():
        model = WithCompiledPart()
        model.listed = model.named = None
        model.net.compile(keras.optimizers.SGD(0.1, momentum=0.9, name="of_part"))
        model.compile()
        if is_attribute:
            model.part_optimizer = model.net.optimizer
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run")
    model.fit(data(), epochs=2, verbose=0, callbacks=[checkpoint])
    told = "tfpara: a checkpoint has to know the optimizers, and 'of_part' is not known."
    assert capfd.readouterr().err.count(told) == (0 if is_attribute else 1)
    former = model.net.optimizer
    with strategy.scope():
        model.net.compile(keras.optimizers.SGD(0.1, name="second"))
        model.compile()
        if is_attribute:
            model.part_optimizer = model.net.optimizer
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "second")
    model.fit(data(), epochs=2, verbose=0, callbacks=[checkpoint])
    lines = capfd.readouterr().err
    assert told not in lines and int(former.iterations) > 0
    assert lines.count(told.replace("of_part", "second")) == (0 if is_attribute else 1)


@pytest.mark.nightly
def test_an_optimizer_without_slots_is_refused_where_they_would_be_kept(tmp_path):
    strategy = make()
    with strategy.scope():
        model = Unready()
        model.compile("sgd", "mse")
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run")
    line = r"model\.other\.build\(model\.PART\.trainable_variables\).*\(head\)"
    with pytest.raises(ValueError, match=line):
        model.fit(data(), verbose=0, callbacks=[checkpoint])
    with strategy.scope():
        model.other.build(model.head.trainable_variables)
    model.fit(data(), verbose=0, callbacks=[checkpoint])
