"""Where Horovod's processes find each other."""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import time

import pytest

from tfpara import cluster
from tfpara.cluster import rendezvous
from tfpara.cluster.startup import StartupError

LONG = 60.0  # seconds; reached only by a hang
OURS, OTHER = b"a secret of this run", b"a secret of another run"


@pytest.fixture
def store():
    server = rendezvous.Server(host="127.0.0.1")
    yield server
    server.close()


def ask(server, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONG)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_store_keeps_what_is_put(store):
    assert ask(store, "GET", "/scope/key") == (404, b"")
    value = bytes(range(256)) * 20
    assert ask(store, "PUT", "/scope/key", value) == (200, b"")
    assert ask(store, "GET", "/scope/key") == (200, value)
    assert ask(store, "GET", "/other/key") == (404, b"")
    assert ask(store, "DELETE", "/scope/key") == (200, b"")
    assert ask(store, "DELETE", "/scope/key") == (200, b"")
    assert ask(store, "GET", "/scope/key") == (404, b"")


def test_the_port_is_free_after_close():
    server = rendezvous.Server(host="127.0.0.1")
    server.close()
    again = rendezvous.Server(server.port, "127.0.0.1")
    again.close()


def told(rank, size):
    return cluster.read({"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)})


def meet_all(store, views, timeout=LONG, environ=None, secrets=(b"",) * 9):
    environ = environ or {rendezvous.ADDRESS: "127.0.0.1", rendezvous.PORT: str(store.port)}

    def meet(view, shared):
        try:
            rendezvous.meet(view, environ, timeout, shared)
        except StartupError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(views)) as pool:
        return list(pool.map(meet, views, secrets))


def test_all_meet(store):
    views = [told(rank, 3) for rank in range(3)]
    assert meet_all(store, views) == [None] * 3
    assert meet_all(store, views[::-1]) == [None] * 3


def test_all_name_who_does_not_come(store):
    messages = meet_all(store, [told(0, 4), told(3, 4)], timeout=2.0)
    for message in messages:
        assert "after 2 s these workers have not started: worker 1, worker 2." in message


def test_sizes_that_differ(store):
    messages = meet_all(store, [told(0, 2), told(1, 3)], timeout=5.0)
    assert any("HOROVOD_SIZE differs" in (message or "") for message in messages)


def test_nobody_serves_there(store):
    store.close()
    [message] = meet_all(store, [told(0, 2)], timeout=0.3)
    assert "nobody answers where Horovod's processes find each other" in message
    assert rendezvous.ADDRESS in message


@pytest.mark.parametrize(
    ("host", "port"), [("", "80"), ("here", ""), ("here", "x"), ("here", "0"), ("here", "70000")]
)
def test_variables_that_are_missing(host, port):
    environ = {rendezvous.ADDRESS: host, rendezvous.PORT: port}
    with pytest.raises(StartupError, match="HOROVOD_RANK is set, but .*horovodrun"):
        rendezvous.meet(told(0, 2), environ, LONG)


def test_variables_of_processes_on_several_hosts():
    """Two on one host, one on another: places counted on each host, and across the hosts."""
    addresses = ("a:1", "b:1", "a:2")
    views = [
        cluster.Cluster(addresses, *task, has_chief_job=True)
        for task in (("chief", 0), ("worker", 0), ("worker", 1))
    ]
    found = [rendezvous.variables(view, "a", 5) for view in views]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    assert [[one[f"HOROVOD_{name}"] for name in names] for one in found] == [
        ["0", "3", "0", "2", "0", "2", "a"],
        ["1", "3", "0", "1", "1", "2", "b"],
        ["2", "3", "1", "2", "0", "1", "a"],
    ]
    for rank, one in enumerate(found):
        assert (one[rendezvous.ADDRESS], one[rendezvous.PORT]) == ("a", "5")
        assert cluster.read(one).rank == rank


@pytest.fixture
def closed_store():
    """A store for those who have the secret, and what leads to it."""
    server = rendezvous.Server(host="127.0.0.1", shared=OURS)
    alone = cluster.Cluster(("127.0.0.1:1",), "chief", 0, has_chief_job=True)
    yield server, rendezvous.variables(alone, "127.0.0.1", server.port, OURS)
    server.close()


def raw(server, text):
    """All that is answered to a request that is written by hand."""
    answer = b""
    address = ("127.0.0.1", server.port)
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(address, LONG) as client,
    ):
        client.sendall(text)
        while chunk := client.recv(1 << 16):
            answer += chunk
    return answer.partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("length", "status"),
    [(str(1 << 40), 413), (str((1 << 20) + 1), 413), ("9" * 5000, 413), ("-1", 411), ("x", 411)],
)
def test_a_length_is_looked_at_before_the_bytes(store, length, status):
    head = f"PUT /scope/key HTTP/1.0\r\nContent-Length: {length}\r\n\r\n"
    assert f" {status} " in raw(store, head.encode()).decode()
    assert f" {411} " in raw(store, b"PUT /scope/key HTTP/1.0\r\n\r\n").decode()
    assert store.values == {}


