"""What goes on from one `fit` to the next: checkpoints, weights, optimizers."""

import contextlib
import csv
import json
import os
import pathlib
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.own_average import Mean

X = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
Y = X @ np.random.default_rng(1).normal(size=(6, 2)).astype("float32")


def made(rule=None, optimizer=None, workers=3, servers=1, **options):
    """A strategy of simulated workers, and a model."""
    options = {"speeds": tfpara.Speed(spread=0.3), **options}
    strategy = tfpara.simulate_async(workers, rule or tfpara.ASGD(), **options)
    if servers > 1:
        strategy._processes.server_devices = tuple(f"CPU:{k}" for k in range(servers))
    with strategy.scope():
        return strategy, plain(optimizer)


def plain(optimizer=None):
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.01, momentum=0.5), "mse")
    return model


def train(strategy, model, epochs=1, callbacks=(), **options):
    return strategy.fit(
        model, X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks), **options
    )


class Note(keras.callbacks.Callback):
    """A callback with a state."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def set_model(self, model):
        super().set_model(model)
        model.distribute_strategy.keep_state("note", self)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)

    def get_state(self):
        return {"epochs": self.epochs}

    def set_state(self, state):
        self.epochs = list(state["epochs"])


def test_a_run_goes_on_from_a_checkpoint_with_all_that_the_servers_hold(tmp_path, capsys):
    averages = {"ema": tfpara.EMA(0.9)}
    one, model = made(averages=averages, optimizer="adam")
    before = Note()
    train(one, model, 2, [before, tfpara.AsyncCheckpoint(tmp_path)])
    with one.weights(model, "ema"):
        ema = model.get_weights()
    two, again = made(averages=averages, optimizer="adam")
    after = Note()
    history = train(two, again, 3, [after, tfpara.AsyncCheckpoint(tmp_path)])
    assert len(history.history["loss"]) == 1  # the third epoch alone
    assert after.epochs == [0, 1, 2]
    counted = two.statistics(again)
    assert counted.pushes == counted.staleness.sum() == 3 * 24
    assert counted.samples == 3 * 96
    # Where nothing is left to do, the state is that of the checkpoint.
    three, same = made(averages=averages, optimizer="adam")
    capsys.readouterr()
    train(three, same, 3, [tfpara.AsyncCheckpoint(tmp_path)])
    said = f"The run in '{tmp_path}' is complete: 3 of 3 epochs are trained (checkpoint 3)"
    assert said in capsys.readouterr().out
    for got, expected in zip(same.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    # Both averages went on from the same one.
    assert not np.allclose(ema[0], model.get_weights()[0])


def test_within_an_epoch_every_minibatch_is_trained_once(tmp_path):
    strategy, model = made()

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 5 and self.model.distribute_strategy.running.chunks_done < 12:
                os.kill(os.getpid(), signal.SIGTERM)

    # A poll sees few pushes of a simulation, where each takes long.
    strategy_wait = 0.0
    from tfpara.parameter_server import fit

    former, fit._POLL_SECONDS = fit._POLL_SECONDS, strategy_wait
    try:
        with pytest.raises(tfpara.callbacks.Preempted) as leaving:
            train(strategy, model, 2, [Kill(), tfpara.AsyncCheckpoint(tmp_path)])
    finally:
        fit._POLL_SECONDS = former
    assert leaving.value.code == 75
    done = strategy.statistics(model).pushes
    assert 0 < done < 24
    again, resumed = made()
    history = train(again, resumed, 2, [tfpara.AsyncCheckpoint(tmp_path)])
    assert len(history.history["loss"]) == 2
    assert again.statistics(resumed).pushes == 48
    assert again.statistics(resumed).samples == 2 * 96


@pytest.mark.nightly
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
def test_a_stop_in_the_epoch_in_which_the_process_is_asked_to_end_is_kept(tmp_path, hook):
    """And so are the weights that a callback sets at the end, as EarlyStopping does."""
    strategy, model = made()

    def stop(*_, **__):
        model.stop_training = True
        os.kill(os.getpid(), signal.SIGTERM)

    ones = [np.ones_like(w) for w in model.get_weights()]
    stopping = keras.callbacks.LambdaCallback(
        **{hook: stop, "on_train_end": lambda logs: model.set_weights(ones)}
    )
    with pytest.raises(tfpara.callbacks.Preempted):
        train(strategy, model, 3, [stopping, tfpara.AsyncCheckpoint(tmp_path)])
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1
    again, resumed = made()
    assert not train(again, resumed, 3, [tfpara.AsyncCheckpoint(tmp_path)]).history
    are_all(resumed.get_weights(), 1.0)


class Tally(keras.layers.Layer):
    """Has a weight for each sample."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def build(self, shape):
        self.times = self.add_weight(shape=(self.samples,), initializer="zeros")

    def call(self, numbers):
        return tf.gather(self.times, numbers)


