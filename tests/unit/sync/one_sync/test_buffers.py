"""How variables are laid out in buckets, for any shapes."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfpara.sync.one_sync.buckets import Layout

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6)


@given(SHAPES, st.integers(1, 200), st.data())
def test_every_element_has_one_place(shapes, capacity, data):
    filled = sum(math.prod(shape) > 0 for shape in shapes)
    fragments = data.draw(st.integers(1, max(1, filled)))
    layout = Layout([tf.TensorShape(s) for s in shapes], 4 * capacity, fragments)
    assert fragments == 1 or all(sum(layout.sizes[run]) > 0 for run in layout.variables)
    assert all(0 < size <= capacity for size in layout.bucket_sizes)
    assert sum(layout.bucket_sizes) == layout.num_elements == sum(map(math.prod, shapes))
    numbers = np.split(np.arange(layout.num_elements, dtype="float32"), np.cumsum(layout.sizes))
    tensors = [n.reshape(s) for n, s in zip(numbers, shapes, strict=False)]
    buckets = layout.pack([tf.constant(t) for t in tensors])
    assert [int(b.shape[0]) for b in buckets] == layout.bucket_sizes
    for got, want in zip(layout.unpack(buckets), tensors, strict=True):
        np.testing.assert_array_equal(got, want)
    for variable, tensor in enumerate(tensors):
        flat = tensor.reshape(-1)
        for bucket, at, piece in layout.places(variable):
            part = buckets[bucket][at : at + piece.stop - piece.start]
            np.testing.assert_array_equal(part, flat[piece.start : piece.stop])
    for number, (run, own) in enumerate(zip(layout.variables, layout.buckets, strict=True)):
        part = layout.pack([tf.constant(t) for t in tensors[run]], number)
        for got, want in zip(part, buckets[own], strict=True):
            np.testing.assert_array_equal(got, want)
        for got, want in zip(layout.unpack(part, number), tensors[run], strict=True):
            np.testing.assert_array_equal(got, want)


def test_large_variables_have_buckets_of_their_own():
    shapes = [(1320, 1024), (1024,), (1024, 1024), (1024,), (1024, 5723), (5723,)]
    layout = Layout([tf.TensorShape(s) for s in shapes], 8 << 20)
    holders = [{b for b, _, _ in layout.places(variable)} for variable in range(len(shapes))]
    assert [len(own) for own in holders] == [1, 1, 1, 1, 3, 1]
    assert holders[1] == holders[3] == holders[5]  # biases share one
    assert len(layout.bucket_sizes) == len(set().union(*holders)) == 6


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_parts_of_large_buckets_are_equal_and_aligned(replicas):
    layout = Layout([tf.TensorShape([1024, 5723])], 8 << 20)
    for size in layout.bucket_sizes:
        assert size % replicas == 0
        assert size // replicas * 4 % 64 == 0
