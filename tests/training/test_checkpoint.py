"""Checkpoints in one process of two devices; tests/distributed has those of a cluster."""

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import os
import shutil
import signal
import tempfile
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.checkpoint import manifest as manifests
from tfpara.checkpoint.base import check_run
from tfpara.checkpoint.local_store import LocalStore
from tfpara.checks import versions

pytestmark = pytest.mark.latest

DEVICES = ["CPU:0", "CPU:1"]
EPOCHS, STEPS, TAU = 3, 8, 2


def make(rule=None, devices=DEVICES, averages=None, seed=1, small=False, **options):
    """`small`: a layer and no averages, where what they hold is not the subject."""
    if averages is None:
        averages = {} if small else {"ema": tfpara.EMA(0.8, num_updates=False), "ma": tfpara.MA()}
    strategy = tfpara.PeriodicSyncStrategy(
        rule or tfpara.BMUF(0.5),
        devices=devices,
        averages=averages,
        **{"sync_period": TAU, **options},
    )
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = [keras.Input((6,))]
        if not small:
            layers.append(keras.layers.Dense(8))
            layers.append(keras.layers.BatchNormalization(momentum=0.9))
            layers.append(keras.layers.Dropout(0.3, seed=5))
        model = keras.Sequential([*layers, keras.layers.Dense(4)])
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[] if small else ["accuracy"],
        )
    return strategy, model


def minibatch(epoch, number):
    rng = np.random.default_rng([epoch, number])
    return rng.normal(size=(4, 6)).astype("float32"), rng.integers(0, 4, 4).astype("int32")


def epoch_data(strategy, log=None, total=2 * STEPS):
    """Minibatch k of an epoch is that of replica k mod N, whatever N is."""

    def of_this_worker(epoch, first):
        mine = [
            k
            for k in range(first, total)
            if (k - first) % strategy.num_replicas in strategy.local_replica_ids
        ]
        if log is not None:
            log.append((epoch, mine))
        xs, ys = zip(*(minibatch(epoch, k) for k in mine), strict=True) if mine else ([], [])
        x, y = np.reshape(xs, (-1, 4, 6)).astype("float32"), np.reshape(ys, (-1, 4)).astype("int32")
        return tf.data.Dataset.from_tensor_slices((x, y))

    return strategy.datasets_by_epoch(of_this_worker)


class Stop(Exception):
    pass


def stop_at(epoch, batch, error=Stop):
    """Stands for a kill: nothing after it runs."""

    def check(number, logs):
        if stopper.model.stop_training is False and (stopper.epoch, number) == (epoch, batch):
            raise error

    stopper = keras.callbacks.LambdaCallback(on_train_batch_end=check)
    stopper.epoch = 0
    stopper.on_epoch_begin = lambda e, logs=None: setattr(stopper, "epoch", e)
    return stopper


def everything(strategy, model):
    """All that a run ends with."""
    found = []
    for which in ("local", "global", *strategy.averages):
        with strategy.weights(model, which):
            for variable in model.variables:
                found += [c.numpy() for c in strategy.experimental_local_results(variable.value)]
    for variable in model.optimizer.variables:
        found += [c.numpy() for c in strategy.experimental_local_results(variable.value)]
    return found


def run(directory, rule=None, stop=None, epochs=EPOCHS, log=None, devices=DEVICES, **options):
    """One process of a run; returns what it ends with and its history, or None if stopped."""
    names = ("aggregation", "averages", "compression", "data_plan", "sync_period", "overlap")
    names += ("fragments", "small")
    settings = {k: options.pop(k) for k in names if k in options}
    # Another seed for each process that resumes: all it has is the checkpoint.
    seed = 1 + len(list(directory.glob("checkpoint-*")))
    strategy, model = make(rule, devices, seed=seed, **settings)
    callbacks = [tfpara.callbacks.Checkpoint(directory, **options)]
    if stop:
        callbacks.insert(0, stop_at(*stop))
    data = epoch_data(strategy, log)
    try:
        history = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks).history
    except Stop:
        callbacks[-1]._checkpoints.store.release()  # As the end of the process would.
        return None
    callbacks[-1]._checkpoints.store.release()
    return everything(strategy, model), history, strategy


