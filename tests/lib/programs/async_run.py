"""A chief with workers and parameter servers of its own: `async_run.py SCENARIO JSON`.

The servers are plain servers of TensorFlow, without a lobby. The result is printed as a line of
JSON.
"""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import types

import keras
import numpy as np
import tensorflow as tf

from tfpara.algorithms import ASGD, AsyncBMUF, AsyncEASGD, Downpour
from tfpara.launch import clusters
from tfpara.parameter_server.chunks import Chunks
from tfpara.parameter_server.errors import ChunkError
from tfpara.parameter_server.processes import Processes, server_config
from tfpara.parameter_server.simulation import simulate_async
from tfpara.parameter_server.strategy import AsyncStrategy

IDS = 64
RULES = {rule.__name__: rule for rule in (ASGD, AsyncBMUF, AsyncEASGD, Downpour)}
FORKS = multiprocessing.get_context("fork")


def serve(spec, job, index):
    """Runs one of TensorFlow's servers until it is killed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    config = server_config(job, len(spec["worker"]))
    cluster = tf.train.ClusterSpec(spec)
    tf.distribute.Server(cluster, job_name=job, task_index=index, config=config).join()


def run_servers(orders, spec):
    """Starts and kills servers as ordered, in a process where TensorFlow has no threads yet."""
    running = {}
    with contextlib.suppress(EOFError):
        while True:
            order, *place = orders.recv()
            if order == "start":
                process = running[tuple(place)] = FORKS.Process(target=serve, args=(spec, *place))
                process.start()
                orders.send(process.pid)
            else:
                running[tuple(place)].kill()
                running[tuple(place)].join()
                orders.send(None)
    for process in running.values():
        process.kill()


class Servers(Processes):
    """Processes that this one has started; workers can be killed and started again."""

    def __init__(self, workers, ps):
        self.state = types.SimpleNamespace(asked_to_end=None, restart_code=None)
        ports = clusters.ports("127.0.0.1", 0, 1 + workers + ps)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.spec = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + workers],
            "ps": addresses[1 + workers :],
        }
        self.pids = {}
        self.gone = []
        self._orders, theirs = FORKS.Pipe()
        self._starter = FORKS.Process(target=self._run_servers, args=(theirs,))
        self._starter.start()
        theirs.close()
        for job, count in (("worker", workers), ("ps", ps)):
            for index in range(count):
                self.start(job, index)
        self._connect(self.spec)

    def _run_servers(self, orders):
        self._orders.close()  # so that the end of this process is the end of that one
        run_servers(orders, self.spec)

    def _order(self, *order):
        self._orders.send(order)
        return self._orders.recv()

    def start(self, job, index):
        self.pids[job, index] = self._order("start", job, index)

    def kill(self, index):
        """Kills a worker, and tells the chief, as the lobby would."""
        self._order("kill", "worker", index)
        self.gone.append(index)

    def check(self):
        pass

    def lost(self):
        gone, self.gone = self.gone, []
        return gone

    def end(self):
        self._orders.close()
        self._starter.join()


def count(y_true, y_pred):
    """Returns a loss whose gradient for a sample's own weights is 1."""
    del y_true
    return tf.reduce_sum(y_pred, axis=-1)


def table():
    """Returns a table of 4 MB, which is pulled and pushed by rows."""
    return keras.layers.Embedding(2**16, 16, embeddings_initializer="zeros")


def counting_model(tables=False):
    """Returns a model of two weights that both count how often each sample was in a gradient."""
    x = keras.Input((IDS,))
    parts = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(x) for _ in "ab"]
    if tables:
        x = keras.Input((1,), dtype="int64")
        parts = [keras.layers.Flatten()(table()(x)) for _ in "ab"]
    model = keras.Model(x, keras.layers.Add()(parts))
    model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError())
    model.compile(
        keras.optimizers.SGD(1.0), loss=lambda y, p: tf.reduce_sum(p, -1) * BATCH, metrics=[]
    )
    return model


def samples(count, batch, tables=False):
    """Returns data whose inputs are the samples' numbers, as one-hot vectors or for tables."""
    x = np.arange(count) % IDS
    x = x[:, None] if tables else np.eye(IDS, dtype=np.float32)[x]
    return x, np.zeros([count, 1], np.float32)


def counted(model, strategy):
    """Returns how often each sample was in the weights, and what the servers' books say."""
    statistics = strategy.statistics(model)
    weights = [(-w.numpy()[:IDS]).round(3).ravel().tolist() for w in model.trainable_variables]
    return {
        "by_rows": len(strategy._models.of(model).work.tables.indices),
        "unused": max(float(abs(w.numpy()[IDS:]).sum()) for w in model.trainable_variables),
        "smallest": [min(w) for w in weights],
        "largest": [max(w) for w in weights],
        "mean": [sum(w) / IDS for w in weights],
        "pushes": statistics.pushes,
        "samples": statistics.samples,
        "staleness": [int(k) for k in statistics.staleness],
        "by_worker": [int(k) for k in statistics.by_worker],
    }


