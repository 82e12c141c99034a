"""The meeting of workers before TensorFlow starts."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import pytest

from tests.lib.cluster_of_processes import free_ports, run, run_all_well
from tfpara import cluster
from tfpara.cluster import messages, startup

LONG = 60.0  # seconds; reached only by a hang


def workers(count, addresses=None):
    """The views of all members of a cluster, by rank."""
    addresses = addresses or [f"127.0.0.1:{port}" for port in free_ports(count)]
    tasks = [("chief", 0), *(("worker", index) for index in range(count - 1))]
    return [cluster.Cluster(tuple(addresses), *task, has_chief_job=True) for task in tasks]


def meet_all(views, timeouts):
    """What each member's meeting came to: None or the message of its StartupError."""

    def meet(view, timeout):
        try:
            startup.meet(view, timeout)
        except startup.StartupError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(views)) as pool:
        return list(pool.map(meet, views, timeouts))


def say_hello(chief, worker, wait=True):
    """What the chief answers to a worker that does not listen; None if it is not there."""
    try:
        channel = messages.connect(chief.address, b"", startup._PURPOSE, LONG)
    except ConnectionError:
        return None
    hello = {"rank": worker.rank, "view": startup._view(worker), "collectives": "tensorflow"}
    channel.send(**hello, at=["127.0.0.1", 9])
    with contextlib.closing(channel):
        channel.wait_for(LONG)  # for the greeting; then the hello leaves
        return channel.wait(time.monotonic() + LONG) if wait else channel.receive() == []


def test_one_process_need_not_meet():
    startup.meet(cluster.Cluster((), "worker", 0), 0.0)
    startup.meet(cluster.Cluster(("127.0.0.1:1",), "worker", 0), 0.0)


def test_a_process_that_has_trained_with_others_is_refused(monkeypatch):
    monkeypatch.setattr(startup, "_met", None)
    views, (other, _) = workers(2), workers(2)

    def start(view):
        with startup.guard(view, LONG):
            return view.rank

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, views)) == [0, 1]
    assert start(startup._met) == startup._met.rank  # a second strategy of the same cluster
    with pytest.raises(startup.StartupError) as caught:
        start(other)
    message = str(caught.value)
    assert f"other workers before ({', '.join(views[0].addresses)})" in message
    assert "new processes; under Spark set spark.python.worker.reuse=false." in message
    with pytest.raises(startup.StartupError, match="other workers before"), startup.elastic_run():
        pass


def test_a_process_takes_part_in_one_elastic_run(monkeypatch):
    monkeypatch.setattr(startup, "_met", None)
    with pytest.raises(ConnectionError), startup.elastic_run():
        raise ConnectionError
    with startup.elastic_run():
        pass
    for another in (startup.elastic_run(), startup.guard(workers(2)[0], LONG)):
        with pytest.raises(startup.StartupError, match=r"before \(an elastic run\)"), another:
            pass


def test_all_meet_whoever_comes_first_and_free_their_ports():
    views = workers(4)
    for order in (views, views[::-1]):
        assert meet_all(order, [LONG] * 4) == [None] * 4
    for view in views:
        with socket.create_server(("", int(view.address.rpartition(":")[2]))):
            pass


def test_a_cluster_of_workers_meets():
    views = [view._replace(has_chief_job=False) for view in workers(2)]
    views = [view._replace(task_type="worker", task_index=rank) for rank, view in enumerate(views)]
    assert meet_all(views, [LONG] * 2) == [None] * 2


def test_all_name_the_worker_that_never_starts():
    views = workers(4)
    absent = views.pop(2)
    messages = meet_all(views, [4.0, LONG, LONG])
    assert len(set(messages)) == 1
    assert f"after 4 s these workers have not started: worker 2 ({absent.address})." in messages[0]
    assert "worker 1" not in messages[0] and "worker 3" not in messages[0]
    assert views[0].address in messages[0]