def test_a_shuffled_dataset_goes_on_in_the_order_that_it_had(tmp_path, monkeypatch):
    """Where an epoch is resumed, though in a program with another seed."""
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    numbered = tf.data.Dataset.range(96).map(lambda k: (k, 0.0)).shuffle(96).batch(4)

    def run(seed, *callbacks):
        strategy = tfpara.simulate_async(3, tfpara.ASGD(), seed=seed)
        with strategy.scope():
            model = keras.Sequential([keras.Input((), dtype="int64"), Tally(96)])
            # A step adds 1 to the weight of each of its samples.
            model.compile(keras.optimizers.SGD(1.0), lambda y, out: -tf.reduce_sum(out))
        checkpoint = tfpara.AsyncCheckpoint(tmp_path)
        strategy.fit(model, numbered, epochs=2, verbose=0, callbacks=[*callbacks, checkpoint])
        return model.get_weights()[0]

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 9:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(tfpara.callbacks.Preempted):
        run(1, Kill())
    np.testing.assert_array_equal(run(2), 2.0)


class Seen(keras.layers.Layer):
    """Has a weight for each input, which a step raises by what came in."""

    def build(self, shape):
        self.sums = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x):
        return x * self.sums


@pytest.mark.nightly
def test_random_layers_have_other_numbers_in_each_fit_and_the_same_after_a_resumption(tmp_path):
    """One minibatch is an epoch, and the layer's mask what it adds to the weights."""

    def masks(seed, *fits):
        strategy = tfpara.simulate_async(1, tfpara.ASGD(), seed=seed)
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5), Seen()])
            model.compile(keras.optimizers.SGD(0.5), lambda y, out: -tf.reduce_sum(out))
        found = []
        look = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: found.append(model.get_weights()[0])
        )
        for epochs, *callbacks in fits:
            options = {"epochs": epochs, "verbose": 0, "callbacks": [look, *callbacks]}
            strategy.fit(model, np.ones((1, 64), "float32"), np.ones(1), **options)
        return np.diff([*found, model.get_weights()[0]], axis=0)

    def different(all_masks):
        return len({mask.tobytes() for mask in all_masks})

    three = masks(0, [1], [2])
    assert set(three.flat) == {0.0, 1.0} and different(three) == 3
    assert different([*three, *masks(1, [1])]) == 4
    masks(0, [1], [1, tfpara.AsyncCheckpoint(tmp_path)])
    resumed = masks(0, [2, tfpara.AsyncCheckpoint(tmp_path)])
    np.testing.assert_array_equal(resumed, three[2:])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"batch_size": 8}, "batch_size: .*has 4, this run has 8; minibatches: .*has 24, .* 12"),
        ({"x": X[:92], "y": Y[:92]}, "minibatches: .*; samples: the checkpoint has 96, .* 92"),
        ({"shuffle": False}, "shuffle: the checkpoint has True, this run has False"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_other_minibatches_are_refused_within_an_epoch_only(tmp_path, monkeypatch, other, told):
    """There some would be trained twice or never. Between epochs they are the user's choice."""
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    kill = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    for hook in ("on_train_batch_end", "on_epoch_end"):
        callbacks = [keras.callbacks.LambdaCallback(**{hook: kill})]
        callbacks.append(tfpara.AsyncCheckpoint(tmp_path / hook))
        data = {"x": X, "y": Y, "batch_size": 4, "chunks": 4, "verbose": 0}
        strategy, model = made()
        with pytest.raises(tfpara.callbacks.Preempted):
            strategy.fit(model, **data, callbacks=callbacks)
        again, model = made()
        data |= {**other, "epochs": 2, "callbacks": [tfpara.AsyncCheckpoint(tmp_path / hook)]}
        if hook == "on_epoch_end":
            again.fit(model, **data)
        else:
            with pytest.raises(tfpara.CheckpointError, match=told):
                again.fit(model, **data)


@pytest.mark.nightly_cases("False")
@pytest.mark.parametrize("quantized", [False, True])
def test_frozen_weights_are_those_of_the_checkpoint(tmp_path, quantized):
    """Though the program begins with others, as one with random initial values does."""
    losses, frozen = [], []
    for value in (0.5, -1.0):
        strategy = tfpara.simulate_async(2, tfpara.ASGD())
        with strategy.scope():
            first = keras.layers.Dense(
                4, kernel_initializer=keras.initializers.Constant(value), trainable=False
            )
            model = keras.Sequential([keras.Input((6,)), first, keras.layers.Dense(2)])
            if quantized:
                first.quantize("int8")
            model.compile(keras.optimizers.SGD(0.0), "mse")
        epochs = len(losses) + 1
        history = train(strategy, model, epochs, [tfpara.AsyncCheckpoint(tmp_path)])
        losses += history.history["loss"]
        frozen.append(np.array(first.kernel))
    are_all(frozen, 127 if quantized else 0.5)
    assert losses[1] == pytest.approx(losses[0])  # the workers compute with them, too


@pytest.mark.nightly
def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    strategy, model = made()
    train(strategy, model, 1, [tfpara.AsyncCheckpoint(tmp_path)])
    other, model = made(tfpara.ASGD(rate_by_staleness=True))
    with pytest.raises(tfpara.CheckpointError, match="rule"):
        train(other, model, 2, [tfpara.AsyncCheckpoint(tmp_path)])
    same, model = made()
    with pytest.raises(tfpara.CheckpointError, match="corpus"):
        train(same, model, 2, [tfpara.AsyncCheckpoint(tmp_path, data_plan={"corpus": "b"})])


@pytest.mark.nightly
def test_a_damaged_checkpoint_is_passed_over_and_refused_if_it_is_the_last(tmp_path):
    strategy, model = made()
    train(strategy, model, 3, [tfpara.AsyncCheckpoint(tmp_path)])
    newest, second, _ = sorted(tmp_path.glob("checkpoint-*"), reverse=True)
    manifest = (newest / "manifest.json").read_text()
    # It is JSON as before, and would have the run train the last epoch twice.
    (newest / "manifest.json").write_text(manifest.replace('"epoch": 3', '"epoch": 2'))
    part = next(second.glob("part-00000.data*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    again, model = made()
    with (
        pytest.warns(UserWarning, match=f"{newest.name}.*damaged"),
        pytest.warns(UserWarning, match=f"{second.name}.*damaged"),
    ):
        history = train(again, model, 3, [tfpara.AsyncCheckpoint(tmp_path)])
    assert len(history.history["loss"]) == 2
    # Three whole ones stay; the two that are damaged take no place among them.
    assert {p.name[-1] for p in tmp_path.glob("checkpoint-*")} == {"1", "2", "3", "4", "5"}
    for path in tmp_path.glob("checkpoint-*/manifest.json"):
        path.write_text(json.dumps({"format": 1}))
    last, model = made()
    with (
        pytest.warns(UserWarning),
        pytest.raises(tfpara.CheckpointError, match='if_damaged="start"'),
    ):
        train(last, model, 2, [tfpara.AsyncCheckpoint(tmp_path)])


def test_checkpoint_arguments_and_strategies_are_checked(tmp_path):
    with pytest.raises(ValueError, match="every_minutes=0"):
        tfpara.AsyncCheckpoint(tmp_path, every_minutes=0)
    with pytest.raises(ValueError, match="directory='' is empty"):
        tfpara.AsyncCheckpoint("")
    with pytest.raises(ValueError, match="keep=0"):
        tfpara.AsyncCheckpoint(tmp_path, keep=0)
    with pytest.raises(ValueError, match="if_damaged"):
        tfpara.AsyncCheckpoint(tmp_path, if_damaged="ignore")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="tfpara.callbacks.Checkpoint"):
        model.fit(X, Y, verbose=0, callbacks=[tfpara.AsyncCheckpoint(tmp_path)])


@pytest.mark.nightly
def test_weights_that_are_set_between_two_fits_are_trained_on():
    strategy, model = made(optimizer=keras.optimizers.SGD(0.0), averages={"ma": tfpara.MA()})
    train(strategy, model)
    ones = [np.ones_like(w) for w in model.get_weights()]
    model.set_weights(ones)
    train(strategy, model)
    for weight in model.get_weights():
        np.testing.assert_array_equal(weight, 1.0)
    with strategy.weights(model, "ma"):  # started anew
        np.testing.assert_array_equal(model.get_weights()[0], 1.0)


def global_weights(strategy, model):
    with strategy.weights(model, "global"):
        return model.get_weights()


def are_all(weights, value):
    for weight in weights:
        np.testing.assert_array_equal(weight, value)


class Set(keras.callbacks.Callback):
    """Sets all weights at a hook, and the next time it is called to one more."""

    def __init__(self, hook, value=1.0):
        super().__init__()
        self.value = value
        setattr(self, hook, self.set)

    def set(self, *_, **__):
        self.model.set_weights([np.full_like(w, self.value) for w in self.model.get_weights()])
        self.value += 1.0


RULES = [tfpara.ASGD(), tfpara.Downpour(), tfpara.AsyncEASGD(0.3)]


# How often a fit of two epochs calls them.
HOOKS = {"on_train_begin": 1, "on_epoch_begin": 2, "on_epoch_end": 2, "on_train_end": 1}


@pytest.mark.nightly_cases("AsyncEASGD*", "Downpour*")
@pytest.mark.parametrize(
    ("rule", "hooks"),
    [  # Workers of EASGD have models of their own.
        (tfpara.AsyncEASGD(0.3), [*HOOKS]),
        (tfpara.ASGD(), ["on_epoch_begin"]),
        (tfpara.Downpour(), ["on_epoch_end"]),
    ],
    ids=str,
)
def test_weights_that_a_callback_sets_are_trained_on(rule, hooks):
    """One hook after the other on the same model, which is traced once."""
    still = keras.optimizers.SGD(0.0)
    strategy, model = made(rule, still, servers=2, averages={"ma": tfpara.MA()})
    before = model.get_weights()
    train(strategy, model, 1)  # workers of EASGD have models of their own now
    for got, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    for number, hook in enumerate(hooks):
        first = 10.0 * number + 1
        train(strategy, model, 2, [Set(hook, first)])
        value = first + HOOKS[hook] - 1
        are_all(model.get_weights(), value)
        are_all(global_weights(strategy, model), value)
        train(strategy, model, 1)
        are_all(global_weights(strategy, model), value)
        with strategy.weights(model, "ma"):  # started anew
            are_all(model.get_weights(), value)


@pytest.mark.nightly
@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_end"])
def test_weights_that_are_set_are_in_the_checkpoint_of_the_same_hook(tmp_path, hook):
    def callbacks(*first):
        return [*first, tfpara.AsyncCheckpoint(tmp_path)]

    strategy, model = made(optimizer=keras.optimizers.SGD(0.0))
    train(strategy, model, 1, callbacks(Set(hook, 5.0)))
    again, resumed = made(optimizer=keras.optimizers.SGD(0.0))
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(resumed.get_weights())
    )
    train(again, resumed, 2, callbacks(look))
    are_all(seen[0], 5.0)  # the chief's model is the checkpoint's, too
    are_all(resumed.get_weights(), 5.0)


@pytest.mark.nightly
@pytest.mark.parametrize("epochs", [1, 2])
def test_weights_that_are_set_while_workers_train_are_refused(epochs, monkeypatch):
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    strategy, model = made()
    told = "kernel' was set while workers train.*on_epoch_end, or between"
    with pytest.raises(ValueError, match=told):
        train(strategy, model, epochs, [Set("on_train_batch_end")])
    trained = model.get_weights()
    assert not np.array_equal(trained[0], np.full_like(trained[0], 1.0))
    for got, expected in zip(trained, global_weights(strategy, model), strict=True):
        np.testing.assert_array_equal(got, expected)
    train(strategy, model, 1)


@pytest.mark.nightly
def test_weights_that_are_set_where_they_would_be_lost_are_refused():
    strategy, model = made(averages={"ma": tfpara.MA()})
    ones = [np.ones_like(w) for w in model.get_weights()]
    train(strategy, model)
    kept = model.get_weights()
    with (
        pytest.raises(ValueError, match=r"set inside `with strategy.weights\(..., 'ma'\)`"),
        strategy.weights(model, "ma"),
    ):
        model.set_weights(ones)
    for got, expected in zip(model.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(got, expected)
    with strategy.weights(model, "ma"):
        before = model.get_weights()
        with strategy.weights(model, "global"):
            np.testing.assert_array_equal(model.get_weights()[0], kept[0])
        np.testing.assert_array_equal(model.get_weights()[0], before[0])
        with pytest.raises(ValueError, match="shows its 'ma' weights"):
            train(strategy, model)
    np.testing.assert_array_equal(global_weights(strategy, model)[0], kept[0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layer", "hook", "told"),
    [
        (
            lambda: keras.layers.Dense(4, trainable=False),
            "on_epoch_end",
            "kernel' is frozen, and was set while fit runs",
        ),
        (
            lambda: keras.layers.BatchNormalization(),
            "on_train_batch_end",
            "moving_mean' was set while workers train",
        ),
    ],
    ids=["frozen", "statistics"],
)
def test_weights_that_are_not_trained_are_refused_where_they_would_be_lost(layer, hook, told):
    strategy = tfpara.simulate_async(1, tfpara.ASGD())
    with strategy.scope():
        own = layer()
        model = keras.Sequential([keras.Input((6,)), own, keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    weight = own.non_trainable_variables[0]
    change = keras.callbacks.LambdaCallback(
        **{hook: lambda number, logs: weight.assign(np.ones(weight.shape))}
    )
    with pytest.raises(ValueError, match=told):
        train(strategy, model, 1, [change])


KINDS = {
    "adam": lambda: "adam",
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.6)
    ),
}


@pytest.mark.nightly_cases("ASGD(*", "AsyncEASGD(elasticity=0.3)-adam")
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [*zip(RULES, ["momentum", "schedule", "adam"], strict=True), (tfpara.ASGD(), "schedule")],
    ids=str,
)
def test_a_snapshot_goes_back_to_all_that_training_changes(rule, optimizer):
    """One worker, one order of the data: training goes the same way again."""
    kind = KINDS[optimizer]()
    strategy, model = made(rule, kind, workers=1, servers=2)
    options = {"shuffle": False, "initial_epoch": 1, "chunks": 2}
    train(strategy, model, 1, shuffle=False)
    go_back = strategy.snapshot(model)
    kept = model.get_weights()
    ends = []
    for _ in range(2):
        go_back()  # what workers have of their own starts anew
        for got, expected in zip(model.get_weights(), kept, strict=True):
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(global_weights(strategy, model)[0], kept[0])
        train(strategy, model, 2, **options)
        ends.append(model.get_weights())
    assert not np.allclose(ends[0][0], kept[0], atol=1e-4)
    for got, expected in zip(*ends, strict=True):
        np.testing.assert_array_equal(got, expected)
    if optimizer == "schedule":
        return
    model.optimizer.learning_rate = 0.0  # stays as it is
    train(strategy, model, 2, [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: go_back())])
    assert strategy._models.of(model).server.learning_rate == 0.0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [(tfpara.ASGD(), "adam"), (tfpara.AveragedASGD(running_rate=0.2), "momentum")],
    ids=str,
)
def test_an_epoch_that_newbob_rejects_leaves_no_trace_but_in_the_rate(rule, optimizer, capsys):
    """As if it had not been: weights, averages and the optimizer on the servers, bit for bit."""
    found = []
    # The second epoch is worse than the first; the other run goes on at half the rate at once.
    for scores in ([2.0, 3.0, 1.0], [2.0, 1.0]):
        kind = keras.optimizers.SGD(0.02, momentum=0.9) if optimizer == "momentum" else optimizer
        averages = {"ema": tfpara.EMA(0.9)}
        strategy, model = made(rule, kind, workers=1, servers=2, averages=averages)
        rate = float(model.optimizer.learning_rate)
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, s=scores: logs.update(score_loss=s[epoch])
        )
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, _, r=rate: r / (1 + epoch))
        if len(scores) == 3:
            schedule = tfpara.callbacks.Newbob(
                "score_loss", rule=tfpara.schedules.NewbobRule(reject_worse=True)
            )
        log = train(strategy, model, len(scores), [note, schedule], shuffle=False, chunks=2)
        server = strategy._models.of(model).server
        of_optimizer = [
            v.numpy()
            for shard in server.shards
            for k, v in enumerate(shard.optimizer)
            if k != shard.steps.rate_index
        ]
        values = [*global_weights(strategy, model), *model.get_weights(), *of_optimizer]
        for which in strategy.averages:
            with strategy.weights(model, which):
                values += model.get_weights()
        found.append(values)
        assert log.history["learning_rate"] == pytest.approx([rate, rate, rate / 2][-len(scores) :])
    assert "went back to where this epoch began; learning rate" in capsys.readouterr().out
    for got, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.nightly
