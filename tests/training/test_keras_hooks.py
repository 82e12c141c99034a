"""Tests of what tfpara/sync/keras replaces, in one process, made another worker by saying so."""

import concurrent.futures
import csv
import gc
import inspect
import os
import tempfile
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib import simulation
from tests.lib.replicas_here import TAU, data_of, make, network, of_replicas
from tests.lib.small import compiled_net, strategy_of
from tfpara import files
from tfpara.sync.keras.training_state import TrainingState
from tfpara.sync.one_sync.global_state import GlobalState
from tfpara.sync.one_sync.placement import Sharded
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.tensorflow.run_steps import predicting

pytestmark = pytest.mark.latest

K = keras.callbacks
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X[:, :2]


@pytest.fixture(scope="module")
def strategy():
    return strategy_of(averages={"ema": tfpara.EMA(0.5)})


def make_model(strategy=None):
    return compiled_net(strategy, 4, 2, optimizer="adam")


@pytest.fixture
def worker(strategy, monkeypatch, tmp_path):
    """The strategy of a worker that is not the chief; its temporary files go to tmp_path/tmp."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(type(strategy), "is_chief", False)
    return strategy


def left(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


WRITERS = {
    "save": lambda model, to: model.save(to / "m.keras"),
    "h5": lambda model, to: model.save(to / "m.h5"),
    "unzipped": lambda model, to: model.save(to / "m", zipped=False),
    "function": lambda model, to: keras.saving.save_model(model, to / "m.keras"),
    "weights": lambda model, to: model.save_weights(to / "m.weights.h5"),
    "weights function": lambda model, to: keras.saving.save_weights(model, to / "m.weights.h5"),
    "shards": lambda model, to: model.save_weights(to / "m.weights.json", max_shard_size=1e-7),
    "export": lambda model, to: model.export(filepath=to / "m"),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("write", WRITERS.values(), ids=list(WRITERS))
def test_another_worker_writes_nothing_and_a_plain_model_is_as_ever(worker, tmp_path, write):
    write(make_model(worker), tmp_path)
    assert left(tmp_path) == []
    write(make_model(), tmp_path)
    assert left(tmp_path) != []


@pytest.mark.all_cases
@pytest.mark.parametrize("write", WRITERS.values(), ids=list(WRITERS))
def test_the_chief_writes_what_keras_writes(strategy, tmp_path, write):
    for name, model in (("plain", make_model()), ("ours", make_model(strategy))):
        (tmp_path / name).mkdir()
        write(model, tmp_path / name)
    assert left(tmp_path / "ours") == left(tmp_path / "plain") != []


LOADERS = {
    "save": "m.keras",
    "h5": "m.h5",
    "unzipped": "m",
    "weights": "m.weights.h5",
}
WITHIN_RULES = {
    "look-ahead": (tfpara.BMUF(0.6), "nesterov", {"eta": 0.6}, {}),
    "replicas apart": (tfpara.EASGD(0.2), "elastic", {"alpha": 0.2}, {"aggregation": "sharded"}),
}
EIGHT = [[4] * 8, [4] * 5]


@pytest.mark.nightly_cases("replicas apart")
@pytest.mark.parametrize("name", WITHIN_RULES)
def test_files_have_the_global_model_and_replicas_stay_as_they_are(name, tmp_path, capfd):
    """That of NumPy: where epochs end, in all formats, and within a block as of the last sync."""
    rule, kind, settings, options = WITHIN_RULES[name]
    strategy = make(rule, local_state="keep", **options)
    model = network(strategy)
    initial = model.get_weights()

    def of_file(path):
        again = network(tf.distribute.get_strategy())
        if "weights" in path.name:
            again.load_weights(path)
            return simulation.flat(again.get_weights())
        loaded = keras.models.load_model(path, compile=False)
        return simulation.flat(loaded.get_weights())

    def within(batch, logs):
        if batch == TAU and not (tmp_path / "within.keras").exists():
            model.save(tmp_path / "within.keras")

    callbacks = [
        K.ModelCheckpoint(tmp_path / "{epoch}.keras"),
        K.LambdaCallback(on_train_batch_end=within),
    ]
    model.fit(data_of(strategy, EIGHT), epochs=2, verbose=0, callbacks=callbacks)
    note = "a model is saved within a block: the file has the global model of the last sync"
    assert capfd.readouterr().err.count(note) == 1
    before = of_replicas(strategy, model)
    for epochs in (1, 2):
        _, center, _ = simulation.simulate(
            *(kind, initial, EIGHT, TAU, lambda: simulation.Momentum(0.2, 0.9)),
            epochs=epochs,
            **settings,
        )
        np.testing.assert_allclose(of_file(tmp_path / f"{epochs}.keras"), center.w, atol=1e-5)
    np.testing.assert_allclose(of_file(tmp_path / "within.keras"), center.history[1], atol=1e-5)
    assert np.abs(before[0] - center.w).max() > 1e-3
    for way, path in LOADERS.items():
        WRITERS[way](model, tmp_path)
        np.testing.assert_allclose(of_file(tmp_path / path), center.w, atol=1e-5, err_msg=way)
    WRITERS["export"](model, tmp_path / "exported")
    with strategy.weights(model, "local"):
        model.save(tmp_path / "local.keras")
    np.testing.assert_array_equal(of_file(tmp_path / "local.keras"), before[0])
    row, loaded = np.ones((1, 6), "float32"), tf.saved_model.load(tmp_path / "exported" / "m")
    with strategy.weights(model, "global"):
        np.testing.assert_allclose(loaded.serve(row), model(row), atol=1e-6)
    for mine, was in zip(of_replicas(strategy, model), before, strict=True):
        np.testing.assert_array_equal(mine, was)


@pytest.mark.nightly
def test_a_file_within_a_block_waits_for_the_sync_beside_the_training(tmp_path, monkeypatch):
    """The sync writes the global model variable by variable."""
    strategy = make(tfpara.BSP(), overlap=True, fragments=2)
    model = network(strategy)
    half, saved = threading.Event(), threading.Event()
    commit = GlobalState.commit

    def slow(state, update):
        def wait():
            half.set()
            return saved.wait(0.5)

        for variables in state._states["rule"][0][update.buckets]:
            variables.global_model.assign(tf.fill(variables.global_model.shape, 1e6))
        with tf.control_dependencies([tf.numpy_function(wait, [], tf.bool)]):
            commit(state, update)

    def save(batch, logs):
        if batch == TAU - 1 and half.wait(120):
            model.save(tmp_path / "m.keras")
            saved.set()

    monkeypatch.setattr(GlobalState, "commit", slow)
    data = data_of(strategy, [[4] * (TAU + 1)] * 2)
    model.fit(data, verbose=0, callbacks=[K.LambdaCallback(on_train_batch_end=save)])
    weights = keras.models.load_model(tmp_path / "m.keras", compile=False).get_weights()
    assert max(np.abs(w).max() for w in weights) < 1e3


@pytest.mark.nightly
def test_a_gathered_global_model_knows_of_weights_that_were_set(tmp_path, monkeypatch):
    """After which BMUFAdam, which counts steps, begins anew with all weights."""
    monkeypatch.setattr(Synchronizer, "_is_in_parts", True)
    strategy = make(tfpara.BMUFAdam(0.5), aggregation="sharded")
    model = network(strategy, optimizer=lambda: keras.optimizers.Adam(0.05))
    spread, noted = Sharded.spread, []

    def watched(aggregation, *args):
        if tf.executing_eagerly():
            (synchronizer,) = strategy.extended.models.synchronizers
            noted.append(synchronizer.graph.waiting_since())
        return spread(aggregation, *args)

    monkeypatch.setattr(Sharded, "spread", watched)
    model.fit(data_of(strategy, EIGHT), epochs=2, verbose=0)
    assert min(noted) > 0.0, "a worker that is silent here would not be noticed"
    output = model.layers[-1]
    output.set_weights([0.5 * w for w in output.get_weights()])
    model.save(tmp_path / "m.keras")
    found = keras.models.load_model(tmp_path / "m.keras", compile=False).get_weights()
    with strategy.weights(model, "global"):
        for mine, wanted in zip(found, model.get_weights(), strict=True):
            np.testing.assert_allclose(mine, wanted, atol=1e-6)
    (synchronizer,) = strategy.extended.models.synchronizers
    assert synchronizer.graph.waiting_since() == 0.0


@pytest.mark.nightly
def test_a_gathered_global_model_goes_back_with_the_state_of_an_earlier_epoch(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Synchronizer, "_is_in_parts", True)
    strategy = make(tfpara.EASGD(0.5), aggregation="sharded")
    model = network(strategy)
    model.fit(data_of(strategy, EIGHT), verbose=0)
    earlier = TrainingState(model)
    with strategy.weights(model, "global"):
        wanted = model.get_weights()
    model.fit(data_of(strategy, EIGHT), verbose=0)
    earlier.restore()
    model.save(tmp_path / "m.keras")
    found = keras.models.load_model(tmp_path / "m.keras", compile=False).get_weights()
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_save_that_fails_leaves_the_former_file(strategy, tmp_path, monkeypatch):
    model, path = make_model(strategy), tmp_path / "m.keras"
    model.save(path)
    former = path.read_bytes()
    monkeypatch.setattr(
        keras.layers.Dense, "save_own_variables", lambda *_: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        model.save(path)
    assert path.read_bytes() == former and left(tmp_path) == ["m.keras"]


def test_a_folder_with_other_things_keeps_them(strategy, tmp_path, capsys):
    model = make_model(strategy)
    (tmp_path / "m").mkdir()
    model.export(tmp_path / "m", verbose=False)  # an empty folder
    model.export(tmp_path / "m", verbose=False)  # that of a model
    (tmp_path / "m" / "labels.txt").write_text("mine")
    model.export(tmp_path / "m")
    assert (tmp_path / "m" / "labels.txt").read_text() == "mine"
    assert f"Saved artifact at '{tmp_path / 'm'}'" in capsys.readouterr().out
    model.export(tmp_path / "n")
    assert f"Saved artifact at '{tmp_path / 'n'}'" in capsys.readouterr().out
    assert files.foreign_entries(os.listdir(tmp_path / "n")) == []


class Renaming(K.ModelCheckpoint):
    """A callback of a user's that changes its path and counts."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        super().on_epoch_end(epoch, logs)
        if epoch == 1:
            self.filepath = os.path.join("moved", "second.keras")