@functools.cache
def uninterrupted(**options):
    """What `run` gives without a stop; how often it writes checkpoints does not change that."""
    with tempfile.TemporaryDirectory() as directory:
        return run(Path(directory), **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run of an epoch, to copy."""
    directory = tmp_path_factory.mktemp("finished")
    run(directory, epochs=1, small=True)
    return directory


@pytest.fixture
def finished_run(finished, tmp_path):
    """A copy of it, that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    """EASGD, replicated: test_data_that_know_no_epochs_are_read_again_up_to_the_position."""
    options = {"rule": tfpara.BMUF(0.5), "aggregation": "sharded"}
    whole, history, strategy = uninterrupted(**options)
    options["every_syncs"] = 1
    broken = tmp_path / "broken"
    assert run(broken, stop=(0, 4), **options) is None  # inside a block
    assert run(broken, stop=(1, 7), **options) is None  # at the end of an epoch
    log = []
    resumed, resumed_history, resumed_strategy = run(broken, log=log, **options)
    assert_same(resumed, whole)
    assert resumed_history["loss"] == history["loss"][1:]
    assert resumed_history["accuracy"] == history["accuracy"][1:]
    assert resumed_strategy.statistics().steps == strategy.statistics().steps == EPOCHS * STEPS
    assert resumed_strategy.statistics().syncs == strategy.statistics().syncs
    # The second process had synced after step 8 of epoch 1, and its checkpoint was not written.
    assert (1, list(range(12, 16))) in log


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_part_of_a_block_is_the_same_part_where_a_run_is_resumed(tmp_path):
    """Epochs of 8 minibatches in blocks of 3, and of 6 for each of two fragments."""
    options = {"every_syncs": 1, "rule": tfpara.BMUF(0.5), "sync_period": 3, "fragments": 2}
    options["small"] = True
    whole, _, _ = run(tmp_path / "whole", **options)
    # After a part of a block, inside one, and before the next part of one.
    assert run(tmp_path / "broken", stop=(1, 4), **options) is None
    resumed, _, _ = run(tmp_path / "broken", **options)
    assert_same(resumed, whole)


@pytest.mark.nightly
@pytest.mark.one_version
def test_what_rounding_has_left_out_is_in_a_checkpoint(tmp_path):
    options = {"every_syncs": 1, "compression": "int4", "small": True, "epochs": 2}
    whole, _, _ = run(tmp_path / "whole", **options)
    assert run(tmp_path / "broken", stop=(0, 5), **options) is None
    resumed, _, _ = run(tmp_path / "broken", **options)
    assert_same(resumed, whole)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("first", "second"), [("sharded", "replicated"), ("replicated", "sharded")]
)
def test_a_run_resumes_under_another_aggregation(tmp_path, first, second):
    whole, _, _ = uninterrupted(rule=tfpara.BMUF(0.5), aggregation="sharded")
    options = {"every_syncs": 1, "rule": tfpara.BMUF(0.5)}
    assert run(tmp_path / "moved", stop=(0, 4), aggregation=first, **options) is None
    moved, _, _ = run(tmp_path / "moved", aggregation=second, **options)
    for a, b in zip(moved, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("own", [False, True], ids=["global batches", "each worker's own"])
def test_data_that_know_no_epochs_are_read_again_up_to_the_position(tmp_path, own):
    ends = []
    for name, stops in (("whole", [None]), ("broken", [(1, 5), None])):
        for stop in stops:
            strategy, model = make(tfpara.EASGD(0.2))
            x = np.random.default_rng(1).normal(size=(80, 6)).astype("float32")
            data = tf.data.Dataset.from_tensor_slices((x, np.arange(80) % 4)).batch(8 >> own)
            validation = data.take(2)
            if own:
                data = strategy.distribute_datasets_from_function(lambda _, mine=data: mine)
            checkpoint = tfpara.callbacks.Checkpoint(tmp_path / name, every_syncs=1)
            callbacks = [*([stop_at(*stop)] if stop else []), checkpoint]
            try:
                model.fit(
                    data, epochs=3, verbose=0, callbacks=callbacks, validation_data=validation
                )
                ends.append(everything(strategy, model))
            except Stop:
                pass
            checkpoint._checkpoints.store.release()
    assert_same(*ends)


@pytest.mark.nightly
@pytest.mark.one_version
def test_resuming_after_the_last_minibatch_of_an_epoch(tmp_path):
    whole, whole_history, _ = uninterrupted()
    assert run(tmp_path / "run", every_syncs=1, stop=(1, 0)) is None
    # What is left was written after the last step, before the epoch's end.
    newest = max((tmp_path / "run").glob("checkpoint-*"))
    shutil.rmtree(newest)
    last = json.loads((max((tmp_path / "run").glob("c*")) / "manifest.json").read_text())
    assert last["position"]["steps"] == STEPS
    resumed, history, _ = run(tmp_path / "run", every_syncs=1)
    assert_same(resumed, whole)
    assert history["accuracy"] == whole_history["accuracy"]


PASS_ROWS = np.random.default_rng(3).normal(size=(28, 6)).astype("float32")
PASS_LABELS = np.arange(28) % 4


class OfBatches(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, number):
        rows = slice(4 * number, 4 * number + 4)
        return PASS_ROWS[rows], PASS_LABELS[rows]


def batches_without_end():
    for number in itertools.cycle(range(7)):
        yield OfBatches()[number]


def dataset_of_batches():
    return tf.data.Dataset.from_tensor_slices((PASS_ROWS, PASS_LABELS)).batch(4)


# Data of 7 batches for `fit`, whose epochs have 3 steps.
PASSES = {
    "repeated": lambda: {"x": dataset_of_batches().shuffle(7, seed=1).repeat()},
    "with an end": lambda: {"x": dataset_of_batches()},
    "of unknown length": lambda: {"x": dataset_of_batches().filter(lambda x, y: True)},
    "of twice an epoch": lambda: {"x": dataset_of_batches().take(6).filter(lambda x, y: True)},
    "arrays": lambda: {"x": PASS_ROWS, "y": PASS_LABELS, "batch_size": 4},
    "PyDataset": lambda: {"x": OfBatches(workers=1), "shuffle": True},
    "generator": lambda: {"x": batches_without_end()},
}


def over_passes(data, directory=None, stop=None):
    """Returns the weights and losses of five epochs; None if it is stopped, in (epoch, batch)."""
    where = contextlib.nullcontext()
    callbacks = []
    if directory is not None:
        where = tfpara.PeriodicSyncStrategy(tfpara.BSP(), devices=DEVICES, sync_period=1).scope()
        callbacks = [tfpara.callbacks.Checkpoint(directory, every_syncs=1)]
    if stop:
        callbacks.append(stop_at(*stop))  # after a checkpoint, which is written last
    keras.utils.set_random_seed(1)
    with where:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        try:
            history = model.fit(
                **PASSES[data](), epochs=5, steps_per_epoch=3, verbose=0, callbacks=callbacks
            ).history["loss"]
        except Stop:
            return None
    return model.get_weights(), history


# Where Keras' data end within an epoch, it is shorter, and the next one begins a pass.
@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize(
    ("data", "stops"),
    [
        ("repeated", [(2, 1), (4, 2)]),
        ("with an end", [(1, 0), (2, 0), (4, 1)]),
        ("of unknown length", [(1, 0), (4, 0)]),
        ("of twice an epoch", [(1, 2), (4, 2)]),
        ("arrays", [(1, 2)]),
        ("PyDataset", [(1, 1), (4, 0)]),
        ("generator", [(3, 1)]),
    ],
)
def test_a_pass_that_lasts_several_epochs_goes_on_where_it_was(tmp_path, capsys, data, stops):
    # Where data are shuffled, plain Keras has another order.
    shuffled = data in ("repeated", "arrays", "PyDataset")
    whole = over_passes(data, tmp_path / "whole" if shuffled else None)
    for stop in stops:
        assert over_passes(data, tmp_path / "broken", stop) is None
    weights, losses = over_passes(data, tmp_path / "broken")
    np.testing.assert_allclose(losses, whole[1][-len(losses) :], rtol=1e-5)
    for weight, want in zip(weights, whole[0], strict=True):
        np.testing.assert_allclose(weight, want, rtol=1e-5, atol=1e-6)
    assert "twice or not at all" not in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_run_that_goes_on_in_data_of_another_order_says_so(tmp_path, capsys, monkeypatch):
    given = {"x": dataset_of_batches().shuffle(7, seed=1)}
    monkeypatch.setitem(PASSES, "shuffled", lambda: given)
    for stop in ((0, 2), (4, 0)):
        assert over_passes("shuffled", tmp_path, stop) is None
    assert "rows may be trained" not in capsys.readouterr().err  # the first order is the seed's
    over_passes("shuffled", tmp_path)
    assert "another order whenever it is read: rows may be trained" in capsys.readouterr().err


class Scores(keras.callbacks.Callback):
    """Keeps the logs that callbacks before `Checkpoint` see."""

    def __init__(self):
        super().__init__()
        self.logs = {}

    def on_epoch_end(self, epoch, logs=None):
        self.logs[epoch] = dict(logs)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("stop", [(1, 7), (1, 5)], ids=["end", "inside"])
def test_epochs_logs_and_validation_are_those_of_an_uninterrupted_run(tmp_path, stop):
    """At (1, 7) no step of the resumed epoch is left; validation reads data that know no epochs."""
    validation = tf.data.Dataset.from_tensor_slices(minibatch(99, 0)).batch(2)

    def logs(name, stop=None):
        strategy, model = make()
        scores = Scores()
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path / name, every_syncs=1)
        callbacks = [scores, *([stop_at(*stop)] if stop else []), checkpoint]
        if stop == (1, 7):  # Once its sync was written.
            callbacks.reverse()
        with contextlib.suppress(Stop):
            model.fit(
                epoch_data(strategy),
                epochs=EPOCHS,
                verbose=0,
                callbacks=callbacks,
                validation_data=validation,
            )
        checkpoint._checkpoints.store.release()
        return scores.logs

    whole = logs("whole")
    assert set(whole) == {0, 1, 2}
    assert set(logs("broken", stop)) == {0}
    assert logs("broken") == {epoch: whole[epoch] for epoch in (1, 2)}
    assert set(whole[1]) == {"loss", "accuracy", "val_loss", "val_accuracy"}


