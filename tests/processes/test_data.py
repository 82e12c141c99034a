"""Which rows `fit` trains on, for every kind of data, against plain Keras and a count by hand."""

import contextlib
import functools
import itertools
import json
import multiprocessing
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib import kinds_of_data as kinds
from tests.lib.cluster_of_processes import run_all_well
from tfpara.sync.data import reading

pytestmark = [pytest.mark.latest, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def strategy():
    return tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The rows of each epoch of plain Keras, which a set of rows by hand confirms."""
    kinds.write_files(tmp_path_factory.mktemp("rows"))
    found, model = {}, kinds.make()
    for kind in kinds.KINDS:
        found[kind] = kinds.trained(model, kind)["epochs"]
        for epoch in found[kind]:
            numbers = [row[0] for row in epoch]
            assert numbers == list(range(len(epoch))), kind
            assert len(epoch) in (32, 40, kinds.ROWS), kind
    return found


@pytest.fixture(scope="module")
def model(strategy):
    return kinds.make(strategy)


@pytest.mark.nightly_cases(
    "PyDataset, *", "from_generator, fixed", "own, OFF", "tensors", "arrays in order", "files"
)
@pytest.mark.all_cases
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_two_devices_train_on_each_row_once(kind, strategy, model, plain):
    found = kinds.trained(model, kind, strategy)
    assert found["epochs"] == plain[kind]
    assert found["untouched"]


# Each kind is trained on by two workers of one device, or of two: kinds that are alike are
# neighbours. Two devices of one process see all of them.
KINDS_OF = {devices: list(kinds.KINDS)[devices - 1 :: 2] for devices in (1, 2)}


@pytest.fixture(scope="module")
def workers(plain, tmp_path_factory):
    """`workers(devices)`: what two of so many devices each have trained on, evaluated, refused."""

    # Not a fixture with parameters: pytest makes that anew for each test that is given one.
    @functools.cache
    def of(devices):
        outs = [tmp_path_factory.mktemp("data") / "seen.json" for _ in range(2)]
        common = {"kinds": KINDS_OF[devices], "devices": devices}
        run_all_well("feed.py", [{**common, "out": str(out)} for out in outs], timeout=500)
        return [json.loads(out.read_text()) for out in outs]

    return of


def together(parts):
    return sorted(row for part in parts for row in part)


@pytest.mark.nightly_cases("2-*")
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        pytest.param(devices, kind, marks=[pytest.mark.one_version] * (devices == 2))
        for devices, own in KINDS_OF.items()
        for kind in own
    ],
)
def test_two_workers_train_on_each_row_once(devices, kind, workers, plain):
    found = [worker["trained"][kind] for worker in workers(devices)]
    assert all(f["untouched"] for f in found)
    epochs = [together(parts) for parts in zip(*(f["epochs"] for f in found), strict=True)]
    assert epochs == plain[kind]
    assert all(part for f in found for part in f["epochs"]), "a worker had nothing"


@pytest.mark.nightly_cases("2*")
@pytest.mark.parametrize("devices", KINDS_OF)
def test_two_workers_evaluate_each_row_once(devices, workers, plain):
    workers = workers(devices)
    assert together(w["evaluated"] for w in workers) == plain["arrays"][0]
    training, validation = (together(w["split"][k] for w in workers) for k in range(2))
    assert [row[0] for row in training] == list(range(31))
    assert [row[0] for row in validation] == list(range(31, kinds.ROWS))
    assert [w["predicted"] for w in workers] == [kinds.ROWS] * 2


@pytest.mark.nightly
@pytest.mark.one_version
def test_two_workers_of_unlike_devices_train_and_evaluate_each_row_once(plain, tmp_path):
    # In 4 steps of endless data three replicas do not take whole batches.
    of_all = [kind for kind in kinds.KINDS if kind != "PyDataset, endless"]
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    common = {"kinds": of_all, "unlike": True}
    of_each = [
        {**common, "devices": devices, "out": str(out)}
        for devices, out in zip((2, 1), outs, strict=True)
    ]
    run_all_well("feed.py", of_each, timeout=500)
    found = [json.loads(out.read_text()) for out in outs]
    for kind in of_all:
        parts = [worker["trained"][kind] for worker in found]
        epochs = zip(*(part["epochs"] for part in parts), strict=True)
        assert [together(each) for each in epochs] == plain[kind], kind
        assert all(part["untouched"] for part in parts)
    assert together(worker["evaluated"] for worker in found) == plain["arrays"][0]
    assert [worker["predicted"] for worker in found] == [kinds.ROWS] * 2


REFUSALS = {
    "arrays of this worker": "rows: those of worker 1",
    "batch sizes": "batch_size: worker 0 has 8, worker 1 has 9",
    "shard": "worker 0 has [[2, 0]], worker 1 has [[2, 1]]",
    "slices": "rows: those of worker 1",
    "shuffle seeds": "keras.utils.set_random_seed(1)",
    "PyDataset of this worker": "rows: those of worker 1",
    "generator of this worker": "rows: those of worker 1",
    "generator that draws": "np.random.default_rng(1)",
    "evaluate": "rows: those of worker 1",
    "processes": "use_multiprocessing=False",
    "unbatched": "Write dataset.batch(32)",
    "read again": "Write steps_per_epoch=…",
}


def test_data_that_would_leave_rows_out_are_refused_by_every_worker(workers):
    refused = [worker["refused"] for worker in workers(1)]  # devices play no part in it
    assert refused[0] == refused[1]
    assert set(refused[0]) == set(REFUSALS)
    for name, words in REFUSALS.items():
        assert words in refused[0][name], (name, refused[0][name])


DEALT = (
    *("arrays", "class weights", "batched", "unknown cardinality"),
    *("PyDataset", "PyDataset, threads", "PyDataset, class weights"),
)
NOT_DEALT = {
    "shuffled": "its order must be known",
    "from_generator": "its order must be known",
    "repeated": "steps_per_epoch=5 and balance= contradict",
    "own, OFF": "balance= deals minibatches out to others",
    "own, function": "those of x, a .*, have none",
    "PyDataset, self-shuffled": "SelfShuffled.on_epoch_end changes the dataset",
    "PyDataset, steps": "steps_per_epoch=4 and balance= contradict",
    "PyDataset, endless": "steps_per_epoch=4 and balance= contradict",
    "generator": "those of x, a generator, have none",
}


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("dealt", [DEALT[::2], DEALT], ids=["some", "all"])
def test_speeds_deal_each_row_out_once(dealt, plain, tmp_path):
    """Shares that change from block to block; one of them is longer than an epoch's data."""
    shares = [[3, 1], [1, 3], [2, 2], [30, 2]] * 10
    given = {"kinds": dealt, "not dealt": list(NOT_DEALT), "devices": 1, "balance": shares}
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    run_all_well("feed.py", [{**given, "out": str(out)} for out in outs], timeout=300)
    found = [json.loads(out.read_text()) for out in outs]
    for kind in dealt:
        parts = [worker["trained"][kind]["epochs"] for worker in found]
        assert [together(both) for both in zip(*parts, strict=True)] == plain[kind], kind
        assert all(worker["trained"][kind]["untouched"] for worker in found)
    assert len(found[0]["trained"]["arrays"]["epochs"][0]) != kinds.ROWS // 2  # unlike shares
    for kind, words in NOT_DEALT.items():
        for worker in found:
            assert re.search(words, worker["refused"][kind]), (kind, worker["refused"][kind])


@pytest.mark.nightly_cases("spawn")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_one_worker_reads_in_processes(method, strategy, model, plain, monkeypatch):
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda: context)
    x, y, w = kinds.arrays()
    epochs = kinds.Epochs()
    data = kinds.Batches((x, y, w), workers=2, use_multiprocessing=True)
    model.fit(data, epochs=2, verbose=0, callbacks=[epochs])
    assert epochs.rows == plain["arrays"][:2]


