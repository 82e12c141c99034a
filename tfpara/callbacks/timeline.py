"""Timelines for chrome://tracing and Perfetto, from the recordings of TensorFlow's profiler.

The profiler records every operation with its name, time and duration. In a sync an operation's name
contains its phase (`tfpara.sync.one_sync.weight_exchange.phase`). Events named `STEP` are steps.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# The protocol buffer of the profiler's recordings. TensorFlow has no public name for it.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfpara.typing import Json

STEP = "tfpara_step"
# The phases of training, in the order in which they run. Each is a row of a worker in the timeline.
PHASES = ("step", "check", "wait", "pack", "reduce", "rule", "unpack")
# An operation belongs to the phase that its innermost scope names. Constants, sends and receives
# are left out: their scopes tell where the graph was built, and not which phase needs them.
_PHASE = re.compile(
    rf"(?:.*/)?sync/({'|'.join(PHASES[1:])})(?:_\d+)?/(?!.*:(?:Const|_Send|_Recv)$)"
)
# The recorded event of a collective may be too long: TensorFlow may run later operations in the
# same thread before that event ends. The collective itself ends when the event `_OVER` begins, so
# the timeline shows it until then.
_OVER = "CollectiveExecutor::ExecuteAsync::Done"


class Span(NamedTuple):
    """A phase from `began` to `ended`, in nanoseconds since 1970.

    `number` is that of a step, as the worker counts its steps; of other phases the number of their
    operations.
    """

    phase: str
    began: int
    ended: int
    number: int


def spans(recorded: xplane_pb2.XSpace) -> list[Span]:
    """Returns the steps and phases of one worker, sorted by their beginning.

    Operations of one phase form one span, unless another phase or step begins between two of them.
    """
    steps: list[Span] = []
    operations: list[Span] = []
    shifts: list[int] = []
    for name, began, ended, notes in _events(recorded):
        found = _PHASE.match(name)
        if found:
            operations.append(Span(found[1], began, ended, 1))
        elif name == STEP:
            steps.append(Span("step", began, ended, int(notes["step"])))
            # At each step the machine's clock was read shortly before the profiler's clock. So each
            # difference is a little too small, and the largest difference is the most exact.
            shifts.append(int(notes["clock_ns"]) - began)
    if not steps:
        raise ValueError("the profiler recorded no training step, so there is no timeline.")
    shift = max(shifts)
    all_spans = [*steps, *_joined(operations, [s.began for s in steps])]
    moved = [s._replace(began=s.began + shift, ended=s.ended + shift) for s in all_spans]
    return sorted(moved, key=lambda s: (s.began, -s.ended))


def chrome_trace(workers: Mapping[str, Iterable[Sequence[Json]]]) -> dict[str, Json]:
    """Returns the object of a Chrome trace file: a process for each worker, a row for each phase.

    `workers` has each worker's spans, by its name. Times are counted from the earliest of all.
    """
    by_worker = {name: [Span(*span) for span in found] for name, found in workers.items()}
    earliest = min((s.began for found in by_worker.values() for s in found), default=0)
    events: list[dict[str, Json]] = []
    for worker, (name, found) in enumerate(by_worker.items()):
        events.append(_named("process_name", worker, 0, name))
        for row, phase in enumerate(PHASES):
            events.append(_named("thread_name", worker, row, phase))
        for span in found:
            what = "step" if span.phase == "step" else "operations"
            events.append(
                {
                    "name": span.phase,
                    "ph": "X",
                    "ts": (span.began - earliest) / 1e3,  # in microseconds
                    "dur": (span.ended - span.began) / 1e3,
                    "pid": worker,
                    "tid": PHASES.index(span.phase),
                    "args": {what: span.number},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read(directory: Path) -> xplane_pb2.XSpace:
    """Returns the newest recording in the profiler's directory, or raises FileNotFoundError."""
    files = sorted(directory.glob("plugins/profile/*/*.xplane.pb"), key=lambda p: p.parent.name)
    if not files:
        raise FileNotFoundError(f"the profiler left no recording in {directory}.")
    recorded = xplane_pb2.XSpace()
    recorded.ParseFromString(files[-1].read_bytes())
    return recorded


def _events(recorded: xplane_pb2.XSpace) -> Iterator[tuple[str, int, int, dict[str, Json]]]:
    """Yields name, begin and end (ns on the profiler's clock) and the notes of each event."""
    for plane in recorded.planes:
        names = {key: entry.name for key, entry in plane.event_metadata.items()}
        kinds = {key: entry.name for key, entry in plane.stat_metadata.items()}
        for line in plane.lines:
            over = sorted(e.offset_ps for e in line.events if names[e.metadata_id] == _OVER)
            for event in line.events:
                name = names[event.metadata_id]
                began = line.timestamp_ns + event.offset_ps // 1000
                duration = event.duration_ps
                if ":Collective" in name:
                    duration = int(min(duration, _next(over, event.offset_ps) - event.offset_ps))
                notes = {}
                if name == STEP:
                    notes = {
                        kinds[s.metadata_id]: getattr(s, s.WhichOneof("value")) for s in event.stats
                    }
                yield name, began, began + duration // 1000, notes


def _joined(operations: list[Span], step_begins: Sequence[int]) -> list[Span]:
    """Joins operations of the same phase into spans; see `spans` for the limits of a span."""
    begins = {
        phase: sorted([*step_begins, *(o.began for o in operations if o.phase != phase)])
        for phase in PHASES
    }
    joined: dict[str, list[Span]] = {phase: [] for phase in PHASES}
    for operation in sorted(operations, key=lambda o: o.began):
        done = joined[operation.phase]
        last = done[-1] if done else None
        others = begins[operation.phase]
        if last is None or _next(others, last.ended) <= operation.began:
            done.append(operation)
        else:
            ended = max(last.ended, operation.ended)
            done[-1] = last._replace(ended=ended, number=last.number + 1)
    return [span for found in joined.values() for span in found]


def _next(times: Sequence[int], first: int) -> float:
    """Returns the first of sorted times that is not before `first`; infinite if there is none."""
    at = bisect.bisect_left(times, first)
    return times[at] if at < len(times) else float("inf")


def _named(what: str, worker: int, row: int, name: str) -> dict[str, Json]:
    return {"name": what, "ph": "M", "pid": worker, "tid": row, "args": {"name": name}}
