"""The listening end of `messages`, which admits the processes of a run and rejects strangers."""

from __future__ import annotations

import collections
import contextlib
import logging
import resource
import selectors
import socket
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tfpara.cluster import secret as run_secret
from tfpara.cluster.messages import Channel
from tfpara.typing import Json

_PAUSE_SECONDS = 0.1
# A new connection is a "stranger" until it is admitted, which must happen within this time.
_STRANGER_SECONDS = 10.0
_STRANGERS = 64  # most strangers at a time; each process of the run raises this limit by 1
_SHARE = 4  # strangers may use 1/4 of the file descriptors that this process may open
_NAMED = 8  # the log names at most this many hosts that have another secret
Key = TypeVar("Key", bound=Hashable)
_log = logging.getLogger(__name__)


class Door(Generic[Key]):
    """A listener that tells the processes of a run from strangers.

    A connection is a stranger until it is admitted. A stranger that is not admitted within 10 s is
    dropped, even if it is still sending. If there are too many strangers, the oldest of the host
    with the most of them is dropped. So strangers cannot block the run.

    `close` closes the `listener`. `guests` processes are expected, which must connect for the same
    `purpose`.
    """

    def __init__(self, listener: socket.socket, secret: bytes, purpose: str, guests: int) -> None:
        listener.setblocking(False)
        self.guests: dict[Key, Channel] = {}  # the admitted connections
        self.turned_away = ""  # a sentence that names the hosts of processes with another secret
        self._listener, self._secret, self._purpose = listener, secret, purpose
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        crowd = _STRANGERS + guests
        limited = files != resource.RLIM_INFINITY
        self._most = min(crowd, files // _SHARE) if limited else crowd
        self._keys: dict[Channel, Key] = {}  # the key of each guest
        self._strangers: dict[Channel, tuple[str, float]] = {}  # (host, arrival time), oldest first
        self._named: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Waits until a connection or a message arrives, at most `seconds`."""
        self._selector.select(seconds)

    def serve(
        self,
        hear: Callable[[Channel, Key | None, dict[str, Json]], object],
        lost: Callable[[Key], object] = lambda key: None,
    ) -> None:
        """Handles what has arrived, without waiting.

        `hear` is called with each message that has a valid signature: with the connection, its key
        (None for a stranger, which `hear` may admit), and the message. `lost` is called with the
        key of each guest whose connection has ended. Connections that have ended are handled first,
        since a process may have left and connected again. If `hear` fails on a message, only the
        connection that sent the message is dropped.
        """
        for channel, messages in self._arrived():
            for message in messages:
                try:
                    hear(channel, self._keys.get(channel), message)
                except Exception as error:
                    _log.warning(
                        "tfpara: a message that this process cannot read ends its sender's "
                        "connection (%r). Install the same version of tfpara everywhere.",
                        error,
                    )
                    channel.closed = True
                    break
            if channel.closed:
                key = self._keys.get(channel)
                if key is not None:
                    lost(key)
                self.drop(channel)

    def let_in(self, channel: Channel, key: Key) -> None:
        """Admits a stranger, which has proved to belong to this run, as a guest."""
        self._strangers.pop(channel, None)
        self._keys[channel] = key
        self.guests[key] = channel

    def tell_guests(self, **message: Json) -> None:
        for guest in self._keys:
            guest.send(**message)

    def drop(self, channel: Channel) -> None:
        self._strangers.pop(channel, None)
        key = self._keys.pop(channel, None)
        if key is not None and self.guests.get(key) is channel:
            del self.guests[key]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def close(self, patience_seconds: float = 0.0) -> None:
        """Ends all connections, after up to `patience_seconds` for messages, and frees the port."""
        until = time.monotonic() + patience_seconds
        for channel in (*self._keys, *self._strangers):
            channel.close(until - time.monotonic() if channel in self._keys else 0.0)
        self.guests.clear()
        self._keys.clear()
        self._strangers.clear()
        self._listener.close()
        self._selector.close()

    def _arrived(self) -> list[tuple[Channel, list[dict[str, Json]]]]:
        """Accepts connections; returns the messages that have arrived, by connection."""
        ready = [key.fileobj for key, _ in self._selector.select(0.0)]
        heard: list[tuple[Channel, list[dict[str, Json]]]] = []
        for channel in ready:
            if isinstance(channel, Channel):
                messages = channel.receive()
                if channel.closed and channel in self._strangers:
                    self._turn_away(channel)
                elif channel.closed or messages:
                    heard.append((channel, messages))
        if self._listener in ready:
            self._accept()
        now = time.monotonic()
        for channel, (_, since) in list(self._strangers.items()):
            if now - since > _STRANGER_SECONDS:
                self.drop(channel)
        return sorted(heard, key=lambda each: not each[0].closed)

    def _accept(self) -> None:
        for _ in range(self._most):
            try:
                connection, (host, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # perhaps no file descriptor is left, but one may be free after a pause
                time.sleep(_PAUSE_SECONDS)
                return
            channel = Channel(connection, self._secret, self._purpose, caller=False)
            self._strangers[channel] = host, time.monotonic()
            self._selector.register(channel, selectors.EVENT_READ)
            if len(self._strangers) > self._most:
                counts = collections.Counter(host for host, _ in self._strangers.values())
                crowd = counts.most_common(1)[0][0]
                self.drop(next(c for c, (host, _) in self._strangers.items() if host == crowd))

    def _turn_away(self, channel: Channel) -> None:
        host, _ = self._strangers[channel]
        self.drop(channel)
        if channel.differs and host not in self._named and len(self._named) < _NAMED:
            self._named.add(host)
            names = ", ".join(sorted(self._named))
            self.turned_away = f" A process on {names} came with another secret than this one."
            _log.warning(
                "tfpara: a process on %s has another secret than this one, and was turned away. If "
                "it is of this run, give all the same %s or %s.",
                host,
                run_secret.FILE_VARIABLE,
                run_secret.VARIABLE,
            )
