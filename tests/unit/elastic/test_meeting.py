"""The meeting point and workers' lines to it, over real connections on loopback."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

from tfpara.elastic import meeting_point
from tfpara.elastic.meeting import Ended, Evicted, Left, Line, MeetingError, Passed
from tfpara.elastic.meeting_point import Meeting
from tfpara.elastic.membership import Limits, Membership
from tfpara.launch import meet as launch_meet

TERMS = {"rule": "BSP()"}


@contextlib.contextmanager
def meeting(founders=3, **settings):
    service = Meeting("127.0.0.1", 0, founders, 60.0, b"secret")
    service.of_test = {
        "min_workers": 1,
        "max_workers": None,
        "grace_seconds": 30.0,
        "silence_seconds": 10.0,
    } | settings
    try:
        yield service
    finally:
        service.close()


def line(service, secret=b"secret", task=None, seconds=20.0, name="", **settings):
    settings = service.of_test | settings
    return Line(f"127.0.0.1:{service.port}", secret, 4000, settings, seconds, task, name)


def found(lines):
    """All connect themselves; returns the first generation as each was told."""

    def take_part(own):
        form = own.formed()
        assert own.ready(form.number)
        return form

    with concurrent.futures.ThreadPoolExecutor(len(lines)) as pool:
        forms = list(pool.map(take_part, lines))
    lines[0].agreed(TERMS)
    return forms


def meet(lines, generation, failed):
    """All come to the meeting; returns the next generation as each is told."""
    with concurrent.futures.ThreadPoolExecutor(len(lines)) as pool:
        reports = [{"task": own.task} for own in lines]
        forms = list(pool.map(lambda own, r: own.met(generation, r, failed), lines, reports))
        assert all(pool.map(lambda own: own.ready(forms[0].number), lines))
        return forms


def test_a_worker_dies_and_another_comes():
    aborted = []
    with meeting() as service:
        lines = [line(service) for _ in range(3)]
        assert [own.task for own in lines] == [0, 1, 2] and all(own.founding for own in lines)
        forms = found(lines)
        assert {form.tasks for form in forms} == {(0, 1, 2)} and forms[0].reports == (None,) * 3
        for own in lines[1:]:
            own.on_abort = lambda generation, why, own=own: aborted.append((own.task, generation))
        lines[0].close()
        wait_until(lambda: len(aborted) == 2)
        assert sorted(aborted) == [(1, 1), (2, 1)]
        assert [own.lost for own in lines[1:]] == [{0}, {0}]
        form, _ = meet(lines[1:], 1, True)
        assert (form.number, form.tasks) == (2, (1, 2))
        assert form.reports == ({"task": 1}, {"task": 2})
        assert form.why == "worker 0 is lost" and not lines[1].lost
        late = line(service)
        assert (late.task, late.founding) == (3, False)
        late.register(TERMS, 0)
        wait_until(lambda: all(own.wanted for own in lines[1:]))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            new = pool.submit(late.formed)
            ready = pool.submit(lambda: late.ready(new.result().number))
            form, _ = meet(lines[1:], 2, False)
            assert ready.result() and new.result() == form
        assert form.tasks == (1, 2, 3) and form.reports[2] is None
        assert [each.members for each in service.state.history] == [(0, 1, 2), (1, 2), (1, 2, 3)]


def test_who_came_by_loopback_is_told_to_others_by_the_address_of_this_machine():
    with meeting(2) as service:
        service.close()  # so that its thread asks nothing of these guests
        hosts = {1: "fd00::1", 3: "127.0.0.1"}
        guests = {task: types.SimpleNamespace(own_host=host) for task, host in hosts.items()}
        service._door.guests.update(guests)
        here, outside = [0, "127.0.0.1:4000"], [1, "[fd00::2]:4001"]
        assert service._reached([here, outside]) == [[0, "[fd00::1]:4000"], outside]
        # A worker of this machine whose address a former meeting point has told to others.
        known = [3, "[fd00::1]:4003"]
        assert service._reached([known, here, outside]) == [known, [0, "[fd00::1]:4000"], outside]
        assert service._reached([here, [2, "[::1]:4002"]]) == [here, [2, "[::1]:4002"]]
        assert service._reached([outside]) == [outside]
        service._door.guests.clear()


def test_a_name_that_leads_to_loopback_on_this_machine_alone_is_listened_to_by_all(monkeypatch):
    """As Debian's /etc/hosts has it: the others find the machine elsewhere."""
    found = {"node": "127.0.1.1", "other": "192.0.2.1"}
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, *_, **__: [(socket.AF_INET, 1, 6, "", (found.get(host, host), port))],
    )
    service = Meeting("node", 0, 1, 60.0, b"secret")
    assert service._door._listener.getsockname()[0] in ("::", "0.0.0.0")
    service.close()
    names = ["127.0.0.1", "localhost", "other"]
    assert [meeting_point._to_listen_on(name) for name in names] == names
    monkeypatch.undo()
    names = ["", "no.such.host.invalid"]
    assert [meeting_point._to_listen_on(name) for name in names] == names