@pytest.mark.nightly
def test_callbacks_of_another_worker_write_elsewhere_and_keep_their_paths(worker, tmp_path, capsys):
    chosen = [
        K.ModelCheckpoint(tmp_path / "new" / "m{epoch}.keras", verbose=1),
        K.CSVLogger(tmp_path / "new" / "log.csv"),
        K.TensorBoard(str(tmp_path / "board") + "/", update_freq=1),
        Renaming(str(tmp_path / "first.keras")),
        [K.LambdaCallback()],
    ]
    model = make_model(worker)
    model.fit(X, Y, epochs=3, verbose=0, callbacks=chosen)
    model.evaluate(X, Y, verbose=0, callbacks=chosen[2:3])
    gc.collect()
    assert left(tmp_path) == [] and os.listdir(tmp_path / "tmp") == []
    assert chosen[0].filepath == str(tmp_path / "new" / "m{epoch}.keras") and chosen[0].verbose == 1
    assert chosen[1].filename == str(tmp_path / "new" / "log.csv")
    assert chosen[2].log_dir == str(tmp_path / "board") + "/"
    assert chosen[3].epochs == 3 and chosen[3].filepath == os.path.join("moved", "second.keras")
    assert "saving model" not in capsys.readouterr().out


@pytest.mark.nightly
def test_a_callback_has_its_path_again_after_an_error(worker, tmp_path):
    class Failing(K.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            assert self.filepath != str(tmp_path / "m.keras")
            raise RuntimeError("mine")

    callback = Failing(str(tmp_path / "m.keras"))
    with pytest.raises(RuntimeError, match="mine"):
        make_model(worker).fit(X, Y, verbose=0, callbacks=[callback])
    assert callback.filepath == str(tmp_path / "m.keras")


@pytest.mark.nightly
def test_the_chief_logs_into_a_new_folder(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model(strategy)
    for path in ("deep/er/log.csv", "log.csv"):
        model.fit(X, Y, epochs=2, verbose=0, callbacks=K.CSVLogger(path))
        with open(path) as log:
            assert [row["epoch"] for row in csv.DictReader(log)] == ["0", "1"]


def test_backup_and_restore_is_refused_and_a_plain_model_may(strategy, tmp_path):
    backup = K.BackupAndRestore(str(tmp_path / "b"))
    with pytest.raises(ValueError, match=rf"tfpara.callbacks.Checkpoint\('{tmp_path / 'b'}'\)"):
        make_model(strategy).fit(X, Y, callbacks=[backup], verbose=0)
    make_model().fit(X, Y, callbacks=[backup], verbose=0)


@pytest.mark.parametrize(
    ("name", "value"), [("num_workers", 2), ("company", types.SimpleNamespace(changes=True))]
)
def test_orbax_is_refused_with_several_workers(strategy, monkeypatch, name, value):
    """Or where others may join, in an elastic run."""
    orbax = K.OrbaxCheckpoint.__new__(K.OrbaxCheckpoint)  # the package need not be there
    monkeypatch.setattr(type(strategy), name, value)
    with pytest.raises(ValueError, match="OrbaxCheckpoint would write from every worker"):
        make_model(strategy).fit(X, Y, callbacks=[orbax], verbose=0)


@pytest.mark.nightly
def test_best_weights_of_each_worker_are_refused_under_easgd(monkeypatch):
    strategy = tfpara.PeriodicSyncStrategy(tfpara.EASGD(), sync_period=2)
    best = K.EarlyStopping("loss", restore_best_weights=True)
    make_model(strategy).fit(X, Y, callbacks=[best], verbose=0)
    monkeypatch.setattr(type(strategy), "num_workers", 2)
    with pytest.raises(ValueError, match="other weights on each worker, since under EASGD"):
        make_model(strategy).fit(X, Y, callbacks=[best], verbose=0)


def test_keras_functions_keep_their_signatures_and_are_replaced_once(strategy):
    fit = keras.Model.fit
    tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1)
    assert keras.Model.fit is fit
    assert list(inspect.signature(fit).parameters)[:4] == ["self", "x", "y", "batch_size"]
    assert list(inspect.signature(keras.Model.export).parameters)[:2] == ["self", "filepath"]


def test_predict_takes_all_rows_where_fit_takes_a_part(strategy, monkeypatch):
    """The data of worker 1 of 2, as TensorFlow divides them; nothing is exchanged for it."""
    monkeypatch.setattr(strategy.extended, "_num_workers", 2)
    monkeypatch.setattr(strategy.extended, "_id_in_cluster", 1)

    def rows(dataset):
        parts = [strategy.experimental_local_results(batch) for batch in dataset]
        return np.concatenate([p for of_batch in parts for p in of_batch])

    def distributed():
        return rows(strategy.experimental_distribute_dataset(dataset))

    dataset = tf.data.Dataset.from_tensor_slices(np.arange(22)).batch(8)
    with predicting():
        np.testing.assert_array_equal(distributed(), range(22))
        # Another thread trains, and gets its part.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            assert len(pool.submit(distributed).result()) < 22
    assert len(distributed()) < 22
    monkeypatch.undo()
    model = make_model(strategy)
    np.testing.assert_allclose(model.predict(X[:22], batch_size=8, verbose=0), model(X[:22]), 1e-5)


@pytest.mark.parametrize("eagerly", [False, True])
def test_predictions_have_each_row_once(strategy, eagerly):
    """The second replica has no row of the last batch, and sequences have no static length."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=eagerly)
    batches = [X[:3].reshape(3, 2, 2), X[3:4].reshape(1, 2, 2)]
    spec = tf.TensorSpec([None, None, 2])
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    expected = np.concatenate([model(batch) for batch in batches])
    np.testing.assert_allclose(model.predict(dataset, verbose=0), expected, 1e-5)
    np.testing.assert_allclose(model.predict_on_batch(batches[0]), expected[:3], 1e-5)


@pytest.mark.nightly
def test_data_of_predict_in_a_callback_are_none_of_the_epoch(strategy):
    """With `steps_per_epoch` a pass may last for several epochs."""
    model, positions = make_model(strategy), []

    def look(*_):
        model.predict(X, batch_size=4, steps=1, verbose=0)
        positions.append(strategy.position(0, 0)["pass"])

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()
    looks = K.LambdaCallback(on_epoch_end=look)
    model.fit(dataset, steps_per_epoch=2, epochs=2, callbacks=[looks], verbose=0)
    assert [each["steps"] for each in positions] == [2, 4]


@pytest.mark.nightly
def test_a_list_of_callbacks_need_not_know_the_epochs(strategy):
    model = make_model(strategy)
    callbacks = K.CallbackList([], add_history=True, model=model)
    assert len(model.fit(X, Y, epochs=2, callbacks=callbacks).history["loss"]) == 2


@pytest.mark.nightly
def test_ctrl_c_is_that_also_where_an_operation_fails_at_the_same_moment(strategy):
    """pybind11 makes another error of both, as two workers that are interrupted have shown."""

    def both(*_, **__):
        raise RuntimeError(
            "pybind11::error_already_set: MISMATCH of original and normalized active exception "
            "types: ORIGINAL UnavailableError REPLACED BY KeyboardInterrupt: <EMPTY MESSAGE>"
        )

    stopped = K.LambdaCallback(on_train_batch_end=both)
    with pytest.raises(KeyboardInterrupt):
        make_model(strategy).fit(X, Y, callbacks=[stopped], verbose=0)
    other = K.LambdaCallback(on_train_batch_end=lambda *_, **__: [].remove(1))
    with pytest.raises(ValueError, match="not in list"):
        make_model(strategy).fit(X, Y, callbacks=[other], verbose=0)


@pytest.mark.nightly
def test_the_company_may_refuse_to_train_a_batch_outside_of_fit(strategy, monkeypatch):
    """Also by the function of an earlier `fit`, which is not traced again."""
    model = make_model(strategy)
    model.fit(X, Y, verbose=0)
    model.train_on_batch(X, Y)

    def refuse():
        raise ValueError("outside of fit")

    monkeypatch.setattr(strategy.extended.worker.company, "check_in_fit", refuse)
    with pytest.raises(ValueError, match="outside of fit"):
        model.train_on_batch(X, Y)
