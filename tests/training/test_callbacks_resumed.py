"""The memory of Keras' callbacks in runs that are killed and resumed, and in uninterrupted runs."""

import csv
import functools
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.small import strategy_of
from tfpara import fit_call

pytestmark = pytest.mark.latest

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype("float32")
Y = RNG.normal(size=(32, 2)).astype("float32")
# The best is that of the third epoch; the plateau and its cooldown end at other epochs.
SCORES = [5.0, 4.0, 1.0, 2.0, 3.0, 2.0, 2.5, 2.0, 3.0, 4.0]
KINDS = ["synchronous", "asynchronous"]


class Killed(Exception):
    pass


def made(kind, optimizer="adam", replicas=2):
    if kind == "synchronous":
        strategy = strategy_of(replicas, tfpara.EASGD(0.2))
    else:
        strategy = tfpara.simulate_async(1, tfpara.ASGD())
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(optimizer, "mse")
    return strategy, model


def scores(kill=None):
    """A callback that sets the scores of epochs, and may kill the run within one."""

    class Scores(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == kill:
                raise Killed

        def on_epoch_end(self, epoch, logs=None):
            logs["score"] = SCORES[epoch]

    return Scores()


CHECKPOINT = {"synchronous": tfpara.callbacks.Checkpoint, "asynchronous": tfpara.AsyncCheckpoint}


def fit(kind, directory, callbacks, epochs=10):
    """One process of a run; returns its model and history."""
    strategy, model = made(kind)
    checkpoint = CHECKPOINT[kind](directory)
    if kind == "synchronous":

        def train(**options):
            data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
            return model.fit(data, **options)
    else:

        def train(**options):
            return strategy.fit(model, X, Y, batch_size=8, **options)

    try:
        history = train(epochs=epochs, verbose=0, callbacks=[*callbacks, checkpoint])
    finally:
        if getattr(checkpoint, "_checkpoints", None):
            checkpoint._checkpoints.store.release()  # as the end of the process would
    return model, history.history


class KilledAfterASync(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise Killed


def test_the_bar_after_a_resumed_epoch_counts_the_steps_of_a_whole_one(tmp_path, capsys):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    data = data.filter(lambda *_: True)  # so that Keras does not know the number of steps

    def run(*callbacks):
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path, every_syncs=1)
        made("synchronous")[1].fit(data, epochs=2, verbose=2, callbacks=[*callbacks, checkpoint])

    with pytest.raises(Killed):
        run(KilledAfterASync())
    capsys.readouterr()
    run()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "/step" in line] == ["2/2", "4/4"]


def deciding(kill=None):
    return [
        scores(kill),
        keras.callbacks.ReduceLROnPlateau("score", 0.5, patience=1, mode="min", cooldown=2),
        keras.callbacks.EarlyStopping("score", patience=6, mode="min", restore_best_weights=True),
    ]


@pytest.mark.one_version
@pytest.mark.nightly_cases("asynchronous")
@pytest.mark.parametrize("kind", KINDS)
def test_early_stopping_and_plateaus_go_on_where_they_were(kind, tmp_path):
    whole, history = fit(kind, tmp_path / "whole", deciding())
    assert len(history["loss"]) == 9
    rates = history["learning_rate"]
    assert len(set(rates)) == 4
    for kill in (2, 5):
        with pytest.raises(Killed):
            fit(kind, tmp_path / "killed", deciding(kill))
    resumed, rest = fit(kind, tmp_path / "killed", deciding())
    assert rest["learning_rate"] == rates[5:]
    for got, expected in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    # A complete run trains nothing, and has the same weights and memories.
    callbacks = deciding()
    again, nothing = fit(kind, tmp_path / "killed", callbacks)
    assert "loss" not in nothing
    for got, expected in zip(again.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert (callbacks[2].best, callbacks[2].best_epoch) == (1.0, 2)
    assert callbacks[2].stopped_epoch == 8 and type(callbacks[2].stopped_epoch) is int


def rows_of_scores(directory, *others, replicas=2):
    """Returns the rows that `HeldOut` writes in two epochs of 8 steps and 4 syncs each."""
    _, model = made("synchronous", replicas=replicas)
    table = directory / "scores.csv"
    held_out = tfpara.callbacks.HeldOut((X, Y), times_per_epoch=4, csv=table)
    checkpoint = tfpara.callbacks.Checkpoint(directory / "run", every_syncs=1)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    try:
        model.fit(data, epochs=2, verbose=0, callbacks=[held_out, *others, checkpoint])
    except Killed:
        checkpoint._checkpoints.store.release()
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole_scores(tmp_path_factory):
    return rows_of_scores(tmp_path_factory.mktemp("whole"))


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize(("last", "replicas"), [(4, 2), (5, 2), (None, 2), (4, 1), (5, 3)])
def test_scores_within_an_epoch_go_on_where_they_were(last, replicas, whole_scores, tmp_path):
    """The run is killed before the checkpoint after batch `last`, or after the end of the epoch.

    It goes on with so many `replicas`.
    """

    class Kill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (1, last):
                raise Killed

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise Killed

    assert [float(row["epoch"]) for row in whole_scores] == [0.25 * k for k in range(1, 9)]
    killed = rows_of_scores(tmp_path, Kill())
    assert killed == whole_scores[: {4: 6, 5: 7, None: 8}[last]]
    rows = rows_of_scores(tmp_path, replicas=replicas)
    if replicas == 2:
        assert rows == whole_scores
    else:  # the scores differ, but not where they are taken
        assert [[row["epoch"], row["syncs"]] for row in rows] == [
            [row["epoch"], row["syncs"]] for row in whole_scores
        ]


def states(directory):
    newest = max(directory.glob("checkpoint-*"))
    found = json.loads((newest / "manifest.json").read_text())["states"]
    return {name: state for name, state in found.items() if name != "order of data"}


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16, tf.float32])
def test_the_best_score_is_remembered_in_any_type(dtype):
    """With the floatx bfloat16, Keras' logs have tensors."""
    strategy = types.SimpleNamespace(states={})
    strategy.keep_state = strategy.states.__setitem__
    stopping = keras.callbacks.EarlyStopping("score")
    fit_call.keep_memories([stopping], strategy)
    stopping.best = tf.constant(1.5, dtype)
    (memory,) = strategy.states.values()
    assert memory.get_state()["best"] == 1.5


