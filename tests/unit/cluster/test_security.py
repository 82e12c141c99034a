"""What listens where, and what strangers can do there, with real sockets."""

import concurrent.futures
import contextlib
import hashlib
import hmac
import json
import re
import socket
import struct
import threading
import time

import pytest

from tests.lib.cluster_of_processes import free_ports
from tfpara import cluster, version
from tfpara.cluster import messages, ports, secret, startup
from tfpara.cluster.asynchronous import AsyncCluster
from tfpara.cluster.door import Door
from tfpara.launch import meet
from tfpara.parameter_server.control import lobby, member, membership

LONG = 60.0  # seconds; reached only by a hang
OURS, OTHER = b"a secret of this run", b"a secret of another run"
ADDRESSES = [["10.0.0.1:1", "10.0.0.2:2"], True]


@pytest.fixture(autouse=True)
def _shared(monkeypatch):
    monkeypatch.setenv("TFPARA_SECRET", OURS.decode())


def workers(count):
    """The views of all members of a cluster, by rank."""
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    tasks = [("chief", 0), *(("worker", index) for index in range(count - 1))]
    return [cluster.Cluster(addresses, *task, has_chief_job=True) for task in tasks]


def views(workers, ps):
    """The views of an asynchronous cluster, by name."""
    chief, *others = (f"127.0.0.1:{port}" for port in free_ports(1 + workers + ps))
    jobs = {"chief": (chief,), "worker": tuple(others[:workers]), "ps": tuple(others[workers:])}
    first = AsyncCluster(jobs, "chief", 0)
    return {"chief": first} | {
        f"{job} {index}": first._replace(task_type=job, task_index=index)
        for job, index in first.members
    }


def listening(numbers):
    """The addresses on which anyone listens at these ports, from Linux' own table."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                local, _, state = line.split()[1:4]
                address, port = local.split(":")
                if state == "0A" and int(port, 16) in numbers:
                    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                    packed = struct.pack(f"={len(words)}I", *words)
                    found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def port_of(address):
    return int(address.rpartition(":")[2])


# -- strangers ----------------------------------------------------------------------------------


def old_hello(**said):
    """A message as whoever has no secret would write it."""
    return json.dumps(said).encode() + b"\n"


def forged(**said):
    """A greeting, and a message with a signature that is none."""
    text = json.dumps(said).encode()
    return b"tfpara " + b"0" * 32 + b"\n" + b"f" * 64 + b" " + text + b"\n"


BYTES = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[]\n{}\n\xff\n",
    b"tfpara 12\n",
    b"[" * 100_000 + b"\n",
    b"x" * (3 << 20),  # no line at all
    struct.pack(">Q", 1 << 62),  # a length, in other protocols
    old_hello(rank="x"),
]


def send(address, text, end=True):
    """Connects, sends and waits for the answer; fails if the other end does not hang up."""
    answer = b""
    with connect(address) as stranger, contextlib.suppress(OSError):  # cut off half-way
        stranger.sendall(text)
        if end:
            stranger.shutdown(socket.SHUT_WR)
        while chunk := stranger.recv(1 << 16):
            answer += chunk
    return answer


def connect(address, until=LONG):
    """A connection to who is about to listen."""
    deadline = time.monotonic() + until
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port_of(address)), LONG)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextlib.contextmanager
def crowd(address, count=200):
    """Many connections that say nothing, one that dribbles, and one that is never closed."""
    ended = threading.Event()
    silent = [connect(address) for _ in range(count)]
    slow = connect(address)

    def dribble():
        while not ended.wait(0.05):
            with contextlib.suppress(OSError):
                slow.send(b"t")

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for stranger in (slow, *silent):
            stranger.close()


def test_strangers_leave_a_process_most_of_its_files(monkeypatch):
    """The launcher starts workers again, which it could not do without a file more."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (40, 40))
    listener = ports.bind("127.0.0.1", 0)
    listener.listen(128)
    door = Door(listener, OURS, "meeting", 1024)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    silent = [connect(address) for _ in range(30)]
    for _ in silent:
        door.serve(print)
    alive = []
    for stranger in silent:
        assert stranger.recv(100).startswith(b"tfpara ")
        stranger.setblocking(False)
        try:
            assert stranger.recv(100) == b""
        except BlockingIOError:
            alive.append(stranger)
    assert alive == silent[-10:]
    for stranger in silent:
        stranger.close()
    door.close()


