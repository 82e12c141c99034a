"""Messages by which workers report their places in their scripts, and their ends.

A worker that waits in a collective cannot send messages. So every process has a thread that is
connected to the chief's thread. If a worker waits for long, the chief asks all workers for their
places. A worker that ends sends a message; one that is stopped or killed does not answer. If the
connection fails, for example because of a firewall, only these messages are missing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from tfpara.cluster import Cluster, failures, messages, ports, secret
from tfpara.cluster.call_site import Purpose
from tfpara.cluster.door import Door
from tfpara.cluster.messages import Channel
from tfpara.contexts import no_garbage_collection
from tfpara.typing import Json

_PURPOSE = "where"
_TICK_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 1.5  # longest wait of the chief for the workers' answers
_TABLE_SECONDS = 3.0  # longest wait of a worker for the table that the chief sends
_BYE_SECONDS = 1.0  # longest wait, at the end, until the last message is sent
_LIBRARIES = tuple(
    sorted({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
) + (str(Path(__file__).parents[1]),)


class Row(NamedTuple):
    """A row of the board: the place of a worker in its script."""

    text: str  # the place, as in "worker 1 is TEXT"; empty if the worker does not answer
    waits: Sequence[str] = ()  # the names of the exchanges in which the worker waits for others
    progress: Json = None  # what the live page shows of the worker


_SILENT = Row("")


def awaited(table: Sequence[Row], own_rank: int) -> list[int]:
    """Returns the ranks of other workers that do not wait, so that all wait for them."""
    return [rank for rank, row in enumerate(table) if rank != own_rank and not row.waits]


def waiting_line(table: Sequence[Row], own_rank: int, seconds: float) -> str:
    """Returns a warning that names the workers for which this one waits, and their places."""
    ranks = awaited(table, own_rank)
    lasting = f"for {seconds:.0f} s"
    if not ranks:
        others = ", ".join(f"worker {rank} {row.text}" for rank, row in enumerate(table))
        return f"All workers have been in a sync {lasting}: {others}."
    said = [(f"is {table[rank].text}" if table[rank].text else "does not answer") for rank in ranks]
    if len(ranks) == 1:
        return f"Waiting for worker {ranks[0]} in a sync {lasting}: it {said[0]}."
    each = ", ".join(f"worker {rank} {what}" for rank, what in zip(ranks, said, strict=True))
    return f"Waiting for workers {', '.join(map(str, ranks))} in a sync {lasting}: {each}."


def apart(table: Sequence[Row]) -> str:
    """Returns the places of all workers if no exchange has all of them waiting; else ""."""
    if all(row.waits for row in table) and not set.intersection(*(set(r.waits) for r in table)):
        others = ", ".join(f"worker {rank} {row.text}" for rank, row in enumerate(table))
        return f"{others.replace('worker 0', 'worker 0 is', 1)}; {Purpose('').advice}"
    return ""


def silent(table: Sequence[Row] | None, found: Cluster) -> str:
    """Returns the workers that were silent for too long, as in "WHO was silent for longer than"."""
    if table is None:
        return ""
    return " and ".join(
        found.describe(rank) + (f", {table[rank].text}," if table[rank].text else "")
        for rank in awaited(table, found.rank)
    )


def mute(table: Sequence[Row] | None, found: Cluster) -> str:
    """Returns the names of the workers that do not answer; "" if none is known."""
    rows = enumerate(table or ())
    return " and ".join(found.describe(rank) for rank, row in rows if not (row.text or row.waits))


def main_frame() -> FrameType | None:
    """Returns what the main thread runs now."""
    # Python 3.11 holds a lock in this call, and makes objects. If that starts the collector, the
    # end of a graph of TensorFlow can wait for the same lock, and the whole process stands still.
    with no_garbage_collection():
        return sys._current_frames().get(threading.main_thread().ident or 0)


def line_of_script() -> str:
    """Returns the main thread's line in the user's script, as "file.py, line 3"; "" if unknown."""
    frame = main_frame()
    return _innermost(reversed([*traceback.walk_stack(frame)])) if frame else ""


def line_of_error(error: BaseException) -> str:
    """Returns the line of the user's script that caused an error, as `line_of_script` does."""
    return _innermost(traceback.walk_tb(error.__traceback__))


def _innermost(lines: Iterable[tuple[FrameType, int]]) -> str:
    """Returns the innermost line that is not in a library; `lines` has the outermost first."""
    found = ""
    for frame, number in lines:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")) and "/site-packages/" not in name:
            found = f"{os.path.basename(name)}, line {number}"
    return found