def test_newbob_goes_back_to_the_model_that_workers_with_their_own_began_with():
    for rule in (tfpara.AsyncEASGD(), tfpara.Downpour()):
        strategy, model = made(rule, workers=2)
        kept = []
        look = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_, s=strategy, m=model, k=kept: k.append(global_weights(s, m)),
            on_epoch_end=lambda epoch, logs: logs.update(score_loss=1.0 + epoch),
        )
        newbob = tfpara.callbacks.Newbob(
            "score_loss", rule=tfpara.schedules.NewbobRule(stop=0.0, reject_worse=True), verbose=0
        )
        train(strategy, model, 3, [look, newbob])
        for got, expected in zip(kept[2], kept[1], strict=True):
            np.testing.assert_array_equal(got, expected)
        assert not np.array_equal(kept[1][0], kept[0][0])


@pytest.mark.nightly
def test_a_snapshot_goes_back_to_an_average_of_ones_own():
    strategy, model = made(averages={"mine": Mean()}, workers=1)

    def average():
        with strategy.weights(model, "mine"):
            return model.get_weights()[0]

    train(strategy, model)
    go_back, kept = strategy.snapshot(model), average()
    train(strategy, model)
    assert not np.allclose(average(), kept, atol=1e-4)
    go_back()
    np.testing.assert_array_equal(average(), kept)