# -- the meeting of workers ---------------------------------------------------------------------


def test_no_stranger_ends_or_delays_a_start():
    chief, one, two = workers(3)
    said = {"collectives": "tensorflow", "at": ["127.0.0.1", 9]}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        meeting = pool.submit(startup.meet, chief, LONG)
        with crowd(chief.address):
            for text in (
                *BYTES,
                # Of another cluster: without the secret, that is no reason to stop this one.
                old_hello(rank=1, view=ADDRESSES, **said),
                forged(rank=1, view=ADDRESSES, **said),
                # In the place of a worker.
                old_hello(rank=1, view=startup._view(chief), **said),
                forged(rank=1, view=startup._view(chief), **said),
            ):
                answer = send(chief.address, text)
                assert b"127.0.0.1" not in answer and b"problem" not in answer
            assert not meeting.done()
            others = [pool.submit(startup.meet, each, LONG) for each in (one, two)]
            assert [each.result(LONG) for each in (meeting, *others)] == [None] * 3


def test_strangers_at_a_worker_do_not_hide_it_from_the_chief():
    """They would fill the queue of connections, and the chief could not reach the worker."""
    chief, one = workers(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(startup.meet, one, LONG)
        with crowd(one.address, 400):
            startup.meet(chief, LONG)
            waiting.result(LONG)


def test_the_meeting_listens_where_it_is_told(monkeypatch):
    chief, one = workers(2)
    ours = set(map(port_of, chief.addresses))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        meeting = [pool.submit(startup.meet, chief, LONG)]
        with connect(chief.address):
            assert listening(ours) == {("127.0.0.1", port_of(chief.address))}
            meeting += [pool.submit(startup.meet, one, LONG)]
            assert [each.result(LONG) for each in meeting] == [None] * 2
    assert not listening(ours)


def meet_all(views, secrets, timeout):
    def meet(view, shared):
        try:
            startup.meet(view, timeout if view.is_chief else LONG, shared=shared)
        except startup.StartupError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(views)) as pool:
        return list(pool.map(meet, views, secrets))


@pytest.mark.parametrize("theirs", [OTHER, b""])
def test_all_name_another_secret(theirs, caplog):
    trio = workers(3)
    chief, differs, same = meet_all(trio, [OURS, theirs, OURS], 2.0)
    assert differs.startswith(f"this process has another secret than chief ({trio[0].address}).")
    assert "TFPARA_SECRET_FILE or TFPARA_SECRET" in differs
    assert chief == same
    assert f"these workers have not started: worker 1 ({trio[1].address})." in chief
    assert chief.endswith("A process on 127.0.0.1 came with another secret than this one.")
    assert caplog.text.count("was turned away") == 1
    assert OURS.decode() not in caplog.text + chief + differs


@pytest.mark.parametrize(
    ("addresses", "given", "lines"),
    [
        (("10.0.0.1:1", "10.0.0.2:1"), b"", 1),
        (("node1:1", "node2:1"), b"", 1),
        (("10.0.0.1:1", "10.0.0.2:1"), OURS, 0),
        (("127.0.0.1:1", "127.0.0.2:1", "[::1]:1", "localhost:1"), b"", 0),
    ],
)
def test_a_meeting_without_a_secret_says_so_on_a_network(addresses, given, lines, caplog):
    secret.warn_without(given, addresses)
    assert len(caplog.records) == lines
    if lines:
        assert "not authenticated" in caplog.text and "Set TFPARA_SECRET_FILE" in caplog.text


