"""Messages that no process of tfpara sends: whoever listens drops their sender, and listens on.

They are sent to the real listeners, over real connections, signed with the run's secret and not.
"""

import contextlib
import copy
import json
import os
import random
import socket
import threading
import time

import pytest

from tests.lib import hostile, mutants
from tests.lib.cluster_of_processes import free_ports
from tfpara import cluster, version
from tfpara.cluster import messages, parent, ports, startup, status_board
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.elastic.meeting import Line, MeetingError
from tfpara.elastic.meeting_point import Meeting
from tfpara.parameter_server.control import lobby, member

LONG = 60.0  # seconds; reached only by a hang
OURS, OTHER = b"a secret of this run", b"a secret of another run"
DEEP = json.loads("[" * 500 + "]" * 500)
ODD = [None, True, 0, -1, 7, 1 << 70, 0.5, float("inf"), float("nan"), "", "x", "\ud800", "1" * 99]
ODD += [[], {}, [[]], [1], ["x", 1], {"x": 1}, DEEP]
SETTINGS = {"min_workers": 1, "max_workers": None, "grace_seconds": 30.0, "silence_seconds": 10.0}
MEMBERS = [[0, "127.0.0.1:1"], [1, "127.0.0.1:2"]]
ENROL = {"enrol": ["127.0.0.1", 4000], "settings": SETTINGS, "name": "x", "founds": True}
AGAIN = ENROL | {"task": 1}
AGAIN["again"] = {"form": 3, "members": MEMBERS, "fit": 1, "histories": [{}]}
TO_THE_MEETING = [
    ENROL,
    AGAIN,
    {"where": True},
    {"begins": 1, "histories": [{}]},
    {"register": True, "terms": {"rule": "x"}, "fit": 0},
    {"met": 1, "report": {"x": 1}, "failed": True, "admits": False},
    {"agreed": 0, "terms": {"rule": "x"}},
    {"ready": 1},
    {"done": True},
    {"out": True},
]
ENROLLED = {"enrolled": 0, "founding": True, "founders": 1}
FORM = {"form": 1, "members": MEMBERS, "reports": [None, {}], "why": "x", "last": ""}
FROM_THE_MEETING = [
    ENROLLED,
    FORM,
    {"fit": 1, "histories": [{}]},
    {"go": 1},
    {"abort": 1},
    {"wanted": True},
    {"lost": 1},
    {"evicted": "x"},
    {"ended": "x", "complete": True},
    {"farewell": True},
    {"refused": "x"},
]
TO_THE_CHIEF = [{"rank": 1}, {"here": ["in fit", ["sync"]]}, {"ended": [1, "x"]}, {"ask": True}]
FROM_THE_CHIEF = [{"where": True}, {"table": [["", []], ["in fit", []]]}, {"ended": [0, None]}]


@pytest.fixture(autouse=True)
def died(monkeypatch, caplog):
    """The errors that have ended threads; there must be none, and all messages are looked at."""
    monkeypatch.setenv("TFPARA_SECRET", OURS.decode())
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda ended: found.append(ended.exc_value))
    yield found
    assert not found and "cannot read" not in caplog.text


def mutated(message, draw):
    """A message with one place of it, at any depth, that is something else or not there."""
    message = copy.deepcopy(message)
    places = []

    def walk(value):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(message)
    value, key = draw.choice(places)
    if draw.random() < 0.2:
        del value[key]
    else:
        value[key] = draw.choice(ODD)
    return message


def speak(address, purpose, said, secret=OURS):
    """Sends messages over a connection of their own, and waits until all that can be is read."""
    channel = messages.connect(address, secret, purpose, LONG)
    with contextlib.closing(channel):
        for message in said:
            channel.send(**message)
        channel.receive()
        for _ in range(3):
            channel.wait_for(0.005)
            channel.receive()
            if channel.closed:
                break


def noise(address, draw, said):
    """Sends a greeting and messages as whoever knows the protocol, and no secret, would."""
    text = b"tfpara %032x\n" % draw.getrandbits(128)
    for message in said:
        text += b"%064x %s\n" % (draw.getrandbits(256), json.dumps(message).encode())
    spoilt = bytearray(text)
    for _ in range(draw.randrange(4)):
        spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), LONG) as stranger:
        stranger.sendall(spoilt)


