"""A simulated cut cable between one process and the others of a run, by filters on their sockets.

If a socket has a filter that accepts nothing (socket(7), SO_ATTACH_FILTER), the kernel drops all
that arrives at it. So the sender gets no acknowledgement and sends again, as on a cut cable. A
process may get the sockets of its own descendants by pidfd_getfd(2), for which it needs neither a
namespace nor root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

_PIDFD_GETFD = 438  # number of the system call pidfd_getfd on most architectures
_ATTACH, _DETACH = 26, 27  # the socket options SO_ATTACH_FILTER and SO_DETACH_FILTER
# BPF_RET | BPF_K, the only instruction of the filter: it accepts a constant number of bytes of each
# packet. `_attach` sets this number to 0, so the socket gets no packet.
_RETURN = 6
# The socket option TCP_INFO, and the offset of tcpi_total_retrans in its struct tcp_info.
_TCP_INFO, _RETRANSMITTED = 11, 8 + 4 * 23
_LIBC = ctypes.CDLL(None, use_errno=True)
_Connection = tuple[str, str]


def need() -> str:
    """Returns what this machine lacks for a cut, in words; "" if nothing."""
    if not Path("/proc/net/tcp").exists():
        return "Linux with /proc/net/tcp"
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            os.close(_descriptor_of(child.pid, 0))
        except OSError as error:
            why = os.strerror(error.errno or 0)
            return f"pidfd_getfd(2) of Linux 5.6, which says {why!r} here (CAP_SYS_PTRACE gives it)"
        finally:
            child.kill()
    return ""


class Cut:
    """A cut between the processes `pid` and `others`; `again` makes it, or cuts new connections."""

    def __init__(self, pid: int, others: Iterable[int]) -> None:
        self._pid, self._others = pid, [other for other in others if other != pid]
        self._cut: dict[str, socket.socket] = {}  # copies of the cut sockets, by inode number

    @property
    def sockets(self) -> int:
        return len(self._cut)

    def again(self) -> None:
        """Cuts all present connections, and the sockets that listen for more."""
        table = dict(_connections(self._pid))
        own = dict(_sockets(self._pid))
        within = {table[number] for number in own if number in table}
        # Connections of the process to itself would not go through a cable, so they are not cut.
        outward = {(here, there) for here, there in within if (there, here) not in within}
        for number, descriptor in own.items():
            if table.get(number) in outward:
                self._attach(self._pid, number, descriptor)
        for other in self._others:
            for number, descriptor in _sockets(other):
                here, there = table.get(number, ("", ""))
                if (there, here) in outward:
                    self._attach(other, number, descriptor)

    def retransmitted(self) -> int:
        """Returns how many packets the cut connections have retransmitted since they began."""
        told = (each.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 192) for each in self._cut.values())
        return sum(struct.unpack_from("I", info, _RETRANSMITTED)[0] for info in told)

    def mend(self) -> None:
        """Ends the cut."""
        for each in self._cut.values():
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            each.close()
        self._cut = {}

    def _attach(self, pid: int, number: str, descriptor: int) -> None:
        if number in self._cut:
            return
        with contextlib.suppress(OSError):  # the socket may be closed already
            copy = socket.socket(fileno=_descriptor_of(pid, descriptor))
            program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
            filter_ = struct.pack("HL", 1, ctypes.addressof(program))
            copy.setsockopt(socket.SOL_SOCKET, _ATTACH, filter_)
            self._cut[number] = copy


def _descriptor_of(pid: int, descriptor: int) -> int:
    """Copies a descriptor of another process into this process."""
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, "")
    process = os.pidfd_open(pid)
    try:
        copy = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "")
    return int(copy)


def _sockets(pid: int) -> Iterator[tuple[str, int]]:
    """Yields the socket number (inode) and the descriptor of each socket of a process."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.readlink(f"/proc/{pid}/fd/{name}")
                if found.startswith("socket:["):
                    yield found[8:-1], int(name)


def _connections(pid: int) -> Iterator[tuple[str, _Connection]]:
    """Yields the number of each TCP socket that the process can see, and both its addresses."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                # An IPv4 address and its port are 13 characters here: 12 hexadecimal digits and a
                # colon. An IPv4 address in the form of IPv6 ends with the same 13 characters, so
                # both forms give the same result.
                here, there = (word[-13:] for word in words[1:3])
                yield words[9], (here, there)
