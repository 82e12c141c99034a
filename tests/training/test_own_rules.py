"""Rules and averages of a user's own: as those there are, wherever they work; or refused."""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import tfpara
from tests.lib.own_average import Mean, Moments
from tests.lib.replicas_here import data_of, make, network

X = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
Y = np.tanh(X[:, :4])


class State(NamedTuple):
    global_model: Any


@dataclasses.dataclass(frozen=True)
class Part(tfpara.Rule):
    """Without block momentum BMUF does the same."""

    rate: float

    def init(self, weights):
        return State(weights)

    def update(self, state, average, num_replicas, share=1.0):
        return State(state.global_model + self.rate * (average - state.global_model))


@dataclasses.dataclass(frozen=True)
class Elastic(Part):
    """EASGD, for two replicas."""

    def update(self, state, average, num_replicas, share=1.0):
        gain = self.rate * num_replicas
        return State(state.global_model + gain * (average - state.global_model))

    def broadcast(self, before, after):
        return before.global_model

    def restart(self, local, broadcast):
        return local - self.rate * (local - broadcast)


def trained(rule, average, epochs=2, callbacks=(), seed=3, **options):
    strategy = tfpara.PeriodicSyncStrategy(
        rule,
        devices=["CPU:0", "CPU:1"],
        averages={"mean": average},
        **{"sync_period": 2, **options},
    )
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    # Five minibatches of each replica: the last block of an epoch is a part of one.
    model.fit(X, Y, batch_size=12, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks])
    found = []
    for which in ("local", "global", "mean"):
        with strategy.weights(model, which):
            for variable in model.variables:
                found += [c.numpy() for c in strategy.experimental_local_results(variable.value)]
    return found


PAIRS = {
    "overwrites": (Part(0.5), tfpara.BMUF(0.0, 0.5)),
    "elastic": (Elastic(0.2), tfpara.EASGD(0.2)),
}
# Every option with each kind of rule, several in one training.
CASES = [
    ("overwrites", {"aggregation": "replicated", "fragments": 2}),
    ("overwrites", {"aggregation": "sharded", "overlap": True, "compression": "int8"}),
    ("elastic", {"aggregation": "replicated", "overlap": True, "fragments": 2}),
    ("elastic", {"aggregation": "sharded", "compression": "int8"}),
]


@pytest.mark.nightly_cases(
    "elastic-{'aggregation': 'repli*", "overwrites-*", "overwrites-{'aggregation': 'shar*"
)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_it_trains_as_the_rule_that_is_the_same(kind, options):
    own, ours = PAIRS[kind]
    found = trained(own, Mean(), **options)
    expected = trained(ours, tfpara.MA(), **options)
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


class Smoothed(NamedTuple):
    smooth: Any


@dataclasses.dataclass(frozen=True)
class Smooth(tfpara.Average):
    """An average that counts nothing."""

    def init(self, weights):
        return Smoothed(weights)

    def update(self, state, global_model, share=1.0):
        return Smoothed(state.smooth + 0.5 * share * (global_model - state.smooth))

    def value(self, state):
        return state.smooth