def test_workers_name_the_chief_that_never_starts():
    chief, *others = workers(3)
    for message in meet_all(others, [0.5, 1.0]):
        assert f"this worker has not started: chief ({chief.address})" in message
        assert "refused" in message


@pytest.mark.parametrize("change", ["address", "order", "jobs", "size"])
def test_all_report_a_tf_config_that_differs(change):
    views = workers(3)
    first, second, third = views[0].addresses
    views[2] = {
        "address": views[2]._replace(addresses=(first, "127.0.0.1:9", third)),
        "order": views[2]._replace(addresses=(first, third, second), task_index=0),
        "jobs": views[2]._replace(task_index=2, has_chief_job=False),
        "size": views[2]._replace(addresses=(first, second, third, "127.0.0.1:9")),
    }[change]
    messages = meet_all(views[::2], [LONG] * 2)
    assert messages[0] == messages[1]
    assert "TF_CONFIG differs between workers: chief" in messages[0]
    for view in views[::2]:
        assert str(json.loads(view.tf_config())["cluster"]) in messages[0]


def test_two_workers_with_the_same_task():
    chief, one, _ = workers(3)
    result = []
    thread = threading.Thread(target=lambda: result.extend(meet_all([chief, one], [LONG] * 2)))
    thread.start()
    # A second process of the same task on another machine: here it cannot listen too.
    said = set()
    while not said:
        answer = say_hello(chief, one)
        if answer is None:
            assert thread.is_alive(), result
        else:
            said.add(answer["problem"])
    thread.join(LONG)
    said.update(result)
    (message,) = said
    assert f"two processes have the same task in TF_CONFIG: both are {one.describe(1)}" in message


def test_a_worker_may_come_again_after_its_death():
    chief, one, two = workers(3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        meeting = pool.submit(startup.meet, chief, LONG)
        while not say_hello(chief, one, wait=False):
            assert not meeting.done()
        others = [pool.submit(startup.meet, each, LONG) for each in (one, two)]
        assert [each.result(LONG) for each in (meeting, *others)] == [None] * 3


def test_a_port_in_use_is_named():
    view = workers(2)[1]
    port = int(view.address.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(startup.StartupError, match=f"port {port} of this process, worker 1.*in use"),
    ):
        startup.meet(view, LONG)


def test_an_address_that_leads_nowhere_is_named(monkeypatch):
    """As behind a firewall: the worker reaches the chief, the chief not the worker."""
    monkeypatch.setattr(cluster.Cluster, "unreachable", lambda *_: ["worker 1 (10.0.0.1:1)"])
    messages = meet_all(workers(2), [LONG] * 2)
    assert messages[0] == messages[1]
    assert "worker 1 (10.0.0.1:1) came to the chief, but the chief cannot" in messages[0]


def test_a_name_may_be_known_later_than_its_process_runs(monkeypatch):
    answers = [["worker 1 (pod-1.job:1)"], ["worker 1 (pod-1.job:1)"], []]
    monkeypatch.setattr(cluster.Cluster, "unreachable", lambda *_: answers.pop(0))
    monkeypatch.setattr(startup.ports, "places", lambda _: set())
    assert meet_all(workers(2), [LONG] * 2) == [None] * 2
    assert not answers


@pytest.mark.nightly
def test_tensorflow_starts_on_the_ports_of_the_meeting():
    for result in run_all_well("start.py", [{"timeout_seconds": LONG}] * 2, fresh=True):
        assert "sum 2.0" in result.output and "met before" in result.output


@pytest.mark.nightly
def test_a_peer_that_dies_between_meeting_and_connection_does_not_hang_the_chief():
    options = [
        {"timeout_seconds": LONG, "connect_seconds": 60},
        {"timeout_seconds": LONG, "dies": True},
    ]
    chief, dead = run("start.py", options, fresh=True)
    assert dead.returncode == 0
    assert chief.returncode == 1
    assert "Timeout (0:01:00)!" in chief.output and "start.py" in chief.output
