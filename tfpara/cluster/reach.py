"""Tests which processes accept connections."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from tfpara.cluster import Cluster, ports


def unreachable(cluster: Cluster, timeout_seconds: float) -> list[str]:
    """Lists the other processes that accept no TCP connection now, by rank; see `accepting`."""
    peers = [rank for rank in range(len(cluster.addresses)) if rank != cluster.rank]
    found = accepting([cluster.addresses[rank] for rank in peers], timeout_seconds)
    return [cluster.describe(rank) for rank in peers if cluster.addresses[rank] not in found]


def accepting(addresses: Sequence[str], timeout_seconds: float) -> frozenset[str]:
    """Returns those of `addresses`, "host:port", that accept a TCP connection now.

    All are tried at once, for at most `timeout_seconds`, name look-up included. An address at which
    a stopped process listens still accepts connections.
    """
    found: set[str] = set()

    def probe(address: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            ports.connect(address, timeout_seconds).close()
            found.add(address)

    # The threads are daemons, because a name look-up cannot be cut short, and must not keep the
    # process alive.
    threads = [threading.Thread(target=probe, args=(each,), daemon=True) for each in addresses]
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return frozenset(found)