def test_orders_differ_between_epochs_and_are_those_of_the_seed(strategy):
    extended = strategy.extended
    extended.data.order.seed = 5
    extended.data.position.enter(0, extended.models.steps_seen)
    orders = [extended.data.next_order(20) for _ in range(2)]
    assert orders[0] == orders[1], "no step was taken between them"
    extended.data.position.move(extended.data.position.epoch + 1, extended.models.steps_seen)
    assert extended.data.next_order(20) != orders[0]
    assert sorted(orders[0]) == list(range(20))


@pytest.mark.one_version
def test_a_resumed_run_goes_on_in_the_orders_that_it_had(tmp_path):
    class Noted(kinds.Batches):
        def __getitem__(self, index):
            self.data[-1].append(index)
            return tuple(a[index * 8 : index * 8 + 8] for a in self.data[:2])

    x, y, _ = kinds.arrays()
    read, seeds = [], []
    for epochs in (2, 4):
        strategy = tfpara.PeriodicSyncStrategy(
            tfpara.BSP(), sync_period=2, devices=["CPU:0", "CPU:1"]
        )
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-5), "mse")  # the inputs are large
        read.append([])
        callbacks = [tfpara.callbacks.Checkpoint(str(tmp_path / "run"))]
        model.fit(Noted((x, y, read[-1])), epochs=epochs, verbose=0, callbacks=callbacks)
        seeds.append(strategy.extended.data.order.seed)
    assert seeds[0] == seeds[1]
    orders = [reading.shuffled(6, seeds[0], epoch) for epoch in range(4)]
    # Each fit reads two batches first, for their shapes.
    assert read[0] == [0, 1, *orders[0], *orders[1]]
    assert read[1] == [0, 1, *orders[2], *orders[3]]