@pytest.mark.parametrize(
    ("host", "arguments", "given", "listens", "warns"),
    [
        ("127.0.0.1", (), "", True, True),
        ("0.0.0.0", (), "", False, True),
        ("", (), "", False, True),
        ("0.0.0.0", ("--without_secret",), "", True, True),
        ("0.0.0.0", (), OURS.decode(), True, False),
    ],
)
def test_a_meeting_point_without_a_secret(
    host, arguments, given, listens, warns, monkeypatch, capsys
):
    def listen(*_):
        raise OSError("it would listen")

    monkeypatch.setenv("TFPARA_SECRET", given)
    monkeypatch.setattr(meet, "Meeting", listen)
    assert meet.main(["-n", "2", "--host", host, *arguments]) == 2
    said = capsys.readouterr().err
    assert ("it would listen" in said) == listens
    assert ("there is no secret" in said) == warns and said.count("\n") == listens + warns


# -- the lobby ----------------------------------------------------------------------------------


@contextlib.contextmanager
def asynchronous_run(monkeypatch, names=("worker 0", "worker 1", "ps 0"), **secrets):
    """A lobby and its members, in threads; yields the lobby, the members' endings and sockets."""
    seen = views(2, 1)
    connections, servers = {}, []
    create = socket.create_connection

    def recorded(*arguments, **options):
        made = create(*arguments, **options)
        connections.setdefault(threading.current_thread().name, []).append(made)
        return made

    monkeypatch.setattr(socket, "create_connection", recorded)
    hall = lobby.Lobby(seen["chief"], LONG, LONG)
    endings = {}

    def attend(name):
        def start(spec):
            servers.append(socket.create_server(("127.0.0.1", port_of(seen[name].address))))

        endings[name] = member.attend(seen[name], start, LONG, [])

    threads = [threading.Thread(target=attend, args=(name,), name=name) for name in names]
    try:
        yield hall, seen, threads, endings, connections
    finally:
        if not hall._closing:
            hall.fail("the test is over")
        for thread in threads:
            if thread.ident is not None:
                thread.join(LONG)
        for server in servers:
            server.close()


def test_no_stranger_ends_an_asynchronous_run(monkeypatch):
    # So that a place is soon free again.
    monkeypatch.setattr(membership, "beat_seconds", lambda _: 0.1)
    with asynchronous_run(monkeypatch) as (hall, seen, threads, endings, connections):
        chief = seen["chief"]
        place = {"hello": chief.spec(), "job": "worker", "index": 1, "version": version.__version__}
        assert listening({port_of(chief.address)}) == {("127.0.0.1", port_of(chief.address))}
        with crowd(chief.address):
            for text in (
                *BYTES,
                old_hello(**place | {"hello": {}}),
                forged(**place | {"hello": {}}),
                old_hello(**place | {"version": "0.0.1"}),
            ):
                assert b"127.0.0.1" not in send(chief.address, text)
            for thread in threads:
                thread.start()
            hall.gather()
            # A worker goes, and a stranger comes in its place and asks all to end.
            for connection in connections["worker 1"]:
                connection.shutdown(socket.SHUT_RDWR)
            threads[1].join(LONG)
            deadline = time.monotonic() + LONG
            while ("worker", 1) in hall.state.serving:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            for text in (
                old_hello(**place) + old_hello(leaving="SIGTERM") + old_hello(problem="none"),
                forged(**place) + old_hello(leaving="SIGTERM"),
            ):
                send(chief.address, text)
            assert hall.state.asked_to_end is None and hall.state.failure is None
            assert set(hall.state.serving) == {("worker", 0), ("ps", 0)}
        hall.fail("", 0)
        for thread in threads:
            thread.join(LONG)
    assert endings["worker 0"] == endings["ps 0"] == (0, "")


