"""The results of a drill, as numbers and as text."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpara.chaos.processes import Size

# Texts by which the library and its launcher report a fault (_NOTICED) and recovery (_WHOLE).
_NOTICED = re.compile(
    r"is lost|was silent|have gone on without|failed|has left|cannot write|damaged|too slow|"
    r"waits? for|did not come|asked to end|restart \d"
)
_WHOLE = re.compile(r"has come: |joins? again|continues? from|resumed|tfpara: \d+ workers?, ")
_TIMES = ("noticed after", "whole after", "cost")


class Line(NamedTuple):
    """A line of output, and its time of arrival (seconds since the run began)."""

    time: float
    text: str


class Made(NamedTuple):
    """A fault: its kind, begin and end (seconds), the evidence, and the point if it has one."""

    kind: str
    time: float
    over: float
    seen: str
    point: str = ""


class Step(NamedTuple):
    """Number of minibatches in the model at a time (seconds), as the script reported."""

    time: float
    done: float


class Sample(NamedTuple):
    """The resources of a process at a time (seconds)."""

    time: float
    name: str
    pid: int
    size: Size


class Run(NamedTuple):
    """A run of the command, from its first start to its end."""

    seconds: float
    code: int
    starts: int  # number of starts of the command
    lines: Sequence[Line]
    faults: Sequence[Made]
    missed: Sequence[Made]  # the faults that did not happen
    steps: Sequence[Step]
    samples: Sequence[Sample]
    told: dict[str, Any]  # the script's numbers of trained, lost and doubled minibatches


def rate(steps: Sequence[Step]) -> float | None:
    """Returns minibatches per second from the first reported step to the last; None if too few."""
    if len(steps) < 2 or steps[-1].time <= steps[0].time:
        return None
    return (steps[-1].done - steps[0].done) / (steps[-1].time - steps[0].time)


def costs(run: Run, quiet_rate: float | None) -> list[float | None]:
    """Returns the cost of each fault in seconds.

    The cost is the time from a fault to the next one, or from the last one to the end of training,
    minus the time that a quiet run needs for the same progress: Δt − Δdone / rate.
    """
    if not quiet_rate or not run.steps or not run.faults:
        return [None] * len(run.faults)
    times = [step.time for step in run.steps]

    def done(at: float) -> float:
        return run.steps[max(0, bisect.bisect_right(times, at) - 1)].done

    ends = [*(fault.time for fault in run.faults[1:]), times[-1]]
    return [
        max(0.0, end - fault.time) - (done(end) - done(fault.time)) / quiet_rate
        for fault, end in zip(run.faults, ends, strict=True)
    ]


def summary(run: Run, quiet_rate: float | None, quiet_seconds: float | None) -> dict[str, Any]:
    """Returns the report for JSON; times are in seconds, memory in bytes."""
    by_fault = []
    for number, (fault, cost) in enumerate(zip(run.faults, costs(run, quiet_rate), strict=True)):
        until = run.faults[number + 1].time if number + 1 < len(run.faults) else float("inf")
        after = [line for line in run.lines if fault.time <= line.time < until]
        noticed = next((line for line in after if _NOTICED.search(line.text)), None)
        whole = next((line for line in after if _WHOLE.search(line.text)), None)
        by_fault.append(
            {
                "kind": fault.kind,
                "at": fault.time,
                "point": fault.point,
                "seconds": fault.over - fault.time,
                "seen": fault.seen,
                "noticed_after": noticed and noticed.time - fault.time,
                "said": noticed and noticed.text,
                "whole_after": whole and whole.time - fault.time,
                "cost": cost,
            }
        )
    own = rate(run.steps)
    goodput = own / quiet_rate if own and quiet_rate else None
    if goodput is None and quiet_seconds:
        goodput = quiet_seconds / run.seconds
    return {
        "code": run.code,
        "seconds": run.seconds,
        "starts": run.starts,
        "faults": by_fault,
        "missed": [{"kind": fault.kind, "why": fault.seen} for fault in run.missed],
        "rate": own,
        "quiet_rate": quiet_rate,
        "goodput": goodput,
        "minibatches": run.told,
        "processes": growth(run.samples),
        "samples": [[each.time, each.name, each.pid, *each.size] for each in run.samples],
    }


def growth(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Returns each process's resources after a third of its life, and at its end."""
    lives: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        lives.setdefault((sample.pid, sample.name), []).append(sample)
    return [
        {
            "name": name,
            "pid": pid,
            "seconds": life[-1].time - life[0].time,
            "third": life[len(life) // 3].size._asdict(),
            "end": life[-1].size._asdict(),
        }
        for (pid, name), life in lives.items()
    ]


def text(found: dict[str, Any]) -> str:
    """Returns the report for a terminal."""
    lines = ["", "faults:"]
    for fault in found["faults"]:
        times = [f"{name} {_seconds(fault[name.replace(' ', '_')])}" for name in _TIMES]
        lines.append(f"  {fault['at']:7.1f} s  {fault['kind']:9} {', '.join(times)}")
        lines.append(f"             {fault['seen']}")
        lines += [f"             said: {fault['said'].strip()[:150]}"] if fault["said"] else []
    lines += [f"  not made: {each['kind']}: {each['why']}" for each in found["missed"]]
    lines.append("by kind:")
    for kind in dict.fromkeys(fault["kind"] for fault in found["faults"]):
        of = [fault for fault in found["faults"] if fault["kind"] == kind]
        known = [fault["cost"] for fault in of if fault["cost"] is not None]
        mean = sum(known) / len(known) if known else None
        lines.append(f"  {kind:9} {len(of)} made, cost {_seconds(mean)} each")
    lines.append("processes (after a third of their life, at its end):")
    for each in found["processes"]:
        sizes = [f"{each['third'][what]:,}, {each['end'][what]:,} {what}" for what in Size._fields]
        life = f"{each['name']:10} {each['pid']:7} {each['seconds']:6.0f} s"
        lines.append(f"  {life}  {'; '.join(sizes)}")
    told = ", ".join(f"{value} {name}" for name, value in found["minibatches"].items())
    lines.append(f"minibatches: {told or 'the script has not told'}")
    goodput = found["goodput"]
    told = "unknown (give --quiet_run or --quiet_seconds)" if goodput is None else f"{goodput:.3f}"
    lines.append(
        f"{len(found['faults'])} faults, {found['starts']} starts, {found['seconds']:.1f} s, "
        f"exit code {found['code']}, goodput {told}"
    )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} s"