@pytest.mark.nightly
def test_snapshots_are_of_the_time_between_epochs(monkeypatch):
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    strategy, model = made()
    with pytest.raises(ValueError, match="not been trained yet"):
        strategy.snapshot(model)
    hook = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: strategy.snapshot(model)
    )
    with pytest.raises(ValueError, match="in the middle of an epoch"):
        train(strategy, model, 1, [hook])


@pytest.mark.nightly
def test_a_model_that_is_compiled_again_has_the_new_optimizer():
    strategy, model = made()
    train(strategy, model)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    before = model.get_weights()
    train(strategy, model)
    for got, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    # So does an optimizer that gets a schedule in place of its number.
    model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
    train(strategy, model)
    assert not np.array_equal(model.get_weights()[0], before[0])


def in_order(model):
    """Trains an epoch, and returns its history; one worker trains as Keras does."""
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    strategy = tfpara.strategy.Strategy.of(model)
    if isinstance(strategy, tfpara.AsyncStrategy):
        return strategy.fit(model, X, Y, chunks=1, **options).history
    return model.fit(X, Y, **options).history


@pytest.mark.nightly
def test_a_model_that_is_compiled_again_with_the_same_optimizer_has_the_new_loss_and_metrics():
    """The optimizer's slots stay, as Keras' do."""
    _, own = made(workers=1)
    wanted = plain()
    for settings in ({"loss": "mae", "metrics": ["mse", "mae"]}, {"loss": "mse"}):
        in_order(own), in_order(wanted)
        for model in (own, wanted):
            model.compile(model.optimizer, **settings)
        got, expected = in_order(own), in_order(wanted)
        assert set(got) == set(expected)
        for name, values in expected.items():
            assert got[name] == pytest.approx(values, rel=1e-4), name
    for mine, theirs in zip(own.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_layers_are_frozen_and_unfrozen_between_fits():
    """With the same optimizer or not; its slots start anew, as those of one that is made anew."""
    _, own = made(workers=1)
    wanted = plain()
    for frozen, compiles in ((True, False), (False, True), (True, True), (False, False)):
        in_order(own), in_order(wanted)
        for model in (own, wanted):
            model.layers[0].trainable = not frozen
        if compiles:
            own.compile(own.optimizer, "mse")
        wanted.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
        before = own.get_weights()
        assert in_order(own)["loss"] == pytest.approx(in_order(wanted)["loss"], rel=1e-4)
        assert np.array_equal(own.get_weights()[0], before[0]) == frozen
        for mine, theirs in zip(own.get_weights(), wanted.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_early_stopping_leaves_the_best_weights():
    strategy, model = made(optimizer=keras.optimizers.SGD(0.02))
    seen = []
    worse = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(score=[3.0, 1.0, 2.0, 2.0][epoch])
    )
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(model.get_weights())
    )
    best = {"mode": "min", "patience": 2, "restore_best_weights": True}
    stopping = keras.callbacks.EarlyStopping("score", **best)
    train(strategy, model, 6, [worse, look, stopping])
    assert len(seen) == 4
    assert not np.array_equal(seen[1][0], seen[3][0])
    for now in (model.get_weights(), global_weights(strategy, model)):
        for got, expected in zip(now, seen[1], strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_callback_sets_the_rate_on_the_servers():
    strategy, model = made()
    zero = keras.callbacks.LearningRateScheduler(lambda epoch: 0.0 if epoch else 0.01)
    seen = []

    class Weights(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.get_weights()[0])

    # Without momentum, a rate of 0 is a standstill.
    model.compile(keras.optimizers.SGD(0.01), "mse")
    train(strategy, model, 3, [zero, Weights()])
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[1], seen[2])