@pytest.mark.nightly_cases("1")
@pytest.mark.one_version
@pytest.mark.parametrize("replicas", [1, 3])
def test_resumed_on_another_number_of_replicas_every_minibatch_is_used_once(tmp_path, replicas):
    assert run(tmp_path, every_syncs=2, stop=(0, 5)) is None
    strategy, model = make(devices=[f"CPU:{i}" for i in range(2)], seed=9)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    look = keras.callbacks.LambdaCallback()
    seen = {}

    def at_begin(epoch, logs=None):
        seen[epoch] = model.get_weights()

    look.on_epoch_begin = at_begin
    # What the same number of replicas goes on from: W + ηΔ.
    with pytest.raises(Stop):
        model.fit(
            epoch_data(strategy), epochs=1, verbose=0, callbacks=[checkpoint, look, stop_at(0, 0)]
        )
    checkpoint._checkpoints.store.release()
    log = []
    other, other_model = make(devices=[f"CPU:{i}" for i in range(replicas)], seed=8)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    first = {}
    look = keras.callbacks.LambdaCallback()
    look.on_epoch_begin = lambda epoch, logs=None: first.setdefault(
        epoch,
        [
            [c.numpy() for c in other.experimental_local_results(v.value)]
            for v in other_model.trainable_variables
        ],
    )
    history = other_model.fit(
        epoch_data(other, log), epochs=1, verbose=0, callbacks=[checkpoint, look]
    ).history
    checkpoint._checkpoints.store.release()
    # Two syncs of 2 steps of 2 replicas were done.
    assert log[-1] == (0, list(range(8, 16)))
    for components, want in zip(first[0], model_weights(seen[0], model), strict=True):
        for component in components:
            np.testing.assert_allclose(component, want, atol=1e-6)
    # The epoch's accuracy is that of all its 64 frames: a multiple of 1/64.
    assert abs(history["accuracy"][0] * 64 - round(history["accuracy"][0] * 64)) < 1e-4


class Steps(keras.metrics.Metric):
    """Counts the steps of the mean replica."""

    def __init__(self):
        super().__init__(name="steps")
        self.count = self.add_variable((), "zeros", name="count", aggregation="mean")

    def update_state(self, *_, sample_weight=None):
        self.count.assign_add(1)

    def result(self):
        return keras.ops.convert_to_tensor(self.count)


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [1, 4])
def test_a_mean_goes_on_with_another_number_of_replicas(tmp_path, capsys, replicas):
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)

    def trained(replicas, *callbacks):
        strategy, model = make(devices=[f"CPU:{i}" for i in range(replicas)], small=True)
        with strategy.scope():
            model.compile(keras.optimizers.SGD(rate), "mse", metrics=[Steps()])
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path, every_syncs=2)
        data = epoch_data(strategy)
        try:
            return model.fit(data, epochs=1, verbose=0, callbacks=[checkpoint, *callbacks]).history
        finally:
            checkpoint._checkpoints.store.release()

    with pytest.raises(Stop):
        trained(2, stop_at(0, 5))
    # Of 16 minibatches 8 were trained, in four steps of each of two replicas.
    assert trained(replicas)["steps"] == [4 + 8 / replicas]
    assert f"with {replicas} in place of 2 replicas, and the" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.one_version
def test_resumed_twice_on_other_numbers_of_replicas_every_minibatch_is_used_once(tmp_path):
    log = []
    options = {"overlap": 1, "fragments": 2, "small": True}
    assert run(tmp_path, every_syncs=1, stop=(0, 4), **options) is None
    # 2 syncs of 2 steps of 2 replicas, then 1 of 3 replicas, then what is left to 1 replica.
    three, one = ([f"CPU:{i}" for i in range(n)] for n in (3, 1))
    assert run(tmp_path, every_syncs=1, stop=(0, 2), devices=three, **options) is None
    run(tmp_path, devices=one, log=log, epochs=1, **options)
    assert log[-1] == (0, list(range(14, 16)))


