"""The server of a run's live page, for programs of this machine that have its token.

| path | what it is |
|---|---|
| `/` | the page |
| `/status.json` | the status as JSON |
| `/metrics` | the status for Prometheus |

The token is in the query, `?token=…`, or in the header `Authorization: Bearer …`. The token is
derived from the run's secret, and does not reveal it. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.server
import secrets
import socketserver
import sys
import threading
from collections.abc import Callable
from typing import Any

from tfpara.cluster import secret
from tfpara.status.page import PAGE, POLICY, as_json, metrics

_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_MOST_AT_ONCE = 16  # largest number of connections at a time
_SECONDS = 10.0  # longest wait for the next bytes of a request
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Connection": "close",
}


class StatusError(ValueError):
    """The page cannot be served. The message states the cause."""


class StatusServer(socketserver.ThreadingTCPServer):
    """Serves the live page on loopback until `close`.

    `status`, which returns the status, is called in threads. 0 means a free `port`, and `given` is
    the user's setting of it, such as "--status_port=8080".

    Raises:
        StatusError: the port cannot be used.
        SecretError: the run's secret cannot be read.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int, status: Callable[[], dict[str, Any]], given: str) -> None:
        self.status = status
        run_secret = secret.read() or secrets.token_bytes(32)
        self.token = secret.derive(run_secret, b"live page").hex()[:32]
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            why = "is in use" if in_use else f"cannot be used ({error.strerror})"
            raise StatusError(
                f"{given}: port {port} of {_HOST} {why}. Give another one, or 0 for a free one."
            ) from None
        self.port = int(self.server_address[1])
        # The address of the page, with its token.
        self.url = f"http://{_HOST}:{self.port}/?token={self.token}"
        threading.Thread(target=self.serve_forever, name="tfpara-page", daemon=True).start()

    def close(self) -> None:
        """Frees the port."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # OSError: the browser has hung up
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers a request."""

    server: StatusServer
    server_version, sys_version = "tfpara", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        # This check prevents DNS rebinding: another site could make its own name lead to this host,
        # and its page could then read the answers.
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self._answer(403, f"Ask for {_HOST} or localhost.\n")
            return
        path, _, query = self.path.partition("?")
        if not self._may(query):
            self._answer(403, "The address needs the token that the run has printed.\n")
        elif path == "/":
            self._answer(200, PAGE, "text/html")
        elif path == "/status.json":
            self._answer(200, as_json(self.server.status()), "application/json")
        elif path == "/metrics":
            self._answer(200, metrics(self.server.status()), "text/plain; version=0.0.4")
        else:
            self._answer(404, "There are /, /status.json and /metrics.\n")

    def _may(self, query: str) -> bool:
        """Returns whether a request has the token."""
        given = [text.removeprefix("token=") for text in query.split("&")]
        given.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
        token = self.server.token.encode()
        return any(hmac.compare_digest(each.encode(), token) for each in given)

    def _answer(self, code: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass
