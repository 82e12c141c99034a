"""Connections of the chief to a worker that is lost, which TensorFlow would wait on, are cut."""

import contextlib
import socket
import threading
import time

import pytest

from tests.lib.cluster_of_processes import free_ports
from tfpara import version
from tfpara.cluster import messages, ports
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.parameter_server.control import lobby, member

LONG = 60.0  # seconds; reached only by a hang
SILENCE = 0.5  # seconds; `timeout_seconds` of a lobby whose guests soon count as silent


class Chief:
    """A lobby, a worker's port, and guests that come from the worker's address."""

    def __init__(self, stack, timeout_seconds):
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.worker_address = f"127.0.0.1:{listener.getsockname()[1]}"
        chief, server = (f"127.0.0.1:{port}" for port in free_ports(2))
        self._stack, self._listener = stack, listener
        jobs = {"chief": (chief,), "worker": (self.worker_address,), "ps": (server,)}
        self.view = AsyncCluster(jobs, "chief", 0)
        self.hall = lobby.Lobby(self.view, LONG, timeout_seconds)
        stack.callback(self.hall.fail, "the test is over")

    def connected(self):
        """The other end of a new connection of this process to the worker, as TensorFlow has it."""
        self._stack.enter_context(ports.connect(self.worker_address, LONG))
        theirs = self._stack.enter_context(self._listener.accept()[0])
        theirs.settimeout(LONG)
        return theirs

    def guest(self):
        """The connection of a worker that the lobby has let in."""
        guest = messages.connect(self.view.address, b"", member.PURPOSE, LONG)
        self._stack.callback(guest.close)
        guest.send(hello=self.view.spec(), job="worker", index=0, version=version.__version__)
        assert "welcome" in guest.wait(time.monotonic() + LONG)
        return guest


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_lost_worker_is_cut_where_its_name_is_no_longer_known(stack, monkeypatch):
    monkeypatch.setattr(ports, "places", lambda address: set())
    chief = Chief(stack, LONG)
    guest = chief.guest()
    theirs = chief.connected()
    guest.close()
    assert theirs.recv(1) == b""


def test_a_silent_worker_is_cut_as_another_takes_its_place(stack, monkeypatch):
    monkeypatch.setattr(ports, "places", lambda address: set())  # the look-up comes too late
    chief = Chief(stack, SILENCE)
    chief.guest()
    theirs = chief.connected()
    time.sleep(4 * member.beat_seconds(SILENCE))
    chief.guest()
    theirs.settimeout(1.0)
    assert theirs.recv(1) == b""


def test_a_worker_that_is_back_is_not_cut_by_a_slow_look_up(stack, monkeypatch):
    goes_on, found = threading.Event(), ports.places

    def places(address):
        assert goes_on.wait(LONG)
        return found(address)

    chief = Chief(stack, LONG)
    first, before = chief.guest(), set(threading.enumerate())
    monkeypatch.setattr(ports, "places", places)
    first.close()
    while not (cuts := set(threading.enumerate()) - before):
        time.sleep(0.01)
    chief.guest()
    theirs = chief.connected()
    goes_on.set()
    for thread in cuts:
        thread.join(LONG)
    theirs.settimeout(0.5)
    with pytest.raises(TimeoutError):
        theirs.recv(1)
