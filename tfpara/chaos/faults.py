"""The faults: what each of them needs, its injection, and the evidence that it happened.

Each function injects one fault, and returns one line that describes it and its evidence. It raises
`Missed` if the fault has not happened: the worker has ended by itself, or nothing can be damaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tfpara.chaos import cable, processes
from tfpara.chaos.processes import Worker

_LOOK_SECONDS = 0.02
_FIRED_SECONDS = 10.0  # longest wait for the effect of SIGKILL or SIGSTOP, which is mostly at once
_END_SECONDS = 120.0  # longest wait for a worker's end after SIGTERM or the fault "memory"
# The fault "slow" divides time into slices of this length. The worker stands still for three
# quarters of each slice, and runs for the last quarter.
_SLICE_SECONDS = 0.05
_LARGEST_DISK = 4 << 30  # bytes; a larger disk is not filled
_NAME = ".chaos"  # name of the file that fills a disk


class Missed(Exception):
    """A fault has not happened; the text states the cause."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """The circumstances of a fault."""

    launcher: int  # id of the process that has started the workers
    workers: Sequence[Worker]  # the workers to choose from
    draw: random.Random
    seconds: float  # duration of a fault that has an end
    checkpoints: Path | None = None  # the folder of the run's checkpoints, if it was given

    def victim(self) -> Worker:
        if not self.workers:
            raise Missed("no worker trains")
        return self.draw.choice(sorted(self.workers))


def kill(scene: Scene) -> str:
    """SIGKILL of a worker."""
    victim = scene.victim()
    _send(victim, signal.SIGKILL)
    _await_end(victim, _FIRED_SECONDS)
    return f"{victim} was killed, and is gone"


def term(scene: Scene) -> str:
    """SIGTERM of a worker, as before a machine is taken away."""
    victim, began = scene.victim(), time.monotonic()
    _send(victim, signal.SIGTERM)
    _await_end(victim, _END_SECONDS)
    return f"{victim} was asked to end, and has {time.monotonic() - began:.1f} s later"


def stop(scene: Scene) -> str:
    """SIGSTOP of a worker, and SIGCONT after --lasting."""
    victim = scene.victim()
    _send(victim, signal.SIGSTOP)
    try:
        _await(lambda: processes.state(victim.pid) == "T", f"{victim} still runs", _FIRED_SECONDS)
        time.sleep(scene.seconds)
    finally:
        _send(victim, signal.SIGCONT)
    return f"{victim} stood still for {scene.seconds:g} s"


def slow(scene: Scene) -> str:
    """A worker that runs for a quarter of the time, for --lasting."""
    victim = scene.victim()
    until, stopped, slices = time.monotonic() + scene.seconds, 0, 0
    while time.monotonic() < until and not processes.has_ended(victim.pid):
        _send(victim, signal.SIGSTOP)
        time.sleep(0.75 * _SLICE_SECONDS)
        stopped, slices = stopped + (processes.state(victim.pid) == "T"), slices + 1
        _send(victim, signal.SIGCONT)
        time.sleep(0.25 * _SLICE_SECONDS)
    if not stopped:
        raise Missed(f"{victim} was never seen to stand still")
    return f"{victim} had a quarter of its time: stood still in {stopped} of {slices} slices"


def memory(scene: Scene) -> str:
    """Refusal of all further memory to a worker (RLIMIT_AS), until it ends."""
    victim, began = scene.victim(), time.monotonic()
    try:
        former = resource.prlimit(victim.pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
    except (OSError, ValueError) as error:
        raise Missed(f"{victim} cannot be limited: {error}") from None
    try:
        _await_end(victim, _END_SECONDS)
    except Missed:
        resource.prlimit(victim.pid, resource.RLIMIT_AS, former)
        raise
    return f"{victim} got no memory, and has ended {time.monotonic() - began:.1f} s later"


def partition(scene: Scene) -> str:
    """A cut between a worker and all others, for --lasting; needs pidfd_getfd(2)."""
    victim, until = scene.victim(), time.monotonic() + scene.seconds
    cut = cable.Cut(victim.pid, processes.tree(scene.launcher))
    try:
        cut.again()
        sockets, before, after = cut.sockets, cut.retransmitted(), 0
        while time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            cut.again()
            after = cut.retransmitted()
    finally:
        cut.mend()
    if after <= before:
        raise Missed(f"nothing was sent on the {sockets} sockets of {victim} that were cut")
    return f"{victim} was cut off at {sockets} sockets: {after - before} packets sent again"


def disk_full(scene: Scene) -> str:
    """The disk of --checkpoints is full for --lasting; it must be small, such as a tmpfs."""
    folder, until, refused = _folder(scene), time.monotonic() + scene.seconds, 0
    path, block = folder / _NAME, bytes(1 << 16)
    try:
        with path.open("wb", buffering=0) as file:
            while time.monotonic() < until:
                try:
                    file.write(block)
                except OSError as error:
                    refused += 1
                    told = os.strerror(error.errno or 0)
                    block = block[: len(block) // 2] or b"\0"  # smaller blocks fill the rest
                    time.sleep(_LOOK_SECONDS if len(block) == 1 else 0.0)
    finally:
        path.unlink(missing_ok=True)
    if not refused:
        raise Missed(f"{folder} was not full after {scene.seconds:g} s")
    return f"{folder} was full for {scene.seconds:g} s: {told!r}, {refused} times"


def corrupt(scene: Scene) -> str:
    """A changed byte in the newest of --checkpoints; SIGKILL of all, so that they read it."""
    folder = _folder(scene)
    found = sorted(folder.glob("checkpoint-*"))
    if len(found) < 2:
        raise Missed(f"{folder} has {len(found)} checkpoints, and none is to be lost")
    files = sorted(file for file in found[-1].rglob("*") if file.is_file() and file.stat().st_size)
    if not files:
        raise Missed(f"{found[-1]} has just been replaced")
    path = scene.draw.choice(files)
    before = path.read_bytes()
    at = scene.draw.randrange(len(before))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([before[at] ^ 0x5A]))
    if path.read_bytes() == before:
        raise Missed(f"byte {at} of {path} is as it was")
    os.kill(scene.launcher, signal.SIGKILL)  # the launcher's guardian then kills the workers
    gone = [scene.launcher, *(worker.pid for worker in scene.workers)]
    _await(lambda: all(map(processes.has_ended, gone)), "the run has not ended", _FIRED_SECONDS)
    return f"byte {at} of {path} was changed, and all processes were killed"


class Fault(NamedTuple):
    """A kind of fault: its function, and a function that returns what this machine lacks for it."""

    make: Callable[[Scene], str]
    need: Callable[[Path | None], str] = lambda checkpoints: ""


def _need_folder(checkpoints: Path | None) -> str:
    return "" if checkpoints else "the folder of the run's checkpoints: --checkpoints=DIR"


def _need_disk(checkpoints: Path | None) -> str:
    if checkpoints is None:
        return _need_folder(checkpoints)
    place = next(each for each in (checkpoints, *checkpoints.parents) if each.exists())
    there = os.statvfs(place)
    if place.stat().st_dev == Path("/").stat().st_dev or (
        there.f_blocks * there.f_frsize > _LARGEST_DISK
    ):
        return (
            f"--checkpoints={checkpoints} on a small file system of its own; as root: "
            f"mount -t tmpfs -o size=256m tmpfs {place}"
        )
    return ""


FAULTS = {
    "kill": Fault(kill),
    "stop": Fault(stop),
    "slow": Fault(slow),
    "memory": Fault(memory),
    "partition": Fault(partition, lambda checkpoints: cable.need()),
    "disk_full": Fault(disk_full, _need_disk),
    "corrupt": Fault(corrupt, _need_folder),
    "term": Fault(term),
}


def _folder(scene: Scene) -> Path:
    if scene.checkpoints is None or not scene.checkpoints.is_dir():
        raise Missed(f"the folder {scene.checkpoints} is not there yet")
    return scene.checkpoints


def _send(worker: Worker, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, number)


def _await_end(worker: Worker, seconds: float) -> None:
    _await(lambda: processes.has_ended(worker.pid), f"{worker} has not ended", seconds)


def _await(holds: Callable[[], bool], otherwise: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise Missed(f"{otherwise} after {seconds:g} s")
        time.sleep(_LOOK_SECONDS)