def test_only_a_parameter_server_asks_for_the_end():
    """Whatever a process in a worker's place may say: training goes on without that."""
    seen = views(1, 1)
    hall = lobby.Lobby(seen["chief"], LONG, LONG)
    with contextlib.ExitStack() as stack:
        for job, words in (("worker", None), ("ps", "ps 0 .* was asked to end")):
            channel = messages.connect(seen["chief"].address, OURS, member.PURPOSE, LONG)
            stack.callback(channel.close)
            channel.send(hello=seen["chief"].spec(), job=job, index=0, version=version.__version__)
            assert "welcome" in channel.wait(time.monotonic() + LONG)
            channel.send(leaving="SIGTERM")
            channel.send(serving=True)  # taken in after the other
            while (job, 0) not in hall.state.serving:
                time.sleep(0.02)
            asked = hall.state.asked_to_end
            assert re.match(words, asked) if words else asked is None
    hall.fail("", 0)


def test_members_and_lobby_name_another_secret(caplog, monkeypatch):
    seen = views(1, 1)
    hall = lobby.Lobby(seen["chief"], 2.0, LONG)
    monkeypatch.setenv("TFPARA_SECRET", OTHER.decode())
    code, sentence = member.attend(seen["worker 0"], print, LONG, [])
    assert code == 1
    assert sentence.startswith(
        f"this process has another secret than chief ({seen['chief'].address}"
    )
    with pytest.raises(startup.StartupError, match="127.0.0.1 came with another secret than this"):
        hall.gather()


# -- all ports of a run ---------------------------------------------------------------------------


# -- messages -----------------------------------------------------------------------------------


@contextlib.contextmanager
def pair(secrets=(OURS, OURS), purposes=("start", "start")):
    """A channel's two ends."""
    ends = socket.socketpair()
    channels = [
        messages.Channel(end, given, purpose, caller=caller)
        for end, given, purpose, caller in zip(ends, secrets, purposes, (True, False), strict=True)
    ]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


def test_messages_arrive_in_both_directions():
    with pair() as (caller, other):
        caller.send(text="ü", number=1)
        caller.send()
        assert other.wait(0.0) is None  # nothing is signed before the greeting has come
        assert caller.receive() == []
        assert other.receive(at_most=1) == [{"text": "ü", "number": 1}]
        other.send(answer=[None])
        assert other.receive() == [{}]
        assert caller.wait(time.monotonic() + LONG) == {"answer": [None]}
        assert caller.known and other.known and not caller.closed
        large = "x" * (1 << 19)
        other.send(large=large)
        received = []
        while not received:
            received = caller.receive()
            other.receive()
        assert received == [{"large": large}]
        caller.close()
        assert other.receive() == [] and other.closed


@pytest.mark.parametrize(
    ("secrets", "purposes"),
    [
        ((OURS, OTHER), ("start",) * 2),
        ((OURS, b""), ("start",) * 2),
        ((OURS,) * 2, ("start", "lobby")),
    ],
)
def test_nothing_arrives_where_secret_or_purpose_differ(secrets, purposes):
    with pair(secrets, purposes) as (caller, other):
        caller.send(text="hello")
        other.send(text="hello")
        assert caller.receive() == other.receive() == caller.receive() == []
        assert other.closed and other.differs and not other.known
        assert caller.wait(time.monotonic() + LONG) is None
        assert caller.closed and not caller.known


def recorded():
    """What a caller with the secret has sent: its greeting, and three lines."""
    ends = socket.socketpair()
    caller = messages.Channel(ends[0], OURS, "start", caller=True)
    ends[1].sendall(b"tfpara %032x\n" % 7)
    for number in range(3):
        caller.send(number=number)
    caller.receive()
    lines = ends[1].recv(1 << 16).splitlines(keepends=True)
    caller.close()
    ends[1].close()
    return lines


