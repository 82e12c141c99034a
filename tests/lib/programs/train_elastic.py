"""A worker of an elastic run, which may be killed or stopped at a place of the test's.

It writes what it does, in order, to the file `log` (`{pid}` is replaced), a line of JSON each:
`["trained", id]` for each minibatch (its id is epoch * 1000 + its number); `["flies"]` where a sync
begins beside the training; `["synced"]` where what it has trained before that, or else until now,
is in the global model; `["reopens"]` where such a sync has failed; `["taken"]` where it is in the
model as another worker knows it, and what was trained after the failed sync will never be, like all
of it at `["dropped"]`; `["generation", number]`, `["epoch", number, log, workers]`, and at the end
`["end", hash of the weights, ...]`.

Options (JSON): log, minibatches (of an epoch), epochs, devices, rule, steps_per_execution,
min_workers, grace_seconds, silence_seconds, max_workers, adam, norm (batch normalisation), dropout,
checkpoints (a directory), period (τ), every_syncs, validate, step_seconds, paces (seconds of a step
by the rank at the start, in place of step_seconds), balance, width, callbacks (names), follows,
scores (a CSV file: of three scores in each epoch),
of_strategy (more of its arguments), arrays (`batch_size`: `fit` is given arrays, of a row each),
kind (what `fit` is given in place of arrays: one of `KINDS`, of the same rows), weights (a file),
replay (a record: it is trained again, in this process),
saves (a path: all save weights there, then the chief adds its task to PATH.chief, and all have the
chief write PATH.all), plain (no `tfpara.run`: "ends" as a script does, "raises" an error there, or
"fails", in `fit`, by `sys.exit(1)`), fits (calls of `fit`; between two of them a layer is frozen
and the model compiled anew), holds and faults.

Epochs are counted through all calls of `fit`. `holds` has expressions by epoch. Before that epoch
begins the worker waits until its expression is true, or 60 s are over. There `tasks` are the
workers that train in this `generation`, `comes` says whether another waits to be let in, and
`exists(path)` asks for a file.

`faults` has [place, n, what] by the rank at the start. At the n-th time that the worker comes to
that one of `PLACES` it sends itself the signal `what`, or, if that is "FAIL", raises an error as a
lost connection does.
"""

import hashlib
import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import replaying

import tfpara
from tfpara.checkpoint import store as checkpoint_store
from tfpara.collectives import TensorFlowCollectives
from tfpara.sync.elastic import company, connection, fit_again, rejoin
from tfpara.sync.one_sync.block import Block
from tfpara.sync.one_sync.consensus import Consensus
from tfpara.sync.one_sync.flight import Flight
from tfpara.sync.one_sync.global_state import GlobalState
from tfpara.sync.one_sync.graph import SyncGraph
from tfpara.sync.one_sync.overlap import Overlap
from tfpara.sync.workers.meetings import Control

PLACES = {
    "step": "in a training step",
    "reports": "in a sync, before the reports",
    "weights": "in a sync, between the reports and the weights",
    "commit": "in a sync, when the new weights have arrived and nothing is written",
    "written": "in a sync, when the global state is written and the replicas may not be",
    "metric": "where the metrics of an epoch are read",
    "validation": "in a step of validation",
    "checkpoint": "while a part of a checkpoint is written",
    "begin": "where an epoch begins",
    "build": "where a variable is made, before training",
    "between": "between two calls of fit",
    "anew": "in the first step of a model that was compiled, or compiled anew",
    "enabling": "where a worker connects itself to the others of a new generation",
    "after": "after the last call of fit, before anything is saved",
    "write": "where the chief writes a file for all",
    "exchange": "after an exchange from Python that has gone well, before this worker knows it",
}
TAU = 3


class Log:
    """The file of what this worker does."""

    def __init__(self, path):
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - it is written to the end

    def __call__(self, *event):
        self.file.write(json.dumps(event) + "\n")

    def trained(self, ids, training):
        if training:
            self("trained", int(ids[0]))
        return np.int64(0)