BATCH = 1


def train_counting(
    servers,
    rule,
    *,
    minibatches,
    batch,
    epochs,
    chunks,
    during=None,
    shuffled=False,
    tables=False,
    **options,
):
    """Trains the model that counts, and scores it; `during` runs beside it in a thread."""
    global BATCH
    BATCH = batch
    strategy = AsyncStrategy(rule, _processes=servers, **options)
    with strategy.scope():
        model = counting_model(tables)
    x, y = samples(minibatches * batch, batch, tables)
    stop = threading.Event()
    thread = threading.Thread(target=during, args=(servers, strategy, stop)) if during else None
    if thread:
        thread.start()
    begun = time.monotonic()
    data = {"x": x, "y": y, "batch_size": batch}
    if shuffled:
        data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(batch)}
    # The length of this dataset is unknown, so each evaluation ends with an error in a graph.
    scored = tf.data.Dataset.from_tensors((x[:1], y[:1])).filter(lambda x, y: True)
    score = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: model.evaluate(scored, verbose=0)
    )
    strategy.fit(model, epochs=epochs, verbose=0, chunks=chunks, callbacks=[score], **data)
    seconds = time.monotonic() - begun
    if thread:
        stop.set()
        thread.join()
    return counted(model, strategy) | {"seconds": seconds, "kills": KILLS}


KILLS = 0


def all_at_work(strategy, stop):
    """Waits until every worker has pushed anew; returns False if the run is over before."""
    before = None
    while not stop.wait(0.1):
        try:
            now = strategy.statistics().by_worker
        except ValueError:  # The run has not begun.
            continue
        before = now if before is None else before
        if (now > before).all():
            return True
    return False


def kill_sometimes(servers, strategy, stop):
    """Kills a worker up to five times, at random moments when all are at work; starts it again."""
    global KILLS
    draw = random.Random(0)
    while KILLS < 5 and all_at_work(strategy, stop) and not stop.wait(draw.uniform(0.0, 0.7)):
        index = draw.randrange(len(servers.spec["worker"]))
        servers.kill(index)
        KILLS += 1
        servers.start("worker", index)


def kill_a_worker(servers, strategy, stop):
    """Kills worker 0 and does not start it again."""
    global KILLS
    if all_at_work(strategy, stop):
        servers.kill(0)
        KILLS += 1


def pause_a_worker(servers, strategy, stop):
    """Stops worker 0 for a while, as if it were slow, and later kills it for good."""
    global KILLS
    for _ in range(2):
        if not all_at_work(strategy, stop):
            return
        os.kill(servers.pids["worker", 0], signal.SIGSTOP)
        stop.wait(1.0)
        os.kill(servers.pids["worker", 0], signal.SIGCONT)
    kill_a_worker(servers, strategy, stop)


class Stop(keras.callbacks.Callback):
    """Ends training once an event is set."""

    def __init__(self, event):
        super().__init__()
        self.event = event

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.event.is_set()


def pushes_until(strategy, wanted):
    """Waits until worker 1 has made `wanted` more pushes; returns all workers' pushes meanwhile."""
    before = strategy.statistics().by_worker
    while (now := strategy.statistics().by_worker)[1] < before[1] + wanted:
        time.sleep(0.01)
    return [int(n) for n in now - before]


def scenario_stopped(servers, options):
    """Counts the workers' pushes while worker 0 is stopped, several times in one long epoch."""
    global BATCH
    BATCH = 4
    strategy = AsyncStrategy(ASGD(), _processes=servers)
    with strategy.scope():
        model = counting_model()
    x, y = samples(2**14 * BATCH, BATCH)  # The end of an epoch would wait for worker 0's chunk.
    pushes, done = [], threading.Event()
    worker = servers.pids["worker", 0]

    def measure():
        for _ in range(options["turns"]):
            all_at_work(strategy, threading.Event())
            os.kill(worker, signal.SIGSTOP)
            pushes.append(pushes_until(strategy, options["wanted"]))
            os.kill(worker, signal.SIGCONT)
        done.set()

    thread = threading.Thread(target=measure)
    thread.start()
    strategy.fit(
        model, x, y, batch_size=BATCH, epochs=10**6, verbose=0, chunks=64, callbacks=[Stop(done)]
    )
    thread.join()
    return {"meanwhile": pushes} | counted(model, strategy)


