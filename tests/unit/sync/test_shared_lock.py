"""The lock by which a change of members waits for threads that read data."""

import gc
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tfpara.sync.elastic.shared_lock import SharedLock
from tfpara.sync.tensorflow import links

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _guard(monkeypatch):
    """Takes away at the end how the test has TensorFlow call Python functions."""
    monkeypatch.setattr(links.FuncRegistry, "__call__", links.FuncRegistry.__call__)


def started(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def waits(thread):
    thread.join(0.3)
    return thread.is_alive()


def test_threads_share_the_lock_and_one_has_it_alone():
    lock, order = SharedLock(60.0), []
    may_end = [threading.Event() for _ in range(12)]
    inside = threading.Barrier(13)

    def share(number):
        with lock.shared(), lock.shared():  # once more in the same thread
            inside.wait(60)
            may_end[number].wait(60)
            order.append("shared")

    def alone():
        with lock.exclusive():
            order.append("exclusive")

    sharing = [started(lambda n=n: share(n)) for n in range(12)]
    inside.wait(60)  # so all twelve are inside together
    changing = started(alone)
    for event in may_end:
        assert waits(changing)
        event.set()
    for thread in [*sharing, changing]:
        thread.join(60)
    assert order == ["shared"] * 12 + ["exclusive"]


@pytest.mark.parametrize("seconds", [0.01, 0.6])
def test_readers_that_come_again_and_again_do_not_keep_the_lock(seconds):
    """At each time one of four readers has a share, and yet all have gone at a change."""
    lock, ends = SharedLock(60.0), threading.Event()

    def read(number):
        time.sleep(number * seconds / 4)
        while not ends.is_set():
            with lock.shared():
                time.sleep(seconds)

    reading = [started(lambda n=n: read(n)) for n in range(4)]
    try:
        for _ in range(3):
            time.sleep(2 * seconds)
            with lock.exclusive():
                for _ in range(20):
                    assert not lock._sharing
                    time.sleep(0.001)
    finally:
        ends.set()
    for thread in reading:
        thread.join(60)
    assert not lock._sharing


def test_a_thread_that_never_ends_is_not_waited_for_for_ever():
    lock, ends = SharedLock(0.2), threading.Event()
    inside = threading.Event()

    def read():
        with lock.shared():
            inside.set()
            ends.wait(60)

    reading = started(read)
    inside.wait(60)
    began = time.monotonic()
    with lock.exclusive():
        assert time.monotonic() - began >= 0.2
    ends.set()
    reading.join(60)
    assert not lock._sharing


def test_an_error_inside_gives_the_lock_back():
    lock = SharedLock(60.0)
    for mode in (lock.shared, lock.exclusive):
        with pytest.raises(KeyError), mode():
            raise KeyError

    def alone():
        with lock.exclusive():
            pass

    thread = started(alone)
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_that_shares_may_wait_for_one_that_wants_to():
    """The second one gets its share although a third one waits for the exclusive mode."""
    lock, inside, may_ask, order = SharedLock(60.0), threading.Event(), threading.Event(), []

    def inner():
        may_ask.wait(60)
        with lock.shared():
            order.append("inner")

    def outer():
        with lock.shared():
            inside.set()
            started(inner).join(60)
            order.append("outer")

    def alone():
        with lock.exclusive():
            order.append("exclusive")

    first = started(outer)
    inside.wait(60)
    changing = started(alone)
    assert waits(changing)
    may_ask.set()
    for thread in (first, changing):
        thread.join(60)
    assert order == ["inner", "outer", "exclusive"]


def test_who_has_the_lock_alone_may_share_it():
    lock = SharedLock(60.0)

    def share():
        with lock.shared():
            pass

    with lock.exclusive(), lock.shared():
        other = started(share)
        assert waits(other)
    other.join(60)
    assert not other.is_alive()


def test_garbage_is_not_collected_while_a_thread_has_the_lock_alone():
    """The garbage may have an iterator whose end waits for threads that now wait for the lock."""
    lock = SharedLock(60.0)
    try:
        for enabled in (False, True):
            (gc.enable if enabled else gc.disable)()
            with lock.exclusive():
                assert not gc.isenabled()
            assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_an_iterator_may_end_while_its_functions_wait_for_the_lock():
    """TensorFlow waits there for the functions, whose wait has an end."""
    lock, called = SharedLock(4.0), threading.Event()
    links.guard_python_functions(lock.shared)

    def function(x):
        called.set()
        return x + 1

    data = tf.data.Dataset.range(10**6).map(
        lambda x: tf.py_function(function, [x], tf.int64), num_parallel_calls=2
    )
    iterator = iter(data.prefetch(100_000))
    next(iterator)
    with lock.exclusive():
        assert not lock._sharing
        called.clear()
        time.sleep(0.05)
        assert not called.is_set()  # all functions wait
        del iterator


@pytest.mark.parametrize("kind", ["py_function", "numpy_function", "from_generator"])
def test_python_functions_of_tensorflow_share_the_lock(kind):
    lock, sharing = SharedLock(60.0), []

    def function(x):
        sharing.append(len(lock._sharing))
        return np.float32(2.0) * x

    def generator():
        for x in np.arange(3, dtype=np.float32):
            yield function(x)

    links.guard_python_functions(SharedLock(60.0).shared)
    links.guard_python_functions(lock.shared)  # of a second strategy, in place of the first
    data = (
        tf.data.Dataset.range(3).map(
            lambda x: getattr(tf, kind)(function, [tf.cast(x, tf.float32)], tf.float32)
        )
        if kind != "from_generator"
        else tf.data.Dataset.from_generator(
            generator, output_signature=tf.TensorSpec([], tf.float32)
        )
    )
    assert list(data.as_numpy_iterator()) == [0.0, 2.0, 4.0]
    assert sharing == [1, 1, 1]
    assert not lock._sharing