@pytest.mark.nightly_cases("11")
@pytest.mark.one_version
@pytest.mark.parametrize("steps", [None, 11])
def test_minibatches_that_a_function_makes_are_used_once_by_other_numbers_of_replicas(
    tmp_path, steps
):
    """Each row has a weight of its own, to which its only step adds 1, divided by N in the sync."""
    rows = np.eye(24, dtype="float32")
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(1)

    def weights(replicas, *callbacks):
        devices = [f"CPU:{i}" for i in range(replicas)]
        strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), devices=devices, sync_period=1)
        with strategy.scope():
            layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((24,)), layer])
            model.compile(keras.optimizers.SGD(1.0), lambda label, output: -output)
        data = strategy.distribute_datasets_from_function(lambda context: dataset)
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path, every_syncs=1)
        try:
            model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[checkpoint, *callbacks])
        finally:
            checkpoint._checkpoints.store.release()
        return model.get_weights()[0].ravel()

    for replicas, kept in ((2, 3), (3, 2)):
        with pytest.raises(Stop):
            weights(replicas, stop_at(0, kept))
    want = np.repeat([1 / 2, 1 / 3, 1 / 2], [6, 6, 12])
    np.testing.assert_allclose(weights(2), want, rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_sync_that_was_in_the_air_counts_on_another_number_of_replicas(tmp_path):
    strategy, model = make(tfpara.BSP(), small=True, overlap=True)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path, every_syncs=1)
    wanted = []

    def look(batch, logs=None):
        if batch == 4:  # the second sync has begun, and was kept
            with strategy.weights(model, "global"):
                wanted.extend(v.numpy() for v in model.trainable_variables)
            raise Stop

    looking = keras.callbacks.LambdaCallback(on_train_batch_begin=look)
    with pytest.raises(Stop):
        model.fit(epoch_data(strategy), verbose=0, callbacks=[checkpoint, looking])
    checkpoint._checkpoints.store.release()
    other, again = make(tfpara.BSP(), ["CPU:0", "CPU:1", "CPU:2"], small=True, overlap=True)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    found = []

    def begin(epoch, logs=None):
        for variable in again.trainable_variables:
            found.append([c.numpy() for c in other.experimental_local_results(variable.value)])

    beginning = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
    again.fit(epoch_data(other), verbose=0, callbacks=[checkpoint, beginning])
    checkpoint._checkpoints.store.release()
    for components, value in zip(found, wanted, strict=True):
        assert len(components) == 3
        for component in components:
            np.testing.assert_allclose(component, value, atol=1e-6)


def model_weights(weights, model):
    """The trainable ones of `get_weights`."""
    trainable = {id(v) for v in model.trainable_variables}
    return [w for w, v in zip(weights, model.weights, strict=True) if id(v) in trainable]


@pytest.mark.one_version
def test_only_the_newest_are_kept_and_what_was_interrupted_goes(tmp_path):
    (tmp_path / ".partial-00000007-0").mkdir()
    run(tmp_path, every_syncs=1, keep=2, small=True)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint-00000015", "checkpoint-00000016", "lock"]
    manifest = json.loads((tmp_path / names[-2] / "manifest.json").read_text())
    assert manifest["position"] == {
        "epoch": 3,
        "steps": 0,
        "minibatches": 0,
        "finished": False,
    }


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.one_version
def test_a_damaged_checkpoint_is_passed_over_and_no_run_starts_from_zero_by_itself(tmp_path):
    whole = uninterrupted(small=True)[0]
    assert run(tmp_path / "run", stop=(2, 5), small=True) is None
    newest, second, *older = sorted((tmp_path / "run").glob("checkpoint-*"), reverse=True)
    damage(second / "part-00000.data-00000-of-00001")
    manifest = (newest / "manifest.json").read_text()
    assert '"minibatches": 0' in manifest
    # It is JSON as before, and would have the run leave out eight minibatches.
    (newest / "manifest.json").write_text(manifest.replace('"minibatches": 0', '"minibatches": 8'))
    with (
        pytest.warns(UserWarning, match=rf"{newest.name}.*damaged.*the checkpoint before it"),
        pytest.warns(UserWarning, match=rf"{second.name}.*damaged.*the checkpoint before it"),
    ):
        resumed, history, _ = run(tmp_path / "run", small=True)
    assert_same(resumed, whole)
    assert len(history["loss"]) == EPOCHS
    for path in (tmp_path / "run").glob("checkpoint-*"):
        (path / "manifest.json").write_text("{")
    with pytest.warns(UserWarning), pytest.raises(tfpara.CheckpointError, match="if_damaged"):
        run(tmp_path / "run", small=True)
    with pytest.warns(UserWarning):
        _, history, _ = run(tmp_path / "run", if_damaged="start", epochs=1, small=True)
    assert len(history["loss"]) == 1
    assert older


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_damaged_checkpoint_takes_no_place_among_those_that_are_kept(finished_run):
    damage(finished_run / "checkpoint-00000002" / "manifest.json")
    with pytest.warns(UserWarning, match="00000002.*the checkpoint before it"):
        run(finished_run, epochs=1, small=True, keep=2)
    assert {p.name[-1] for p in finished_run.glob("c*")} == {"1", "2", "3"}
    run(finished_run, epochs=2, small=True, keep=2)
    assert {p.name[-1] for p in finished_run.glob("c*")} == {"3", "4"}


