"""Signed messages between the processes of a run: JSON objects, one a line, each limited in length.

Both ends of a connection begin with a line that holds a random number, fresh for the connection. A
key made of the run's secret and of both numbers signs every message, with its sender and its place
in the row; so what was said on another connection, or before on this one, or by the same end, is no
message. Where the run has no secret anyone can make the key, and a signature is a checksum.

Nothing that arrives is parsed before its length and its signature have been looked at, and nobody
is waited for: reading and sending never block. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import select
import socket
import time

from tfpara.cluster import ports
from tfpara.cluster import secret as run_secret
from tfpara.typing import Json

_LONGEST_MESSAGE = 1 << 20  # bytes
_LONGEST_GREETING = 64  # bytes
_READ = 1 << 16  # bytes
_GREETING = re.compile(rb"tfpara ([0-9a-f]{32})")
_FRAME = re.compile(rb"([0-9a-f]{64}) (.*)", re.DOTALL)
_REFUSAL = b"tfpara: another secret"
_TICK_SECONDS = 0.1


class Signer:
    """What one end of a connection signs, and how it checks the other end.

    Args:
        secret: of the run; may be empty.
        purpose: what the connection is for, the same at both ends.
        numbers: the random numbers of the end that connected and of the other.
        caller: whether this is the end that connected.
    """

    def __init__(
        self, secret: bytes, purpose: str, numbers: tuple[bytes, bytes], caller: bool
    ) -> None:
        self._key = run_secret.derive(secret, purpose.encode(), *numbers)
        self._caller = caller
        self._sent = self._read = 0

    def sign(self, text: bytes) -> bytes:
        """The next message of this end as a line."""
        self._sent += 1
        return self._signature(self._caller, self._sent, text) + b" %s\n" % text

    def read(self, line: bytes) -> bytes | None:
        """The text of a line without its end, if it is the other end's next message; else None."""
        frame = _FRAME.fullmatch(line)
        if frame is None:
            return None
        wanted = self._signature(not self._caller, self._read + 1, frame[2])
        if not hmac.compare_digest(wanted, frame[1]):
            return None
        self._read += 1
        return frame[2]

    def _signature(self, by_caller: bool, place: int, text: bytes) -> bytes:
        signed = b"%d %d %s" % (by_caller, place, text)
        return hmac.new(self._key, signed, "sha256").hexdigest().encode()


