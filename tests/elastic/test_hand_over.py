"""What a worker that joins takes over arrives as it was."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfpara.sync.hand_over import hand_over, hand_over_arrays, hand_over_text
from tfpara.sync.state import Kind, Slot

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
    hand_over(slots[0], wire, 0, receives=False)
    wire.receives = True
    hand_over(slots[1], wire, 0, receives=True)
    for slot in slots[1]:
        np.testing.assert_array_equal(slot.variable.numpy(), values_of(slot.name), slot.name)


@pytest.mark.parametrize("dtype", LARGEST)
def test_arrays_of_every_dtype_arrive_bit_for_bit(dtype):
    wire, value = Wire(), values_of(dtype)
    hand_over_arrays([value], wire, 0)
    wire.receives = True
    (got,) = hand_over_arrays([np.zeros_like(value)], wire, 0)
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("own", ["", "x", "a longer one than the other's"])
def test_a_text_arrives(own):
    wire = Wire()
    assert hand_over_text("nine: ünü", wire, 0) == "nine: ünü"
    wire.receives = True
    assert hand_over_text(own, wire, 0) == "nine: ünü"