@pytest.mark.one_version
def test_a_missing_part_is_damage(finished_run):
    for path in finished_run.glob("checkpoint-*/part-00000.index"):
        path.unlink()
    with pytest.warns(UserWarning, match="part-00000.index"), pytest.raises(tfpara.CheckpointError):
        run(finished_run, small=True)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path):
    first = {"data_plan": {"minibatch": 4, "epochs.of": 1}, "small": True}
    run(tmp_path, epochs=1, **first)
    common = {**first, "may_change": ("epochs.of",)}
    changed = {"minibatch": 4, "epochs.of": 7}
    run(tmp_path, epochs=1, **{**common, "may_change": "epochs.of", "data_plan": changed})
    for change, message in [
        ({"rule": tfpara.BSP()}, "rule: the checkpoint has 'BMUF.*this run has 'BSP"),
        ({"averages": {"ema": tfpara.EMA(0.7)}}, "averages: "),
        ({"sync_period": 4}, "sync_period: the checkpoint has 2, this run has 4"),
        ({"may_change": ("of",), "data_plan": {"minibatch": 4, "epochs.of": 7}}, "data_plan.epo"),
        (
            {"data_plan": {"minibatch": 8}},
            r"data_plan.minibatch: the checkpoint has 4, this run has 8",
        ),
    ]:
        with pytest.raises(tfpara.CheckpointError, match=message):
            run(tmp_path, **{**common, **change})


def compiled_anew(rate=0.1, metrics=()):
    """Returns a strategy and the small model, compiled with another rate or other metrics."""
    strategy, model = make(small=True)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
        model.compile(optimizer, model.loss, metrics=list(metrics))
    return strategy, model


def test_an_optimizer_of_other_settings_is_refused_by_name(finished_run):
    strategy, model = compiled_anew(keras.optimizers.schedules.CosineDecay(0.1, 20))
    message = r"00002 is of another run: .* optimizer's variables begin with \[\[\], \[\], "
    with pytest.raises(tfpara.CheckpointError, match=message):
        callbacks = [tfpara.callbacks.Checkpoint(finished_run)]
        model.fit(epoch_data(strategy), epochs=2, verbose=0, callbacks=callbacks)


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [0, 6])
def test_a_run_goes_on_with_other_metrics(finished_run, steps):
    """Its checkpoints have no metrics but the loss, which counts only what is trained now."""
    for path in finished_run.glob("checkpoint-*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["position"] |= {"epoch": 1, "steps": steps, "minibatches": 2 * steps}
        path.write_text(manifests.text(manifest))
    strategy, model = compiled_anew(metrics=["accuracy"])
    callbacks = [tfpara.callbacks.Checkpoint(finished_run)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.fit(epoch_data(strategy), epochs=2, verbose=0, callbacks=callbacks)
    said = [str(each.message) for each in warned]
    told = [text for text in said if "metrics of this epoch cover only the rest of it" in text]
    assert len(told) == (steps > 0)


@pytest.mark.nightly
def test_a_checkpoint_that_lacks_facts_about_the_data_is_used(tmp_path):
    """As those of older versions lack what their run's `may_change` had."""
    run(tmp_path, epochs=1, small=True, data_plan={"minibatch": 4})
    run(tmp_path, epochs=1, small=True, data_plan={"minibatch": 4, "epochs": 1})
    with pytest.raises(tfpara.CheckpointError, match="data_plan.minibatch: the checkpoint has 4"):
        run(tmp_path, epochs=1, small=True, data_plan={"epochs": 1})


@pytest.mark.parametrize("change", ["version", "format"])
def test_a_checkpoint_of_another_version_is_used_and_of_another_format_refused(
    finished_run, change
):
    for path in finished_run.glob("checkpoint-*/manifest.json"):
        manifest = json.loads(path.read_text())
        if change == "version":
            manifest["versions"]["tfpara version"] = "0.0.1"
            path.write_text(manifests.text(manifest))
        else:
            path.write_text(json.dumps(manifest | {"format": 3}))
    if change == "version":
        with pytest.warns(UserWarning, match="was written with tfpara version 0.0.1; numbers may"):
            assert run(finished_run, epochs=1, small=True)
    else:
        with pytest.raises(tfpara.CheckpointError, match="has format 3; this version reads 2"):
            run(finished_run, small=True)


def test_a_checkpoint_with_other_buckets_is_refused(finished_run):
    for path in finished_run.glob("checkpoint-*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["bucket_sizes"].append(1)
        path.write_text(manifests.text(manifest))
    with pytest.raises(tfpara.CheckpointError, match="buckets, of other sizes than the 1 of this"):
        run(finished_run, small=True)


@pytest.mark.one_version
def test_a_directory_in_use_is_refused(tmp_path):
    with (tmp_path / "lock").open("w") as other:  # as another process would have it
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(tfpara.CheckpointError, match="in use by another run"):
            run(tmp_path, small=True)
    run(tmp_path, epochs=1, small=True)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EWOULDBLOCK, r"in use by another run \(process 7 on elsewhere\)"),
        (errno.EACCES, "in use by another run"),
        (errno.ENOLCK, "file system without locks .flock: No locks available., so a second run"),
        (errno.ENOSYS, "file system without locks .flock: Function not implemented."),
        (errno.EOPNOTSUPP, "file system without locks"),
        (errno.EIO, "cannot be written to .Input/output error"),
    ],
)
def test_what_flock_says_is_told_apart(tmp_path, monkeypatch, number, message):
    (tmp_path / "lock").write_text("process 7 on elsewhere")

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(tfpara.CheckpointError, match=message):
        LocalStore(tmp_path, 1).lock()
    assert (tmp_path / "lock").read_text() == "process 7 on elsewhere"


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_complete_run_says_so_and_goes_on_with_more_epochs(tmp_path, capsys):
    whole, whole_history, _ = uninterrupted(small=True)
    capsys.readouterr()
    run(tmp_path, epochs=1, small=True)
    assert capsys.readouterr().out == ""
    _, history, strategy = run(tmp_path, epochs=1, small=True)
    assert (history, strategy.statistics().steps) == ({}, STEPS)
    assert capsys.readouterr().out == (
        f"The run in '{tmp_path}' is complete: 1 of 1 epochs are trained (checkpoint 2), so "
        "nothing is trained now. To train longer, give more epochs. To begin anew, give "
        "another directory or remove this one.\n"
    )
    resumed, history, _ = run(tmp_path, small=True)
    assert capsys.readouterr().out == "Resuming from checkpoint 2: epoch 2.\n"
    assert_same(resumed, whole)
    assert history["loss"] == whole_history["loss"][1:]


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_run_that_has_stopped_says_so(tmp_path, capsys):
    def fit():
        strategy, model = make(small=True)
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "first")
        data = epoch_data(strategy)
        model.fit(data, epochs=9, verbose=0, callbacks=[stop, checkpoint])
        checkpoint._checkpoints.store.release()
        return capsys.readouterr().out, strategy, model, data

    assert fit()[0] == ""
    said, strategy, model, data = fit()
    assert model.stop_training is True
    assert "is complete: it stopped by itself after 2 epochs (checkpoint 3), so nothing" in said
    assert "with initial_epoch=2 and a Checkpoint of another directory" in said
    # The second time, all epochs are trained, which is no stop.
    for _ in range(2):
        second = tfpara.callbacks.Checkpoint(tmp_path / "second")
        model.fit(data, initial_epoch=2, epochs=EPOCHS, verbose=0, callbacks=[second])
        assert model.stop_training is False
    assert_same(everything(strategy, model), uninterrupted(small=True)[0])
    assert len(list((tmp_path / "second").glob("checkpoint-*"))) == 2


