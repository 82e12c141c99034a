"""Connections of this process that are ended, whoever has opened them."""

import os
import random
import socket

import pytest

from tfpara.cluster import ports
from tfpara.launch import clusters


def connected(family, host):
    """A connection's two ends, and its address."""
    with socket.create_server((host, 0), family=family) as listener:
        address = ports.joined(host, listener.getsockname()[1])
        return ports.connect(address, 10.0), listener.accept()[0], address


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_connections_to_an_address_are_cut_and_no_others(family, host):
    try:
        own, peer, address = connected(family, host)
    except OSError:
        pytest.skip(f"there is no {host} here")
    other, others_peer, _ = connected(family, host)
    number = os.dup(own.fileno())  # as a library holds it
    own.detach()
    before = len(os.listdir("/dev/fd"))
    ports.cut(ports.places(address))
    assert len(os.listdir("/dev/fd")) == before
    assert peer.recv(1) == b""
    with socket.socket(fileno=number) as copy, pytest.raises(BrokenPipeError):
        copy.sendall(b"x")
    with peer, other, others_peer:
        other.sendall(b"x")
        assert others_peer.recv(1) == b"x"


@pytest.mark.parametrize(
    ("environ", "direct"),
    [
        ({}, None),
        ({"http_proxy": "p:1"}, "a,::1"),
        ({"https_proxy": "p:1", "no_proxy": "b,a"}, "b,a,::1"),
        ({"http_proxy": "p:1", "no_grpc_proxy": "c", "no_proxy": "b"}, "c,a,::1"),
        ({"http_proxy": "p:1", "grpc_proxy": "q:1"}, None),
    ],
)
def test_no_proxy_comes_between_the_processes_of_a_run(environ, direct, monkeypatch):
    monkeypatch.setattr(os, "environ", environ)
    for _ in range(2):
        ports.without_proxy(["a:1", "[::1]:2", "a:3"])
        assert environ.get("no_grpc_proxy") == direct


def test_ports_do_not_follow_the_seed_of_the_program():
    """Runs with the same seed would take the same ports, and draw other numbers than without."""
    random.seed(1)
    state = random.getstate()
    ports.reserve().close()
    clusters.ports("127.0.0.1", 0, 1)
    assert random.getstate() == state


def test_a_name_that_nobody_knows_leads_nowhere():
    assert ports.places("nobody.invalid:4000") == set()
