"""The state of a run as slots, and how a checkpoint's parts give them their values."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.replicas_here import data_of, make, network
from tfpara.checkpoint.parts import Parts
from tfpara.checkpoint.store import CheckpointError
from tfpara.sync.one_sync import counter
from tfpara.sync.one_sync.state_vars import Kind, Slot, model_slots, slots_of
from tfpara.sync.tensorflow import extended, trained_models

pytestmark = pytest.mark.latest


class Reader:
    """A worker's part, as TensorFlow's reader gives it."""

    def __init__(self, **tensors):
        self.tensors = {name.replace("__", "/"): np.array(v) for name, v in tensors.items()}

    def get_variable_to_shape_map(self):
        return {name: list(value.shape) for name, value in self.tensors.items()}

    def has_tensor(self, name):
        return name in self.tensors

    def get_tensor(self, name):
        return self.tensors[name]


# Two workers of two replicas each; a bucket of 7 weights in two pieces, the last with a zero more.
PARTS = Parts(
    [
        Reader(
            global__w__0__0=[0.0, 1.0, 2.0, 3.0],
            global__t__0__0=5.0,
            counter__samples=3.0,
            counter__syncs=8,
            **{"replica-0__m": 1.0, "replica-1__m": 2.0},
        ),
        Reader(
            global__w__0__4=[4.0, 5.0, 6.0, 9.0],
            global__t__0__4=5.0,
            counter__samples=4.0,
            counter__syncs=8,
            **{"replica-2__m": 4.0, "replica-3__m": 8.0},
        ),
    ],
    replicas=4,
    sizes=[7],
)


def strategy_of(worker, workers, devices):
    return types.SimpleNamespace(
        worker_index=worker,
        num_workers=workers,
        num_replicas=workers * devices,
        local_replica_ids=list(range(worker * devices, (worker + 1) * devices)),
    )


def value(slot, strategy):
    found = PARTS.value(slot, strategy)
    return found if found is None else np.array(found).tolist()


def test_pieces_of_a_field_are_cut_anew_for_any_number_of_holders():
    three = [Slot(f"global/w/0/{at}", Kind.HOLDER, tf.Variable(tf.ones([3]))) for at in (0, 3, 6)]
    found = [value(slot, strategy_of(rank, 3, 1)) for rank, slot in enumerate(three)]
    assert found == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 0.0, 0.0]]
    whole = Slot("global/w/0/0", Kind.HOLDER, tf.Variable(tf.ones([7])))
    assert value(whole, strategy_of(0, 1, 1)) == list(range(7))
    number = Slot("global/t/0/3", Kind.HOLDER, tf.Variable(1.0))
    assert value(number, strategy_of(1, 3, 1)) == 5.0


@pytest.mark.parametrize(
    ("kind", "of_three", "of_six"),
    [
        (Kind.MODEL, [1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0, 1.0, 2.0]),
        (Kind.RANDOM, [1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0, None, None]),
        (Kind.REPLICA, [None] * 3, [None] * 6),
        (Kind.BLOCK, [None] * 3, [None] * 6),
        (Kind.SUM, [9.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0, 0.0, 0.0]),
        (Kind.MEAN, [3.75] * 3, [3.75] * 6),
        (Kind.FIRST, [1.0, 2.0, 4.0], [1.0, 2.0, 4.0, 8.0, 1.0, 2.0]),
    ],
    ids=lambda each: getattr(each, "value", None),
)
def test_what_replicas_had_goes_to_another_number_of_them(kind, of_three, of_six):
    for workers, want in ((3, of_three), (6, of_six)):
        slots = [Slot("m", kind, tf.Variable(7.0), 0) for _ in want]
        got = [value(slot, strategy_of(k, workers, 1)) for k, slot in enumerate(slots)]
        assert got == want
    same = [value(Slot("m", kind, tf.Variable(7.0), k), strategy_of(1, 2, 2)) for k in range(2)]
    assert same == [4.0, 8.0]


def test_what_workers_have_counted_goes_to_another_number_of_them():
    samples = Slot("counter/samples", Kind.SUM, tf.Variable(0.0, dtype=tf.float64))
    assert [value(samples, strategy_of(k, 3, 1)) for k in range(3)] == [3.0, 4.0, 0.0]
    assert value(samples, strategy_of(0, 1, 1)) == 7.0
    syncs = Slot("counter/syncs", Kind.WORKER, tf.Variable(0, dtype=tf.int64))
    assert value(syncs, strategy_of(2, 3, 1)) == 8


def test_what_a_checkpoint_lacks_is_an_error_unless_earlier_ones_lack_it():
    new = Slot("counter/new", Kind.WORKER, tf.Variable([1.0, 1.0]), absent=0.0)
    assert value(new, strategy_of(0, 2, 2)) == [0.0, 0.0]
    for name, kind, replica in (
        ("counter/other", Kind.SHARED, None),
        ("n", Kind.MODEL, 0),
        ("global/v/0/0", Kind.HOLDER, None),
    ):
        with pytest.raises(CheckpointError, match=f"the checkpoint lacks {name}"):
            PARTS.value(Slot(name, kind, tf.Variable([1.0]), replica), strategy_of(0, 2, 2))


class Counter(keras.layers.Layer):
    """Counts its steps in a whole number."""

    def build(self, shape):
        self.count = self.add_weight(name="count", shape=(), dtype="int32", initializer="zeros")
        self.count.trainable = False

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs


def test_of_a_models_state_the_seeds_alone_are_random():
    model = keras.Sequential([keras.Input([3]), Counter(), keras.layers.Dropout(0.5)])
    model.compile("sgd", "mse")
    kinds = [slot.kind for slot in model_slots(model) if slot.name.startswith("state/")]
    assert [v.name for v in model.non_trainable_variables] == ["count", "seed_generator_state"]
    assert kinds == [Kind.MODEL, Kind.RANDOM]


def test_variables_of_metrics_are_terms_of_what_their_aggregation_says():
    options = {"shape": (), "initializer": "zeros"}
    metric = keras.metrics.MeanSquaredError()
    for aggregation in ("mean", "only_first_replica"):
        metric.add_variable(aggregation=aggregation, name=aggregation, **options)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[metric])
    model.fit(np.ones([1, 3]), np.ones([1, 1]), verbose=0)
    kinds = [slot.kind for slot in model_slots(model) if slot.name.startswith("metrics/")]
    assert kinds == [Kind.SUM] * 4 + [Kind.MEAN, Kind.FIRST]  # two of them of the loss


# What need not be kept: it is over where a block is closed, or is written before it is read.
_NOT_KEPT = {
    "request",
    "agreed",
    "dealt",
    "fitted",
    "device_steps",
    "device_samples",
    "sync_began",
    "flight_committed",
    "flight_rows",
    "flight_agreed",
    "flight_problem",
}


@pytest.mark.one_version
@pytest.mark.nightly_cases("{'overlap*")
@pytest.mark.parametrize("options", [{}, {"overlap": True, "compression": "int8"}], ids=str)
def test_every_variable_of_a_sync_is_a_slot_once(monkeypatch, options):
    made = {}
    create = extended.plain_variable

    def noting(value, name, *shape):
        variable = create(value, name, *shape)
        made[id(variable)] = name
        return variable

    for module in (extended, trained_models):
        monkeypatch.setattr(module, "plain_variable", noting)
    strategy = make(tfpara.BMUF(0.5), averages={"ema": tfpara.EMA(0.9)}, **options)
    model = network(strategy)
    model.fit(data_of(strategy, [[4] * 6] * 2), verbose=0)
    slots = slots_of(model)
    ids = strategy.local_replica_ids
    assert len({id(slot.variable) for slot in slots}) == len(slots)
    shared = [slot.key(ids) for slot in slots if not slot.name.startswith("open/arrived/")]
    assert len(set(shared)) == len(shared)
    left = {name for key, name in made.items() if key not in {id(s.variable) for s in slots}}
    whole = set() if options else {"turn"}
    # The counts are kept one by one, as parts of their variable.
    assert left <= _NOT_KEPT | whole | {"counts"}, left
    counters = {slot.name for slot in slots if isinstance(slot.variable, counter.Counter)}
    of_block = {"open/block_steps", "sync/pending_samples"} if options else set()
    assert counters == {"counter/steps", "counter/samples"} | of_block