@pytest.mark.nightly_cases("files", "own, OFF", "batched")
@pytest.mark.parametrize(
    ("kind", "others", "words"),
    [
        ("PyDataset", 3, "PyDataset was divided among 3 workers and now is among 1"),
        ("files", 3, "files were divided among 3 workers and now are among 1"),
        ("own, OFF", 3, "data were divided among 3 workers and now are among 1"),
        ("own, function", 4, "data were divided among 4 workers and now are among 1"),
        ("batched", 3, ""),
    ],
    ids=["PyDataset", "files", "own, OFF", "own, function", "batched"],
)
def test_data_that_other_workers_began_to_read_are_told_of(
    kind, others, words, strategy, model, plain, capsys
):
    extended = strategy.extended

    def resume(former, epoch, logs):
        extended.data.order.set_state({"workers": former})  # as Checkpoint does
        extended.data.position.move(epoch, extended.models.steps_seen, first=4, steps=2)

    for former, told in ((1, 0), (others, 1)):
        begin = functools.partial(resume, former)
        callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
        given = {**kinds.KINDS[kind](kinds.arrays(), strategy), "epochs": 1}
        model.fit(**given, verbose=0, callbacks=[callback])
        said = capsys.readouterr().err
        if words:
            assert said.count(words) == told
            assert extended.data.order.get_state()["workers"] == 1
        assert said.count("divided among") == told * bool(words)


def of_epoch(epoch):
    """Three minibatches, which are full of the epoch's number."""
    return tf.data.Dataset.from_tensors((tf.fill([4, 2], float(epoch)), tf.zeros([4, 1]))).repeat(3)


@pytest.mark.nightly
def test_data_by_epoch_are_those_of_the_epoch_of_fit(strategy, model):
    """In calls of one epoch each, with data made for each call or for all; so in validation."""
    kept = [strategy.datasets_by_epoch(lambda epoch, first: of_epoch(epoch)) for _ in range(2)]
    for epoch in (2, 3, 0):
        made = strategy.minibatches_by_epoch(of_epoch)
        for data in (made, kept[0]):
            epochs = kinds.Epochs()
            model.rows()
            model.fit(
                data,
                initial_epoch=epoch,
                epochs=epoch + 2,
                validation_data=kept[1],
                verbose=0,
                callbacks=[epochs],
            )
            numbers = [{row[0] for row in rows} for rows in (*epochs.rows, *epochs.validated)]
            assert numbers == [{epoch}, {epoch + 1}] * 2


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_fit_in_a_callback_leaves_the_epoch_of_the_outer_one(strategy, model):
    with strategy.scope():
        other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        other.compile("sgd", "mse")

    def fit_other(epoch, logs=None):
        other.fit(strategy.minibatches_by_epoch(of_epoch), epochs=2, verbose=0)

    for hook in ("on_epoch_begin", "on_epoch_end"):
        epochs = kinds.Epochs()
        within = keras.callbacks.LambdaCallback(**{hook: fit_other})
        data = strategy.datasets_by_epoch(lambda epoch, first: of_epoch(epoch))
        model.fit(data, epochs=3, verbose=0, callbacks=[within, epochs])
        assert [{row[0] for row in rows} for rows in epochs.rows] == [{0}, {1}, {2}]


@pytest.mark.nightly
def test_class_weights_of_data_that_are_not_divided_by_fit(strategy, model):
    x, _, _ = kinds.arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1] % 3)).batch(4)
    weights = {0: 1.0, 1: 0.5, 2: 3.0}
    expected = [[r, 2 * r, r % 3, weights[r % 3]] for r in x[:, 0].tolist()]
    for data in (
        strategy.distribute_datasets_from_function(lambda context: dataset),
        strategy.datasets_by_epoch(lambda epoch, first: dataset),
        strategy.minibatches_by_epoch(lambda epoch: dataset),
        strategy.experimental_distribute_dataset(dataset),
    ):
        epochs = kinds.Epochs()
        model.fit(data, epochs=2, class_weight=weights, verbose=0, callbacks=[epochs])
        assert epochs.rows == [expected] * 2