class Faults:
    """Makes the fault of the test."""

    def __init__(self, fault):
        self.place, self.times, self.what = fault or (None, 0, None)

    def here(self, place):
        if place != self.place:
            return
        self.times -= 1
        if self.times == 0 and self.what == "FAIL":
            raise tf.errors.UnavailableError(None, None, "Collective: a fault of the test")
        if self.times == 0:
            os.kill(os.getpid(), getattr(signal, self.what))

    def op(self, place):
        return tf.numpy_function(lambda: self.here(place), [], [])

    def before(self, owner, name, place, traced=False):
        former = getattr(owner, name)

        def method(this, *args, **kwargs):
            if not traced:
                self.here(place)
                return former(this, *args, **kwargs)
            inputs = [leaf for leaf in tf.nest.flatten(args) if tf.is_tensor(leaf)]
            with tf.control_dependencies(inputs):
                operation = self.op(place)
            with tf.control_dependencies([operation]):
                return former(this, *args, **kwargs)

        setattr(owner, name, method)


def install(faults, log):
    if faults.place == "reports":
        faults.before(Consensus, "gather", "reports", traced=True)
    if faults.place == "weights":
        reduce = TensorFlowCollectives.all_reduce

        def all_reduce(this, buffers, name):
            if not tf.executing_eagerly():
                with tf.control_dependencies(buffers):
                    operation = faults.op("weights")
                with tf.control_dependencies([operation]):
                    buffers = [tf.identity(buffer) for buffer in buffers]
            return reduce(this, buffers, name)

        TensorFlowCollectives.all_reduce = all_reduce
    if faults.place == "commit":
        faults.before(SyncGraph, "commit", "commit", traced=True)
    if faults.place == "written":
        commit = GlobalState.commit

        def committing(this, update):
            commit(this, update)
            faults.op("written")

        GlobalState.commit = committing
    if faults.place == "build":
        faults.before(Control, "broadcast", "build")
    if faults.place == "anew":
        faults.before(fit_again.FitAgain, "check_step", "anew")
    if faults.place == "enabling":
        faults.before(connection.Connection, "become", "enabling")
    if faults.place == "checkpoint":
        faults.before(checkpoint_store.Store, "write_part", "checkpoint")

    def known_as(event):
        # What a worker trains alone, before it joins, is in nobody's model.
        return "dropped" if strategy.company.joining else event

    become = connection.Connection.become

    def becoming(this, form):
        become(this, form)
        log("generation", form.number)

    connection.Connection.become = becoming
    together = company.Elastic.together

    def exchanging(this, operation):
        def failing():
            result = operation()
            closed = this._rejoin.progress.epoch_is_closed
            if not this.joining and this.epoch_units.plan.epoch == 0 and closed:
                faults.here("exchange")
            return result

        return together(this, failing if faults.place == "exchange" else operation)

    company.Elastic.together = exchanging
    note = SyncGraph.note

    def noting(this, reports, committed, seconds):
        note(this, reports, committed, seconds)
        tf.numpy_function(
            lambda number: log(known_as("synced")) if number else None, [committed], []
        )

    SyncGraph.note = noting
    give_up = Block.give_up

    def giving_up(this):
        # What a worker that is behind has trained is in the state that it takes over.
        log(known_as("taken"))
        give_up(this)

    Block.give_up = giving_up
    launch, reopen = Flight._launch, Overlap._reopen

    def launching(this):
        log("flies")
        return launch(this)

    def reopening(this):
        if tf.executing_eagerly():
            log("reopens")
        reopen(this)

    Flight._launch, Overlap._reopen = launching, reopening
    # As TensorFlow names an error of a function of Python's.
    for module in (company, fit_again, rejoin):
        module.LOST += (tf.errors.UnknownError,)


