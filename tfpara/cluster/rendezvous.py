"""The key-value store over HTTP in which Horovod's processes find each other.

Gloo, Horovod's transport, stores the addresses of its connections and polls for those of the
others. `horovodrun` and `tfpara-launch --collectives=horovod` serve a store; in a cluster of
TF_CONFIG the chief serves it. Gloo aborts the process if the store does not answer or a worker is
missing, so the workers first meet in the same store.

Gloo does not sign its requests. But the variable that names the store's host may contain a path
after the host. If the run has a secret, that path contains a token derived from the secret, and the
store refuses requests without the token. The token is sent unencrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfpara import cluster
from tfpara.cluster import messages, ports, secret
from tfpara.cluster.startup import StartupError
from tfpara.cluster.waiting import tried, until

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_ANSWER_SECONDS = 10.0
_REFUSED_SECONDS = 1.0
_LONGEST_VALUE = 1 << 20  # bytes; Gloo's values have a few hundred bytes for each process
_LONGEST_KEY = 1 << 10
_MOST_BYTES = 1 << 28  # the most bytes that all keys and values may have together
_CLIENTS = 256  # largest number of clients at a time
_PURPOSE = b"store"
_FORGED = -1


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handles GET, PUT and DELETE of a path, which is a key of the server's `values`."""

    server: Server
    raw_requestline: bytes
    timeout = _ANSWER_SECONDS  # a client that sends nothing for this long is dropped

    def parse_request(self) -> bool:
        """Refuses a request with a wrong path before parsing the rest."""
        words, path = self.raw_requestline.split(b" "), self.server.path.encode()
        if len(words) > 1 and hmac.compare_digest(words[1][: len(path)], path):
            return super().parse_request()
        self.requestline, self.request_version = "", "HTTP/1.0"
        self._refuse(403)
        return False

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(200 if value is not None else 404, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(411)
        elif len(length) > 9 or not self.server.has_room(self.path, int(length)):
            self._refuse(413)
        else:
            value = self.rfile.read(int(length))
            # If the value is shorter than announced, the client has closed the connection.
            if len(value) == int(length):
                self.server.values[self.path] = value
                self._answer(200)

    def do_DELETE(self) -> None:
        self.server.values.pop(self.path, None)
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int) -> None:
        """Answers with an error before the request is fully read; closes the connection."""
        self.close_connection = True
        self._answer(status)
        with contextlib.suppress(OSError):
            # The server must read the bytes that have arrived. Otherwise the client would get a
            # reset in place of the answer.
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_REFUSED_SECONDS)
            self.connection.recv(_LONGEST_VALUE)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Server(http.server.ThreadingHTTPServer):
    """The store, served until `close` by a thread that ends with the process.

    An empty `host` means all interfaces, and 0 a free `port`. Without a secret, `shared`, everybody
    may read and write. Raises OSError if the port is in use.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, host: str = "", shared: bytes = b"") -> None:
        self.values: dict[str, bytes] = {}
        # The clients, oldest first, and the time when each of them has connected.
        self._clients: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        token = _token(shared, self.port)
        self.path = f"/{token}:{self.port}/" if token else "/"
        threading.Thread(target=self.serve_forever, name="tfpara-store", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def has_room(self, key: str, length: int) -> bool:
        """Returns whether the store has room for a value of `length` bytes under a key."""
        if length > _LONGEST_VALUE or len(key) > _LONGEST_KEY:
            return False
        held = sum(len(each) + len(value) for each, value in list(self.values.items()))
        return held + len(key) + length <= _MOST_BYTES

    def process_request(self, request: Any, client_address: tuple[str, int]) -> None:
        """Answers a client in a new thread; if there are too many clients, drops the oldest."""
        with self._lock:
            self._clients[request] = time.monotonic()
            crowd = list(self._clients)[: max(0, len(self._clients) - _CLIENTS)]
        _cut(crowd)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Drops clients whose time is over; the base class calls this twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [each for each, at in self._clients.items() if now - at > _ANSWER_SECONDS]
        _cut(late)

    def handle_error(self, request: object, client_address: object) -> None:
        """Prints nothing, since errors come from clients that have closed their connection."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def _cut(clients: list[socket.socket]) -> None:
    for client in clients:
        with contextlib.suppress(OSError):  # the client's socket may be closed already
            client.shutdown(socket.SHUT_RDWR)


def _token(shared: bytes, port: int) -> str:
    """Returns the path's token, derived from the secret `shared`; empty without a secret."""
    return secret.derive(shared, _PURPOSE, b"%d" % port).hex() if shared else ""