def test_steps_of_a_workers_own_minibatches_are_those_of_its_devices(strategy, model, monkeypatch):
    """Five minibatches are three steps of two devices, for Keras and for the library."""
    noted = []
    monkeypatch.setattr(
        strategy.extended.momentum, "begin_epoch", lambda model, steps, _: noted.append(steps)
    )
    x, y, _ = kinds.arrays()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(5)
    data = strategy.distribute_datasets_from_function(lambda context: dataset)
    epochs = kinds.Epochs()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Your input ran out of data")
        model.fit(data, epochs=2, verbose=0, callbacks=[epochs])
    assert [[row[0] for row in rows] for rows in epochs.rows] == [list(range(20))] * 2
    assert epochs.params["steps"] == 3 and noted == [3, 3]


class Batches(keras.callbacks.Callback):
    """Keeps the rows of each batch, with those of each minibatch sorted."""

    def __init__(self, stop=None):
        super().__init__()
        self.seen, self.epoch, self.stop = [], 0, stop

    def on_train_begin(self, logs=None):
        self.model.rows()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.seen.append([])

    def on_train_batch_end(self, batch, logs=None):
        self.seen[-1].append([row[0] for row in self.model.rows()])
        if (self.epoch, batch) == self.stop:
            raise InterruptedError


@pytest.mark.nightly
def test_a_replica_without_rows_is_told_of(strategy, model, capsys, monkeypatch):
    """Before the first epoch where each batch is too small; else at its end, as counted."""
    x, y, _ = kinds.arrays()
    rows = tf.data.Dataset.from_tensor_slices((x, y)).take(3).batch(1)
    monkeypatch.setattr(strategy.extended.notes, "_told", set())
    said = []
    note = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: said.append(capsys.readouterr().err)
    )
    for data in ({"x": x[:3], "y": y[:3], "batch_size": 1}, {"x": rows}):
        strategy.extended.notes._told.clear()
        model.fit(**data, epochs=2, verbose=0, callbacks=[note])
        assert "batches of 1 row among 2 replicas, which leaves 1 of them" in said[-1]
        assert "Give batch_size=2 at least" in said[-1]
    strategy.extended.notes._told.clear()
    model.predict(x[:1], verbose=0)  # is no fit
    assert "batches of 1 row" not in capsys.readouterr().err
    three = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=9, devices=[f"CPU:{k}" for k in range(3)]
    )
    other = kinds.make(three)
    other.fit(x[:20], y[:20], batch_size=4, epochs=2, verbose=0)
    steps = three.experimental_local_results(other.optimizer.iterations.value)
    assert [int(s) for s in steps] == [10, 10, 0]  # TensorFlow cuts 4 rows into 2, 2 and none
    text = capsys.readouterr().err
    assert text.count("replicas without a row in this epoch: 2 (of 0 … 2)") == 1
    assert text.count("sync_period=9 is longer than an epoch") == 1
    assert "in any case, so after 5 steps" in text


@pytest.mark.nightly
def test_a_resumed_epoch_of_unknown_length_does_not_cut_the_others(tmp_path):
    x, y, _ = kinds.arrays()
    steps = []
    for stop in ((0, 3), None):
        strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0"])
        model, batches = kinds.make(strategy), Batches(stop)
        checkpoint = tfpara.callbacks.Checkpoint(str(tmp_path / "run"), every_syncs=1)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(lambda *_: True)
        with contextlib.suppress(InterruptedError), warnings.catch_warnings():
            warnings.filterwarnings("error", "Your input ran out of data")
            model.fit(data, epochs=3, verbose=0, callbacks=[checkpoint, batches])
        steps.append([len(epoch) for epoch in batches.seen])
    assert steps == [[4], [4, 6, 6]]


def test_data_of_the_first_epoch_that_are_shuffled_go_on_where_they_were(tmp_path):
    """Keras looks at their first batch before the epoch, which must not change their order."""
    x, y, _ = kinds.arrays()
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    seen = []
    for stop in ((0, 2), None):
        strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, devices=["CPU:0"])
        model, batches = kinds.make(strategy), Batches(stop)
        checkpoint = tfpara.callbacks.Checkpoint(str(tmp_path / "run"), every_syncs=1)
        data = strategy.minibatches_by_epoch(lambda epoch: rows.shuffle(42, seed=epoch).batch(8))
        with contextlib.suppress(InterruptedError):
            model.fit(data, verbose=0, callbacks=[checkpoint, batches])
        seen.append(batches.seen[0])
    kept = seen[0][:2]  # the checkpoint was written after two steps
    assert sorted(sum([*kept, *seen[1]], [])) == x[:, 0].tolist()


