"""What a worker that joins takes over arrives as it was."""

import json
import types

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfpara.collectives import TensorFlowCollectives
from tfpara.strategy import HAS_WEIGHTS
from tfpara.sync.elastic.state_transfer import (
    StateTransfer,
    hand_over,
    hand_over_arrays,
)
from tfpara.sync.one_sync.replicas import BUCKET_BYTES
from tfpara.sync.one_sync.state_vars import Kind, Slot

pytestmark = pytest.mark.latest

LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895e38,
    "float32": 3.4e38,
    "float64": 1.7e308,
    "bool": True,
} | {
    name: np.iinfo(name).max
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}


class Wire:
    """What the source has sent, in order, for who receives it later."""

    def __init__(self):
        self.sent, self.receives = [], False

    @property
    def rank(self):
        return int(self.receives)

    def broadcast(self, buffer, name, source):
        if not self.receives:
            self.sent.append((name, buffer))
            return buffer
        sent_as, got = self.sent.pop(0)
        assert sent_as == name
        assert (got.dtype, got.shape) == (buffer.dtype, buffer.shape)
        return got


def values_of(dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    small = [0, 1, 1] if dtype == "bool" or dtype.startswith(("u", "i")) else [0.3, -1e-3, 2.7]
    return np.array([[*small, LARGEST[dtype]]], dtype=kind)


def test_variables_of_every_dtype_arrive_bit_for_bit():
    wire = Wire()
    slots = [
        [Slot(dtype, Kind.MODEL, tf.Variable(value)) for dtype, value in each.items()]
        for each in (
            {dtype: values_of(dtype) for dtype in LARGEST},
            {dtype: np.zeros_like(values_of(dtype)) for dtype in LARGEST},
        )
    ]
    assert hand_over(slots[0], wire, 0, receives=False) == ([], b"")
    assert len(wire.sent) == 1  # of all together
    wire.receives = True
    for variable, value in hand_over(slots[1], wire, 0, receives=True)[0]:
        variable.assign(value)
    for slot in slots[1]:
        np.testing.assert_array_equal(slot.variable.numpy(), values_of(slot.name), slot.name)


def test_a_variable_that_fills_a_bucket_is_sent_by_itself():
    wire, large = Wire(), tf.Variable(tf.range(BUCKET_BYTES // 4))
    scalar = tf.Variable(1.5, dtype=tf.bfloat16)  # of which `np.asarray` makes no array
    slots = [Slot(str(n), Kind.MODEL, v) for n, v in enumerate([scalar, large])]
    hand_over(slots, wire, 0, receives=False)
    assert [len(buffer) for _, buffer in wire.sent] == [1, BUCKET_BYTES // 4]
    wire.receives = True
    large.assign(tf.zeros_like(large))
    for variable, value in hand_over(slots, wire, 0, receives=True)[0]:
        variable.assign(value)
    assert slots[0].variable.numpy() == 1.5
    np.testing.assert_array_equal(large.numpy(), np.arange(BUCKET_BYTES // 4))


@pytest.mark.parametrize("dtype", LARGEST)
def test_arrays_of_every_dtype_arrive_bit_for_bit(dtype):
    wire, value = Wire(), values_of(dtype)
    hand_over_arrays([value], wire, 0)
    wire.receives = True
    (got,) = hand_over_arrays([np.zeros_like(value)], wire, 0)
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("large_first", [False, True])
def test_a_note_travels_with_the_first_pack(size, large_first):
    wire, text = Wire(), bytes(range(7, 7 + size))
    large, small = tf.Variable(tf.range(BUCKET_BYTES // 4)), tf.Variable(values_of("int16"))
    slots = [
        Slot(str(n), Kind.MODEL, v)
        for n, v in enumerate([large, small][:: 1 if large_first else -1])
    ]
    assert hand_over(slots, wire, 0, receives=False, note=text)[1] == text
    wire.receives = True
    values, note = hand_over(slots, wire, 0, receives=True, note=bytes(size))
    assert note == text
    got = {variable.ref(): value for variable, value in values}
    np.testing.assert_array_equal(got[small.ref()], values_of("int16"))
    np.testing.assert_array_equal(got[large.ref()], np.arange(BUCKET_BYTES // 4))


HISTORY = json.dumps({"epoch": [0, 1], "history": {}}).encode()


class Breaking(TensorFlowCollectives):
    """Gives ones; or, from the one with a number on, the source is lost."""

    rank = 1

    def __init__(self, breaks_at):
        self.left = breaks_at

    def broadcast(self, buffer, name, source):
        self.left -= 1
        if self.left < 0:
            raise tf.errors.UnavailableError(None, None, "the source is lost")
        if name == "hand over/0":  # the bytes of both variables, and the history
            got = np.ones(1, np.float32).tobytes() + np.ones(1).tobytes() + HISTORY.ljust(32)
            assert len(got) == 4 * len(buffer)
            return tf.constant(np.frombuffer(got, np.int32))
        return tf.ones_like(buffer)


def test_there_is_a_history_before_keras_has_begun_it():
    """Another callback may meet the others, since a worker is lost, as `fit` begins."""
    transfer = StateTransfer(types.SimpleNamespace())
    assert transfer.note_history() == 2  # before the first fit
    transfer.model = types.SimpleNamespace(history=keras.callbacks.History())
    assert transfer.note_history() == len(json.dumps({"epoch": [], "history": {}}))


@pytest.mark.parametrize("breaks_at", range(3))
def test_who_takes_over_has_all_or_nothing(breaks_at):
    variables = [tf.Variable([0.0]), tf.Variable([0.0], dtype=tf.float64)]
    holder, history, done = (
        types.SimpleNamespace(weights=[np.zeros(2)]),
        keras.callbacks.History(),
        [],
    )
    history.epoch = []
    synchronizer = types.SimpleNamespace(
        graph=types.SimpleNamespace(_agreed=tf.Variable([0.0])),
        broadcast_point=list,
        start_from=lambda weights: done.append("start"),
        give_up_block=lambda: done.append("block"),
    )
    control = types.SimpleNamespace(collectives=Breaking(breaks_at))
    models = types.SimpleNamespace(synchronizers=[synchronizer])
    transfer = StateTransfer(types.SimpleNamespace(models=models, control=control, states={}))
    transfer.model = types.SimpleNamespace(history=history)
    transfer.slots = lambda: [Slot(str(k), Kind.MODEL, v) for k, v in enumerate(variables)]
    transfer.holders = {"callback": holder}
    ahead = {"states": {"callback": {HAS_WEIGHTS: True}}, "agreed": [1.0], "history": len(HISTORY)}
    try:
        transfer.hand_over(0, receives=True, joins=True, ahead=ahead)
        whole = True
    except tf.errors.UnavailableError:
        whole = False
    assert whole == (breaks_at == 2)
    assert [v.numpy().tolist() for v in variables] == [[float(whole)]] * 2
    assert holder.weights[0].tolist() == [float(whole)] * 2
    assert history.epoch == ([0, 1] if whole else [])
    assert done == (["start", "block"] if whole else [])
