"""A flight: a sync that runs in a thread of its own while training goes on.

A flight *starts* at a sync point: the replicas' weights and reports are copied (by TensorFlow, when
the next step writes to them), and a thread exchanges these copies. A flight *lands* when its
results have arrived; the training thread reads them only after that. If training has to wait for a
landing, it waits in a TensorFlow queue, which blocks no thread that the flight may need.

Each wait first puts the flight's end, if it is known, into the queue again: see docs/design.md,
"The result of a flight is kept until the next flight begins".
"""

from __future__ import annotations

import atexit
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpara.sync.one_sync.replicas import Buckets
from tfpara.sync.one_sync.state_vars import Kind, Slot

# The values of `Flight.state`: no flight; a flight under way; a flight whose results have arrived.
NONE, FLYING, LANDED = range(3)
# When the program ends, it waits at most this long for the thread of a flight. If another worker
# was lost, the wait is short, because the exchange fails and the thread ends at once.
_PATIENCE_SECONDS = 5.0
# The end of a flight is the text of its error, or "" if there was none. Until the flight has
# started, its end is this text, because the step that is to start the flight may fail.
_NOT_STARTED = "a sync was to run beside the training, and the step failed that starts it"
# Matches the text of an error that a collective has raised, with any backend.
OF_COLLECTIVE = (
    "(?s)the sync beside the training failed: "
    "(Unavailable|DeadlineExceeded|Aborted|Cancelled|Internal|Unknown)Error: "
    ".*(ollective|RecvBuf|Horovod has).*"
)


class Flight:
    """The thread of an overlapped sync, with the variables that it reads and writes.

    `fly` does the exchange, called in the thread. It reads `rows`, `fragment` and `snapshots`, and
    writes `agreed`, `trained`, `problem`, `arrived` and `committed`.

    Attributes:
        state: NONE, FLYING or LANDED.
        rows: this worker's reports, [local replicas, columns].
        agreed, trained: see `tfpara.sync.one_sync.reports.Decision`.
        stops: whether training stops for the next sync, which is then no flight.
        problem: the sentence that forbids the sync; "" if none does.
        committed: 1 if the sync was committed, else 0.
        snapshots: for each local replica the buckets of its weights when the flight started.
        arrived: for each local device the buckets that the rule broadcast.
    """

    def __init__(
        self,
        fly: Callable[[], object],
        devices: Sequence[str],
        sizes: Sequence[int],
        columns: int,
        make: Callable[..., tf.Variable],
    ) -> None:
        self._fly = fly
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._end: str | None = _NOT_STARTED  # None while the thread runs
        with tf.device("CPU:0"), tf.init_scope():
            self._ends = tf.queue.FIFOQueue(1, [tf.string], [[]])
        with tf.device("CPU:0"):
            self.state = make(tf.constant(NONE, tf.int64), "flight")
            self.fragment = make(tf.zeros([], tf.int32), "flight_fragment")
            self.committed = make(tf.zeros([], tf.int64), "flight_committed")
            self.rows = make(tf.zeros([len(devices), columns], tf.float64), "flight_rows")
            self.agreed = make(tf.zeros([3], tf.float64), "flight_agreed")
            self.trained = make(tf.zeros([1], tf.int64), "flight_trained", [None])
            self.stops = make(tf.constant(False), "flight_stops")
            self.problem = make(tf.constant(""), "flight_problem")
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
        """Whether a sync has begun and has not landed."""
        return int(self.state) == FLYING

    @property
    def is_open(self) -> bool:
        """Whether a sync has begun and has not been merged."""
        return int(self.state) != NONE

    @property
    def was_cut_off(self) -> bool:
        """Whether the thread has ended because a collective failed."""
        return self._end is not None and re.fullmatch(OF_COLLECTIVE, self._end) is not None

    def start(
        self, rows: tf.Tensor, fragment: tf.Tensor, local: Sequence[Buckets], buckets: slice
    ) -> tf.Tensor:
        """Copies what the exchange needs, and starts the thread; then the result is computed.

        `local` are each local replica's `buckets`, a slice of all of them, those of the fragment.
        """
        with tf.control_dependencies([tf.numpy_function(self._prepare, [], tf.int64)]):
            copies = [self.state.assign(FLYING), self.rows.assign(rows)]
        copies.append(self.fragment.assign(fragment))
        for kept, values in zip(self.snapshots, local, strict=True):
            with tf.device(kept[0].device):
                copies += [k.assign(v) for k, v in zip(kept[buckets], values, strict=True)]
        with tf.control_dependencies(copies):
            return tf.numpy_function(self._launch, [], tf.int64)

    def landing(self) -> tf.Tensor:
        """Waits for the end of the flight; returns the text of its error, or ""."""
        with tf.control_dependencies([tf.numpy_function(self._tell, [], tf.int64)]):
            return self._ends.dequeue()

    def give_up(self) -> None:
        """Waits for the end of a flight and drops its results."""
        self.wait()
        self.state.assign(NONE)

    def set_part(self, bucket: int, at: int, values: tf.Tensor) -> None:
        """Overwrites elements `at` … of a bucket in all copies, so that a merge keeps them."""
        for buckets in (*self.snapshots, *self.arrived):
            buckets[bucket][at : at + int(values.shape[0])].assign(values)

    def slots(self) -> Iterator[Slot]:
        """Yields the results of a flight that has landed and is not merged yet."""
        options: dict[str, Any] = {"empty": int(self.state) != LANDED, "absent": NONE}
        yield Slot("open/state", Kind.BLOCK, self.state, **options)
        yield Slot("open/fragment", Kind.BLOCK, self.fragment, **options)
        for replica, snapshots in enumerate(self.snapshots):
            for k, snapshot in enumerate(snapshots):
                yield Slot(f"sync/flight/snapshot/{k}", Kind.BLOCK, snapshot, replica, **options)
        # The arrived value is the same on all devices, so the slots of all devices have one name.
        for arrived in self.arrived:
            for k, value in enumerate(arrived):
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
        end = ""
        try:
            self._fly()
        except BaseException as error:  # any error is passed on to the training thread
            end = f"the sync beside the training failed: {type(error).__name__}: {error}"
        with self._lock:
            self._end = end
            self._tell()

    def _tell(self) -> int:
        with self._lock:
            if self._end is not None and not int(self._ends.size()):
                self._ends.enqueue(self._end)
        return 0

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the end of the thread, if there is one, and changes nothing."""
        if self._thread is not None:
            self._thread.join(seconds)


_flights: weakref.WeakSet[Flight] = weakref.WeakSet()


@atexit.register
def _wait_for_flights() -> None:
    """Waits for flights: no thread may be in TensorFlow while the interpreter is taken down."""
    for flight in list(_flights):
        flight.wait(_PATIENCE_SECONDS)