@pytest.mark.nightly
@pytest.mark.one_version
def test_each_call_of_fit_draws_an_order_that_the_seed_repeats(strategy, model):
    x, y, _ = kinds.arrays()
    for data in ({"x": x, "y": y, "batch_size": 8}, {"x": kinds.Batches((x, y))}):
        orders = []
        for calls in (2, 1):
            keras.utils.set_random_seed(1)
            for _ in range(calls):
                batches = Batches()
                model.fit(**data, epochs=2, shuffle=True, verbose=0, callbacks=[batches])
                orders.append(batches.seen)
        assert orders[0] == orders[2], "not by the seed"
        epochs = [*orders[0], *orders[1]]
        assert all(sorted(sum(epoch, [])) == x[:, 0].tolist() for epoch in epochs)
        assert all(one != other for one, other in itertools.combinations(epochs, 2))


@pytest.mark.one_version
@pytest.mark.nightly_cases("2")
@pytest.mark.parametrize("devices", [2, 3])
def test_shuffled_arrays_go_on_where_they_were(tmp_path, devices):
    """Within an epoch, with as many replicas or others: each row is trained once in an epoch."""
    x, y, w = kinds.arrays()
    weights, seen = [], []
    for folder, count, stop in [
        ("whole", 2, None),
        ("broken", 2, (1, 3)),
        ("broken", devices, None),
    ]:
        strategy = tfpara.PeriodicSyncStrategy(
            tfpara.BSP(), sync_period=2, devices=[f"CPU:{k}" for k in range(count)]
        )
        keras.utils.set_random_seed(len(seen) if seen[1:] else 1)  # another one in the last
        model = kinds.make(strategy)
        model.optimizer.learning_rate = 1e-5
        batches = Batches(stop)
        checkpoint = tfpara.callbacks.Checkpoint(str(tmp_path / folder), every_syncs=1)
        given = {"x": x, "y": y, "sample_weight": w, "batch_size": 8, "epochs": 3}
        with contextlib.suppress(InterruptedError):
            model.fit(**given, verbose=0, callbacks=[checkpoint, batches])
        weights.append(model.get_weights())
        seen.append(batches.seen)
    whole, broken, rest = seen
    assert broken == [whole[0], whole[1][:4]]
    # Checkpoint runs last, so that of the fourth step was not written.
    assert rest == [whole[1][2:], whole[2]]
    assert sorted(sum(rest[1], [])) == x[:, 0].tolist()
    if devices == 2:
        for one, other in zip(weights[0], weights[2], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_seed_of_a_shuffle_gives_one_order_at_each_start():
    """Also where nobody sets a seed of the program: on two workers and in plain TensorFlow."""
    workers = run_all_well("orders.py", [{"workers": 2}] * 2)
    (alone,) = run_all_well("orders.py", [{"workers": 1}], environ=[{"TF_CONFIG": ""}])
    lines = [re.search("order .*", each.output)[0] for each in (*workers, alone)]
    assert len(set(lines)) == 1 and len(lines[0].split()) == 51
    assert lines[0].split()[1:] != list(map(str, range(50)))


@pytest.mark.nightly
@pytest.mark.one_version
def test_nested_inputs_are_divided(strategy):
    def model():
        a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b")
        joined = keras.layers.Concatenate()([a, b])
        return keras.Model({"a": a, "b": b}, {"c": keras.layers.Dense(1)(joined), "d": b})

    class Nested(kinds.Batches):
        def __getitem__(self, index):
            x, y, w = super().__getitem__(index)
            return {"a": x, "b": y}, {"c": y, "d": y}, {"c": w, "d": w}

    x, y, w = kinds.arrays()
    losses = []
    a, b, c = Nested((x, y, w), batch=len(x))[0]
    for scope, given in [
        (tf.distribute.get_strategy(), {"x": Nested((x, y, w))}),
        (strategy, {"x": Nested((x, y, w), workers=2)}),
        (strategy, {"x": (Nested((x, y, w))[k] for k in range(6))}),
        (strategy, {"x": a, "y": b, "sample_weight": c, "batch_size": 8}),
    ]:
        keras.utils.set_random_seed(1)
        with scope.scope():
            net = model()
            net.compile(keras.optimizers.SGD(0.0), {"c": "mse", "d": "mse"})
        losses.append(net.fit(**given, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 3, rtol=1e-5)
