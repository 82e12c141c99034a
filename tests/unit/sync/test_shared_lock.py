"""The lock by which a change of members waits for threads that read data."""

import threading
import time

import pytest
import tensorflow as tf

from tfpara.sync.elastic.shared_lock import SharedLock
from tfpara.sync.tensorflow import links

pytestmark = pytest.mark.unit


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

    def late():
        with lock.shared():
            order.append("late")

    sharing = [started(lambda n=n: share(n)) for n in range(12)]
    inside.wait(60)  # so all twelve are inside together
    changing = started(alone)
    assert waits(changing)
    after = started(late)
    for event in may_end[:-1]:
        event.set()
    assert waits(changing)
    assert waits(after)  # who asks later goes after the thread that wants the lock alone
    may_end[-1].set()
    for thread in [*sharing, changing, after]:
        thread.join(60)
    assert order == ["shared"] * 12 + ["exclusive", "late"]


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
    with lock.exclusive(), lock._changed:  # nothing is left over
        assert lock._sharing == 0


def test_an_error_inside_gives_the_lock_back():
    lock = SharedLock(60.0)
    for mode in (lock.shared, lock.exclusive):
        with pytest.raises(KeyError), mode():
            raise KeyError

    def alone():
        with lock.exclusive():
            pass

    assert not waits(started(alone))


def test_python_functions_of_tensorflow_share_the_lock(monkeypatch):
    monkeypatch.setattr(links.EagerFunc, "__call__", links.EagerFunc.__call__)
    lock, sharing = SharedLock(60.0), []

    def function(x):
        sharing.append(lock._sharing)
        return 2.0 * x

    links.guard_python_functions(SharedLock(60.0).shared)
    links.guard_python_functions(lock.shared)  # of a second strategy, in place of the first
    data = tf.data.Dataset.range(3).map(
        lambda x: tf.py_function(function, [tf.cast(x, tf.float32)], tf.float32)
    )
    assert list(data.as_numpy_iterator()) == [0.0, 2.0, 4.0]
    assert sharing == [1, 1, 1]
    assert lock._sharing == 0