def test_who_is_awaited_for_long_is_named(caplog):
    with meeting() as service:
        lines = [line(service) for _ in range(3)]
        found(lines)
        # Only the last is long enough, so the order in which they arrive does not matter.
        for own, waits in zip(lines, (3.0, 0.0, 12.0), strict=True):
            own.report(waits, f"in fit\n[x.py, line {own.task}]")
        wait_until(lambda: "waited" in caplog.text)
        who = "worker 1 (in fit[x.py, line 1])"
        assert f"tfpara: the other workers have waited for {who} for 12 s." in caplog.text


def test_who_comes_while_the_last_founders_begin_joins():
    """Each is told at once, so none takes itself for a founder when the others are complete."""
    with meeting(4, max_workers=2) as service:
        lines = [line(service) for _ in range(3)]
        assert [(own.task, own.founding) for own in lines] == [(0, True), (1, True), (2, False)]
        assert {own.founders for own in lines} == {2}
        assert {form.tasks for form in found(lines[:2])} == {(0, 1)}


def test_who_is_lost_before_the_run_has_begun_is_replaced():
    with meeting(3) as service:
        first, lost = line(service), line(service)
        lost.close()
        forms = found([first, line(service), line(service)])
        assert {form.tasks for form in forms} == {(0, 2, 3)}


def test_who_waits_for_a_run_that_turns_out_to_be_under_way_is_told():
    """The meeting point is new, and does not know of the run when a worker comes."""
    with meeting(2) as service:
        lines = [line(service, seconds=60.0) for _ in range(2)]
        found(lines)
        port, settings = service.port, service.of_test
        early_is_there = threading.Event()
        for own in lines:
            own._found_again = lambda again=own._found_again: early_is_there.wait(60.0) and again()
    again = Meeting("127.0.0.1", port, 2, 60.0, b"secret")
    try:
        again.of_test = settings
        early = line(again)
        assert early.founding
        early_is_there.set()
        with pytest.raises(Evicted, match="others have begun the run without it"):
            early.formed()
        assert not line(again).founding
    finally:
        again.close()


def test_who_wants_to_join_where_no_member_is_begins_nothing():
    """The meeting point is new, and a worker that joins is there before the members are."""
    with meeting(1) as service:
        first, joins = line(service), line(service, seconds=60.0)
        found([first])
        port, settings = service.port, service.of_test
    first.close()  # with which the run is over
    joins.task = 0  # the number that it gets from the new one
    again = Meeting("127.0.0.1", port, 1, 60.0, b"secret")
    try:
        again.of_test = settings
        joins.register(TERMS, 0)
        with pytest.raises(Evicted, match="no member of its run is here"):
            joins.formed()
        assert not again.state.history
    finally:
        again.close()


def test_who_waits_to_join_and_gets_another_number_from_a_new_meeting_point_ends():
    """The server of TensorFlow in its process has the former number."""
    with meeting(1) as service:
        first, gone, joins = line(service, seconds=60.0), line(service), line(service, seconds=60.0)
        found([first])
        gone.close()
        joins.register(TERMS, 0)
        port = service.port
    again = Meeting("127.0.0.1", port, 1, 60.0, b"secret")
    try:
        with pytest.raises(Ended, match="has another number for this worker"):
            joins.formed()
    finally:
        first.close()
        again.close()


def test_who_waits_in_a_call_of_fit_that_others_have_left_is_told():
    with meeting(1) as service:
        first, joins = line(service), line(service)
        found([first])
        assert joins.where() == (0, [])
        joins.register({}, 0)
        wait_until(lambda: first.wanted)
        first.begins(1, [{"epoch": [0]}])
        with pytest.raises(Passed) as passed:
            joins.formed()
        assert (passed.value.fit, passed.value.histories) == (1, [{"epoch": [0]}])
        wait_until(lambda: not first.wanted)
        first.done()
        with pytest.raises(Ended):
            joins.where()