def test_the_signature_is_what_the_module_says():
    """HMAC-SHA256 of direction, place and text; the key is that of purpose and both numbers."""
    greeting, *lines = recorded()
    number = greeting.split()[1]
    parts = b"".join(
        len(each).to_bytes(4, "big") + each for each in (b"start", number, b"%032x" % 7)
    )
    key = hmac.new(OURS, b"tfpara" + parts, hashlib.sha256).digest()
    for place, line in enumerate(lines):
        text = b'{"number": %d}' % place
        wanted = hmac.new(key, b"1 %d " % (place + 1) + text, hashlib.sha256).hexdigest()
        assert line == wanted.encode() + b" " + text + b"\n"


@pytest.mark.parametrize(
    ("order", "taken"), [([1, 2, 3], [1, 2, 3]), ([1, 1], [1]), ([2, 1], [1]), ([3], [])]
)
def test_messages_that_were_heard_elsewhere_are_none(order, taken):
    """Those of another connection; and of this one, if not in their place."""
    lines = recorded()
    with contextlib.ExitStack() as stack:
        ends = socket.socketpair()
        stack.callback(ends[0].close)
        other = messages.Channel(ends[1], OURS, "start", caller=False)
        ends[0].sendall(b"".join([lines[0], *(lines[each] for each in order)]))
        assert other.receive() == [] and other.closed
        number = lines[0].split()[1]
        signer = messages.Signer(OURS, "start", (number, b"%032x" % 7), caller=False)
        places = []  # of the messages that were taken
        for each in order:
            if signer.read(lines[each].rstrip()) is not None:
                places.append(each)
        assert places == taken
        other.close()


def test_nothing_is_heard_from_a_mirror():
    """A stranger sends all back: the greeting, and what was signed by this very end."""
    ends = socket.socketpair()
    caller = messages.Channel(ends[0], OURS, "start", caller=True)
    caller.send(text="hello")
    ends[1].sendall(ends[1].recv(1 << 16))
    assert caller.receive() == [] and caller.closed
    ends[1].close()
    caller.close()
    signer = messages.Signer(OURS, "start", (b"1", b"2"), caller=True)
    assert signer.read(signer.sign(b"{}").rstrip()) is None


def test_of_a_line_without_end_little_is_kept():
    ends = socket.socketpair()
    other = messages.Channel(ends[1], OURS, "start", caller=False)
    ends[0].sendall(recorded()[0])
    ends[0].setblocking(False)
    sent = 0
    while not other.closed:
        with contextlib.suppress(BlockingIOError):
            sent += ends[0].send(b"x" * (1 << 16))
        assert other.receive() == []
        assert len(other._arrived) <= (1 << 20) + (1 << 16)
        assert sent < 1 << 23
    for each in (ends[0], other):
        each.close()


@pytest.mark.parametrize("shared", [OURS, b""])
def test_who_knows_the_secret_may_send_long_messages(shared):
    ends = [
        messages.Channel(end, shared, "start", caller=not number)
        for number, end in enumerate(socket.socketpair())
    ]
    until = time.monotonic() + LONG
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for length in (10, 3 << 20, 17 << 20):
            ends[0].send(text="x" * length)
            heard = pool.submit(ends[1].wait, until)
            while not heard.done() and not ends[0].closed:
                ends[0].receive()
            comes = length == 10 or (shared and length < 1 << 24)
            assert (heard.result() is not None) == bool(comes), length
            if not comes:
                break
            ends[1].send()
            assert ends[0].wait(until) == {}
    assert ends[1].closed
    ends[0].close()


# -- where a process listens --------------------------------------------------------------------


