"""A lock for stores without locks: an object (the lease) that its holder renews regularly.

Clocks of machines are not compared. A process that waits for a lease to lapse measures, by its own
clock, how long the lease stays the same. A holder that was cut off from the store until its lease
lapsed finds another run's lease when it renews its own, and gives up. So for a moment two runs may
believe that they hold the lease. They cannot overwrite each other's checkpoints, since a manifest
is never overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time

from tfpara.checkpoint.store import CheckpointError, in_use, no_lock
from tfpara.remote_files import RemoteFolder
from tfpara.typing import Json

LOCK = "lock"
THREAD = "tfpara lease"  # name of the thread that renews a lease
SECONDS = 30.0  # a lease lapses if it is not renewed for this long
_EVERY = 3  # number of renewals in SECONDS
_LOOK = 0.5  # seconds between two looks at the lease of another run
# If two runs may have written a lease at the same time, each run waits this many seconds. Then each
# run reads the lease again to see which of them has it.
_SETTLE = 2.0


class Lease:
    """A run's lease on a directory.

    `mark` is the run's: another process with the same mark may take over the lease at once.
    """

    def __init__(self, folder: RemoteFolder, mark: str) -> None:
        self._folder, self._mark = folder, mark
        self._token, self._beat = secrets.token_hex(8), 0
        self._process = os.getpid()
        self._ended = threading.Event()
        # Both a thread and each checkpoint renew the lease. This lock prevents two renewals at the
        # same time.
        self._one = threading.Lock()

    def take(self) -> None:
        """Takes the lease; a thread renews it until `give_back`.

        If a killed run has left a lease, this waits until that lease lapses: at most the number of
        seconds that it states. If another run holds it, this raises CheckpointError.
        """
        taken_over = False
        while not self._folder.create(LOCK, self._text()):
            taken_over = self._remove_stale() or taken_over
        self._beat += 1
        # The lease exists now, so a second `create` returns False. It returns True only if the
        # store overwrites existing files in spite of mode="create". Then another run may have
        # overwritten the lease at the same time.
        overwrites = self._folder.create(LOCK, self._text())
        if taken_over or overwrites or not self._folder.creates_in_one_step:
            time.sleep(_SETTLE)
        if taken_over:
            found = self._read()
            if found.get("mark") == self._mark and found.get("token") != self._token:
                # A lost worker of this run has renewed its lease at the moment of the takeover, so
                # this worker's lease is written again.
                self._folder.write(LOCK, self._text())
        self.renew()
        threading.Thread(target=self._keep, name=THREAD, daemon=True).start()

    def renew(self) -> None:
        """Renews the lease; raises CheckpointError if it was removed or another run has it."""
        with self._one:
            if self._ended.is_set():
                return
            found = self._read()
            if not found:
                raise CheckpointError(
                    f"{self._folder.place(LOCK)}, by which this run holds the directory, is gone: "
                    f"another run may have had it when this one stood still for {SECONDS:g} s. "
                    "Start this run again."
                )
            if found.get("token") != self._token:
                raise self._in_use(found)
            self._beat += 1
            self._folder.write(LOCK, self._text())

    def give_back(self) -> None:
        """Removes the lease, unless another run has it; does nothing in a forked process."""
        if self._process != os.getpid():
            return
        self._ended.set()
        with self._one, contextlib.suppress(OSError, CheckpointError):
            if self._read().get("token") == self._token:
                self._folder.remove([LOCK])

    def _keep(self) -> None:
        while not self._ended.wait(SECONDS / _EVERY):
            # An error may be temporary, so it is ignored here. If it lasts, it is raised when the
            # next checkpoint renews the lease.
            with contextlib.suppress(OSError, CheckpointError):
                self.renew()

    def _remove_stale(self) -> bool:
        """Waits until another's lease has lapsed or is gone; returns whether this removed it."""
        first, since = self._read(), time.monotonic()
        found = first
        if found and found.get("mark") != self._mark:
            print(
                f"tfpara: {self._folder.url} is locked by {self._holder(found)}; waits for at "
                f"most {self._limit(found):.0f} s to see whether that run still uses it.",
                file=sys.stderr,
                flush=True,
            )
        while found and found.get("mark") != self._mark:
            if found != first:
                raise self._in_use(found)
            if time.monotonic() - since > self._limit(first):
                break
            time.sleep(_LOOK)
            found = self._read()
        if not found:
            return False
        self._folder.remove([LOCK])
        return True

    def _limit(self, lease: dict[str, Json]) -> float:
        said = lease.get("seconds")
        return min(float(said), 10 * SECONDS) if isinstance(said, int | float) else SECONDS

    def _holder(self, lease: dict[str, Json]) -> str:
        return str(lease.get("holder", "an unknown process"))[:100]

    def _read(self) -> dict[str, Json]:
        """Returns the content of the present lease, {} if there is none."""
        try:
            content = self._folder.read(LOCK)
        except FileNotFoundError:
            return {}
        try:
            lease = json.loads(content)
        except ValueError:
            lease = None
        if not isinstance(lease, dict) or "token" not in lease:
            raise no_lock(self._folder.place(LOCK), content)
        return lease

    def _text(self) -> bytes:
        holder = f"process {self._process} on {socket.gethostname()}"
        lease = {"holder": holder, "mark": self._mark, "token": self._token}
        return json.dumps({**lease, "beat": self._beat, "seconds": SECONDS}).encode()

    def _in_use(self, found: dict[str, Json]) -> CheckpointError:
        return in_use(self._folder.url, self._holder(found))
