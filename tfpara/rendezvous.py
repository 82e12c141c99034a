"""Where Horovod's processes find each other: a key-value store over HTTP.

Gloo, Horovod's transport, puts the addresses of its connections there and polls for those of the
others. `horovodrun` serves one, and so does `tfpara-launch --collectives=horovod`; in a cluster of
TF_CONFIG the chief does. Gloo itself aborts the process where the store does not answer or a worker
does not come, so the workers meet in the same store first. Only the standard library is imported.
"""

from __future__ import annotations

import http.client
import http.server
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping

from tfpara import cluster
from tfpara.startup import StartupError

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_LOG_SECONDS = 30.0
_log = logging.getLogger(__name__)


class _Handler(http.server.BaseHTTPRequestHandler):
    """GET, PUT and DELETE of a path; the server's `values` has what is there."""

    server: Server
    timeout = _ANSWER_SECONDS  # so that one who connects and says nothing is dropped

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(200 if value is not None else 404, value or b"")

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.server.values[self.path] = self.rfile.read(length)
        self._answer(200)

    def do_DELETE(self) -> None:
        self.server.values.pop(self.path, None)
        self._answer(200)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Server(http.server.ThreadingHTTPServer):
    """The store, served on all interfaces until `close`, by a thread that ends with the process.

    Args:
        port: to listen on; 0 takes a free one.
        host: to listen on; all interfaces if empty.

    Raises:
        OSError: the port is in use.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, host: str = "") -> None:
        self.values: dict[str, bytes] = {}
        super().__init__((host, port), _Handler)
        threading.Thread(target=self.serve_forever, name="tfpara-store", daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing of clients that went away."""

    def close(self) -> None:
        """Frees the port."""
        self.shutdown()
        self.server_close()


def variables(found: cluster.Cluster, host: str, port: int) -> dict[str, str]:
    """What Horovod has to be told in the environment of one process of a cluster with addresses.

    Args:
        found: this process's view.
        host: where the store is served.
        port: the same.
    """
    hosts = [address.rpartition(":")[0].strip("[]") for address in found.addresses]
    own = hosts[found.rank]
    beside = [rank for rank, other in enumerate(hosts) if other == own]
    local_rank = beside.index(found.rank)
    # Of each host that has as many processes: its one with the same local rank.
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
        ADDRESS: host,
        PORT: str(port),
    }


def meet(found: cluster.Cluster, environ: Mapping[str, str], timeout_seconds: float) -> None:
    """Waits until every process has come to the store that the environment names.

    Args:
        found: this process's view.
        environ: has HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT.
        timeout_seconds: longest wait.

    Raises:
        StartupError: the variables are missing or wrong, nobody serves there, a process does not
            come in time or counts another number of processes.
    """
    host, port = environ.get(ADDRESS, ""), environ.get(PORT, "")
    if not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise StartupError(
            f"{found.rank_variable} is set, but {ADDRESS}={host!r} and {PORT}={port!r} name no "
            "host and port at which Horovod's processes find each other. Start them by horovodrun "
            "or tfpara-launch --collectives=horovod, which set all of them."
        )
    deadline = time.monotonic() + timeout_seconds
    say = json.dumps({"size": found.num_workers}).encode()

    def store(method: str, rank: int, body: bytes | None = None) -> bytes | None:
        return _patiently(lambda: _request(host, int(port), method, rank, body), deadline)

    store("PUT", found.rank, say)
    missing, log_at = set(range(found.num_workers)), time.monotonic() + _LOG_SECONDS
    while missing:
        for rank in sorted(missing):
            said = store("GET", rank)
            if said is None:
                continue
            missing.discard(rank)
            if json.loads(said) != json.loads(say):
                raise StartupError(
                    f"HOROVOD_SIZE differs: this process has {found.num_workers}, "
                    f"{found.describe(rank)} has {json.loads(said)['size']}. Give all the same."
                )
        names, now = ", ".join(map(found.describe, sorted(missing))), time.monotonic()
        if missing and now >= deadline:
            raise StartupError(
                f"after {timeout_seconds:g} s these workers have not started: {names}. Start one "
                "process for each rank below HOROVOD_SIZE within startup_timeout_seconds."
            )
        if missing and now >= log_at:
            _log.warning("Waiting for %s.", names)
            log_at = now + _LOG_SECONDS
        if missing:
            time.sleep(_RETRY_SECONDS)


def _patiently(ask: Callable[[], bytes | None], deadline: float) -> bytes | None:
    """The answer of a store that may not be served yet."""
    while True:
        try:
            return ask()
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"nobody answers where Horovod's processes find each other ({error}): see to "
                    f"it that {ADDRESS} and {PORT} name the host and port of horovodrun, or of "
                    "whatever serves them."
                ) from None
        time.sleep(_RETRY_SECONDS)


def _request(host: str, port: int, method: str, rank: int, body: bytes | None) -> bytes | None:
    """What the store answers about a rank; None if it has nothing."""
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
    try:
        connection.request(method, f"/tfpara/{rank}", body)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    return content if answer.status == 200 else None