@pytest.mark.nightly
def test_one_callback_in_several_fits(tmp_path):
    """A fit for each epoch is one run; the same epochs again are not."""
    strategy, model = make(small=True)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    data = epoch_data(strategy)
    for epoch in range(2):
        model.fit(data, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[checkpoint])
    newest = max(tmp_path.glob("checkpoint-*"))
    assert json.loads((newest / "manifest.json").read_text())["position"]["epoch"] == 2
    with pytest.raises(ValueError, match="begins epoch 0 again"):
        model.fit(data, epochs=2, verbose=0, callbacks=[checkpoint])
    # The same process may open the directory again, as a notebook does: this goes on at epoch 2.
    again = tfpara.callbacks.Checkpoint(tmp_path)
    history = model.fit(data, epochs=3, verbose=0, callbacks=[again]).history
    assert len(history["loss"]) == 1


@pytest.mark.nightly
@pytest.mark.one_version
def test_the_callback_of_a_fit_that_has_ended_goes_on_with_another_model(tmp_path):
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    for epoch in range(2):
        strategy, model = make(small=True, seed=1 + epoch)
        data, ends = epoch_data(strategy), {"initial_epoch": epoch, "epochs": epoch + 1}
        model.fit(data, **ends, verbose=0, callbacks=[checkpoint])
    whole = uninterrupted(small=True, epochs=2)[0]
    assert_same(run(tmp_path, small=True, epochs=2)[0], whole)  # what was written
    assert_same(everything(strategy, model), whole)


@pytest.mark.one_version
def test_a_disk_that_is_full_leaves_the_checkpoints_before_it(tmp_path, monkeypatch):
    from tfpara.checkpoint import local_store

    whole = uninterrupted(small=True)[0]
    writes = []

    def full(path):
        writes.append(path)
        if len(writes) > 12:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_store, "sync_to_disk", full)
    with pytest.raises(tfpara.CheckpointError, match="No space left on device"):
        run(tmp_path / "run", every_syncs=1, small=True)
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob(".partial*"))
    numbers = [int(p.name[-8:]) for p in (tmp_path / "run").glob("checkpoint-*")]
    assert numbers == [1, 2] or numbers == [2, 1]
    # That process has ended; its lock with it.
    import gc

    gc.collect()
    shutil.copytree(tmp_path / "run", tmp_path / "after")
    assert_same(run(tmp_path / "after", small=True)[0], whole)


class Counter:
    def __init__(self, value=0):
        self.value = value

    def get_state(self):
        return {"value": self.value}

    def set_state(self, state):
        self.value = state["value"]


def test_states_of_callbacks_and_random_numbers_come_back(tmp_path):
    import random

    drawn = []
    for first in (True, False):
        random.seed(1 if first else 2)
        np.random.seed(1 if first else 2)
        strategy, model = make(small=True)
        counter = Counter(17 if first else 0)
        strategy.keep_state("counter", counter)
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
        model.fit(epoch_data(strategy), epochs=1, verbose=0, callbacks=[checkpoint])
        checkpoint._checkpoints.store.release()
        assert counter.value == 17
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


SCORES = [3.0, 1.0, 2.0, 0.5]


@pytest.mark.one_version
@pytest.mark.nightly_cases("asynchronous")
@pytest.mark.parametrize("run", ["synchronous", "asynchronous"])
def test_a_resumed_run_does_not_overwrite_a_better_model(run, tmp_path):
    """The third epoch scores worse than the second, which another process has trained."""
    set_score = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(score=SCORES[epoch])
    )
    for epochs in (1, 2, 3, 4):
        best = keras.callbacks.ModelCheckpoint(
            tmp_path / "{epoch}.keras", monitor="score", mode="min", save_best_only=True
        )
        if run == "synchronous":
            strategy, model = make(small=True)
            checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run")
            fit, data = model.fit, epoch_data(strategy)
        else:
            strategy = tfpara.simulate_async(2, tfpara.ASGD())
            with strategy.scope():
                model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
                model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            checkpoint = tfpara.AsyncCheckpoint(tmp_path / "run")
            fit = functools.partial(strategy.fit, model)
            data = tf.data.Dataset.from_tensors(minibatch(0, 0)).repeat(4)
        fit(data, epochs=epochs, verbose=0, callbacks=[set_score, best, checkpoint])
        assert best.best == min(SCORES[:epochs])
        if run == "synchronous":
            checkpoint._checkpoints.store.release()
    assert sorted(path.stem for path in tmp_path.glob("*.keras")) == ["1", "2", "4"]


