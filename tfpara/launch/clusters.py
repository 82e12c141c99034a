"""Clusters of processes on this machine, with free ports. TensorFlow is not imported."""

from __future__ import annotations

import errno
import itertools
import socket

from tfpara import cluster
from tfpara.cluster import asynchronous as async_cluster
from tfpara.cluster.ports import candidates, joined


class LaunchError(ValueError):
    """The workers cannot be started. The message states the cause."""


def local_clusters(count: int, host: str = "127.0.0.1", port: int = 0) -> list[cluster.Cluster]:
    """Returns a cluster of `count` workers on this machine, as each sees it, the chief first.

    For `port` and the errors see `ports`.
    """
    addresses = tuple(joined(host, number) for number in ports(host, port, count))
    tasks = [("chief", 0), *(("worker", index) for index in range(count - 1))]
    return [cluster.Cluster(addresses, *task, has_chief_job=True) for task in tasks]


def local_async_clusters(
    workers: int, ps: int, host: str = "127.0.0.1", port: int = 0
) -> list[async_cluster.AsyncCluster]:
    """Returns a cluster with parameter servers on this machine, as each process sees it.

    The chief comes first, then the workers, then the parameter servers, of which there are `ps`.
    """
    first, *others = local_clusters(1 + workers + ps, host, port)[0].addresses
    jobs = {"chief": (first,), "worker": tuple(others[:workers]), "ps": tuple(others[workers:])}
    return [
        async_cluster.AsyncCluster(jobs, job, index)
        for job, addresses in jobs.items()
        for index in range(len(addresses))
    ]


def ports(host: str, base: int, count: int) -> list[int]:
    """Returns `count` free ports: from `base` on, or any if `base` is 0.

    Raises LaunchError if one is in use, or the host is not this machine's.
    """
    if not base:
        free = (port for port in candidates() if _is_free(host, port))
        return list(itertools.islice(free, count))
    if base + count - 1 > 65535:
        raise LaunchError(
            f"--port={base} and {count} workers need ports above 65535. Lower --port."
        )
    for port in range(base, base + count):
        if not _is_free(host, port):
            raise LaunchError(f"port {port} on {host} is in use. Change --port={base}, or omit it.")
    return list(range(base, base + count))


def _is_free(host: str, port: int) -> bool:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # With this option a port whose connections have just ended counts as free. Workers also
            # set this option, so they can use such a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # a name such as "10..0.1" raises UnicodeError
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            raise LaunchError(
                f"--host={host} is not an address of this machine "
                f"({getattr(error, 'strerror', error)}). Workers are started here only; the "
                "default is 127.0.0.1."
            ) from None
        return False
    return True
