"""A sync that runs in a thread of its own while training goes on.

A flight *starts* at a sync point: the replicas' weights and reports are copied (by TensorFlow, when
the next step writes to them), and a thread takes part in the exchange with these copies. It *lands*
when its results are there; training waits for it, where it has to, in a TensorFlow queue, which
blocks no thread that the flight may need. Only then does the training thread look at what the
flight has written.

How a flight has ended stays known until the next one starts. The queue only wakes who waits, and
whoever comes to wait puts the end into it again: where the training failed while it was told of the
end, or because of it, the next one who asks is told the same, and does not wait for ever.
"""

from __future__ import annotations

import atexit
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpara.sync.replicas import Buckets
from tfpara.sync.state import Kind, Slot
from tfpara.typing import Array

# Of a flight's `state`.
NONE, FLYING, LANDED = range(3)
# At the end of the program: a peer that is gone ends a flight at once.
_PATIENCE_SECONDS = 5.0
# What a failed collective of any backend raises, and says: others of its group then fail alike.
_OF_COLLECTIVES = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
_WORDS = re.compile("ollective|RecvBuf|Horovod has")
# The error that ended a flight, "" if none did; and whether a collective raised it.
_WELL = ("", False)
_NOT_STARTED = ("a sync was to run beside the training, and the step failed that starts it", False)


class Flight:
    """Variables that a flight starts from and lands in, and its thread.

    Args:
        fly: does the exchange, from `rows` and `snapshots`, and writes `table`, `arrived` and
            `committed`; called in the thread.
        devices: of this worker's replicas.
        sizes: of the buckets of all fragments.
        columns: numbers in a replica's report.
        num_replicas: N.
        make: creates a plain variable, `make(initial_value, name)`.

    Attributes:
        state: NONE, FLYING or LANDED.
        fragment: the one that it carries.
        rows, table: this worker's reports, [replicas, columns], and those of all.
        apart: who is where, if the workers have come to different exchanges; else "".
        committed: 1 if the table allowed an exchange, else 0.
        snapshots: for each local replica its buckets at the start.
        arrived: for each local device the buckets that the rule broadcast.
    """

    def __init__(
        self,
        fly: Callable[[], object],
        devices: Sequence[str],
        sizes: Sequence[int],
        columns: int,
        num_replicas: int,
        make: Callable[[Array, str], tf.Variable],
    ) -> None:
        self._fly = fly
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._end: tuple[str, bool] | None = _NOT_STARTED  # None while the thread is in the air
        with tf.device("CPU:0"), tf.init_scope():
            self._ends = tf.queue.FIFOQueue(1, [tf.string, tf.bool], [[], []])
        with tf.device("CPU:0"):
            self.state = make(tf.constant(NONE, tf.int64), "flight")
            self.fragment = make(tf.zeros([], tf.int32), "flight_fragment")
            self.committed = make(tf.zeros([], tf.int64), "flight_committed")
            self.rows = make(tf.zeros([len(devices), columns], tf.float64), "flight_rows")
            self.table = make(tf.zeros([num_replicas, columns], tf.float64), "flight_table")
            self.apart = make(tf.constant(""), "flight_apart")
        self.snapshots: list[list[tf.Variable]] = []
        self.arrived: list[list[tf.Variable]] = []
        for number, device in enumerate(devices):
            with tf.device(device):
                for name, kept in (("snapshot", self.snapshots), ("arrived", self.arrived)):
                    kept.append(
                        [make(tf.zeros([s]), f"{name}_{number}_{k}") for k, s in enumerate(sizes)]
                    )
        _flights.add(self)

    @property
    def in_the_air(self) -> bool:
        """Whether a sync has begun and its results are not known yet."""
        return int(self.state) == FLYING

    @property
    def is_open(self) -> bool:
        """Whether a sync has begun and is not merged yet."""
        return int(self.state) != NONE

    def start(
        self, rows: tf.Tensor, fragment: tf.Tensor, local: Sequence[Buckets], buckets: slice
    ) -> tf.Tensor:
        """Copies what the exchange needs, and lets the thread begin.

        Args:
            rows: this worker's reports.
            fragment: the one to carry.
            local: for each local replica the fragment's buckets.
            buckets: which these are.

        Returns:
            A tensor that is there once the flight has started.
        """
        with tf.control_dependencies([tf.numpy_function(self._prepare, [], tf.int64)]):
            copies = [self.state.assign(FLYING), self.rows.assign(rows)]
        copies.append(self.fragment.assign(fragment))
        for device, kept, values in zip(
            [s[0].device for s in self.snapshots], self.snapshots, local, strict=True
        ):
            with tf.device(device):
                copies += [k.assign(v) for k, v in zip(kept[buckets], values, strict=True)]
        with tf.control_dependencies(copies):
            return tf.numpy_function(self._launch, [], tf.int64)

    def landing(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The error that ended the flight, "" if none; and whether a collective raised it."""
        with tf.control_dependencies([tf.numpy_function(self._remind, [], tf.int64)]):
            message, of_collective = self._ends.dequeue()
        return message, of_collective

    def give_up(self) -> None:
        """Waits for the end of a flight under way; neither it nor what it brought counts."""
        if self._thread is not None:
            self._thread.join()
        self.state.assign(NONE)

    def set_part(self, bucket: int, at: int, values: tf.Tensor) -> None:
        """Weights were set since the flight began: they are to stay what they are."""
        for buckets in (*self.snapshots, *self.arrived):
            buckets[bucket][at : at + int(values.shape[0])].assign(values)

    def slots(self) -> Iterator[Slot]:
        """What a flight that has landed leaves for the merge."""
        options: dict[str, Any] = {"empty": int(self.state) != LANDED, "absent": NONE}
        yield Slot("open/state", Kind.BLOCK, self.state, **options)
        yield Slot("open/fragment", Kind.BLOCK, self.fragment, **options)
        for replica, (snapshots, arrived) in enumerate(
            zip(self.snapshots, self.arrived, strict=True)
        ):
            for k, (snapshot, value) in enumerate(zip(snapshots, arrived, strict=True)):
                name = f"sync/flight/snapshot/{k}"
                yield Slot(name, Kind.BLOCK, snapshot, replica, **options)
                # The same on all devices.
                yield Slot(f"open/arrived/{k}", Kind.BLOCK, value, **options)

    def _prepare(self) -> int:
        with self._lock:
            self._end = _NOT_STARTED
            while int(self._ends.size()):
                self._ends.dequeue()
        return 0

    def _launch(self) -> int:
        self._end = None
        self._thread = threading.Thread(target=self._run, name="tfpara-flight", daemon=True)
        self._thread.start()
        return 0

    def _run(self) -> None:
        end = _WELL
        try:
            self._fly()
        except BaseException as error:  # whatever it is, training must hear of it
            message = f"the sync beside the training failed: {type(error).__name__}: {error}"
            end = message, isinstance(error, _OF_COLLECTIVES) and bool(_WORDS.search(message))
        with self._lock:
            self._end = end
            self._tell()

    def _remind(self) -> int:
        with self._lock:
            self._tell()
        return 0

    def _tell(self) -> None:
        if self._end is not None and not int(self._ends.size()):
            self._ends.enqueue(self._end)

    def wait_a_little(self) -> None:
        """Waits for the thread, if there is one."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)


_flights: weakref.WeakSet[Flight] = weakref.WeakSet()


@atexit.register
def _wait_for_flights() -> None:
    """No thread must be in TensorFlow while the interpreter is taken down."""
    for flight in list(_flights):
        flight.wait_a_little()
