"""Addresses and ports: connecting, and listening for peers and as few others as possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import random
import socket
import stat
import struct
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

# The range from which this module chooses ports. Linux takes ports of outgoing connections from a
# higher range, so no such connection takes a chosen port before a process listens on the port.
CHOSEN = range(10000, 32768)
_PAUSE_SECONDS = 0.1
_DIRECT = "no_grpc_proxy"  # gRPC's environment variable of the hosts that need no proxy
_SIOCGIFADDR = 0x8915  # Linux's ioctl that returns the IPv4 address of a network interface


def joined(host: str, port: int) -> str:
    """Returns "host:port", with brackets around an IP address of version 6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, str]:
    """Returns the host, without brackets, and the port of an address "host:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def connect(address: str, timeout_seconds: float) -> socket.socket:
    """Connects to "host:port"; raises OSError or UnicodeError if no process accepts that."""
    host, port = split(address)
    connection = socket.create_connection((host, int(port)), timeout_seconds)
    # If nobody listens on a port of this machine, a socket that connects to this port can by chance
    # be connected to itself.
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("nobody listens")
    return connection


def accepting(addresses: Sequence[str], timeout_seconds: float) -> frozenset[str]:
    """Returns those of `addresses`, "host:port", that accept a TCP connection now.

    All are tried at once, for at most `timeout_seconds`, name look-up included. An address at which
    a stopped process listens still accepts connections.
    """
    found: set[str] = set()

    def probe(address: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            connect(address, timeout_seconds).close()
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


def without_proxy(addresses: Iterable[str]) -> None:
    """Has TensorFlow's gRPC connect to "host:port" directly, where a proxy for web pages is set.

    gRPC takes the proxy of http_proxy or https_proxy for every connection, also for one within this
    machine. A proxy of grpc_proxy, which the user has set for gRPC alone, stays.
    """
    if "grpc_proxy" in os.environ or not {"http_proxy", "https_proxy"} & os.environ.keys():
        return
    former = os.environ.get(_DIRECT, os.environ.get("no_proxy", ""))
    hosts = dict.fromkeys([*former.split(","), *(split(each)[0] for each in addresses)])
    os.environ[_DIRECT] = ",".join(filter(None, hosts))


def places(address: str) -> set[tuple[str, int]]:
    """Returns the IP addresses, each with the port, to which "host:port" leads now.

    The set is empty if the host cannot be resolved. The call may take long.
    """
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {(plain(str(there[0])), int(there[1])) for *_, there in found}


def cut(peers: Collection[tuple[str, int]]) -> None:
    """Ends all of this process's connections to `peers`, also those of TensorFlow.

    Otherwise TensorFlow would wait forever for the answer of a peer that is stopped, since its
    connection stays open. `peers` are pairs of an IP address and a port.
    """
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            number = int(name)
            # Files are skipped, because the code below closes a copied descriptor. A process may
            # lose its locks on a file if it closes any descriptor of the file, even a copied one.
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6):
                    there = own.getpeername()
                    if (plain(there[0]), there[1]) in peers:
                        own.shutdown(socket.SHUT_RDWR)


class OpenPort:
    """A port that accepts and closes connections, so that others see that this process lives."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(None)
        self.port = int(listener.getsockname()[1])
        self._listener = listener
        self._open = True
        self._thread = threading.Thread(target=self._accept, name="tfpara-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which waits in accept()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            try:
                self._listener.accept()[0].close()
            except OSError:  # the listener is closed, or no file descriptor is left
                time.sleep(_PAUSE_SECONDS)


def own_host(host: str) -> str:
    """Returns the IP address to listen on, so that others reach this machine by `host`.

    It is of version 4 if there is one. In two cases it is empty, which means all interfaces: the
    address is not of this machine (behind address translation); or the name leads to loopback on
    this machine, as Debian configures it, though other machines resolve the name to another
    address.
    """
    host = host.strip("[]")
    named = not is_address(host) and host != "localhost"
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    for family, _, _, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        text = str(address[0])
        if not (named and ipaddress.ip_address(text.partition("%")[0]).is_loopback):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind(address)
                return text
    return ""


def bind(host: str, port: int, reuse: bool = True) -> socket.socket:
    """Returns a socket that is bound to an IP address of this machine, and does not listen yet.

    An empty `host` means all interfaces, and 0 a free `port`. `reuse`: whether a port whose
    connections have just ended counts as free. Raises OSError if the port is in use, or the address
    is not this machine's.
    """
    if not host and socket.has_dualstack_ipv6():
        try:
            return _bind(socket.AF_INET6, "::", port, reuse)
        except OSError as error:  # IPv6 may be disabled; then IPv4 is used
            if error.errno == errno.EADDRINUSE:
                raise
    return _bind(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port, reuse)


def listen(host: str, port: int, peers: int = 0) -> socket.socket:
    """Returns a socket that listens for `peers` processes; arguments and errors as for `bind`."""
    listener = bind(host, port)
    listener.listen(max(128, peers))
    return listener


def candidates() -> list[int]:
    """Returns the ports of `CHOSEN` in a random order."""
    # The program's seed is not used: programs with the same seed would try the same ports.
    return random.Random().sample(CHOSEN, len(CHOSEN))


def reserve() -> socket.socket:
    """Returns a socket that keeps a port, free on all interfaces; OSError if there is none."""
    for port in candidates():
        with contextlib.suppress(OSError):
            # With reuse=True, two processes that do not listen yet could get the same port.
            return bind("", port, reuse=False)
    raise OSError(errno.EADDRINUSE, "no port is free")


def plain(host: str) -> str:
    """Returns an IP address without zone, and without the "::ffff:" before one of version 4."""
    return host.partition("%")[0].removeprefix("::ffff:")


def interface(address: str) -> str:
    """Returns the name of the network interface that has an IP address; empty if none has it."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket() as any_socket:
            asked = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _bind(family: int, host: str, port: int, reuse: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def is_place(host: str, port: int) -> bool:
    """Returns whether `host` is an IP address and `port` the number of a port."""
    return is_address(host) and 0 < port < 65536


def is_every_interface(host: str) -> bool:
    """Returns whether a host to listen on means all interfaces: others cannot connect to it."""
    return not host or (is_address(host) and ipaddress.ip_address(host).is_unspecified)


def is_loopback(host: str) -> bool:
    """Returns whether a host leads to this machine alone."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def reached_by_all(addresses: Mapping[int, str], reached: Iterable[str]) -> dict[int, str]:
    """Returns the "host:port" of processes that came here, so that each can reach all others.

    A process that came by loopback is on this machine. If others came from elsewhere, they reach
    that process at the host at which they have `reached` this one.
    """
    outside = next((host for host in reached if not is_loopback(host)), "")
    found = dict(addresses)
    for key, address in addresses.items():
        host, port = split(address)
        if outside and is_loopback(host):
            found[key] = joined(outside, int(port))
    return found


def is_address(host: str) -> bool:
    """Returns whether `host` is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
