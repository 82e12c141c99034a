"""A bare exchange of the model's bytes: each process sends them over one socket, both at once."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from scripts.benchmarks.peers import process

_SECONDS = 60.0


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Measures the exchange of `elements` float32 numbers each way between two processes."""
    rank, addresses = process.place()
    host, port = addresses[0].rsplit(":", 1)
    connection = _accept(host, int(port)) if rank == 0 else _connect(host, int(port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    outgoing = memoryview(bytearray(4 * options["elements"]))
    incoming = memoryview(bytearray(4 * options["elements"]))

    def exchange() -> None:
        sender = threading.Thread(target=connection.sendall, args=(outgoing,))
        sender.start()
        received = 0
        while received < len(incoming):
            count = connection.recv_into(incoming[received:])
            if not count:
                raise ConnectionError("the other process of the socket copy has gone")
            received += count
        sender.join()

    return process.timed_sync(options, exchange)


def _accept(host: str, port: int) -> socket.socket:
    with socket.create_server((host, port)) as server:
        server.settimeout(_SECONDS)
        return server.accept()[0]


def _connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    process.run(main)