def test_a_process_listens_on_the_host_it_is_told(monkeypatch):
    assert ports.own_host("127.0.0.1") == ports.own_host("localhost") == "127.0.0.1"
    assert ports.own_host("[::1]") in ("::1", "")  # a machine may have no IPv6
    # Not of this machine: behind address translation, or known to others alone.
    assert ports.own_host("192.0.2.1") == ports.own_host("no.such.host.invalid") == ""
    found = {"node": ["127.0.1.1"], "both": ["192.0.2.1", "127.0.0.1"], "name": ["192.0.2.1"]}
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *_, **__: [(socket.AF_INET, 1, 6, "", (each, 0)) for each in found[host]],
    )
    # As Debian's /etc/hosts: the others find the machine elsewhere.
    assert ports.own_host("node") == ports.own_host("both") == ports.own_host("name") == ""


def test_ports_are_bound_as_told():
    for host, wanted in (("127.0.0.1", {"127.0.0.1"}), ("", {"::", "0.0.0.0"})):
        with ports.bind(host, 0) as bound:
            bound.listen()
            ((where, _),) = listening({bound.getsockname()[1]})
            assert where in wanted
            with pytest.raises(OSError, match="in use"):
                ports.bind("", bound.getsockname()[1])
    assert ports.interface("127.0.0.1") == "lo"
    assert ports.interface("192.0.2.1") == ports.interface("") == ""


def test_an_open_port_hangs_up_and_is_freed():
    listener = ports.bind("127.0.0.1", 0)
    listener.listen()
    port = ports.OpenPort(listener)
    for _ in range(3):
        assert send(f":{port.port}", b"x" * 1000) == b""
    port.close()
    assert not listening({port.port})


# -- the secret ---------------------------------------------------------------------------------


def test_the_secret_is_read_from_a_variable_or_a_file(tmp_path, caplog):
    path = tmp_path / "secret"
    path.write_bytes(OURS + b"\n")
    path.chmod(0o600)
    assert secret.read({}) == secret.read({"TFPARA_SECRET": "", "TFPARA_SECRET_FILE": ""}) == b""
    assert secret.read({"TFPARA_SECRET": OURS.decode()}) == OURS
    assert secret.read({"TFPARA_SECRET_FILE": str(path)}) == OURS
    assert not caplog.records
    path.chmod(0o644)
    assert secret.read({"TFPARA_SECRET_FILE": str(path)}) == OURS
    assert "everyone on this machine may read" in caplog.text and str(path) in caplog.text


def test_each_start_has_a_fresh_secret_unless_one_is_given(tmp_path):
    first, second = (secret.for_start({"HOME": "/"})["TFPARA_SECRET"] for _ in range(2))
    assert first != second and len(first) == len(second) == 64
    path = tmp_path / "secret"
    path.write_bytes(OURS)
    for given in ({"TFPARA_SECRET": OURS.decode()}, {"TFPARA_SECRET_FILE": str(path)}):
        assert secret.for_start(given) == {}


@pytest.mark.parametrize(
    ("environ", "contents", "words"),
    [
        ({"TFPARA_SECRET": "short"}, None, "TFPARA_SECRET has 5 bytes, but a secret has from 16"),
        ({"TFPARA_SECRET": " " * 20}, None, "TFPARA_SECRET has 0 bytes"),
        ({"TFPARA_SECRET": OURS.decode()}, OURS, "are both set. Unset one"),
        ({}, b"x", "has 1 bytes, but a secret has from 16 to 4096. Make one by .*token_hex"),
        ({}, b"x" * 5000, "has 4097 bytes"),
        ({"TFPARA_SECRET_FILE": "/no/such"}, None, "TFPARA_SECRET_FILE='/no/such' cannot be read"),
        ({"TFPARA_SECRET_FILE": "/tmp"}, None, "cannot be read .*Is a directory"),
    ],
)
def test_bad_secrets_are_named_but_not_shown(tmp_path, environ, contents, words):
    if contents is not None:
        (tmp_path / "secret").write_bytes(contents)
        environ = environ | {"TFPARA_SECRET_FILE": str(tmp_path / "secret")}
    with pytest.raises(secret.SecretError, match=words) as caught:
        secret.read(environ)
    assert OURS.decode() not in str(caught.value) and "short" not in str(caught.value)