def test_who_is_silent_is_given_up_and_may_come_again_under_its_number():
    with meeting(2, silence_seconds=3.0) as service:
        lines = [line(service) for _ in range(2)]
        found(lines)
        lines[1]._open = False  # its thread ends, the connection stays
        form = lines[0].met(1, {}, True)
        assert (form.tasks, form.why) == ((0,), "worker 1 was silent for 3 s")
        assert lines[0].ready(2)
        lines[1]._thread.join()
        lines[1]._open = True
        lines[1]._listen_again = lines[1]._channel.wait(time.monotonic() + 60.0)
        again = line(service, task=1)
        assert again.task == 1 and not again.founding
        again.register(TERMS, 0)
        wait_until(lambda: lines[0].wanted)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            new = pool.submit(again.formed)
            form = lines[0].met(2, {}, False)
            assert new.result().tasks == form.tasks == (0, 1)


def test_who_leaves_is_told_that_it_has():
    with meeting(2) as service:
        lines = [line(service) for _ in range(2)]
        found(lines)
        lines[1].leave()
        wait_until(lambda: all(own.wanted for own in lines))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            stays = pool.submit(lines[0].met, 1, {}, False)
            with pytest.raises(Left, match="has left"):
                lines[1].met(1, {}, False)
            assert stays.result().tasks == (0,)


def test_too_few_end_together():
    with meeting(2, min_workers=2, grace_seconds=0.2) as service:
        lines = [line(service) for _ in range(2)]
        found(lines)
        lines[0].close()
        form = lines[1].met(1, {}, True)
        assert form.last == "1 of at least 2 workers are left"


def test_settings_of_workers_that_have_all_left_do_not_stay():
    with meeting(2) as service:
        first = line(service)
        with pytest.raises(MeetingError, match="the run has elastic=.*this worker"):
            line(service, grace_seconds=7.0)
        first.close()
        wait_until(lambda: not service._door.guests)
        lines = [line(service, grace_seconds=7.0) for _ in range(2)]
        found(lines)
        lines[0].close()
        lines[1].close()
        wait_until(lambda: not service._door.guests)
        with pytest.raises(MeetingError, match="the run has elastic=.*this worker"):
            line(service)  # the run has begun


def test_who_is_not_let_in(monkeypatch, caplog):
    monkeypatch.setattr("tfpara.cluster.waiting._LOG_SECONDS", 0.0)
    with meeting(1) as service:
        with pytest.raises(MeetingError, match="another secret than the meeting point at 127"):
            line(service, b"other")
        first = line(service, seconds=2.0)
        found([first])
        with pytest.raises(MeetingError, match="the run has elastic=.*min_workers.: 1.* 7"):
            line(service, min_workers=7)
        other = line(service)
        wait_until(lambda: "rule" in service.state.terms)
        other.register({"rule": "EASGD()"}, 0)
        with pytest.raises(MeetingError, match="rule: the run has 'BSP..', this worker has"):
            other.formed()
        port = service.port
    with pytest.raises(MeetingError, match="the meeting point at 127.0.0.1:.* is gone, and was"):
        first.formed()
    with pytest.raises(MeetingError, match=f"nobody answers at the meeting point 127.0.0.1:{port}"):
        Line(f"127.0.0.1:{port}", b"", 4000, service.of_test, 1.0)
    for wrong in ("node1", "node1:", "node1:port"):  # no wait would help
        with pytest.raises(MeetingError, match=f"TFPARA_MEETING='{wrong}' must be HOST:PORT"):
            Line(wrong, b"", 4000, service.of_test, 60.0)
    awaited = f"Waiting for the meeting point 127.0.0.1:{port}"
    assert f"{awaited}, which is gone." in caplog.messages
    assert any(each.startswith(f"{awaited} (") for each in caplog.messages)


def test_the_evicted_are_told():
    with meeting(2) as service:
        lines = [line(service) for _ in range(2)]
        found(lines)
        with pytest.raises(Evicted, match="generation 7 is over"):
            lines[0].met(7, {}, False)