@pytest.mark.nightly
def test_a_searched_rate_outlasts_a_resumption_and_a_second_fit(tmp_path):
    search = tfpara.ChunkRateSearch((0.5,), minibatches=2)  # halves it for each chunk
    strategy, model = made(tfpara.AveragedASGD(), keras.optimizers.SGD(0.064))
    options = {"chunks": 2, "search_rate": search}
    train(strategy, model, 1, [tfpara.AsyncCheckpoint(tmp_path)], **options)
    rate = strategy._models.of(model).server.learning_rate
    assert rate == pytest.approx(0.016)
    again, resumed = made(tfpara.AveragedASGD(), keras.optimizers.SGD(0.064))
    train(again, resumed, 2, [tfpara.AsyncCheckpoint(tmp_path)], **options)
    assert again._models.of(resumed).server.learning_rate == pytest.approx(0.004)
    train(again, resumed, 1, **options)
    assert again._models.of(resumed).server.learning_rate == pytest.approx(0.001)
    resumed.optimizer.learning_rate = 0.5  # set by the user: the next search starts from it
    train(again, resumed, 1, **options)
    assert again._models.of(resumed).server.learning_rate == pytest.approx(0.125)


@pytest.mark.nightly
@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end"])
def test_a_rate_that_a_callback_has_set_last_is_the_servers_after_a_resumption(tmp_path, hook):
    """A checkpoint has it, though the servers are told of it after the hook."""

    class Lower(keras.callbacks.Callback):
        def lower(self, *_, **__):
            self.model.optimizer.learning_rate = 0.005
            os.kill(os.getpid(), signal.SIGTERM)

    setattr(Lower, hook, Lower.lower)
    strategy, model = made(optimizer=keras.optimizers.SGD(0.01))
    with pytest.raises(tfpara.callbacks.Preempted):
        train(strategy, model, 1, [Lower(), tfpara.AsyncCheckpoint(tmp_path)])
    again, resumed = made(optimizer=keras.optimizers.SGD(0.01))
    train(again, resumed, 2, [tfpara.AsyncCheckpoint(tmp_path)])
    assert float(resumed.optimizer.learning_rate) == pytest.approx(0.005)
    assert again._models.of(resumed).server.learning_rate == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (
            lambda: tfpara.callbacks.LearningRate(lambda position: 0.1 * (1 - position), 24),
            lambda batch: 0.1 * (1 - batch / 24),
        ),
        (
            lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            lambda batch: 0.05,
        ),
    ],
    ids=["by position", "by the last rate"],
)
def test_a_scheduled_rate_goes_on_within_an_epoch(tmp_path, monkeypatch, make, wanted):
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append((batch, float(self.model.optimizer.learning_rate)))

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 8:
                os.kill(os.getpid(), signal.SIGTERM)

    def callbacks(*more):
        return [make(), Look(), *more, tfpara.AsyncCheckpoint(tmp_path)]

    strategy, model = made(optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(tfpara.callbacks.Preempted):
        train(strategy, model, 1, callbacks(Kill()))
    before = len(seen)
    again, resumed = made(optimizer=keras.optimizers.SGD(0.1))
    train(again, resumed, 1, callbacks())
    assert before and len(seen) > before
    for batch, rate in seen:
        assert rate == pytest.approx(wanted(batch))
    assert again._models.of(resumed).server.learning_rate == pytest.approx(rate)


def test_a_rate_by_position_is_each_minibatchs_own_also_in_a_resumed_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    by_step = plain(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 24, 0.2)))
    by_step.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)

    def trained(*others):
        strategy, model = made(optimizer=keras.optimizers.SGD(0.1), workers=1)
        rate = tfpara.callbacks.LearningRate(lambda position: 0.1 * 0.2**position, 24)
        train(strategy, model, 2, [rate, *others], shuffle=False)
        return model.get_weights()

    def leave(batch, logs):
        if batch == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    kill = keras.callbacks.LambdaCallback(on_train_batch_end=leave)
    with pytest.raises(tfpara.callbacks.Preempted):
        trained(kill, tfpara.AsyncCheckpoint(tmp_path))
    whole, resumed = trained(), trained(tfpara.AsyncCheckpoint(tmp_path))
    for wanted, one, other in zip(by_step.get_weights(), whole, resumed, strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-6)
        np.testing.assert_array_equal(other, one)


