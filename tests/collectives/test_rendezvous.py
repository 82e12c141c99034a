"""Where Horovod's processes find each other."""

import concurrent.futures
import http.client

import pytest

from tfpara import cluster, rendezvous
from tfpara.startup import StartupError

LONG = 30.0  # seconds; reached only by a hang


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


def meet_all(store, views, timeout=LONG):
    environ = {rendezvous.ADDRESS: "127.0.0.1", rendezvous.PORT: str(store.port)}

    def meet(view):
        try:
            rendezvous.meet(view, environ, timeout)
        except StartupError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(views)) as pool:
        return list(pool.map(meet, views))


def test_all_meet(store):
    views = [told(rank, 3) for rank in range(3)]
    assert meet_all(store, views) == [None] * 3
    assert meet_all(store, views[::-1]) == [None] * 3


def test_all_name_who_does_not_come(store):
    messages = meet_all(store, [told(0, 4), told(3, 4)], timeout=0.5)
    for message in messages:
        assert "after 0.5 s these workers have not started: worker 1, worker 2." in message


def test_sizes_that_differ(store):
    messages = meet_all(store, [told(0, 2), told(1, 3)], timeout=2.0)
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