def test_an_average_that_counts_nothing_starts_again_where_weights_are_set():
    strategy = make(tfpara.BSP(), averages={"mine": Smooth()}, aggregation="sharded")
    model = network(strategy)
    model.fit(data_of(strategy, [[4] * 6] * 2), verbose=0)
    wanted = [np.full(w.shape, 0.25, np.float32) for w in model.get_weights()]
    model.set_weights(wanted)
    with strategy.weights(model, "mine"):
        for got, want in zip(model.get_weights(), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.nightly
def test_a_checkpoint_has_its_state_and_knows_it(tmp_path):
    whole = trained(Elastic(0.2), Mean(), epochs=3)
    trained(Elastic(0.2), Mean(), epochs=2, callbacks=[tfpara.callbacks.Checkpoint(tmp_path)])
    again = [tfpara.callbacks.Checkpoint(tmp_path)]
    resumed = trained(Elastic(0.2), Mean(), epochs=3, callbacks=again, seed=9)
    for value, other in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(value, other)
    again = [tfpara.callbacks.Checkpoint(tmp_path)]
    with pytest.raises(tfpara.CheckpointError, match=r"rule: the checkpoint has 'Elastic"):
        trained(Elastic(0.3), Mean(), epochs=4, callbacks=again)


class Undecorated(Part):
    def __init__(self):
        object.__setattr__(self, "rate", 0.5)

    __repr__ = object.__repr__


class Normed(Part):
    def update(self, state, average, num_replicas, share=1.0):
        move = average - state.global_model
        return State(state.global_model + move / (1.0 + (move**2).sum()))


class Shorter(Part):
    def update(self, state, average, num_replicas, share=1.0):
        return State(average[:1])


class Bare(Part):
    def init(self, weights):
        return weights


class Nameless(Part):
    def init(self, weights):
        return Moments(weights, 0.0)


class Changing(Part):
    def update(self, state, average, num_replicas, share=1.0):
        return Moments(average, 1.0)


class Exploding(Part):
    def update(self, state, average, num_replicas, share=1.0):
        return State(state.global_model / 0.0)


@dataclasses.dataclass(frozen=True)
class Empty(tfpara.Rule):
    def init(self, weights):
        return State(weights)


class Sorted(Mean):
    def value(self, state):
        return np.sort(state.mean)


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (Part, TypeError, r"That is the class: write Part\(\) with parentheses"),
        (Undecorated(), TypeError, "prints an address. Write @dataclasses.dataclass"),
        (Normed(0.5), ValueError, r"Normed\(rate=0.5\) mixes weights"),
        (Shorter(0.5), ValueError, r"update's global_model has the shape \(1,\) for weights of"),
        (Bare(0.5), TypeError, "init returns ndarray, and must return a NamedTuple"),
        (Nameless(0.5), TypeError, "init returns Moments without a field `global_model`"),
        (Changing(0.5), TypeError, "update returns the fields mean, count; init returns global_m"),
        (Exploding(0.5), ValueError, "update's global_model is not finite"),
        (Empty(), NotImplementedError, r"Empty has no update\(state, average, num_replicas"),
        (Mean(), TypeError, r"is not a rule object, .* one of your own \(tfpara.Rule\)"),
        (tfpara.ASGD(), TypeError, "one is asynchronous: give it to tfpara.AsyncStrategy"),
        (tfpara.AsyncBMUF, TypeError, "one is asynchronous: give it to tfpara.AsyncStrategy"),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_is_no_rule_is_refused_where_the_strategy_is_made(rule, error, message):
    with pytest.raises(error, match=message):
        tfpara.PeriodicSyncStrategy(rule, sync_period=2)


def test_a_synchronous_rule_is_refused_by_the_asynchronous_strategy():
    for rule in (tfpara.BMUF(), tfpara.BMUF):
        with pytest.raises(TypeError, match="BMUF is a synchronous rule: give it to tfpara.Perio"):
            tfpara.AsyncStrategy(rule)


@pytest.mark.parametrize(
    ("average", "error", "message"),
    [
        (Mean, TypeError, "is not an average object, but the class"),
        (Sorted(), ValueError, r"Sorted\(\) mixes weights"),
        (Part(0.5), TypeError, r"an average object\. .* one of your own \(tfpara.Average\)"),
        (0.9, TypeError, r"but a number; write tfpara.EMA\(0.9\) if it is to be the decay"),
        (tfpara.RunningThenMean(), TypeError, "only tfpara.AsyncStrategy can start its mean"),
    ],
    ids=["class", "mixes", "rule", "number", "asynchronous"],
)
def test_what_is_no_average_is_refused_where_the_strategy_is_made(average, error, message):
    with pytest.raises(error, match=message):
        tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, averages={"own": average})


@pytest.mark.nightly
@pytest.mark.parametrize(
    "rule",
    [tfpara.BSP(), tfpara.BMUF(), tfpara.EASGD(), tfpara.BMUFAdam(), tfpara.DiLoCo()],
    ids=str,
)
def test_our_own_rules_are_rules(rule):
    from tfpara.algorithms import check_rule

    check_rule(rule.resolve(4), 4)