class Channel:
    """One end of a connection: sends and receives messages without waiting.

    Args:
        connection: a TCP connection.
        secret: of the run; may be empty.
        purpose: what the connection is for, the same at both ends.
        caller: whether this end connected; the other accepted.

    Attributes:
        heard: when the other end was last heard, in seconds of `time.monotonic()`.
        closed: whether the connection has ended, or brought what is no message.
        known: whether a message has come, so that the other end has the same secret.
        differs: whether the other end has another secret.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, purpose: str, caller: bool
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # small messages that should go at once
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._secret, self._purpose, self._caller = secret, purpose, caller
        self._number = secrets.token_hex(16).encode()
        self._signer: Signer | None = None  # once the other end's number is known
        self._waiting: list[bytes] = []  # to be signed
        self._leaving = b"tfpara %s\n" % self._number
        self._arrived = b""
        self.heard = time.monotonic()
        self.closed = self.known = self.differs = False
        self._flush()

    def fileno(self) -> int:
        """The socket's number, for `selectors`."""
        return self._connection.fileno()

    @property
    def own_host(self) -> str:
        """The IP address of this end, at which the other one reaches it."""
        return ports.plain(str(self._connection.getsockname()[0]))

    def send(self, **message: Json) -> None:
        """Sends a message, if the other end still reads, and as soon as it has said its number."""
        self._waiting.append(json.dumps(message).encode())
        self._flush()

    def receive(self, at_most: int = _LONGEST_MESSAGE) -> list[dict[str, Json]]:
        """The messages that have arrived; the rest is kept. Sets `closed` at the end."""
        self._read()
        messages: list[dict[str, Json]] = []
        while len(messages) < at_most and b"\n" in self._arrived:
            line, self._arrived = self._arrived.split(b"\n", 1)
            if self._signer is None:
                self._begin(line)
            elif (message := self._message(line)) is not None:
                messages.append(message)
        if self._signer is None and len(self._arrived) > _LONGEST_GREETING:
            self._give_up()
        self._flush()
        return messages

    def wait(self, until: float) -> dict[str, Json] | None:
        """The next message; None if the connection ends or `time.monotonic()` is `until` before."""
        while True:
            for message in self.receive(at_most=1):
                return message
            if self.closed or time.monotonic() >= until:
                return None
            self.wait_for(_TICK_SECONDS)

    def wait_for(self, seconds: float, *, to_write: bool = False) -> None:
        """Waits until there is something to read, or room to write, for some seconds at most."""
        poll = select.poll()
        poll.register(self, select.POLLOUT if to_write else select.POLLIN)
        poll.poll(seconds * 1000.0)

    def close(self, patience_seconds: float = 0.0) -> None:
        """Ends the connection. What was sent still arrives, where it leaves in time."""
        until = time.monotonic() + patience_seconds
        while self._leaving and time.monotonic() < until:
            self.wait_for(_TICK_SECONDS, to_write=True)
            self._flush()
        self.closed = True
        self._connection.close()

    def _read(self) -> None:
        try:
            while not self.closed and len(self._arrived) <= _LONGEST_MESSAGE:
                chunk = self._connection.recv(_READ)
                if not chunk:
                    self.closed = True
                self.heard = time.monotonic()
                self._arrived += chunk
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
        if len(self._arrived) > _LONGEST_MESSAGE:
            self._give_up()

    def _begin(self, line: bytes) -> None:
        """Takes in the first line, which holds the other end's number."""
        greeting = _GREETING.fullmatch(line)
        if greeting is None or greeting[1] == self._number:
            self._give_up()
            return
        numbers = (self._number, greeting[1]) if self._caller else (greeting[1], self._number)
        self._signer = Signer(self._secret, self._purpose, numbers, self._caller)

    def _message(self, line: bytes) -> dict[str, Json] | None:
        """The message of a line; None, and the end of the channel, if it is none."""
        message: Json = None
        text = self._signer.read(line) if self._signer else None
        if text is not None:
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(text)
        elif self._caller:
            self.differs = line == _REFUSAL and not self.known
        elif _FRAME.fullmatch(line) and not self.known:
            # One of us, but not of this run. In the clear, for there is no key that it would know.
            self.differs = True
            self._leaving += _REFUSAL + b"\n"
        if isinstance(message, dict):
            self.known = True
            return message
        self._give_up()
        return None

    def _give_up(self) -> None:
        self.closed = True
        self._arrived = b""

    def _flush(self) -> None:
        if self._signer is not None:
            self._leaving += b"".join(map(self._signer.sign, self._waiting))
            self._waiting.clear()
        try:
            while self._leaving:
                self._leaving = self._leaving[self._connection.send(self._leaving) :]
        except BlockingIOError:
            # All messages of a run fit this. Where they do not, because a stopped process has not
            # read for hours, it is the one given up for its silence.
            if len(self._leaving) > 4 * _LONGEST_MESSAGE:
                self._give_up()
        except OSError:  # reading will tell
            self._leaving = b""


def connect(address: str, secret: bytes, purpose: str, timeout_seconds: float) -> Channel:
    """Connects to the "host:port" of a `door.Door`.

    Raises:
        OSError, UnicodeError: nobody accepts there.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout_seconds)
    # A loopback connection to a free port can, by chance, be made with itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("nobody listens")
    return Channel(connection, secret, purpose, caller=True)


def other_secret(chief: str) -> str:
    """That this process has another secret than the chief, which is named, in a sentence."""
    return (
        f"this process has another secret than {chief}. Give all processes of the run the same "
        f"{run_secret.FILE_VARIABLE} or {run_secret.VARIABLE}, or none of them."
    )