@pytest.mark.nightly
def test_scores_within_an_epoch_go_on_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    table = tmp_path / "scores.csv"

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 8:
                os.kill(os.getpid(), signal.SIGTERM)

    def scored(*others):
        strategy, model = made()
        held_out = tfpara.callbacks.HeldOut((X, Y), times_per_epoch=24, csv=table)
        leaving = pytest.raises(tfpara.callbacks.Preempted) if others else contextlib.nullcontext()
        with leaving:
            checkpoint = tfpara.AsyncCheckpoint(tmp_path / "run")
            train(strategy, model, 1, [held_out, *others, checkpoint])
        with table.open(newline="") as file:
            return strategy.statistics(model).pushes, list(csv.DictReader(file))

    pushes, before = scored(Kill())
    assert before and pushes < 24
    lost = {**before[-1], "epoch": (pushes + 0.5) / 24}  # as of a process that has trained on
    with table.open("a", newline="") as file:
        csv.DictWriter(file, lost).writerow(lost)
    _, after = scored()
    assert after[: len(before)] == before
    passes = [float(row["epoch"]) for row in after]
    assert passes == sorted(set(passes)) and passes[-1] == 1.0 and lost["epoch"] not in passes


@pytest.mark.nightly
def test_sigterm_is_the_programs_own_again_after_a_fit_that_failed(tmp_path):
    def own(*_):
        pass

    former = signal.signal(signal.SIGTERM, own)
    try:
        strategy, model = made()
        failing = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: 1 / 0)
        checkpoint = tfpara.AsyncCheckpoint(tmp_path)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                train(strategy, model, 1, [failing, checkpoint])
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, former)