def test_a_state_that_an_object_does_not_take_is_named(finished_run):
    strategy, model = make(small=True)
    strategy.keep_state("counter", Counter())
    for path in finished_run.glob("checkpoint-*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["states"]["counter"] = {"other": 1}
        path.write_text(manifests.text(manifest))
    checkpoint = tfpara.callbacks.Checkpoint(finished_run)
    told = "checkpoint-0.*set_state.. of 'counter' does not take its state: KeyError: 'value'"
    with pytest.raises(tfpara.CheckpointError, match=told):
        model.fit(epoch_data(strategy), epochs=1, verbose=0, callbacks=[checkpoint])


def test_a_state_that_json_cannot_carry_is_named(tmp_path):
    strategy, model = make(small=True)
    strategy.keep_state("score", Counter(np.float32(1)))
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    with pytest.raises(tfpara.CheckpointError, match="state of 'score' cannot be kept.*float32"):
        model.fit(epoch_data(strategy), epochs=1, verbose=0, callbacks=[checkpoint])
    checkpoint._checkpoints.store.release()


@pytest.mark.nightly_cases("last*", "validation")
@pytest.mark.parametrize("when", ["inside", "last block", "validation"])
@pytest.mark.one_version
def test_asked_to_end_it_writes_a_checkpoint_and_leaves(tmp_path, when):
    whole = uninterrupted(epochs=2, small=True)[0]
    validation = tf.data.Dataset.from_tensor_slices(minibatch(99, 0)).batch(2)
    strategy, model = make(small=True)

    def ask(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # Some schedulers send it twice.

    asking = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            ask() if batch == {"inside": 4, "last block": STEPS - 1}.get(when) else None
        )
    )
    asking.on_test_begin = lambda logs=None: ask() if when == "validation" else None
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run")
    with pytest.raises(SystemExit) as left:
        model.fit(
            epoch_data(strategy),
            epochs=2,
            verbose=0,
            callbacks=[asking, checkpoint],
            validation_data=validation,
        )
    assert left.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    manifest = json.loads((max((tmp_path / "run").glob("c*")) / "manifest.json").read_text())
    position = (manifest["position"]["epoch"], manifest["position"]["steps"])
    assert position == ((0, 6) if when == "inside" else (1, 0))
    assert_same(run(tmp_path / "run", epochs=2, small=True)[0], whole)


@pytest.mark.nightly
@pytest.mark.one_version
def test_asked_to_end_in_its_last_block_a_run_is_complete_and_leaves(tmp_path):
    strategy, model = make(small=True)
    ask = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            os.kill(os.getpid(), signal.SIGTERM) if batch == STEPS - 1 else None
        )
    )
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    with pytest.raises(tfpara.callbacks.Preempted):
        model.fit(epoch_data(strategy), epochs=1, verbose=0, callbacks=[ask, checkpoint])
    assert signal.getsignal(signal.SIGTERM) == before
    assert run(tmp_path, epochs=1, small=True)[1] == {}


@pytest.mark.nightly
@pytest.mark.one_version
def test_asked_to_end_while_it_writes_the_last_checkpoint_it_leaves(tmp_path):
    class Asking(Counter):
        def get_state(self):
            if len(list(tmp_path.glob("checkpoint-*"))) == 1:  # the second one is being written
                os.kill(os.getpid(), signal.SIGTERM)
            return super().get_state()

    strategy, model = make(small=True)
    strategy.keep_state("asking", Asking(0))
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path)
    with pytest.raises(tfpara.callbacks.Preempted):
        model.fit(epoch_data(strategy), epochs=1, verbose=0, callbacks=[checkpoint])
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("where", ["batch", "begin"])
def test_the_callback_of_a_fit_that_failed_goes_on_in_the_next_one(tmp_path, where):
    """It failed in a batch, or once more before the first epoch after the checkpoint."""
    whole, history, _ = uninterrupted(small=True)
    strategy, model = make(small=True)
    data = epoch_data(strategy)
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path, every_syncs=1)

    def fit(*more):
        callbacks = [*more, checkpoint]
        return model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks).history

    with pytest.raises(Stop):
        fit(stop_at(1, 4))
    if where == "begin":

        def fail(epoch, logs):
            raise Stop

        with pytest.raises(Stop):
            fit(keras.callbacks.LambdaCallback(on_epoch_begin=fail))
    assert fit()["loss"] == history["loss"][1:]
    assert_same(everything(strategy, model), whole)


@pytest.mark.nightly_cases("True")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.one_version
def test_a_fit_that_fails_leaves_nothing_behind_and_the_next_one_goes_on(tmp_path, overlap):
    """In one process, each time with a callback of its own, as in a loop that tries again."""
    whole = uninterrupted(small=True, **({"overlap": True} if overlap else {}))[0]
    strategy, model = make(small=True, overlap=overlap)
    data, received = epoch_data(strategy), []

    def own(number, frame):
        received.append(number)

    def fit(*more):
        checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run", every_syncs=1)
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[*more, checkpoint])

    def assert_nothing_is_left():
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.set_wakeup_fd(-1) == -1
        with (tmp_path / "run/lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    former = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(Stop):
            fit(stop_at(0, 4))
        assert_nothing_is_left()
        try:
            fit(stop_at(1, 2, KeyboardInterrupt))
        except KeyboardInterrupt:
            # The error holds the call of fit, which has ended all the same.
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
        assert_nothing_is_left()
        fit()
        assert_nothing_is_left()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert_same(everything(strategy, model), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep=0"),
        ({"every_syncs": 0}, "every_syncs=0"),
        ({"every_minutes": -1}, "every_minutes=-1"),
        ({"if_damaged": "ignore"}, "refuse, start"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfpara.callbacks.Checkpoint("run", **arguments)


def test_a_model_of_no_strategy_is_told_what_to_use(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="BackupAndRestore"):
        model.fit(
            np.ones((4, 2)),
            np.ones((4, 1)),
            callbacks=[tfpara.callbacks.Checkpoint(tmp_path)],
            verbose=0,
        )


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_block_closed_by_hand_does_not_keep_checkpoints_from_being_written(tmp_path):
    strategy, model = make(small=True)
    close = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 2 and strategy.synchronize()
    )
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path, every_syncs=1, keep=99)
    model.fit(epoch_data(strategy), epochs=1, verbose=0, callbacks=[close, checkpoint])
    steps = [
        json.loads((path / "manifest.json").read_text())["position"]["steps"]
        for path in sorted(tmp_path.glob("checkpoint-*"))
    ]
    # τ = 2: after steps 2, by hand after 3, then after 5 and 7; before and after the epoch.
    assert steps == [0, 2, 3, 5, 7, 0]


def test_stopping_together_stops_at_the_next_sync():
    strategy, model = make(small=True)
    wish = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == 2)
    )
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    callbacks = [wish, count, tfpara.callbacks.StopTogether()]
    model.fit(epoch_data(strategy), epochs=3, verbose=0, callbacks=callbacks)
    assert steps == [0, 1, 2, 3]


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("stops", [False, True])
def test_stopping_together_does_not_forget_that_the_run_is_to_leave(tmp_path, stops):
    strategy, model = make(small=True)
    # τ = 2, and the epoch ends with half a block, whose sync tells all of the wish to leave.
    data, last = epoch_data(strategy, total=2 * STEPS - 2), STEPS - 2

    def wish(batch, logs):
        if batch == last - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        model.stop_training = stops and batch == last

    ask = keras.callbacks.LambdaCallback(on_train_batch_end=wish)
    callbacks = [ask, tfpara.callbacks.Checkpoint(tmp_path), tfpara.callbacks.StopTogether()]
    with pytest.raises(tfpara.callbacks.Preempted):
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    manifest = json.loads((max(tmp_path.glob("c*")) / "manifest.json").read_text())
    position = {"epoch": 1, "steps": 0, "minibatches": 0, "finished": stops}
    assert manifest["position"].items() >= position.items()


