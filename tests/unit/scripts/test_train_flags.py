"""What scripts.train makes of its flags, without starting it."""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

import tfpara
from scripts import model_flags, rule_flags, runs, schedule_flags, train
from tfpara import callbacks
from tfpara.checkpoint.store import CheckpointError

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("20", {0: 20}),
        ("1,2:20,4:80", {0: 1, 2: 20, 4: 80}),
    ],
)
def test_sync_periods(text, values):
    with flagsaver.flagsaver(sync_period=text):
        assert schedule_flags.sync_periods() == values


@pytest.mark.parametrize("text,value", [("0.5", 0.5), ("sqrt", "sqrt"), (None, None)])
def test_block_momentum_is_a_number_or_a_name(text, value):
    with flagsaver.flagsaver(rule="bmuf", block_momentum=text):
        assert rule_flags._rule().block_momentum == value
    with flagsaver.flagsaver(rule="bmuf", block_momentum="square"), pytest.raises(ValueError):
        rule_flags._rule()


def test_minibatches_change_within_epochs():
    with flagsaver.flagsaver(minibatch="64,0.25:256,2.25:1024"):
        assert schedule_flags.minibatches() == {0: 64, 0.25: 256, 2.25: 1024}


@pytest.mark.parametrize("text", ["", "0", "x", "1,2", "1,0:2", "1,3:2,2:4", "1,2:0", "1,inf:2"])
@pytest.mark.parametrize("flag", ["sync_period", "minibatch"])
def test_other_texts_are_refused(flag, text):
    with (
        flagsaver.flagsaver(**{flag: text}),
        pytest.raises(ValueError, match=f"--{flag}={text} must be"),
    ):
        schedule_flags.check()


def test_a_period_changes_between_epochs_only():
    with flagsaver.flagsaver(sync_period="1,0.5:2"), pytest.raises(ValueError, match="whole"):
        schedule_flags.check()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"optimizer": "adam", "momentum": 0.5}, "--momentum=0.5 is for --optimizer=sgd"),
        ({"weight_decay": 0.1}, "--weight_decay=0.1 is for --optimizer=adamw"),
        ({"schedule": "constant", "final_learning_rate": 0.1}, "is for --schedule=exponential"),
        ({"newbob_by": "accuracy"}, "is for --schedule=newbob"),
        ({"newbob_reject_worse": True}, "is for --schedule=newbob"),
        ({"scale_learning_rate": True}, "is for --rule=bsp"),
        (
            {
                "rule": "bsp",
                "scale_learning_rate": True,
                "warm_start_epochs": 1,
                "schedule": "hand",
            },
            "the rate would have to rise",
        ),
        ({"rule": "bmuf_adam"}, "--optimizer=sgd has none. Give --optimizer=adam"),
        ({"clip_norm": 0.0}, "--clip_norm=0.0 must be positive"),
        ({"final_learning_rate": 0.0}, "--final_learning_rate=0.0 must be a positive number"),
        ({"learning_rate": 0.0}, "--learning_rate=0.0 must be a positive number"),
        ({"learning_rate": math.inf}, "--learning_rate=inf must be a positive number"),
        ({"learning_rate": math.nan}, "--learning_rate=nan must be a positive number"),
        ({"momentum": 1.0}, "--momentum=1.0 is outside"),
        ({"overfitting_guard": -1.0}, "--overfitting_guard=-1.0 must be a positive number"),
        ({"model": "lstm-000", "minibatch": "64"}, "--minibatch=64 is for"),
    ],
)
def test_combinations_that_are_refused(chosen, message):
    with flagsaver.flagsaver(**chosen), pytest.raises(ValueError, match=message):
        schedule_flags.check()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"rule": "bsp", "block_momentum": 0.5}, "--block_momentum=0.5 is for --rule=bmuf"),
        ({"rule": "bmuf_adam", "compat": "cntk"}, "--compat=cntk is for --rule=bmuf"),
        ({"elasticity": 0.1}, "is for --rule=easgd"),
        ({"outer_momentum": 0.1}, "is for --rule=diloco"),
        ({"rule": "none", "local_state": "reset"}, "is for synchronous rules"),
        ({"rule": "none", "simulate_replicas": 2}, "--rule=none trains one replica"),
        ({"rule": "downpour", "delay_compensation": 0.1}, "is for --rule=asgd and aasgd"),
        ({"rule": "easgd_async", "max_staleness": 1}, "is for --rule=asgd, aasgd, downpour"),
        ({"rule": "bmuf_async", "nesterov": False}, "--nesterov=False is for --rule=bmuf and"),
        ({"rule": "bmuf_async", "rate_by_staleness": True}, "is for --rule=asgd, aasgd, downpour"),
        ({"rule": "downpour", "block_momentum": "0.5"}, "is for --rule=bmuf, bmuf_adam, bmuf_asy"),
        ({"rule": "asgd", "block_learning_rate": 0.5}, "is for --rule=bmuf, bmuf_adam, bmuf_async"),
        ({"ema_decay": ["1.5"]}, r"--ema_decay=1.5: .* outside \(0, 1\)"),
    ],
)
def test_rules_that_are_refused(chosen, message):
    with flagsaver.flagsaver(**chosen), pytest.raises(ValueError, match=message):
        rule_flags.strategy(5, {})