class StatusBoard:
    """The thread of this process that exchanges rows of the board with the other workers.

    `here` returns the row of this process; called in the thread. `listener` is the chief's
    listening socket, None on the other workers, and `port` its port.
    """

    def __init__(
        self,
        found: Cluster,
        here: Callable[[], Row],
        listener: socket.socket | None = None,
        port: int = 0,
    ) -> None:
        self._cluster, self._here = found, here
        self._asked = threading.Event()  # set while this process wants a table
        self._table: list[Row] | None = None
        self._has_table = threading.Event()
        self._asking = threading.Lock()
        self._stop = threading.Event()
        self._chief_at = f"{found.addresses[0].rpartition(':')[0]}:{port}"
        self._door: Door[int] | None = None
        if listener is not None:
            self._door = Door(listener, secret.read(), _PURPOSE, found.num_workers)
        run = self._serve if self._door else self._answer
        self._thread = threading.Thread(target=run, name="tfpara-where", daemon=True)
        self._thread.start()
        _all.append(self)

    def table(self) -> list[Row] | None:
        """Asks all workers for their rows; returns these by rank, None if unknown.

        The call waits at most 3 s.
        """
        if not self._thread.is_alive():
            return None
        with self._asking:
            self._has_table.clear()
            self._table = None
            self._asked.set()
            if self._has_table.wait(_TABLE_SECONDS) or self._door or not self._thread.is_alive():
                return self._table
        # The chief does not answer, and only the chief can ask the other workers for their rows. So
        # the chief is shown as silent. Each other worker is shown as waiting, so that messages
        # blame only the chief.
        return [_SILENT] + [Row("", [""])] * (self._cluster.num_workers - 1)

    def end(self) -> None:
        """Makes the thread report the end of this process to the others, and then end."""
        self._stop.set()

    def join(self) -> None:
        """Waits a short time for the thread's end."""
        self._thread.join(_BYE_SECONDS + _TICK_SECONDS)

    def _take_asked(self) -> bool:
        if not self._asked.is_set():
            return False
        self._asked.clear()
        return True

    def _set_table(self, table: Sequence[Row]) -> None:
        self._table = list(table)
        self._has_table.set()

    def _answer(self) -> None:
        try:
            channel = messages.connect(self._chief_at, secret.read(), _PURPOSE, _CONNECT_SECONDS)
        except (OSError, UnicodeError):
            return
        channel.send(rank=self._cluster.rank)
        while not self._stop.is_set() and not channel.closed:
            channel.wait_for(_TICK_SECONDS)
            for message in channel.receive():
                match message:
                    case {"where": _}:
                        channel.send(here=list(self._here()))
                    case {"table": list() as told}:
                        rows = [row for row in map(_row, told) if row is not None]
                        if len(rows) == len(told) == self._cluster.num_workers:
                            self._set_table(rows)
                    case {"ended": ended}:
                        self._note(ended)
            if self._take_asked():
                channel.send(ask=True)
        if self._stop.is_set():
            channel.send(ended=[self._cluster.rank, failures.last_words()])
        channel.close(_BYE_SECONDS)

    def _serve(self) -> None:
        door = self._door
        assert door is not None
        rows: dict[int, Row] = {}
        askers: list[Channel | None] = []  # channels that wait for a table; None: this process
        until = 0.0

        def hear(channel: Channel, rank: int | None, message: dict[str, Json]) -> None:
            match message:
                case {"rank": int() as own} if rank is None and 0 < own < self._cluster.num_workers:
                    door.let_in(channel, own)
                case {"here": told} if rank is not None and (row := _row(told)) is not None:
                    rows[rank] = row
                case {"ended": ended} if rank is not None and self._note(ended):
                    door.tell_guests(ended=ended)
                case {"ask": _} if rank is not None:
                    new.append(channel)

        while not self._stop.is_set():
            door.wait(_TICK_SECONDS)
            new: list[Channel | None] = [None] if self._take_asked() else []
            door.serve(hear)
            if new and not askers:
                rows.clear()
                until = time.monotonic() + _ANSWER_SECONDS
                door.tell_guests(where=True)
            askers += new
            if askers and (len(rows) == len(door.guests) or time.monotonic() > until):
                others = range(1, self._cluster.num_workers)
                table = [self._here(), *(rows.get(rank, _SILENT) for rank in others)]
                for asker in askers:
                    if asker is None:
                        self._set_table(table)
                    else:
                        asker.send(table=table)
                askers.clear()
        door.tell_guests(ended=[0, failures.last_words()])
        door.close(_BYE_SECONDS)

    def _note(self, ended: Json) -> bool:
        """Notes the end of a worker; returns whether `ended` reports one."""
        match ended:
            case [int() as rank, str() | None as words] if 0 <= rank < self._cluster.num_workers:
                if words is not None:
                    failures.note_end(rank, words)
                return True
        return False


def _row(told: Json) -> Row | None:
    """Returns the row that a worker's message holds; None if it holds something else."""
    match told:
        case [str() as text, list() as waits, told] if all(isinstance(w, str) for w in waits):
            return Row(text, waits, told)
    return None


_all: list[StatusBoard] = []  # all status boards of this process


@atexit.register
def _end_all() -> None:
    for each in _all:
        each.end()
    for each in _all:
        each.join()


def begin(
    found: Cluster, exchange: Callable[[int], Sequence[int]], here: Callable[[], Row]
) -> StatusBoard | None:
    """Connects the workers, if they have addresses; every worker must call this.

    `exchange` sends a number to all workers, and returns theirs by rank; `here` returns the row of
    this process.
    """
    listener = None
    if found.is_chief and found.addresses:
        with contextlib.suppress(OSError):
            host, _ = ports.split(found.addresses[0])
            listener = ports.listen(ports.own_host(host), 0, found.num_workers)
    port = exchange(int(listener.getsockname()[1]) if listener else 0)[0]
    if not port or not found.addresses:
        return None
    return StatusBoard(found, here, listener, port)