def variables(found: cluster.Cluster, host: str, port: int, shared: bytes = b"") -> dict[str, str]:
    """Returns Horovod's environment variables for one process of a cluster with addresses.

    `host` and `port` are the store's, `shared` is the secret of the run.
    """
    token = _token(shared, port)
    hosts = [ports.split(address)[0] for address in found.addresses]
    own = hosts[found.rank]
    beside = [rank for rank, other in enumerate(hosts) if other == own]
    local_rank = beside.index(found.rank)
    # The hosts that have a process with this local rank.
    across = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
    return {
        "HOROVOD_RANK": str(found.rank),
        "HOROVOD_SIZE": str(found.num_workers),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(len(beside)),
        "HOROVOD_CROSS_RANK": str(across.index(own)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_HOSTNAME": own,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Gloo requests http://ADDRESS:PORT/…, which has no token. With a token, ADDRESS is
        # "host:port/token". Then Gloo requests http://host:port/token:PORT/…, a path that begins
        # with the token.
        ADDRESS: f"{host}:{port}/{token}" if token else host,
        PORT: str(port),
    }


def meet(
    found: cluster.Cluster,
    environ: Mapping[str, str],
    timeout_seconds: float,
    shared: bytes = b"",
) -> None:
    """Waits until every process has reached the store that the environment names.

    All values are signed with the secret of the run, `shared`, also if horovodrun serves the store.

    Raises:
        StartupError: the variables are missing or wrong, no store answers at the address, or a
            process does not come in time, or has another secret or HOROVOD_SIZE.
    """
    address, port = environ.get(ADDRESS, ""), environ.get(PORT, "")
    if not address or not (port.isdecimal() and 0 < int(port) < 65536):
        raise StartupError(
            f"{found.rank_variable} is set, but {ADDRESS}={address!r} and {PORT}={port!r} name no "
            "host and port at which Horovod's processes find each other. Start them by horovodrun "
            "or tfpara-launch --collectives=horovod, which set all of them."
        )
    deadline = time.monotonic() + timeout_seconds
    places = _Places(address, int(port), shared, deadline)
    size = found.num_workers
    places.put(found.rank, size)
    missing, forged = set(range(size)), ""

    def names() -> str:
        return ", ".join(map(found.describe, sorted(missing)))

    for _ in until(deadline, names):
        forged = ""
        for rank in sorted(missing):
            said = places.get(rank)
            if said == size:
                missing.discard(rank)
            elif said == _FORGED:
                forged = f" What is there of {found.describe(rank)} has another secret."
            elif said is not None:
                raise StartupError(
                    f"HOROVOD_SIZE differs: this process has {size}, "
                    f"{found.describe(rank)} has {said}. Give all the same."
                )
        if not missing:
            return
    raise StartupError(
        f"after {timeout_seconds:g} s these workers have not started: {names()}. Start one "
        f"process for each rank below HOROVOD_SIZE within startup_timeout_seconds.{forged}"
    )


class _Places(NamedTuple):
    """The values by which processes report their presence in a store.

    The values are signed with the run's secret, `shared`, since anyone may be able to write to the
    store. `address` and `port` are Horovod's variables; the store must answer by `deadline`.
    """

    address: str
    port: int
    shared: bytes
    deadline: float

    def put(self, rank: int, size: int) -> None:
        """Reports that this process is present, and its HOROVOD_SIZE, `size`."""
        value = {"size": size, "signature": self._signature(rank, size)}
        self._ask("PUT", rank, json.dumps(value).encode())

    def get(self, rank: int) -> int | None:
        """Returns a rank's HOROVOD_SIZE; None: there is none yet; `_FORGED`: it is not signed."""
        value = self._ask("GET", rank)
        if value is None:
            return None
        try:
            said = json.loads(value)
            size, signature = int(said["size"]), str(said["signature"]).encode()
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return _FORGED
        own = self._signature(rank, size).encode()
        return size if hmac.compare_digest(own, signature) else _FORGED

    def _signature(self, rank: int, size: int) -> str:
        text = f"{self.address}:{self.port} {rank} {size}"
        return secret.derive(self.shared, _PURPOSE, text.encode()).hex()

    def _ask(self, method: str, rank: int, body: bytes | None = None) -> bytes | None:
        errors = (OSError, http.client.HTTPException)
        # `tried` repeats the request until the deadline, since the process that serves the store
        # may start later than this one.
        try:
            return tried(lambda: self._request(method, rank, body), self.deadline, errors=errors)
        except errors as error:
            raise StartupError(
                f"nobody answers where Horovod's processes find each other ({error}): see to it "
                f"that {ADDRESS} and {PORT} name the host and port of horovodrun, or of whatever "
                "serves them."
            ) from None

    def _request(self, method: str, rank: int, body: bytes | None) -> bytes | None:
        """Returns the store's answer about a rank; None if the store has no value for it."""
        host, slash, token = self.address.partition("/")
        path = f"/{token}:{self.port}" if slash else ""
        host = host.rpartition(":")[0] if slash else host
        connection = http.client.HTTPConnection(host, self.port, timeout=_ANSWER_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, f"{path}/tfpara/{rank}", body)
            answer = connection.getresponse()
            content = answer.read(_LONGEST_VALUE)
        if answer.status == 403:
            where = f"where Horovod's processes meet, {host}:{self.port}"
            raise StartupError(messages.other_secret(where))
        return content if answer.status == 200 else None