def wait_until(holds):
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def listening(said, purpose):
    """A fake listener, which says something to the one who comes; yields its port."""
    listener = ports.bind("127.0.0.1", 0)
    listener.listen(1)

    def serve():
        with (
            listener,
            contextlib.closing(
                messages.Channel(listener.accept()[0], OURS, purpose, caller=False)
            ) as channel,
        ):
            channel.wait(time.monotonic() + LONG)
            for message in said:
                channel.send(**message)
            channel.wait(time.monotonic() + 0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    yield int(listener.getsockname()[1])
    thread.join()


@pytest.mark.parametrize("secret", [OURS, b""])
def test_a_meeting_point_listens_on(secret):
    draw = random.Random(1)
    for _ in range(12):
        service = Meeting("127.0.0.1", 0, 2, LONG, secret)
        address = f"127.0.0.1:{service.port}"
        with contextlib.closing(service):
            for _ in range(12):
                first = draw.choice([ENROL, mutated(ENROL, draw), mutated(AGAIN, draw)])
                said = [mutated(draw.choice(TO_THE_MEETING), draw) for _ in range(3)]
                speak(address, "meeting", [first, *said], secret)
                noise(address, draw, said)
            answered = messages.connect(address, secret, "meeting", LONG)
            with contextlib.closing(answered):
                answered.send(**ENROL)
                assert answered.wait(time.monotonic() + LONG)


def test_a_number_without_a_float_is_no_message():
    """The meeting point would fail later, where it adds the number to the time."""
    with contextlib.closing(Meeting("127.0.0.1", 0, 1, LONG, OURS)) as service:
        for grace, comes in ((10**400, False), (30, True)):
            said = ENROL | {"settings": SETTINGS | {"grace_seconds": grace}}
            channel = messages.connect(f"127.0.0.1:{service.port}", OURS, "meeting", LONG)
            with contextlib.closing(channel):
                channel.send(**said)
                assert (channel.wait(time.monotonic() + LONG) is not None) == comes


def test_an_error_ends_the_connection_that_it_came_by_and_no_other(monkeypatch, died, caplog):
    def hear(service, channel, task, message):
        assert "where" not in message
        channel.send(heard=True)

    monkeypatch.setattr(Meeting, "_hear", hear)
    service = Meeting("127.0.0.1", 0, 2, LONG, OURS)
    with contextlib.closing(service):
        address = f"127.0.0.1:{service.port}"
        good, bad = (messages.connect(address, OURS, "meeting", LONG) for _ in range(2))
        with contextlib.closing(good), contextlib.closing(bad):
            bad.send(where=True)
            assert bad.wait(time.monotonic() + LONG) is None and bad.closed
            good.send(out=True)
            assert good.wait(time.monotonic() + LONG) == {"heard": True}
        # An error of the service itself ends all connections, so that nobody waits for it.
        assert not service.is_deaf
        monkeypatch.setattr(Meeting, "_notice_pause", lambda service: 1 / 0)
        wait_until(lambda: service.is_deaf)
        with pytest.raises(OSError):
            messages.connect(address, OURS, "meeting", LONG)
    assert "AssertionError" in caplog.text and type(died.pop()) is ZeroDivisionError
    caplog.clear()


def test_a_run_goes_on_whatever_those_say_who_do_not_know_its_secret():
    draw = random.Random(2)
    service = Meeting("127.0.0.1", 0, 1, LONG, OURS)
    address = f"127.0.0.1:{service.port}"
    with contextlib.closing(service):
        line = Line(address, OURS, 4000, SETTINGS, LONG)
        with contextlib.closing(line):
            form = line.formed()
            for _ in range(50):
                said = [mutated(draw.choice(TO_THE_MEETING), draw) for _ in range(3)]
                noise(address, draw, said)
                speak(address, "meeting", said, OTHER)
            assert line.ready(form.number)
            assert [generation.number for generation in service.state.history] == [1]


def test_a_worker_whose_meeting_point_says_what_it_does_not_know_ends_with_a_sentence():
    draw = random.Random(3)
    for _ in range(20):
        said = [mutated(draw.choice(FROM_THE_MEETING), draw) for _ in range(4)]
        with listening([ENROLLED, *said], "meeting") as port:
            line = Line(f"127.0.0.1:{port}", OURS, 4000, SETTINGS, 0.2)
            with contextlib.closing(line), contextlib.suppress(MeetingError):
                line.formed()


def test_whereabouts_are_told_on():
    draw = random.Random(4)
    found = cluster.Cluster(("127.0.0.1:1", "127.0.0.1:2"), "chief", 0, has_chief_job=True)
    listener = ports.bind("127.0.0.1", 0)
    listener.listen(16)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    where = status_board.StatusBoard(found, lambda: status_board.Row("here"), listener, 0)
    for _ in range(60):
        said = [mutated(draw.choice(TO_THE_CHIEF), draw) for _ in range(3)]
        speak(address, "where", [{"rank": 1}, *said])
        noise(address, draw, said)
    assert where.table()[0] == status_board.Row("here")
    where.end()
    where.join()
    worker = found._replace(task_type="worker")
    for _ in range(20):
        said = [mutated(draw.choice(FROM_THE_CHIEF), draw) for _ in range(4)]
        with listening(said, "where") as port:
            where = status_board.StatusBoard(worker, lambda: status_board.Row("here"), None, port)
            where._thread.join(LONG)
            where.end()
            assert not where._thread.is_alive()


def test_a_lobby_listens_on():
    draw = random.Random(5)
    chief, own, server = (f"127.0.0.1:{port}" for port in free_ports(3))
    view = AsyncCluster({"chief": (chief,), "worker": (own,), "ps": (server,)}, "chief", 0)
    hello = {"hello": view.spec(), "job": "worker", "index": 0, "version": version.__version__}
    known = [hello, {"serving": True}, {"leaving": "SIGTERM"}, {"problem": "x"}]
    hall = lobby.Lobby(view, LONG, LONG)
    for _ in range(60):
        said = [mutated(draw.choice(known), draw) for _ in range(3)]
        speak(chief, member.PURPOSE, [hello, *said] if draw.random() < 0.5 else said)
        noise(chief, draw, said)
    wait_until(lambda: not hall._door.guests)
    with contextlib.closing(messages.connect(chief, OURS, member.PURPOSE, LONG)) as channel:
        channel.send(**hello)
        assert "welcome" in channel.wait(time.monotonic() + LONG)
    hall.fail("the test is over")


def test_a_start_names_what_is_wrong_or_goes_on():
    draw = random.Random(6)
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(3))
    view = cluster.Cluster(addresses, "chief", 0, has_chief_job=True)
    hello = {"rank": 1, "view": startup._view(view), "collectives": "tensorflow"}
    hello["at"] = ["127.0.0.1", 9]
    for _ in range(8):
        ends = []

        def meet(ends=ends):
            try:
                startup.meet(view, 0.2, shared=OURS)
            except startup.StartupError as error:
                ends.append(str(error))

        thread = threading.Thread(target=meet)
        thread.start()
        with contextlib.suppress(OSError):  # it has ended because of what came first
            for _ in range(3):
                speak(addresses[0], "start", [mutated(hello, draw)])
        thread.join()
        assert ends