@pytest.mark.nightly
def test_telemetry_reports_pushes_and_their_staleness(tmp_path):
    strategy, model = made()
    train(strategy, model)
    with strategy.scope():
        other = plain()
    train(strategy, other)  # whose numbers are those of the strategy where no model is named
    history = train(strategy, model, 2, [tfpara.callbacks.Telemetry(tmp_path)])
    assert history.history["pushes"] == [24.0, 24.0]
    assert 0 < history.history["staleness"][1] < 3
    (file,) = tmp_path.glob("events.out.*")
    plugins = {}
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            name = value.metadata.plugin_data.plugin_name
            plugins.setdefault(value.tag, set()).add(name)
    assert plugins["staleness"] == plugins["pushes"] == plugins["loss"] == {"scalars"}
    assert plugins["staleness_distribution"] == {"histograms"}


def test_a_plan_does_not_measure_pushes(monkeypatch):
    strategy, model = made()
    monkeypatch.setenv("TFPARA_MEASURE", "1")
    with pytest.raises(RuntimeError, match="--measure is for PeriodicSyncStrategy"):
        train(strategy, model)


@pytest.mark.nightly
def test_tensorboard_shows_pushes_and_their_staleness(tmp_path):
    strategy, model = made()
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    for _ in range(2):  # fits
        history = train(strategy, model, 1, [board])
        assert not {"pushes", "staleness"} & set(history.history)
    written = [
        (value.tag, float(tf.make_ndarray(value.tensor)))
        for file in (tmp_path / "train").glob("events.out.*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag.startswith("epoch_")
    ]
    assert [value for tag, value in written if tag == "epoch_pushes"] == [24.0, 24.0]
    assert all(0 <= value < 3 for tag, value in written if tag == "epoch_staleness")
    assert {"epoch_staleness_max", "epoch_samples_per_second"} <= {tag for tag, _ in written}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["start_mean", "held_out"])