@pytest.mark.nightly
def test_a_lesser_wish_does_not_replace_a_greater_one():
    from tfpara.sync.one_sync.reports import Request

    strategy, model = make(small=True)
    model.fit(epoch_data(strategy), epochs=1, verbose=0)
    strategy.request(Request.STOP)
    strategy.request(Request.CHECKPOINT)
    strategy.synchronize()
    assert strategy.synchronizer_of(model).agreement().request == Request.STOP


@pytest.mark.nightly
@pytest.mark.one_version
def test_epochs_of_unknown_and_different_length_are_trained_whole(tmp_path):
    """Keras would cut all epochs to the length of the first that ends."""
    lengths = [8, 6, 10]
    assert fit_epochs_of(lengths, tmp_path, stop_at(0, 5)) is None
    counts, strategy = fit_epochs_of(lengths, tmp_path)
    assert counts == [4, 6, 10]
    assert strategy.statistics().steps == sum(lengths)


def fit_epochs_of(lengths, directory, *callbacks):
    strategy, model = make(small=True)
    counts = []

    def of_epoch(epoch, first):
        one = tf.data.Dataset.from_tensors(minibatch(epoch, 0))
        return tf.data.Dataset.range(2 * lengths[epoch] - first).flat_map(lambda _: one)

    count = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: counts.append(0),
        on_train_batch_end=lambda batch, logs: counts.append(counts.pop() + 1),
    )
    checkpoint = tfpara.callbacks.Checkpoint(directory, every_syncs=1)
    data = strategy.datasets_by_epoch(of_epoch)
    try:
        model.fit(data, epochs=3, verbose=0, callbacks=[*callbacks, count, checkpoint])
    except Stop:
        return None
    finally:
        checkpoint._checkpoints.store.release()
    return counts, strategy


@pytest.mark.nightly
def test_a_resumed_recurrent_model_carries_its_state_on(tmp_path):
    """Keras does not count the state of a stateful layer among the model's variables."""
    ends = []
    for name, stop in (("whole", None), ("broken", (0, 4)), ("broken", None)):
        strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=TAU, devices=DEVICES)
        keras.utils.set_random_seed(1 if not list((tmp_path / name).glob("c*")) else 2)
        with strategy.scope():
            inputs = keras.Input(batch_shape=(4, 3, 2))
            outputs = keras.layers.Dense(4)(keras.layers.LSTM(5, stateful=True)(inputs))
            model = keras.Model(inputs, outputs)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.5), loss)

        def of_epoch(epoch, first):
            pairs = [minibatch(epoch, k) for k in range(first, 16)]
            x = np.stack([x for x, _ in pairs]).reshape(-1, 4, 3, 2)
            return tf.data.Dataset.from_tensor_slices((x, np.stack([y for _, y in pairs])))

        checkpoint = tfpara.callbacks.Checkpoint(tmp_path / name, every_syncs=1)
        callbacks = [*([stop_at(*stop)] if stop else []), checkpoint]
        with contextlib.suppress(Stop):
            model.fit(
                strategy.datasets_by_epoch(of_epoch), epochs=1, verbose=0, callbacks=callbacks
            )
            ends.append(everything(strategy, model))
        checkpoint._checkpoints.store.release()
    assert len(ends) == 2
    assert_same(*ends)


@pytest.mark.one_version
def test_a_run_of_an_earlier_version_goes_on_to_the_same_end(tmp_path):
    # Written at d0f83fea (right after 0.2.0, TensorFlow 2.17) by this program with two epochs
    # of six steps, stopped in the second of them, in the sync after four; end.npz is what it ends
    # with where nothing stops it.
    golden, steps = Path(__file__).parents[1] / "golden", 6
    shutil.copytree(golden / "checkpoint", tmp_path / "run")
    strategy, model = make(seed=9)
    log = []
    checkpoint = tfpara.callbacks.Checkpoint(tmp_path / "run", every_syncs=1, keep=1)
    data = epoch_data(strategy, log, total=2 * steps)
    model.fit(data, epochs=2, verbose=0, callbacks=[checkpoint])
    epoch, minibatches = log[-1]
    assert (epoch, minibatches[0]) == (1, 2 * 4)
    assert strategy.statistics().steps == 2 * steps
    expected = np.load(golden / "end.npz")
    found = everything(strategy, model)
    assert len(found) == len(expected.files)
    for value, name in zip(found, expected.files, strict=True):
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.nightly
def test_a_run_that_was_told_to_keep_its_momentum_does_not_go_on_with_another():
    theirs, mine = ({"local_state": state, "rule": "BSP()"} for state in ("keep", "auto"))
    with pytest.raises(tfpara.CheckpointError, match="local_state: the checkpoint has 'keep'"):
        check_run(
            "run", {"run": theirs, "versions": versions()}, {"run": mine, "versions": versions()}
        )