def test_the_evaluator_scores_the_average_of_averaged_asgd_too():
    with flagsaver.flagsaver(rule="aasgd", running_rate=0.1, ema_decay=["0.9"]):
        found = rule_flags.all_averages()
        assert found == {
            "ema-0.9": tfpara.EMA(0.9, True),
            "average": tfpara.AveragedASGD(running_rate=0.1).average,
        }
        with flagsaver.flagsaver(simulate_replicas=1):
            assert rule_flags.strategy(1, {}).averages == found


@pytest.mark.parametrize(
    ("chosen", "rates"),
    [
        ({}, [0.1, 0.1]),
        ({"optimizer": "adam"}, [0.001, 0.001]),
        ({"final_learning_rate": 0.025}, [0.1, 0.05, 0.025]),
        ({"schedule": "exponential", "learning_rate": 1.0}, [1.0, 0.1, 0.01]),
        ({"rule": "bsp", "scale_learning_rate": True, "learning_rate": 0.2}, [0.8, 0.8]),
        ({"rule": "bsp", "scale_learning_rate": True, "warm_start_epochs": 1}, [0.1, 0.4, 0.4]),
    ],
)
def test_rates_of_the_epochs(chosen, rates):
    with flagsaver.flagsaver(epochs=3, **chosen):
        *_, schedule = schedule_flags.before_scores(4, callbacks.WarmStart(0))
        found = [schedule._schedule(epoch) for epoch in range(len(rates))]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("rule", "minibatches"),
    [("asgd", 5), *((rule, 1) for rule in ("downpour", "bmuf_async", "easgd_async", "bmuf"))],
)
def test_rates_by_hand_fall_with_each_minibatch(rule, minibatches):
    # What the optimizer counts is pushes on a server, and minibatches on a worker.
    chosen = {"rule": rule, "sync_period": "5", "schedule": "hand", "decay_per_minibatch": 0.9}
    with flagsaver.flagsaver(**chosen):
        config = schedule_flags.optimizer(None, 4).get_config()["learning_rate"]["config"]
    assert config["decay_rate"] == pytest.approx(0.9**minibatches)


@pytest.mark.quick
@pytest.mark.parametrize("rule", ["none", "bsp", "asgd"])
def test_rates_by_hand_are_in_the_log(rule):
    """Of one replica, of two, and of a worker whose pushes are of two minibatches."""
    chosen = {"rule": rule, "schedule": "hand", "decay_per_minibatch": 0.9, "sync_period": "2"}
    x, y = np.zeros((64, 5), "float32"), np.zeros(64)
    with flagsaver.flagsaver(**chosen, learning_rate=0.5):
        if rule == "asgd":
            strategy = tfpara.simulate_async(1, tfpara.ASGD(), sync_period=2)
        else:
            strategy = tfpara.simulate(2 if rule == "bsp" else 1, tfpara.BSP(), sync_period=2)
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
            model.compile(schedule_flags.optimizer(model, 1), **runs.metrics({"kind": "dnn"}))
        options = {
            "batch_size": 4 * strategy.num_replicas_in_sync,
            "epochs": 2,
            "verbose": 0,
            "callbacks": schedule_flags.before_scores(1, callbacks.WarmStart(0)),
        }
        fit = model.fit if rule != "asgd" else functools.partial(strategy.fit, model)
        rates = fit(x, y, **options).history["learning_rate"]
    steps = 8 if rule == "bsp" else 16
    assert rates == pytest.approx([0.5 * 0.9**steps, 0.5 * 0.9 ** (2 * steps)])