def test_models_that_are_scored_together_are_of_one_moment(kind, monkeypatch):
    """Though workers push between two scores: here the server's model and its mean move."""
    strategy, model = made(tfpara.AveragedASGD(running_rate=1.0))  # the average is the model
    seen = []

    def evaluate(model, _):
        seen.append(model.get_weights()[0])
        (shard,) = strategy._models.of(model).server.shards
        for held in [*shard.weights, *(s.average for s in shard.averages["average"])]:
            held.assign_add(tf.ones_like(held))
        return {"loss": 0.0}

    monkeypatch.setattr(f"tfpara.callbacks.{kind}.evaluate", evaluate)
    callback = tfpara.callbacks.HeldOut((X, Y), "all")
    if kind == "start_mean":
        callback = tfpara.StartMean((X, Y))
    train(strategy, model, 1, [callback])
    assert seen and len(seen) % 2 == 0
    for one, other in zip(seen[::2], seen[1::2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.nightly
def test_model_checkpoint_within_an_epoch_has_the_weights_of_the_servers(tmp_path, monkeypatch):
    """And not those of the epoch's begin, which the chief's model has."""
    monkeypatch.setattr("tfpara.parameter_server.fit._POLL_SECONDS", 0.0)
    strategy, model = made()
    found = {}
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.update(
            {batch + 1: global_weights(strategy, model)}
        )
    )
    path = tmp_path / "{batch}.weights.h5"
    keep = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=1)
    train(strategy, model, 1, [look, keep])
    assert len(found) > 1
    for batch, expected in found.items():
        saved = plain()
        saved.load_weights(tmp_path / f"{batch}.weights.h5")
        for mine, theirs in zip(saved.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(ValueError, match=r"AsyncCheckpoint\('.*backup'\) in its place"):
        train(strategy, model, 1, [backup])


@pytest.mark.nightly
def test_held_out_scores_every_average():
    strategy, model = made(averages={"ma": tfpara.MA()})
    held = tfpara.callbacks.HeldOut(tf.data.Dataset.from_tensors((X, Y)), "all")
    history = train(strategy, model, 1, [held])
    assert history.history["validation_loss"] != history.history["validation_ma_loss"]
    assert history.history["validation_loss"] == pytest.approx(
        [model.evaluate(X, Y, batch_size=96, verbose=0)]
    )


OLD = pathlib.Path(__file__).parents[2] / "golden" / "parameter_server"


def test_a_checkpoint_of_an_earlier_version_goes_on_where_it_was(tmp_path):
    """In the middle of an epoch of arrays; three workers. Written at d0f83fea (0.2.0)."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    averages = {"ema": tfpara.EMA(0.5, num_updates=False)}
    strategy = tfpara.simulate_async(3, tfpara.ASGD(), averages=averages, seed=5)
    with strategy.scope():
        x = keras.Input((), dtype="int64")
        model = keras.Model(x, keras.layers.Add()([Tally(40)(x), Tally(40)(x)]))
        model.compile(keras.optimizers.SGD(1.0), lambda y, out: -tf.reduce_sum(out))
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(model.get_weights()[0].sum())
    )
    checkpoint = tfpara.AsyncCheckpoint(tmp_path)
    data = {"x": np.arange(40), "y": np.zeros(40), "batch_size": 3}
    strategy.fit(model, **data, epochs=2, verbose=0, callbacks=[look, checkpoint])
    assert 0 < seen[0] < 40 and seen[1] == 40
    are_all(model.get_weights(), 2.0)
    assert strategy.statistics(model).samples == 80


def test_a_checkpoint_of_other_variables_is_refused_before_any_is_set(tmp_path):
    strategy, model = made(optimizer=keras.optimizers.SGD(0.01))
    train(strategy, model, 1, [tfpara.AsyncCheckpoint(tmp_path)])
    other, again = made(optimizer=keras.optimizers.SGD(0.01, momentum=0.5))
    again.set_weights([w + 1.0 for w in again.get_weights()])
    before = again.get_weights()
    told = "another run: its variable 'optimizer/0/2' has the shape none, and here .*same model"
    with pytest.raises(tfpara.CheckpointError, match=told):
        train(other, again, 2, [tfpara.AsyncCheckpoint(tmp_path)])
    for got, expected in zip(global_weights(other, again), before, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.nightly_cases("AsyncEASGD(elasticity=0.3)-adam", "Downpour(*")
@pytest.mark.parametrize(
    ("rule", "optimizer"), zip(RULES, ["adam", "momentum", "adam"], strict=True), ids=str
)
def test_a_second_fit_goes_on_where_the_first_has_ended(rule, optimizer):
    """Workers' own models and optimizers too: two fits of an epoch are one of two epochs."""
    found = []
    for fits in (1, 2):
        strategy, model = made(rule, KINDS[optimizer](), 2, servers=2, speeds=tfpara.Speed())
        for _ in range(fits):
            train(strategy, model, 2 // fits, shuffle=False, chunks=2)
        found.append(model.get_weights())
    for got, expected in zip(*found, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (lambda path: tfpara.callbacks.Checkpoint(path), "Checkpoint needs .*AsyncCheckpoint"),
        (lambda path: tfpara.callbacks.StopTogether(), "StopTogether needs .* leave it out"),
    ],
)
def test_callbacks_of_the_synchronous_strategy_are_refused(callback, told, tmp_path):
    strategy, model = made()
    with pytest.raises(ValueError, match=told):
        train(strategy, model, 1, [callback(tmp_path)])