class Seen(keras.layers.Layer):
    """Says which minibatch it is given, and has a weight for each, which training makes larger."""

    def __init__(self, count, log):
        super().__init__()
        self.count, self.log = count, log

    def build(self, shape):
        self.seen = self.add_weight(shape=(self.count,), initializer="zeros", name="seen")

    def call(self, number, training=False):
        told = tf.numpy_function(
            lambda ids, training: self.log.trained(ids, training), [number, training], tf.int64
        )
        with tf.control_dependencies([told]):
            number = tf.identity(number)
        if training:
            self.add_loss(-tf.gather(self.seen, number[0] % 1000))
        return number


class Net(keras.Model):
    def __init__(self, options, log):
        super().__init__()
        self.seen = Seen(options["minibatches"], log)
        self.hidden = keras.layers.Dense(options["width"], "relu")
        self.norm = keras.layers.BatchNormalization() if options["norm"] else lambda x, **_: x
        self.drop = keras.layers.Dropout(0.2) if options["dropout"] else lambda x, **_: x
        self.top = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        self.seen(inputs["id"], training=training)
        hidden = self.norm(self.hidden(inputs["x"]), training=training)
        return self.top(self.drop(hidden, training=training))


class Watch(keras.callbacks.Callback):
    def __init__(self, options, log, faults, rank):
        super().__init__()
        self.options, self.log, self.faults, self.rank = options, log, faults, rank
        self.first = 0  # of the epochs of this call of fit

    def on_epoch_begin(self, epoch, logs=None):
        epoch += self.first
        if "rejecting" in self.options["callbacks"]:
            self.log("begins", epoch, digest_of(self.model.get_weights()))
        self.faults.here("begin")
        until = time.monotonic() + 60.0
        while not self.may_begin(epoch) and time.monotonic() < until:
            time.sleep(0.01)

    def may_begin(self, epoch):
        names = {"exists": os.path.exists}
        connection = getattr(strategy.extended.worker.company, "connection", None)
        if connection is not None:
            names |= {"tasks": connection.form.tasks, "generation": connection.form.number}
            names |= {"comes": connection.line.wanted}
        return eval(self.options["holds"].get(str(epoch), "True"), names)

    def on_train_batch_end(self, batch, logs=None):
        if "rate" in self.options["callbacks"]:
            self.log("rate", float(tf.convert_to_tensor(self.model.optimizer.learning_rate)))
        self.faults.here("step")
        time.sleep(self.options["paces"].get(self.rank, self.options["step_seconds"]))

    def on_test_batch_end(self, batch, logs=None):
        self.faults.here("validation")

    def on_epoch_end(self, epoch, logs=None):
        epoch += self.first
        self.log("epoch", epoch, {k: float(v) for k, v in logs.items()}, strategy.num_workers)


def digest_of(values):
    return hashlib.md5(b"".join(v.tobytes() for v in values)).hexdigest()


def save(model, path, faults):
    """Saves as a script does whose workers may be lost after `fit`."""
    faults.here("after")
    time.sleep(2.0)  # the others hear of it meanwhile
    model.save_weights(path + ".weights.h5")
    task = strategy.extended.worker.company.connection.line.task
    if strategy.is_chief:
        with open(path + ".chief", "a") as file:
            file.write(str(task))

    def write():
        faults.here("write")
        with open(path + ".all", "a") as file:
            file.write(str(task))

    strategy.extended.worker.company.by_the_chief(write, "tfpara.export()")


def callbacks(options):
    steps = options["minibatches"] // (3 * options["devices"])  # of one of three workers
    # The rate falls, so this rule gives up every epoch but the first.
    worse = tfpara.schedules.NewbobRule(0.0, 0.0, rising=True, relative=False, reject_worse=True)
    made = {
        "newbob": lambda: tfpara.callbacks.Newbob("loss"),
        "rate": lambda: tfpara.callbacks.LearningRate(lambda at: 0.003 * (1.0 - at / 8.0), steps),
        "rejecting": lambda: tfpara.callbacks.Newbob("learning_rate", rule=worse, verbose=0),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1),
        # The loss falls, so the best weights are those of the first epoch.
        "stopping": lambda: keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=3, restore_best_weights=True
        ),
        "together": tfpara.callbacks.StopTogether,
        "period": lambda: tfpara.callbacks.SyncPeriod({0: 2, 1: TAU}, verbose=0),
    }
    return [made[name]() for name in options["callbacks"]]


