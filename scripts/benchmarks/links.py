"""The networks of a benchmark's processes: this machine's loopback, or limited links.

For limited links, each process has a network namespace of its own, with a cable to a switch. The
cables have a limited speed, and a delay. `ip` and `tc` make all of this; only root may use them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts import common
from tfpara.cluster import Cluster
from tfpara.launch.clusters import local_clusters

_INTERFACE = "cable"
_NETWORK = "10.77.0"  # start of the addresses, which exist in the namespaces only
_QUEUE_MS = 100
_HOSTS = Path("/etc/netns")


class Loopback:
    """A place where all processes share this machine's loopback."""

    interface = "lo"
    shared = True  # whether the interface counts the bytes of all processes together
    delay_ms = 0.0

    def prefix(self, rank: int) -> list[str]:
        """Returns the words that are written before the command of a process."""
        del rank
        return []

    def clusters(self, workers: int) -> list[Cluster]:
        """Returns each worker's view of the cluster, the chief's first."""
        return local_clusters(workers)


class Namespaces:
    """Network namespaces with a cable each, to a switch in a namespace of its own.

    Make them with `limited`, which also removes them.
    """

    interface = _INTERFACE
    shared = False

    def __init__(self, ends: int) -> None:
        self.names = [f"tfpara-{os.getpid()}-{end}" for end in range(ends)]
        self._switch = f"tfpara-{os.getpid()}-switch"
        self.delay_ms = 0.0
        # Each cluster has new ports, so that it never meets processes of an earlier cluster.
        self._ports = itertools.count(20000)

    def prefix(self, rank: int) -> list[str]:
        """Returns the words that are written before the command of a process."""
        return ["ip", "netns", "exec", self.names[rank]]

    def clusters(self, workers: int) -> list[Cluster]:
        """Returns each worker's view of their cluster, the chief's first."""
        addresses = tuple(f"{_address(end)}:{next(self._ports)}" for end in range(workers))
        tasks: list[tuple[Any, int]] = [("chief", 0), *(("worker", i) for i in range(workers - 1))]
        return [Cluster(addresses, *task, has_chief_job=True) for task in tasks]

    def make(self, mbit: float, delay_ms: float) -> None:
        """Makes the namespaces and cables, and limits both ends of each cable."""
        _run("ip", "netns", "add", self._switch)
        inside = ["ip", "-n", self._switch]
        _run(*inside, "link", "add", "switch", "type", "bridge")
        _run(*inside, "link", "set", "switch", "up")
        for end, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            # Gloo listens at the address that /etc/hosts gives for the machine's name. Within the
            # namespace, `ip netns exec` shows the file written here as /etc/hosts. So the file
            # gives the machine's name the address of the cable's end.
            (_HOSTS / name).mkdir(parents=True)
            lines = f"127.0.0.1 localhost\n{_address(end)} {socket.gethostname()}\n"
            (_HOSTS / name / "hosts").write_text(lines)
            self._connect(name, f"port{end}")
            _run("ip", "-n", name, "address", "add", f"{_address(end)}/24", "dev", _INTERFACE)
            for interface in ("lo", _INTERFACE):
                _run("ip", "-n", name, "link", "set", interface, "up")
            self._limit(name, _INTERFACE, mbit, delay_ms)
            self._limit(self._switch, f"port{end}", mbit, 0.0)

    def _connect(self, name: str, port: str) -> None:
        """Makes the cable between a namespace and a port of the switch."""
        peer = ["peer", "name", port, "netns", self._switch]
        _run("ip", "link", "add", _INTERFACE, "netns", name, "type", "veth", *peer)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "switch")
        _run("ip", "-n", self._switch, "link", "set", port, "up")

    def _limit(self, name: str, interface: str, mbit: float, delay_ms: float) -> None:
        """Limits what a namespace sends on an interface."""
        at = ["tc", "-n", name, "qdisc", "add", "dev", interface]
        # The token bucket (tbf) holds the data of 1 ms, and at least one large packet. A packet
        # waits in the queue for at most _QUEUE_MS, as it would in a switch.
        burst = max(128 * 1024, int(mbit * 1e6 / 8 * 0.001))
        speed = ["tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", f"{_QUEUE_MS}ms"]
        _run(*at, "root", "handle", "1:", *speed)
        if delay_ms:
            delay = [*at, "parent", "1:1", "handle", "10:", "netem", "delay", f"{delay_ms}ms"]
            # Not every kernel can delay packets. If this one cannot, the command fails, and
            # `delay_ms` stays 0.
            if subprocess.run(delay, capture_output=True).returncode == 0:
                self.delay_ms = delay_ms

    def remove(self) -> None:
        """Removes the namespaces, and with them the cables."""
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(_HOSTS / name, ignore_errors=True)
        # rmdir fails if the directory does not exist, or has files of another benchmark. Neither is
        # an error.
        with contextlib.suppress(OSError):
            _HOSTS.rmdir()


@contextlib.contextmanager
def limited(mbit: float, delay_ms: float = 0.0, ends: int = 2) -> Iterator[Namespaces]:
    """Makes `ends` namespaces, with cables of `mbit` Mbit/s and a delay in each direction.

    They are removed at the end, also after an error or Ctrl-C, and after SIGTERM in a program that
    has called `common.exit_on_signals`. The attribute `delay_ms` of the result is 0 if the kernel
    cannot delay packets.

    Raises:
        Failure: this process may not make namespaces, or the tools are missing.
    """
    made = Namespaces(ends)
    try:
        made.make(mbit, delay_ms)
        yield made
    finally:
        made.remove()


def problem() -> str | None:
    """Returns what keeps this process from making limited links, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 cannot be found. Install iproute2"
    try:
        with limited(1000):
            return None
    except common.Failure as failure:
        return str(failure)


def _address(end: int) -> str:
    return f"{_NETWORK}.{end + 1}"


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        reason = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise common.Failure(
            f"a limited link could not be made: {_shown(command)}: {reason}. Only root may make one"
        )


def _shown(command: Sequence[str]) -> str:
    return f"`{' '.join(command)}`"
