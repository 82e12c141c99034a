"""One end of the connection between the chief and a worker or parameter server: lines of JSON."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

_LONGEST_MESSAGE = 1 << 20  # bytes
_READ = 1 << 16  # bytes


def beat_seconds(timeout_seconds: float) -> float:
    """Time between two signs of life, where silence of `timeout_seconds` means a loss."""
    return min(2.0, timeout_seconds / 5.0)


class Channel:
    """Sends and receives messages, each a JSON object, without waiting.

    Attributes:
        heard: when the other end was last heard, in seconds of `time.monotonic()`.
        closed: whether the connection has ended, or brought what is no message.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # small messages that should go at once
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._pending = b""
        self.heard = time.monotonic()
        self.closed = False

    def fileno(self) -> int:
        """The socket's number, for `selectors`."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message, if the other end still reads."""
        # All messages of a run fit the system's buffer. Where they do not, because a stopped
        # process has not read for hours, it is the one given up for its silence.
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps(message).encode() + b"\n")

    def receive(self, at_most: int = 1 << 20) -> list[dict[str, Any]]:
        """The messages that have arrived; the rest is kept. Sets `closed` at the end."""
        try:
            while chunk := self._connection.recv(_READ):
                self.heard = time.monotonic()
                self._pending += chunk
                if len(self._pending) > _LONGEST_MESSAGE:
                    break
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        messages: list[dict[str, Any]] = []
        while len(messages) < at_most and b"\n" in self._pending:
            line, self._pending = self._pending.split(b"\n", 1)
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):  # not one of us
                self.closed = True
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        """Ends the connection; what was sent still arrives."""
        self.closed = True
        self._connection.close()