def test_the_store_is_full_at_some_point(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "_MOST_BYTES", 100)
    assert ask(store, "PUT", "/scope/1", b"x" * 80) == (200, b"")
    assert ask(store, "PUT", "/scope/2", b"x" * 80)[0] == 413
    assert ask(store, "GET", "/scope/1") == (200, b"x" * 80)


def test_a_value_that_is_cut_off_is_none(store):
    raw_put = b"PUT /scope/key HTTP/1.0\r\nContent-Length: 8\r\n\r\nhalf"
    with socket.create_connection(("127.0.0.1", store.port), LONG) as client:
        client.sendall(raw_put)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    assert store.values == {}


@pytest.mark.parametrize("begun", [b"", b"GET /scope/key HTTP/1.0\r\nX: "])
def test_slow_clients_are_cut_off(store, monkeypatch, begun):
    """However often they send a byte; who is quick is answered meanwhile."""
    monkeypatch.setattr(rendezvous, "_ANSWER_SECONDS", 3.0)
    with socket.create_connection(("127.0.0.1", store.port), LONG) as client:
        client.sendall(begun)
        deadline = time.monotonic() + LONG
        client.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    if client.recv(1) == b"":
                        break
                client.sendall(b"G")
                assert ask(store, "GET", "/scope/key")[0] == 404
        assert time.monotonic() < deadline


def test_a_crowd_does_not_keep_others_out(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "_CLIENTS", 16)
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            address = ("127.0.0.1", store.port)
            stack.enter_context(socket.create_connection(address, LONG))
        assert ask(store, "GET", "/scope/key")[0] == 404
        deadline = time.monotonic() + LONG
        while len(store._clients) > 16 + 1:  # its threads close connections after the answer
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_without_the_secret_nothing_is_read_or_written(closed_store):
    server, environ = closed_store
    token = environ[rendezvous.ADDRESS].partition("/")[2]
    assert len(token) == 64 and OURS.decode() not in token
    for path in ("/scope/key", f"/{token}/scope/key", f"/{'0' * 64}:{server.port}/scope/key", "/"):
        for method in ("GET", "PUT", "DELETE"):
            assert ask(server, method, path, b"x")[0] == 403
    assert server.values == {}
    path = f"/{token}:{server.port}/scope/key"  # as Gloo makes it of host and port
    assert ask(server, "PUT", path, b"x") == (200, b"")
    assert ask(server, "GET", path) == (200, b"x")
    assert ask(server, "DELETE", path) == (200, b"")


def test_those_with_the_secret_meet(closed_store):
    server, environ = closed_store
    views = [told(rank, 3) for rank in range(3)]
    assert meet_all(server, views, LONG, environ, [OURS] * 3) == [None] * 3


def test_another_secret_is_named(closed_store):
    """Of one who came to the store by another path, and of one whose values are in it."""
    server, environ = closed_store
    alone = cluster.Cluster(("127.0.0.1:1",), "chief", 0, has_chief_job=True)
    theirs = rendezvous.variables(alone, "127.0.0.1", server.port, OTHER)
    (message,) = meet_all(server, [told(1, 2)], LONG, theirs, [OTHER])
    assert message.startswith("this process has another secret than where Horovod's processes meet")
    messages = meet_all(server, [told(0, 2), told(1, 2)], 2.0, environ, [OURS, OTHER])
    for own, other in enumerate(("worker 1", "chief")):
        assert f"have not started: {other}. Start" in messages[own]
        assert messages[own].endswith(f"What is there of {other} has another secret.")


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b'{"size": 2}', b"[" * 100_000])
def test_what_strangers_put_is_nobody(store, value):
    """As in the store of horovodrun, to which all may write."""
    assert ask(store, "PUT", "/tfpara/1", value)[0] == 200
    (message,) = meet_all(store, [told(0, 2)], timeout=0.3)
    assert "have not started: worker 1." in message
    forged = json.dumps({"size": 2, "signature": "0" * 64}).encode()
    assert ask(store, "PUT", "/tfpara/1", forged)[0] == 200
    (message,) = meet_all(store, [told(0, 2)], timeout=0.3, secrets=[OURS])
    assert "have not started: worker 1." in message