class Batches(keras.utils.PyDataset):
    def __init__(self, given):
        super().__init__(workers=2)
        self.given = given

    def __len__(self):
        return -(-len(self.given["y"]) // self.given["batch_size"])

    def __getitem__(self, number):
        size = self.given["batch_size"]
        rows = slice(number * size, (number + 1) * size)
        x = {name: values[rows] for name, values in self.given["x"].items()}
        return x, self.given["y"][rows]


def by_tensorflow(rows):
    """The same rows, after many calls of TensorFlow's operations."""
    found = tf.identity(rows)
    for shift in range(30):
        found = tf.reshape(tf.stack(tf.unstack(tf.roll(found, shift, 0))), tf.shape(rows))
        found = tf.roll(found, -shift, 0)
    return found


class CallingTensorFlow(Batches):
    def __init__(self, given):
        super().__init__(given)
        self.workers, self.max_queue_size = 4, 30

    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return {name: by_tensorflow(values).numpy() for name, values in x.items()}, y


class Rows(keras.utils.PyDataset):
    def __init__(self, dataset):
        super().__init__(workers=2)
        self.rows = list(dataset)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return keras.tree.map_structure(np.asarray, self.rows[number])


# What `validation_data` are made of, by the option `validate`.
HELD_OUT = {False: lambda dataset: None, True: lambda dataset: dataset, "py_dataset": Rows}
KINDS = {
    "arrays": dict,
    "dataset": lambda given: {
        "x": tf.data.Dataset.from_tensor_slices((given["x"], given["y"])).batch(given["batch_size"])
    },
    "py_dataset": lambda given: {"x": Batches(given)},
    "calling_tensorflow": lambda given: {"x": CallingTensorFlow(given)},
}


def main():
    global strategy
    options = {
        "minibatches": 60,
        "epochs": 2,
        "devices": 1,
        "rule": "tfpara.BSP()",
        "steps_per_execution": 1,
        "min_workers": 1,
        "max_workers": None,
        "grace_seconds": 5.0,
        "silence_seconds": 10.0,
        "adam": False,
        "norm": False,
        "dropout": False,
        "checkpoints": None,
        "period": TAU,
        "every_syncs": 1,
        "validate": False,
        "step_seconds": 0.0,
        "paces": {},
        "balance": False,
        "width": 4,
        "callbacks": [],
        "follows": True,
        "scores": None,
        "of_strategy": {},
        "arrays": None,
        "kind": "arrays",
        "weights": None,
        "saves": None,
        "plain": "",
        "replay": None,
        "fits": 1,
        "holds": {},
        "faults": {},
    } | json.loads(sys.argv[1])
    log = Log(options["log"].format(pid=os.getpid()))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    devices = options["devices"]
    if not options["replay"]:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * devices,
        )
    limits = ("min_workers", "max_workers", "grace_seconds", "silence_seconds")
    limits = {name: options[name] for name in limits}
    settings = {
        "sync_period": options["period"],
        "averages": {"ema": tfpara.EMA(0.9)},
        "balance": options["balance"],
        "elastic": tfpara.Elastic(**limits, rule_follows=options["follows"]),
    }
    rule = eval(options["rule"])
    if options["replay"]:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        strategy = replaying.replayed(options["replay"], rule, **settings)
        rank = "replays"
    else:
        devices = [f"CPU:{k}" for k in range(devices)]
        settings |= options["of_strategy"]
        strategy = tfpara.PeriodicSyncStrategy(rule, devices=devices, **settings)
        # Each generation would optimise all graphs again.
        assert tf.config.optimizer.get_experimental_options()["disable_meta_optimizer"]
        rank = "joins" if strategy.company.joining else str(strategy.worker_index)
    log("rank", rank)
    faults = Faults(options["faults"].get(rank))
    install(faults, log)
    keras.utils.set_random_seed(1)

    def compiled(model):
        adam = options["adam"]
        model.compile(
            keras.optimizers.Adam(0.003) if adam else keras.optimizers.SGD(0.01, momentum=0.5),
            "mse",
            steps_per_execution=options["steps_per_execution"],
        )

    with strategy.scope():
        model = Net(options, log)
        compiled(model)

    def row(epoch, number):
        seed = tf.stack([epoch, number])
        x = tf.random.stateless_normal([4, 6], seed)
        ids = tf.fill([4], epoch * 1000 + number)
        return {"x": x, "id": ids}, tf.reduce_sum(x, 1, keepdims=True)

    def data(epoch, first):
        epoch += watch.first
        numbers = [
            start + own
            for start in range(first, options["minibatches"], strategy.num_replicas)
            for own in strategy.local_replica_ids
            if start + own < options["minibatches"]
        ]
        numbers = np.array(numbers, np.int64)
        return tf.data.Dataset.from_tensor_slices(numbers).map(lambda n: row(np.int64(epoch), n))

    held_out = tf.data.Dataset.range(8).map(lambda number: row(np.int64(9), number))
    watch = Watch(options, log, faults, rank)

    def found(number):
        """The callbacks of a call of fit."""
        made = [watch, *callbacks(options)]
        if options["scores"]:
            scores = {"times_per_epoch": 3, "csv": options["scores"]}
            made.append(tfpara.callbacks.HeldOut(held_out, **scores))
        if options["checkpoints"]:
            directory = options["checkpoints"] + (f"-{number}" if number else "")
            every = options["every_syncs"]
            made.append(tfpara.callbacks.Checkpoint(directory, every_syncs=every))
        return made

    if faults.place == "metric":
        faults.before(keras.metrics.Mean, "result", "metric")
    given = {"x": strategy.datasets_by_epoch(data)}
    if options["arrays"]:
        x = np.random.default_rng(0).normal(size=(options["minibatches"], 6)).astype("float32")
        given = {
            "x": {"x": x, "id": np.arange(len(x))},
            "y": x.sum(1, keepdims=True),
            "batch_size": options["arrays"],
        }
        given = KINDS[options["kind"]](given)
    if options["plain"] == "fails":
        exits = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: sys.exit(1))
        options["fits"] = 0
        model.fit(**given, epochs=options["epochs"], verbose=0, callbacks=[exits])
    for number in range(options["fits"]):
        watch.first = number * options["epochs"]
        if not options["arrays"]:
            # Another object in each call: of one, an epoch of the same number is built once.
            given = {"x": strategy.datasets_by_epoch(data)}
        if number:
            faults.here("between")
            model.hidden.trainable = False
            with strategy.scope():
                compiled(model)
        history = model.fit(
            **given,
            epochs=options["epochs"],
            validation_data=HELD_OUT[options["validate"]](held_out),
            verbose=0,
            callbacks=found(number),
        )
        log("history", number, history.epoch, history.history.get("loss"))
    values = []
    for which in ("global", "ema"):
        with strategy.weights(model, which):
            values += [np.asarray(w) for w in model.get_weights()]
    if options["weights"]:
        np.savez(options["weights"].format(pid=os.getpid()), *values)
    if options["replay"]:
        return
    digest = digest_of(values)
    if options["saves"]:
        save(model, options["saves"], faults)
    seen = np.asarray(model.seen.seen).tolist()
    log("steps", strategy.statistics().steps)
    log("end", digest, seen, strategy.company.generation)
    if options["plain"] == "raises":
        raise KeyError("the user's")


if '"plain"' in sys.argv[1]:
    main()
else:
    tfpara.run(main)