@pytest.mark.one_version
def test_what_is_no_number_in_a_class_of_the_users_is_left_out(tmp_path):
    class Pairs(keras.callbacks.EarlyStopping):
        def on_epoch_end(self, epoch, logs=None):
            self.wait, self.best = epoch, (1.0, epoch)

    fit("synchronous", tmp_path, [scores(), Pairs("score", mode="min")], epochs=2)
    (kept,) = states(tmp_path).values()
    assert kept["wait"] == 1 and "best" not in kept


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_of_another_score_or_mode_begins_anew_and_a_line_says_so(kind, tmp_path):
    def stopping(mode):
        return keras.callbacks.EarlyStopping("score", patience=9, mode=mode)

    fit(kind, tmp_path, [scores(), stopping("min"), stopping("min"), stopping("max")], epochs=2)
    names = [f"EarlyStopping(score, {each})" for each in ("min", "min", "max")]
    names[1] += " 2"
    assert set(states(tmp_path)) == set(names)
    new = stopping("max")
    with pytest.warns(UserWarning, match=r"EarlyStopping\(score, min\) 2', which this run"):
        fit(kind, tmp_path, [scores(), new, stopping("min")], epochs=3)
    assert (new.best, new.wait) == (5.0, 2)
    # A fit knows nothing of the callbacks of an earlier one.
    assert set(states(tmp_path)) == {names[0], names[2]}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["best.keras", "{epoch:02d}-[{score:.1f}].keras"])
def test_the_best_score_of_a_model_that_is_gone_is_not_kept(kind, path, tmp_path):
    def best():
        return keras.callbacks.ModelCheckpoint(
            tmp_path / path, monitor="score", mode="min", save_best_only=True
        )

    kept = best()
    fit(kind, tmp_path / "run", [scores(), kept], epochs=3)
    (name,) = states(tmp_path / "run")
    assert name == f"ModelCheckpoint(score, min) of {tmp_path / path}"
    again = best()
    fit(kind, tmp_path / "run", [scores(), again], epochs=4)
    assert again.best == 1.0
    for file in tmp_path.glob("*.keras"):
        file.unlink()
    anew = best()
    fit(kind, tmp_path / "run", [scores(), anew], epochs=5)
    assert anew.best == SCORES[4]
    assert len(list(tmp_path.glob("*.keras"))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_two_callbacks_that_write_checkpoints_are_refused_before_training(kind, tmp_path):
    with pytest.raises(
        ValueError, match="fit got 2 callbacks that write checkpoints, .*Checkpoint"
    ):
        fit(kind, tmp_path / "run", [scores(), CHECKPOINT[kind](tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_other_kind_of_strategy_is_named_and_not_replaced(kind, tmp_path):
    fit(kind, tmp_path, [scores()], epochs=1)
    before = sorted(tmp_path.rglob("*"))
    (other,) = set(KINDS) - {kind}
    made_by = {"synchronous": "PeriodicSyncStrategy", "asynchronous": "AsyncStrategy"}[kind]
    strategy, model = made(other)
    train = model.fit
    if other == "asynchronous":
        train = functools.partial(strategy.fit, model)
    callbacks = [CHECKPOINT[other](tmp_path, if_damaged="start")]
    told = f"other kind of strategy: go on with tfpara.{made_by} and tfpara.*Checkpoint, which have"
    with pytest.raises(tfpara.CheckpointError, match=told):
        train(X, Y, batch_size=8, verbose=0, callbacks=callbacks)
    assert sorted(tmp_path.rglob("*")) == before