def test_a_meeting_point_that_was_started_again_goes_on_with_the_run():
    with meeting(3, grace_seconds=1.0) as service:
        lines = [line(service, seconds=60.0) for _ in range(3)]
        found(lines)
        for own in lines:
            own.begins(1, ["told"])
        port, settings = service.port, service.of_test
    # Nobody needs it, and nobody is told that it is gone. Then one dies.
    lines[0].close()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = [pool.submit(own.met, 1, {"task": own.task}, True) for own in lines[1:]]
        time.sleep(0.3)
        assert not any(each.done() for each in waits)
        again = Meeting("127.0.0.1", port, 3, 60.0, b"secret")
        try:
            again.of_test = settings
            # The one that is gone is awaited; here for as long as the run has said.
            forms = [each.result(60.0) for each in waits]
            assert [form.number for form in forms] == [2, 2]
            assert forms[0].tasks == (lines[1].task, lines[2].task)
            assert forms[0].reports == ({"task": lines[1].task}, {"task": lines[2].task})
            assert forms[0].why == f"worker {lines[0].task} has not come back"
            assert all(pool.map(lambda own: own.ready(2), lines[1:]))
            lines[1].agreed(TERMS)  # as every new chief does
            # It lets others in, and refuses those that differ, as the former one did.
            own = line(again, seconds=60.0)
            assert own.where() == (1, ["told"])
            own.register({"rule": "EASGD()"}, 1)
            with pytest.raises(MeetingError, match="cannot take part"):
                own.formed()
            # A worker whose connection was cut is done without, and told so.
            lines[2]._channel._connection.shutdown(socket.SHUT_RDWR)
            form = lines[1].met(2, {}, True)
            assert form.tasks == (lines[1].task,)
            with pytest.raises(Evicted, match="gone on without it"):
                lines[2].met(2, {}, True)
        finally:
            again.close()


def stopped(lines):
    """Stops the threads of lines, as a stopped process does; returns the event that ends it."""
    goes_on = threading.Event()
    for own in lines:
        wait_for = own._channel.wait_for
        own._channel.wait_for = lambda seconds, wait_for=wait_for: (
            goes_on.wait(60.0),
            wait_for(seconds),
        )
    return goes_on


def wait_until(holds):
    until = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_all_workers_are_stopped_and_go_on_together():
    with meeting(2, silence_seconds=3.0) as service:
        lines = [line(service) for _ in range(2)]
        found(lines)
        goes_on = stopped(lines)
        wait_until(lambda: service.state.absent == {0, 1})
        late = line(service)  # of a worker that is started again: the run is not over for it
        assert late.where() == (0, [])
        goes_on.set()
        forms = meet(lines, 1, True)
        assert {(form.number, form.tasks) for form in forms} == {(2, (0, 1))}
        assert forms[0].reports == ({"task": 0}, {"task": 1})


def test_nobody_comes_back_and_the_run_is_not_taken_for_done():
    with meeting(2, grace_seconds=0.3) as service:
        lines = [line(service) for _ in range(2)]
        found(lines)
        for own in lines:
            own.close()
        wait_until(lambda: service.state.phase == "ended")
        assert not service.state.is_complete
        with pytest.raises(Ended, match="no member of it is left. Start all") as ended:
            line(service).where()
        assert not ended.value.complete


def test_nobody_is_awaited_whose_process_has_ended():
    with meeting(2, grace_seconds=3600.0) as service:
        lines = [line(service, name=f"worker {number}") for number in range(2)]
        found(lines)
        for own in lines:
            own.close()
        assert not service.follow("worker 0")()
        wait_until(lambda: service.state.phase == "meeting")
        time.sleep(0.5)
        assert service.state.phase == "meeting"  # worker 1 may come back
        assert not service.state.is_deserted
        service.follow("worker 1")
        wait_until(lambda: service.state.phase == "ended")
        assert service.state.is_deserted and not service.state.is_complete


def test_the_meeting_point_is_stopped_and_nobody_meets_for_it():
    """Workers take it for dead, and connect themselves anew, for nothing to be done."""
    aborted = []
    with meeting(3, silence_seconds=3.0) as service:
        lines = [line(service) for _ in range(3)]
        found(lines)
        for own in lines:
            own.on_abort = lambda generation, why: aborted.append(generation)
        with stands_still(service, lines):
            pass
        wait_until(lambda: all(own._channel.known for own in lines))
        time.sleep(4.0)
        assert not aborted and len(service.state.history) == 1
        # All is as before: they meet where they have reason to.
        form, *_ = meet(lines, 1, False)
        assert form.tasks == (0, 1, 2)


