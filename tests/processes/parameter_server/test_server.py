"""The server: on devices of this process, and in real processes, which are killed at random."""

import json
import os
import pathlib
import random
import subprocess
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lib import warm
from tfpara.algorithms import ASGD, AsyncEASGD, Downpour
from tfpara.algorithms.asgd import RunningThenMean
from tfpara.parameter_server.exchange import Exchange
from tfpara.parameter_server.messages import Place, Push
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.shard import NOT_FINITE

pytestmark = pytest.mark.latest

PROGRAM = pathlib.Path(__file__).parents[2] / "lib" / "programs" / "async_run.py"


def run(scenario, timeout=280, **options):
    """What a scenario of the program says."""
    with warm.Popen(
        [str(PROGRAM), scenario, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TF_NUM_INTRAOP_THREADS": "1"},
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, out[-1000:] + err[-3000:]
    return json.loads(lines[0][7:])


def check_counts(got, times, pushes, workers):
    """Every sample is in both weights so often, and the books agree."""
    assert got["smallest"] == got["largest"] == [times, times]
    assert got["pushes"] == pushes
    assert sum(got["staleness"]) == pushes
    assert sum(got["by_worker"]) == pushes
    assert len([n for n in got["by_worker"] if n]) == workers


@pytest.mark.nightly
@pytest.mark.long
def test_no_update_is_lost():
    pushes = 2 * 500
    got = run("counting", workers=2, ps=2, minibatches=500, batch=64, epochs=2, chunks=10)
    check_counts(got, pushes, pushes, 2)
    assert got["samples"] == pushes * 64
    assert sum(got["staleness"][1:]) > 0  # they were at it at once


@pytest.mark.long
def test_every_minibatch_is_in_once_though_workers_are_killed():
    options = {"minibatches": 1024, "batch": 1, "epochs": 3, "chunks": 8, "during": "kills"}
    got = run("counting", workers=2, ps=2, rule="Downpour", sync_period=2, **options)
    check_counts(got, 3 * 1024 // 64, 3 * 1024 // 2, 2)
    assert got["kills"] >= 2


# At each change: test_a_push_of_rows_that_is_in_already_is_left_out.
@pytest.mark.nightly
@pytest.mark.long
def test_every_minibatch_is_in_the_rows_of_tables_once_though_workers_are_killed():
    """Two tables on two servers, of which workers pull and push rows."""
    options = {"minibatches": 512, "batch": 1, "epochs": 2, "chunks": 8, "during": "kills"}
    got = run("counting", workers=2, ps=2, rule="Downpour", sync_period=2, tables=True, **options)
    assert (got["by_rows"], got["unused"]) == (2, 0.0)
    check_counts(got, 2 * 512 // 64, 2 * 512 // 2, 2)
    assert got["kills"] >= 1


@pytest.mark.nightly
def test_a_shuffled_dataset_is_read_once_though_a_worker_is_killed():
    options = {"minibatches": 512, "batch": 1, "epochs": 2, "chunks": 3, "during": "kill"}
    got = run("counting", workers=3, ps=2, shuffled=True, **options)
    check_counts(got, 2 * 512 // 64, 2 * 512, 3)
    assert got["kills"] == 1


@pytest.mark.nightly
@pytest.mark.long
def test_no_push_is_staler_than_the_bound_and_nobody_waits_for_the_dead():
    bound = 1
    got = run(
        "counting",
        workers=3,
        ps=2,
        minibatches=1024,
        batch=1,
        epochs=2,
        chunks=12,
        bound=bound,
        during="pause",
    )
    check_counts(got, 2 * 1024 // 64, 2 * 1024, 3)
    assert sum(got["staleness"][bound + 1 :]) == 0
    assert got["kills"] == 1


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_slow_worker_does_not_hold_up_the_others():
    got = run("stopped", workers=2, ps=1, wanted=100, turns=3)
    assert len(got["meanwhile"]) == 3
    for stopped, other in got["meanwhile"]:
        assert stopped <= 1 and other >= 100  # one push was under way
    # All the same, no update is lost; in the epoch that was broken off samples differ.
    assert got["mean"] == [got["pushes"] * 4 / 64] * 2  # 4 samples in a push, of 64
    assert sum(got["staleness"]) == sum(got["by_worker"]) == got["pushes"]


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.timeout(700)
@pytest.mark.parametrize("tables", [False, True])
def test_runs_on_a_cluster_are_repeated_in_the_simulation(tables):
    """With tables also the workers' slots, which they keep whole and read and write by rows."""
    cases = [
        ("ASGD", {"delay_compensation": 0.1}, 1),
        ("ASGD", {"delay_compensation": 0.1}, 3),
        ("Downpour", {"max_staleness": 2}, 3),
        ("AsyncBMUF", {"block_momentum": 0.6}, 3),
        ("AsyncEASGD", {}, 3),
    ]
    cases = [(*case, tables) for case in cases]
    results = run("replay", 600, workers=2, ps=1, cases=cases)
    for case, got in zip(cases, results, strict=True):
        assert got["records"], case
        assert got["difference"] < 1e-5, case
        assert got["moved"] > 0.1, case
        for name, values in got["histories"][0].items():
            np.testing.assert_allclose(values, got["histories"][1][name], rtol=1e-4)


@pytest.mark.nightly
def test_weights_that_a_callback_sets_reach_servers_and_workers():
    ones = [[1.0, 1.0], [1.0, 1.0]]
    assert run("set", workers=2, ps=2) == {"ASGD": ones, "AsyncEASGD": ones}


@pytest.mark.nightly
def test_after_a_fit_that_failed_every_sample_is_used_once(tmp_path):
    """A chunk cannot be read, which is named; a callback fails, while chunks are under way."""
    for k in (0, 1, 3):
        (tmp_path / str(k)).write_text("1 2 3 4 5 6\n1 2 3 4 5 6\n")
    got = run("broken", workers=2, ps=2, path=str(tmp_path))
    assert got["error"].startswith("chunk 2 of epoch 0 could not be trained: ")
    assert got["error"].endswith("/2; No such file or directory")
    assert 0 < got["failed"] < 1024
    assert got["then"] == [[16.0, 16.0]] * 2


# On devices of this process.


def long(value):
    return tf.convert_to_tensor(value, tf.int64)


def made(rule, devices=2, averages=None, num_workers=3, chunks=2, **options):
    """A model with a weight on each server, but at least two, on servers of this process."""
    x = keras.Input((2,))
    parts = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(x)
        for _ in range(max(2, devices))
    ]
    model = keras.Model(x, keras.layers.Add()(parts))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    names = [f"CPU:{k}" for k in range(devices)]
    server = Server(model, [], rule, averages or {}, names, num_workers=num_workers, **options)
    server.divide(chunks)
    server.open_epoch(0, anew=True)
    return server


def pushed(server, pulled, values, *, worker=0, epoch=0, chunk=0, start=0, waits=False, rate=-1.0):
    push = Push(
        values=[tf.constant(v, tf.float32, shape=[2, 1]) for v in values],
        state=[],
        kept=[],
        metrics=[tf.zeros_like(m) for m in server.metrics],
        worker=long(worker),
        place=Place(long(epoch), long(chunk), long(start)),
        minibatches=long(1),
        samples=long(5),
        rate=tf.constant(rate),
    )
    return Exchange(server).push(push, pulled, waits=waits)


def weights(server):
    now = server.weights_at_once(["global"]).weights["global"]
    return [w.numpy().ravel().tolist() for w in now]


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_in_already_is_left_out(devices):
    server = made(ASGD(), devices)
    pulled = Exchange(server).read()
    first = pushed(server, pulled, [[1, 2], [3, 4]])
    assert bool(first.included) and int(first.versions[0]) == 1
    again = pushed(server, pulled, [[1, 2], [3, 4]])  # by the worker that took over
    assert bool(again.included)  # which goes on
    ahead = pushed(server, pulled, [[1, 2], [3, 4]], start=2)  # as if one were missing
    assert not ahead.included
    former = pushed(server, pulled, [[1, 2], [3, 4]], epoch=1, start=1)
    assert not former.included
    assert weights(server) == [[-1, -2], [-3, -4]]
    assert int(server.counters.samples) == 5
    assert int(Exchange(server).done(long(0))) == 1
    assert server.counters.histogram.numpy().sum() == server.counters.by_worker.numpy().sum() == 1


@pytest.mark.parametrize("rule", [ASGD(), Downpour(block_learning_rate=0.5)], ids=str)
def test_a_push_that_came_to_one_server_only_is_made_whole(rule):
    server = made(rule, 2)
    pulled = Exchange(server).read()
    moved = np.multiply(-1 if isinstance(rule, ASGD) else 0.5, [[1, 2], [3, 4]]).tolist()
    first = server.shards[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "shards", [first])  # the worker dies before the other one has it
        patch.setattr(server, "order", [first])
        patch.setattr(server, "names", server.names[:1])
        pushed(server, pulled, [[1, 2], [3, 4]])
    assert int(Exchange(server).done(long(0))) == 0  # so it is made again
    pushed(server, pulled, [[1, 2], [3, 4]])
    assert weights(server) == moved
    assert int(Exchange(server).done(long(0))) == 1
    assert int(server.counters.samples) == 5


def test_a_push_that_is_not_finite_leaves_all_as_it_was():
    server = made(ASGD(), 1)
    pulled = Exchange(server).read()
    pushed(server, pulled, [[1, 2], [3, 4]])
    before = {name: v.numpy() for name, v in server.variables().items()}
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{NOT_FINITE} '.*kernel'"):
        pushed(server, Exchange(server).read(), [[1, 2], [np.nan, 4]], start=1)
    for name, variable in server.variables().items():
        np.testing.assert_array_equal(variable, before[name])
    pushed(server, Exchange(server).read(), [[1, 2], [3, 4]], start=1)  # the lock was given back
    assert weights(server) == [[-2, -4], [-6, -8]]


def test_weights_whose_sum_is_infinite_are_not_refused():
    server = made(ASGD(), 1)
    pushed(server, Exchange(server).read(), [[-3e38, -3e38], [3, 4]])
    largest = float(np.float32(3e38))
    assert weights(server) == [[largest, largest], [-3, -4]]


def test_the_rate_of_a_push_and_of_its_staleness():
    server = made(ASGD(rate_by_staleness=True), 1)
    pulled = Exchange(server).read()
    pushed(server, pulled, [[1, 1], [1, 1]])
    pushed(server, pulled, [[1, 1], [1, 1]], start=1)  # staleness 1: half the rate
    pushed(server, Exchange(server).read(), [[1, 1], [1, 1]], start=2, rate=0.25)
    assert weights(server) == [[-1.75, -1.75]] * 2
    assert server.learning_rate == 1.0
    server.learning_rate = 0.5
    pushed(server, Exchange(server).read(), [[1, 1], [1, 1]], start=3)
    assert weights(server) == [[-2.25, -2.25]] * 2


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_rate_and_a_mean_that_are_set_while_workers_push_are_not_lost():
    server = made(ASGD(), 1, averages={"average": RunningThenMean(0.1)})
    zeros = [tf.zeros([2, 1])] * 2

    @tf.function
    def push(start):
        values = Push(
            zeros, [], [], [tf.zeros_like(m) for m in server.metrics], long(0),
            Place(long(0), long(0), start), long(1), long(5), tf.constant(-1.0),
        )  # fmt: skip
        return Exchange(server).push(values, Exchange(server).read()).versions[0]

    pushes = 0
    stop = threading.Event()

    def work():
        nonlocal pushes
        while not stop.is_set():
            push(long(pushes))
            pushes += 1

    def let_two_pass():
        seen = pushes
        while pushes < seen + 2:
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for rate in range(1, 100):
            server.learning_rate = rate / 128
            let_two_pass()
            assert server.learning_rate == rate / 128
        server.start_mean("average")
        let_two_pass()
    finally:
        stop.set()
        thread.join()
    assert [bool(s.mean) for s in server.shards[0].averages["average"]] == [True, True]


def test_an_elastic_move_is_told_to_the_worker():
    server = made(AsyncEASGD(0.25), 2)
    answer = pushed(server, Exchange(server).read(), [[4, 8], [0, -4]])
    assert [m.numpy().ravel().tolist() for m in answer.moves] == [[1, 2], [0, -1]]
    assert weights(server) == [[1, 2], [0, -1]]
    again = pushed(server, Exchange(server).read(), [[4, 8], [0, -4]])  # in already
    assert [m.numpy().ravel().tolist() for m in again.moves] == [[0, 0], [0, 0]]


def test_turns_are_taken_where_staleness_is_bounded():
    server = made(ASGD(max_staleness=1), 2, record=True)
    ones = [[1, 1], [1, 1]]
    assert Exchange(server).ask_to_pull(long(0), waits=False)
    old = Exchange(server).read()
    assert Exchange(server).ask_to_pull(long(1), waits=False)
    assert not Exchange(server).ask_to_pull(long(2), waits=False)  # two are under way
    assert pushed(server, Exchange(server).read(), ones, worker=1, chunk=1).settled
    assert Exchange(server).ask_to_pull(long(1), waits=False)
    refused = pushed(server, Exchange(server).read(), ones, worker=1, chunk=1, start=1)
    assert not refused.settled  # worker 0's would be of staleness 2
    assert not refused.included
    assert weights(server) == [[-1, -1]] * 2
    server.forget(0)
    assert pushed(server, Exchange(server).read(), ones, worker=1, chunk=1, start=1).settled
    # Worker 0 was alive after all, and has been overtaken.
    late = pushed(server, old, ones, worker=0)
    assert bool(late.settled) and not late.included
    assert weights(server) == [[-2, -2]] * 2
    assert [tuple(line) for line in server.counters.lines()] == [(1, 1, 0, 0), (1, 1, 1, 1)]


class Lock:
    """A server's lock that calls `before` each time, in graphs, too, before it is taken."""

    def __init__(self, lock, before):
        self.lock, self.before = lock, before

    def execute(self, inside):
        called = tf.numpy_function(lambda: bool(self.before()), [], tf.bool)
        with tf.control_dependencies([called]):
            return self.lock.execute(inside)


def late(lock, seed):
    """A server's lock that takes its time: what is sent to the server comes late."""
    draw = random.Random(seed)
    return Lock(lock, lambda: time.sleep(draw.choice([0.0, 0.0, 0.001, 0.01])))


@pytest.mark.one_version
@pytest.mark.nightly_cases("2", "0")
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_the_bound_holds_on_every_server(bound):
    """Workers in threads, and three servers that are slow at times.

    The threads run graphs, as workers do. TensorFlow 2.17 confuses the inputs of operations that
    several threads run eagerly while Python collects garbage.
    """
    workers, pushes = 4, 30
    server = made(ASGD(max_staleness=bound), 3, num_workers=workers, chunks=workers)
    for seed, shard in enumerate(server.shards):
        shard.lock = late(shard.lock, seed)
    ones = [[1, 1]] * 3

    def a_push(worker, start):
        pulled = Exchange(server).pull(worker)
        answer = pushed(server, pulled, ones, worker=worker, chunk=worker, start=start, waits=True)
        within = answer.included & answer.settled
        return within, tf.stack(answer.versions) - 1 - tf.stack(pulled.versions)

    number = tf.TensorSpec([], tf.int64)
    push = tf.function(a_push, autograph=False).get_concrete_function(number, number)
    stale, errors = [], []

    def work(worker):
        try:
            for k in range(pushes):
                within, staleness = push(long(worker), long(k))
                assert within
                stale.append(staleness.numpy())
        except BaseException as error:
            errors.append(error)

    for worker in range(workers):
        Exchange(server).begin(long(worker), long(worker))
    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert [str(error) for error in errors] == []
    assert len(stale) == pushes * workers
    assert np.max(stale, axis=0).tolist() == [bound] * 3  # it is made use of
    assert weights(server) == [[-pushes * workers] * 2] * 3


@pytest.mark.parametrize("how", ["lost", "given up"])
@pytest.mark.parametrize("when", ["after its pull", "in the middle of its push"])
def test_nobody_waits_for_a_worker_that_does_not_come_back(how, when):
    server = made(ASGD(max_staleness=0), 2)
    ones = [[1, 1], [1, 1]]
    Exchange(server).begin(long(0), long(0))
    pulled = Exchange(server).pull(long(0))
    if when != "after its pull":
        lock, server.first.lock = server.first.lock, late(server.first.lock, 0)
        calls = []

        def dies(inside):  # after its turn has come, and the push is on the second server
            calls.append(inside)
            if len(calls) == 2:
                raise ConnectionError
            return lock.execute(inside)

        server.first.lock.execute = dies
        with pytest.raises(ConnectionError):
            pushed(server, pulled, ones)
        server.first.lock = lock
        assert weights(server) == [[0, 0], [-1, -1]]
    if how == "lost":
        server.forget(0)
    else:  # TensorFlow has given its call up, and another worker has its chunk
        assert not Exchange(server).ask_to_pull(long(1), waits=False)
        Exchange(server).begin(long(1), long(0))
    assert int(Exchange(server).done(long(0))) == 0
    assert Exchange(server).ask_to_pull(long(1), waits=False)
    assert pushed(server, Exchange(server).read(), ones, worker=1).included
    assert weights(server) == [[-1, -1]] * 2
    assert int(Exchange(server).done(long(0))) == 1


@pytest.mark.nightly
def test_a_call_that_was_given_up_takes_no_turn_from_the_one_in_its_place():
    """TensorFlow has made another one for the same worker, which still runs the first."""
    server = made(ASGD(max_staleness=0), 2)
    ones = [[1, 1], [1, 1]]
    Exchange(server).begin(long(1), long(1))
    other = Exchange(server).pull(long(1))
    asked = []
    server.first.lock = Lock(server.first.lock, lambda: asked.append(1))
    included = []

    @tf.function(autograph=False)
    def begin_and_push():
        with tf.control_dependencies([Exchange(server).begin(long(0), long(0))]):
            pulled = Exchange(server).pull(long(0))
        return pushed(server, pulled, ones, waits=True).included

    push = begin_and_push.get_concrete_function()

    def call():
        included.append(bool(push()))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    # The second one's begin has the first one ask again.
    for thread, times in zip(threads, (2, 5), strict=True):
        thread.start()
        while len(asked) < times:
            time.sleep(0.01)
    pushed(server, other, ones, worker=1, chunk=1)
    for thread in threads:
        thread.join(60)
    assert included == [True, True]
    assert weights(server) == [[-2, -2]] * 2


@pytest.mark.one_version
def test_pushes_of_the_fit_before_are_left_out():
    server = made(ASGD(), 2)
    pulled = Exchange(server).read()
    ones = [[1, 1], [1, 1]]
    late = tf.function(lambda: pushed(server, pulled, ones).included).get_concrete_function()
    server.divide(2)
    server.open_epoch(0, anew=True)
    assert not late()
    assert weights(server) == [[0, 0]] * 2
    assert pushed(server, Exchange(server).read(), ones).included
    assert weights(server) == [[-1, -1]] * 2


def test_no_record_is_told_of():
    with pytest.raises(ValueError, match="record=True"):
        made(ASGD()).counters.lines()


def test_weights_are_spread_over_servers_and_have_names_in_checkpoints():
    x = keras.Input((8,))
    model = keras.Sequential([x, keras.layers.Dense(8), keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    server = Server(model, [], ASGD(), {}, ["CPU:0", "CPU:1"], num_workers=1)
    shapes = [[tuple(w.shape) for w in shard.weights] for shard in server.shards]
    assert shapes == [[(8, 8)], [(8,), (8, 4), (4,)]]
    assert [w.device[-5:] for shard in server.shards for w in shard.weights] == ["CPU:0"] + 3 * [
        "CPU:1"
    ]
    names = server.variables()
    assert {f"weight/{k}" for k in range(4)} < set(names)
    assert {"version/0", "version/1", "progress/0", "progress/1", "books/finished"} < set(names)