def test_of_bytes_that_were_changed_no_message_comes_and_none_that_was_not_sent():
    """Somebody in the middle changes what one end has sent; the greeting, too."""
    said = [{"met": 1, "report": {"x": [1.5, None]}}, {"ready": 1}, {"done": True}]
    whole = 0
    for seed in range(mutants.count(200)):
        (near, far), (inner, outer) = socket.socketpair(), socket.socketpair()
        with far, inner:
            caller = messages.Channel(near, OURS, "meeting", caller=True)
            called = messages.Channel(outer, OURS, "meeting", caller=False)
            far.sendall(inner.recv(1000))
            for message in said:
                caller.send(**message)
            caller.receive()
            sent = far.recv(100_000)
            (case,) = mutants.of_bytes(sent, seed, 1)
            with hostile.watched(len(case)):
                inner.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    inner.sendall(case)
                inner.shutdown(socket.SHUT_WR)
                heard = called.receive()
                called.receive()
            assert heard == said[: len(heard)] and (heard != said or case.startswith(sent))
            assert called.closed
            whole += heard == said
            for channel in (caller, called):
                channel.close()
    assert whole < mutants.count(200) // 4


def test_reports_of_anything_are_none_or_what_they_say():
    told = json.dumps({"because": ["worker 1"], "at": 7.5}).encode() + b"\n"
    told += json.dumps({"saves": True}).encode() + b"\n"
    for case in mutants.of_bytes(told, 3, mutants.count(200)):
        reports = parent.Reports()
        with contextlib.suppress(BlockingIOError), hostile.watched(len(case)):
            for at in range(0, len(case), 60_000):
                os.write(reports.writer, case[at : at + 60_000])
                assert isinstance(reports.read(), dict)
        os.close(reports.writer)
        reports.close()