def test_the_meeting_point_is_stopped_while_a_worker_is_to_be_let_in():
    """The only member comes to the meeting meanwhile. It stays a member, and the other joins."""
    with (
        meeting(1, silence_seconds=3.0) as service,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        member, late = line(service), line(service)
        found([member])
        late.register(TERMS, 0)
        wait_until(lambda: member.wanted)
        joins = pool.submit(late.formed)
        with stands_still(service, [member, late]):
            comes = pool.submit(member.met, 1, {}, False)
        form = comes.result(60.0)
        while late.task not in form.tasks:  # it has come back after the member
            assert member.ready(form.number)
            wait_until(lambda: member.wanted)
            form = member.met(form.number, {}, False)
        assert joins.result(60.0) == form and form.tasks == (0, 1)


def test_who_was_let_in_and_asks_again_is_let_in_anew():
    """Its connection ended when its thread alone had heard the answer, so it asks once more."""
    with meeting(1) as service, concurrent.futures.ThreadPoolExecutor() as pool:
        member, late = line(service), line(service)
        found([member])
        late.register(TERMS, 0)
        wait_until(lambda: member.wanted)
        assert member.met(1, {}, False) == late.formed()
        late._send(register=True, terms=TERMS, fit=0)
        joins = pool.submit(late.ready, 2)
        assert not member.ready(2)
        form = member.met(2, {}, True)
        assert not joins.result(60.0) and late.met(2, None, True) == form
        assert all(pool.map(lambda own: own.ready(3), [member, late]))


@contextlib.contextmanager
def stands_still(service, lines):
    """The meeting point runs again when the lines have taken it for dead, and connected anew."""
    channels = [own._channel for own in lines]
    wait, stands, goes_on = service._door.wait, threading.Event(), threading.Event()
    service._door.wait = lambda seconds: (stands.set(), goes_on.wait(60.0), wait(seconds))
    stands.wait()
    yield
    wait_until(lambda: all(own._channel not in channels for own in lines))
    service._door.wait = wait
    goes_on.set()


# -- the program --------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("begins", [True, False])
def test_the_program_serves_on_where_nobody_reads_what_it_prints(begins):
    """It ends with 1 if training has not begun: it would not the next time either."""
    command = [sys.executable, "-m", "tfpara.launch.meet", "-n", "1" if begins else "2"]
    command += ["--start_seconds=1"]
    environment = {**os.environ, "TFPARA_SECRET": "secret" * 3}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as program:
        try:
            address = program.stdout.readline().decode().strip().partition("=")[2]
            program.stdout.close()
            settings = {"min_workers": 2 - begins, "max_workers": None}
            settings |= {"grace_seconds": 9.0, "silence_seconds": 9.0}
            own = Line(address, b"secret" * 3, 4000, settings, 9.0)
            if begins:
                found([own])
                own.done()
            else:
                with pytest.raises(Ended, match="2 workers were to begin, and 1 have come"):
                    own.formed()
                own.close()
            assert program.wait(60.0) == (0 if begins else 1)
        finally:
            program.kill()


class Over:
    """A meeting for which nobody has come in time."""

    port = 4000
    state = Membership(Limits(2, 1, None, 0.0, 1.0, 1.0), 0.0)

    def __init__(self, *_):
        self.state.tick(1.0)

    def close(self):
        pass


def test_the_program_leaves_signals_ignored_that_are_ignored(monkeypatch):
    """SIGINT is, if a shell's script has started the program in the background."""
    former = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL}
    handled = []
    monkeypatch.setattr(launch_meet, "Meeting", Over)
    monkeypatch.setattr(launch_meet.signal, "getsignal", former.get)
    monkeypatch.setattr(launch_meet.signal, "signal", lambda number, _: handled.append(number))
    assert launch_meet.main(["-n", "2"]) == 1 and handled == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "node1"), ("[0::0]", "node1"), ("10.0.0.1", "10.0.0.1")]
)
def test_the_program_prints_an_address_that_other_machines_reach(
    host, reached, monkeypatch, capsys
):
    monkeypatch.setattr(launch_meet, "Meeting", Over)
    monkeypatch.setattr(launch_meet.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch_meet.socket, "gethostname", lambda: "node1")
    assert launch_meet.main(["-n", "2", "--without_secret", "--host", host]) == 1
    assert f"TFPARA_MEETING={reached}:4000\n" in capsys.readouterr().out


def test_a_host_that_is_no_name_is_one_sentence(capsys):
    assert launch_meet.main(["-n", "2", "--without_secret", "--host=10..0.1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("tfpara-meet: cannot listen on 10..0.1:0: ")


@pytest.mark.parametrize("wrong", ["--port=70000", "--start_seconds=nan", "--start_seconds=-1"])
def test_the_program_names_a_wrong_argument(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        launch_meet.main(["-n", "2", wrong])
    flag, value = wrong.split("=")
    named = f"argument {flag}: '{value}' is not a "
    assert ended.value.code == 2 and named in capsys.readouterr().err
