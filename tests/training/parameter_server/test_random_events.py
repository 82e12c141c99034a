"""Random orders of pulls, pushes and deaths on several servers, beside NumPy."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.parameter_server.exchange import Exchange
from tfpara.parameter_server.messages import Place, Push
from tfpara.parameter_server.server import Server

WEIGHTS, SIZE, LENGTH = 3, 2, 4  # weights of a model, elements of one, minibatches of a chunk
RATE, ZETA, ALPHA, LAMBDA, DECAY = 0.1, 0.5, 0.3, 0.5, 0.7
RULES = {
    "sgd": tfpara.ASGD(),
    "adam": tfpara.ASGD(),
    "compensated": tfpara.ASGD(delay_compensation=LAMBDA),
    "slower": tfpara.ASGD(rate_by_staleness=True),
    "downpour": tfpara.Downpour(rate_by_staleness=True, block_learning_rate=ZETA),
    "easgd": tfpara.AsyncEASGD(ALPHA),
}


class Expected:
    """What is on the servers, from the equations, in float64."""

    def __init__(self, kind, weights, shards, chunks):
        self.kind, self.w = kind, weights
        self.ema = [w.copy() for w in weights]
        self.m = [0.0 * w for w in weights]
        self.v = [0.0 * w for w in weights]
        self.steps = [0] * len(weights)
        self.shards = shards  # numbers of the weights of each
        self.versions = [0] * len(shards)
        self.done = np.zeros((len(shards), chunks), int)

    def pull(self):
        return [w.copy() for w in self.w], list(self.versions)

    def push(self, shard, values, pulled, chunk, start):
        """A push comes to one server."""
        if self.done[shard, chunk] != start:
            return
        weights, versions = pulled
        staleness = self.versions[shard] - versions[shard]
        for k in self.shards[shard]:
            self.w[k] = self.stepped(k, values[k], weights[k], staleness)
            self.ema[k] = DECAY * self.ema[k] + (1 - DECAY) * self.w[k]
        self.versions[shard] += 1
        self.done[shard, chunk] += 1

    def stepped(self, k, g, pulled, staleness):
        w = self.w[k]
        if self.kind == "compensated":
            return w - RATE * (g + LAMBDA * g * g * (w - pulled))
        if self.kind == "slower":
            return w - RATE / (1 + staleness) * g
        if self.kind == "downpour":
            return w + ZETA / (1 + staleness) * g
        if self.kind == "easgd":
            return w + ALPHA * (g - w)
        if self.kind == "sgd":
            return w - RATE * g
        self.steps[k] += 1
        self.m[k] = 0.9 * self.m[k] + 0.1 * g
        self.v[k] = 0.999 * self.v[k] + 0.001 * g * g
        m, v = self.m[k] / (1 - 0.9 ** self.steps[k]), self.v[k] / (1 - 0.999 ** self.steps[k])
        return w - RATE * m / (np.sqrt(v) + 1e-7)


def long(value):
    return tf.constant(value, tf.int64)


def served(kind, servers, workers, chunks):
    x = keras.Input((SIZE,))
    parts = [keras.layers.Dense(1, use_bias=False)(x) for _ in range(WEIGHTS)]
    model = keras.Model(x, keras.layers.Add()(parts))
    step = keras.optimizers.Adam if kind == "adam" else keras.optimizers.SGD
    model.compile(step(RATE), "mse")
    devices = [f"CPU:{k}" for k in range(servers)]
    server = Server(
        model, [], RULES[kind], {"ema": tfpara.EMA(DECAY, num_updates=False)}, devices, workers
    )
    server.divide(chunks)
    server.open_epoch(0, anew=True)
    weights = [w.numpy().astype("float64") for w in model.trainable_variables]
    return server, Expected(kind, weights, [s.indices for s in server.shards], chunks)


class Worker:
    """What it is at: a chunk, a place in it, and what it has pulled (from both)."""

    def __init__(self, chunk, start):
        self.chunk, self.start, self.pulled = chunk, start, None


@pytest.mark.nightly_cases("easgd-3", "sgd-2", "slower-3")
@pytest.mark.parametrize(("kind", "servers"), [(k, 2 + n % 2) for n, k in enumerate(RULES)])
def test_any_order_of_events_is_as_by_hand(kind, servers):
    """A worker may die before its push, or when only some servers have it; a chunk may have two."""
    draw, numbers = random.Random(kind), np.random.default_rng(servers)
    workers, chunks = [None] * 3, 3
    server, expected = served(kind, servers, len(workers), chunks)
    died = 0
    for _ in range(50):
        k = draw.randrange(len(workers))
        worker = workers[k]
        if worker is None:
            chunk = draw.randrange(chunks)
            start = int(Exchange(server).done(long(chunk)))
            assert start == expected.done[:, chunk].min()
            workers[k] = Worker(chunk, start) if start < LENGTH else None
            continue
        if worker.pulled is None:
            worker.pulled = Exchange(server).read(), expected.pull()
            continue
        values = [numbers.normal(size=(SIZE, 1)) for _ in range(WEIGHTS)]
        push = Push(
            values=[tf.constant(v, tf.float32) for v in values],
            state=[],
            kept=[],
            metrics=[tf.zeros_like(m) for m in server.metrics],
            worker=long(k),
            place=Place(long(0), long(worker.chunk), long(worker.start)),
            minibatches=long(1),
            samples=long(5),
            rate=tf.constant(-1.0),
        )
        reached = draw.choice([servers] * 3 + list(range(servers)))
        for shard in range(reached):
            expected.push(shard, values, worker.pulled[1], worker.chunk, worker.start)
        if reached < servers:
            died += 1
            for shard in server.shards[:reached]:
                part = Exchange(server).part(shard, push, worker.pulled[0])
                Exchange(server).apply(shard, part, worker.pulled[0].held, tf.constant(True))
            workers[k] = None
            continue
        included = bool(Exchange(server).push(push, worker.pulled[0], waits=False).included)
        assert included == (expected.done[:, worker.chunk] > worker.start).all()
        goes_on = included and worker.start + 1 < LENGTH
        workers[k] = Worker(worker.chunk, worker.start + 1) if goes_on else None
    assert died
    tolerances = {"rtol": 1e-4, "atol": 1e-5}
    now = server.weights_at_once(["global", "ema"]).weights
    for which, all_wanted in (("global", expected.w), ("ema", expected.ema)):
        for got, wanted in zip(now[which], all_wanted, strict=True):
            np.testing.assert_allclose(got, wanted, **tolerances)
    assert [int(shard.version) for shard in server.shards] == expected.versions
    assert int(server.counters.samples) == 5 * expected.done[0].sum()