def scenario_counting(servers, options):
    rule = RULES[options.pop("rule", "ASGD")](max_staleness=options.pop("bound", None))
    known = {"kill": kill_a_worker, "kills": kill_sometimes, "pause": pause_a_worker}
    during = known.get(options.pop("during", None))
    return train_counting(servers, rule, during=during, **options)


def model_with_a_table():
    x = keras.Input((6,), dtype="int64")
    y = keras.layers.Dense(3)(keras.layers.Flatten()(table()(x)))
    model = keras.Model(x, y)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def small_model(dropout):
    layers = [keras.Input((6,)), keras.layers.Dense(5, activation="tanh")]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(dropout)]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def scenario_replay(servers, options):
    """Runs trainings on the cluster, and repeats their orders of pulls and pushes in simulation."""
    return [replayed(servers, *case) for case in options["cases"]]


def replayed(servers, rule, settings, sync_period, tables=False):
    """Runs one training on the cluster, and in simulation."""
    options = {"sync_period": sync_period}
    draw = np.random.default_rng(0)
    x = draw.normal(size=(320, 6)).astype(np.float32)
    y = (x @ draw.normal(size=(6, 3))).argmax(1)
    if tables:
        x = (x * 3).astype(np.int64) + 10
    rule = RULES[rule](**settings)

    def train(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = model_with_a_table() if tables else small_model(0.2)
        history = strategy.fit(model, x, y, batch_size=8, epochs=2, verbose=0, chunks=7).history
        return model, history

    real = AsyncStrategy(rule, _processes=servers, record=True, **options)
    trained, history = train(real)
    order = real.record(trained)
    again = simulate_async(real.num_workers, rule, order=order, **options)
    repeated, same = train(again)
    return {
        "difference": max(
            float(np.abs(a - b).max())
            for a, b in zip(trained.get_weights(), repeated.get_weights(), strict=True)
            if a.dtype == np.float32
        ),
        "moved": float(np.abs(trained.get_weights()[0]).max()),
        "histories": [history, same],
        "records": order == again.record(repeated),
        "pushes": len(order),
        "staleness": real.statistics(trained).staleness[:4].tolist(),
    }


def scenario_set(servers, options):
    """Has a callback set weights after the first epoch; then only elasticity moves the models."""
    found = {}
    for rule in (ASGD(), AsyncEASGD(0.5)):
        strategy = AsyncStrategy(rule, _processes=servers, **options)
        with strategy.scope():
            model = counting_model()
            model.compile(keras.optimizers.SGD(0.0), "mse")
        set_once = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, model=model: (
                model.set_weights([np.ones((IDS, 1))] * 2) if epoch == 0 else None
            )
        )
        x, y = samples(64, 4)
        options_of_fit = {"batch_size": 4, "epochs": 2, "chunks": 4, "verbose": 0}
        strategy.fit(model, x, y, callbacks=[set_once], **options_of_fit)
        with strategy.weights(model, "global"):
            found[type(rule).__name__] = [[w.min(), w.max()] for w in model.get_weights()]
    return {name: np.asarray(values).tolist() for name, values in found.items()}


def scenario_broken(servers, options):
    """Trains with a missing file, then with a callback that fails, and then once more."""
    global BATCH
    path = options["path"]

    def part(epoch, chunk):
        name = tf.strings.join([path, "/", tf.strings.as_string(chunk)])
        data = tf.data.TextLineDataset(name).map(
            lambda s: tf.strings.to_number(tf.strings.split(s))
        )
        return data.map(lambda v: (tf.ensure_shape(v, [6]), tf.zeros([], tf.int64))).batch(2)

    strategy = AsyncStrategy(ASGD(max_staleness=1), _processes=servers)
    with strategy.scope():
        model = small_model(0.0)
    found = {"error": None}
    try:
        strategy.fit(model, Chunks(4, part), epochs=3, verbose=0)
    except ChunkError as error:
        found["error"] = str(error)
    BATCH = 1
    with strategy.scope():
        model = counting_model()
    x, y = samples(1024, BATCH)
    failing = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    trained = []
    for callbacks in ([failing], []):
        with contextlib.suppress(ZeroDivisionError):
            strategy.fit(model, x, y, batch_size=BATCH, chunks=8, verbose=0, callbacks=callbacks)
        trained.append([-w.numpy() for w in model.trainable_variables])
    found["failed"] = float(trained[0][0].sum())
    found["then"] = [
        [float(f(b - a)) for f in (np.min, np.max)] for a, b in zip(*trained, strict=True)
    ]
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    run = Servers(given.pop("workers"), given.pop("ps"))
    try:
        print("RESULT", json.dumps(globals()[f"scenario_{sys.argv[1]}"](run, given)), flush=True)
    finally:
        run.end()
    os._exit(0)