def test_nobody_is_told_to_begin_a_run_anew_that_has_trained():
    """A full disk, say, keeps it from writing a checkpoint."""
    history = train._History()
    assert "give --start_over" in str(train._failure(CheckpointError("of another run."), history))
    history.on_epoch_begin(3)
    assert str(train._failure(CheckpointError("cannot write."), history)) == "cannot write."


def test_newbob_has_the_papers_thresholds():
    found = []
    for by in ("cross_entropy", "accuracy"):
        with flagsaver.flagsaver(schedule="newbob", newbob_by=by):
            assert schedule_flags.before_scores(1, callbacks.WarmStart(0)) == []
            (newbob,) = schedule_flags.after_scores("loss", None)
        rule = newbob._rule
        found.append((rule.start, rule.stop, rule.relative))
    assert found == [(0.01, 0.001, True), (0.005, 0.001, False)]


class Scores(keras.callbacks.Callback):
    """Frame accuracies of the held-out data, in the test's hand."""

    def __init__(self, accuracies):
        super().__init__()
        self.accuracies = accuracies

    def on_epoch_end(self, epoch, logs=None):
        logs["validation_frame_accuracy"] = self.accuracies[epoch]


def test_the_recipe_with_newbob_is_kaldis_schedule():
    """Rates and weights of a run whose scores are given, computed by hand.

    initial  0.25   1 of the 4 frames, as the model gives class 0 to all
    epoch 1  0.50   rises by 25 %: accepted
    epoch 2  0.49   falls: rejected, and the halving begins
    epoch 3  0.504  rises by 0.4 % over epoch 1, from whose model it begins: accepted, halved again
    epoch 4  0.504  does not rise: rejected, and less than 0.1 %: the end, with the model of epoch 3
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 5)).astype("float32"), rng.integers(0, 4, 64)
    validation = tf.data.Dataset.from_tensors((x[:4], np.arange(4)))
    # The last ones are of other programs, whose flags are here too if their tests run before.
    required = ["--corpus=-", "--run_dir=-", "--data=-", "--out=-", "--results=-"]
    recipe = ["train", "--flagfile=scripts/recipes/001-newbob.flags", *required]

    def train(accuracies, rates=None):
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4, kernel_initializer="zeros")]
        )
        optimizer = schedule_flags.optimizer(model, num_replicas=1)
        model.compile(optimizer, **runs.metrics({"kind": "dnn"}))
        chosen = schedule_flags.after_scores("loss", validation)
        if rates:
            chosen = [keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])]
        # The log has the rate that an epoch was trained with.
        log = model.fit(
            x,
            y,
            batch_size=8,
            epochs=len(accuracies),
            shuffle=False,
            verbose=0,
            callbacks=[Scores(accuracies), *chosen],
        )
        return log.history["learning_rate"], model.get_weights()

    with flagsaver.flagsaver():
        flags.FLAGS(recipe, known_only=True)
        rates, weights = train([0.50, 0.49, 0.504, 0.504, 0.9])
        _, expected = train([0.50, 0.504], rates=[0.32, 0.16])
        assert schedule_flags.epochs() == 20
    assert rates == pytest.approx([0.32, 0.32, 0.16, 0.08])
    for got, want in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_papers_model_takes_the_frames_of_the_corpus(tiny_description):
    with flagsaver.flagsaver(model="cldnn-003", scale=0.25):
        made = model_flags.description(tiny_description, coefficients=80)
        assert model_flags.about_width(made) is None
    assert made["arguments"]["input_dim"] == 11 * 80
    assert (made["arguments"]["num_classes"], made["arguments"]["cells"]) == (9, 256)
    with flagsaver.flagsaver(model="lstm-000"):
        made = model_flags.description(tiny_description)
        said = model_flags.about_width(made)
    assert said.startswith("--model=lstm-000: frames are 120 wide here, and 84 in the paper. ")
    assert (made["kind"], made["stack"], made["arguments"]["input_dim"]) == ("lstm", 3, 360)


class Corpus:
    """As much of a corpus as the model needs."""

    num_classes, directory, fingerprint = 9, "corpus", "mark"

    def __init__(self, feature_dim=120, **options):
        self.feature_dim, self.options = feature_dim, options


@pytest.fixture
def tiny_description():
    return Corpus()


@pytest.mark.parametrize(("name", "frames"), [("dnn", 64), ("lstm-000", 4 * 5)])
def test_adapt_sums_over_the_frames_of_a_replicas_minibatch(name, frames):
    chosen = {"scale": 0.02} if name != "dnn" else {"minibatch": "64", "layers": 1, "width": 8}
    with flagsaver.flagsaver(optimizer="adapt", model=name, **chosen):
        description = model_flags.description(Corpus()) | {"streams": 4, "truncation": 5}
        model = train._model(description, tfpara.simulate(2, tfpara.BSP(), sync_period=1))
    assert model.optimizer.gradient_scale == frames


@pytest.mark.parametrize(
    ("corpus", "chosen", "coefficients", "bands"),
    [
        (Corpus(), {}, None, 40),  # of prepare_speech
        (Corpus(56, features="fbank", num_mel=28, deltas=1), {}, 28, 28),
        (Corpus(160, features="given", deltas=1), {"bands": 80}, None, 80),
    ],
)
def test_the_convolution_runs_over_the_channels_of_a_frame(corpus, chosen, coefficients, bands):
    with flagsaver.flagsaver(model="cldnn-003", **chosen):
        made = model_flags.description(corpus, coefficients)
    assert made["arguments"]["bands"] == bands


@pytest.mark.parametrize(
    ("corpus", "chosen", "coefficients", "message"),
    [
        (
            Corpus(160, features="given", deltas=1),
            {},
            None,
            "nothing says what the 80 columns of the feats.scp of corpus are. .* --bands=80",
        ),
        (
            Corpus(129, features="given", deltas=2),
            {"bands": 40},
            80,
            "alone, --bands=40, and those of corpus have 43 numbers before deltas",
        ),
        (
            Corpus(129, features="given", deltas=2),
            {"bands": 43},
            80,
            "--coefficients=80 must be a multiple of the 43 .* Give --coefficients=43.",
        ),
        (Corpus(39, features="mfcc", num_ceps=13, deltas=2), {}, None, "those of corpus have MFCC"),
        (Corpus(120, features="plp", num_ceps=40, deltas=2), {}, None, "have PLP. Prepare"),
        (
            Corpus(129, features="fbank", num_mel=40, pitch=True, deltas=2),
            {},
            80,
            "have pitch. Prepare the corpus with --features=fbank and without --pitch",
        ),
        (Corpus(), {"model": "lstm-000", "bands": 40}, None, "--bands=40 is for --model=cldnn-003"),
    ],
)
def test_a_convolution_over_anything_else_is_refused(corpus, chosen, coefficients, message):
    with (
        flagsaver.flagsaver(**{"model": "cldnn-003", **chosen}),
        pytest.raises(ValueError, match=message),
    ):
        model_flags.description(corpus, coefficients)


def test_rbms_pretrain_sigmoids():
    assert model_flags.sigmoid_dnn(Corpus())["arguments"]["activation"] == "sigmoid"
    with flagsaver.flagsaver(model="dnn-001"):
        assert model_flags.sigmoid_dnn(Corpus())["arguments"]["activation"] == "sigmoid"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"activation": "relu"}, "--activation=relu, and RBMs give .* Give --activation=sigmoid"),
        ({"activation": "tanh"}, "--activation=tanh, and RBMs give the weights of sigmoid ones"),
        ({"model": "dnn-003"}, "--model=dnn-003 has relu units, and .* Choose --model=dnn-001"),
        ({"model": "lstm-000"}, "RBMs pretrain DNNs"),
    ],
)
def test_rbms_of_other_units_are_refused(chosen, message):
    with flagsaver.flagsaver(**chosen), pytest.raises(ValueError, match=message):
        model_flags.sigmoid_dnn(Corpus())


def test_the_bar_of_an_epoch_has_the_steps_of_that_epoch(capsys):
    bar = train._Bar()
    bar.set_params({"verbose": 2, "epochs": 2, "steps": None})
    for epoch, steps in enumerate((3, 2)):
        bar.on_epoch_begin(epoch)
        for step in range(steps):
            bar.on_train_batch_end(step)
        bar.on_epoch_end(epoch)
    lines = [line.split(" - ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["Epoch 1/2", "3/3", "Epoch 2/2", "2/2"]
