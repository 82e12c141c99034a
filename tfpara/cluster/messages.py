"""Signed messages between the processes of a run: JSON objects of limited length, one a line.

Both ends of a connection begin with a line that holds a fresh random number. The run's secret and
both numbers give a key. With this key the sender signs each message, together with the message's
direction and sequence number. So a message that is copied from another connection, sent twice or
sent back is not accepted. If the run has no secret, anyone can derive the key, and a signature is a
mere checksum.

The length and the signature of a message are checked before the message is parsed. Its content is
not checked, so a caller has to expect any JSON object. Sending and receiving never block.
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
_LONGEST_OF_RUN = 1 << 24  # bytes; for a sender that has proved that it knows the run's secret
_LONGEST_GREETING = 64  # bytes
_DEEPEST = 64  # levels of nested objects and lists; Python's json fails at about a thousand
_LONGEST_NUMBER = 100  # digits of a whole number; float() and str() fail for numbers with many more
_READ = 1 << 16  # bytes that are read at a time
_GREETING = re.compile(rb"tfpara ([0-9a-f]{32})")
_FRAME = re.compile(rb"([0-9a-f]{64}) (.*)", re.DOTALL)
_REFUSAL = b"tfpara: another secret"
_TICK_SECONDS = 0.1


class Signer:
    """The signatures of one end of a connection: it signs messages and checks the other end's.

    `purpose` is the same at both ends. `numbers` are the random numbers of the end that connected
    and of the other end. `caller`: whether this is the end that connected.
    """

    def __init__(
        self, secret: bytes, purpose: str, numbers: tuple[bytes, bytes], caller: bool
    ) -> None:
        self._key = run_secret.derive(secret, purpose.encode(), *numbers)
        self._caller = caller
        self._sent = self._read = 0

    def sign(self, text: bytes) -> bytes:
        """Returns the line of this end's next message, with its signature."""
        self._sent += 1
        return self._signature(self._caller, self._sent, text) + b" %s\n" % text

    def read(self, line: bytes) -> bytes | None:
        """Returns the text of `line` (without newline) if it is the next message; else None."""
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
    """One end of a TCP connection, which sends and receives messages without waiting.

    For the arguments see `Signer`.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, purpose: str, caller: bool
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # TCP_NODELAY: small messages are sent without delay
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._secret, self._purpose, self._caller = secret, purpose, caller
        self._number = secrets.token_hex(16).encode()
        self._signer: Signer | None = None  # None until the other end's number is known
        self._waiting: list[bytes] = []  # messages that are not signed yet
        self._leaving = b"tfpara %s\n" % self._number
        self._arrived = b""
        self.heard = time.monotonic()  # time of the last data from the other end
        self.closed = False  # whether the connection has ended; invalid data also end it
        self.known = False  # whether a valid message has come: the other end has the same secret
        self.differs = False  # whether the other end has another secret
        self._flush()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def own_host(self) -> str:
        """The IP address of this end, as the other end reaches it."""
        return ports.plain(str(self._connection.getsockname()[0]))

    @property
    def peer_host(self) -> str:
        """The IP address of the other end; "" if the connection has ended."""
        with contextlib.suppress(OSError):
            return ports.plain(str(self._connection.getpeername()[0]))
        return ""

    def send(self, **message: Json) -> None:
        """Sends a message, as soon as the other end's number is known.

        The message is lost if the other end no longer reads.
        """
        self._waiting.append(json.dumps(message).encode())
        self._flush()

    def receive(self, at_most: int = _LONGEST_MESSAGE) -> list[dict[str, Json]]:
        """Returns up to `at_most` arrived messages; sets `closed` if the connection has ended."""
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
        """Waits for the next message until the time `until` (monotonic); returns it, or None."""
        while True:
            for message in self.receive(at_most=1):
                return message
            if self.closed or time.monotonic() >= until:
                return None
            self.wait_for(_TICK_SECONDS)

    def wait_for(self, seconds: float, *, to_write: bool = False) -> None:
        """Waits until there are data to read, or room to write, but at most `seconds`."""
        poll = select.poll()
        poll.register(self, select.POLLOUT if to_write else select.POLLIN)
        poll.poll(seconds * 1000.0)

    def close(self, patience_seconds: float = 0.0) -> None:
        """Ends the connection; first waits `patience_seconds` at most for messages to be sent."""
        until = time.monotonic() + patience_seconds
        while self._leaving and time.monotonic() < until:
            self.wait_for(_TICK_SECONDS, to_write=True)
            self._flush()
        self.closed = True
        self._connection.close()

    @property
    def _longest(self) -> int:
        """Limit in bytes of a message; low for senders that know no secret, to save memory."""
        return _LONGEST_OF_RUN if self.known and self._secret else _LONGEST_MESSAGE

    def _read(self) -> None:
        try:
            while not self.closed and len(self._arrived) <= self._longest:
                chunk = self._connection.recv(_READ)
                if not chunk:
                    self.closed = True
                self.heard = time.monotonic()
                self._arrived += chunk
        except BlockingIOError:
            return
        except OSError:
            self.closed = True
        if len(self._arrived) > self._longest:
            self._give_up()

    def _begin(self, line: bytes) -> None:
        """Reads the first line, which holds the other end's number."""
        greeting = _GREETING.fullmatch(line)
        if greeting is None or greeting[1] == self._number:
            self._give_up()
            return
        numbers = (self._number, greeting[1]) if self._caller else (greeting[1], self._number)
        self._signer = Signer(self._secret, self._purpose, numbers, self._caller)

    def _message(self, line: bytes) -> dict[str, Json] | None:
        """Returns the message of a line; if it is invalid, returns None and closes the channel."""
        message: Json = None
        text = self._signer.read(line) if self._signer else None
        if text is not None:
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(text, parse_int=_whole)
        elif self._caller:
            self.differs = line == _REFUSAL and not self.known
        elif _FRAME.fullmatch(line) and not self.known:
            # The refusal has no signature, because the other end belongs to another run and could
            # not check one.
            self.differs = True
            self._leaving += _REFUSAL + b"\n"
        if isinstance(message, dict) and _is_flat(message, _DEEPEST):
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
            # The unsent messages exceed this limit only if the other end is stopped and has not
            # read for hours. In that case the connection is closed.
            if len(self._leaving) > 4 * self._longest:
                self._give_up()
        except OSError:  # the next read finds that the connection has ended
            self._leaving = b""


def _whole(digits: str) -> int:
    """Returns a whole number of a message; raises ValueError if it is too long."""
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _is_flat(value: Json, levels: int) -> bool:
    """Returns whether objects and lists are nested at most `levels` deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_flat(each, levels - 1) for each in inner)


def connect(address: str, secret: bytes, purpose: str, timeout_seconds: float) -> Channel:
    """Connects to the "host:port" of a `door.Door`; errors as for `ports.connect`."""
    return Channel(ports.connect(address, timeout_seconds), secret, purpose, caller=True)


def other_secret(chief: str) -> str:
    """Returns the sentence that this process has another secret than the process named `chief`."""
    return (
        f"this process has another secret than {chief}. Give all processes of the run the same "
        f"{run_secret.FILE_VARIABLE} or {run_secret.VARIABLE}, or none of them."
    )
