"""Joining and leaving the group of processes that Horovod connects.

Every process keeps a port open while it is in the group. Horovod's errors do not say which process
was lost; the others find it by its closed port.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import sys
import threading
from typing import Any, NamedTuple

import tensorflow as tf

from tfpara import program
from tfpara.cluster import Cluster, ports, rendezvous, secret, startup
from tfpara.cluster.call_site import Purpose
from tfpara.collectives.horovod import HorovodCollectives, load
from tfpara.sync.workers.json_exchange import everyones
from tfpara.sync.workers.meetings import Control

_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_DEFAULTS = {
    # Milliseconds after which Horovod's thread looks for work again. With 1, Horovod's default, the
    # thread always uses 8 % of a core. With 5 it uses 4 to 5 %, and a large sync is no slower.
    "HOROVOD_CYCLE_TIME": "5",
    # A threshold of 0 turns fusion off. With fusion, Horovod would send several buckets as one. All
    # of these would arrive together, so the rule could not begin with the first bucket while others
    # are under way.
    "HOROVOD_FUSION_THRESHOLD": "0",
}
# The network interface on which Gloo listens. By default Gloo takes the interface to whose address
# the host name leads. But this process may have its address in the run on another interface.
_INTERFACE = "HOROVOD_GLOO_IFACE"
_LEAVING_SECONDS = 2.0  # longest wait, at an orderly end, for the others to leave
_REACH_SECONDS = 5.0  # longest wait for the other processes' ports to accept a connection


class _Joined(NamedTuple):
    """The cluster and the open port of this process while it is in the group."""

    cluster: Cluster
    port: rendezvous.Server | ports.OpenPort


_joined: _Joined | None = None


def join(found: Cluster, startup_timeout_seconds: float, timeout_seconds: float) -> None:
    """Joins the group, unless this process is in it already. Every process must call this function.

    `timeout_seconds`: time for which a process may be stopped before it counts as lost.

    Raises:
        ValueError: Horovod cannot be used, or its group has other processes than `found`.
        startup.StartupError: some processes did not come.
        secret.SecretError: the environment's secret is not valid.
    """
    global _joined
    hvd = load()
    if _joined is not None and _joined.cluster == found:
        return
    if os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0"):
        raise ValueError(
            "HOROVOD_ELASTIC is set: Horovod's elastic mode is not supported. Start a fixed number "
            "of processes, by horovodrun without --min-np, or restart them from checkpoints by "
            "tfpara-launch --max_restarts."
        )
    port = _meet(hvd, found, startup_timeout_seconds, secret.read())
    # Only this variable limits how long Horovod, once started, waits for a stopped process.
    os.environ.setdefault(_GLOO_TIMEOUT, str(max(5, math.ceil(timeout_seconds))))
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    host = found.address.rpartition(":")[0] or os.environ.get("HOROVOD_HOSTNAME", "")
    interface = ports.interface(ports.own_host(host)) if host else ""
    if interface:
        os.environ.setdefault(_INTERFACE, interface)
    hvd.init()
    if (hvd.rank(), hvd.size()) != (found.rank, found.num_workers):
        raise ValueError(
            f"Horovod sees rank {hvd.rank()} of {hvd.size()}, but "
            f"{found.rank_variable or 'TF_CONFIG'} says rank {found.rank} of {found.num_workers}. "
            "Start all processes by one horovodrun, mpirun or tfpara-launch --collectives=horovod, "
            "and call hvd.init() nowhere else."
        )
    if port is None:
        listener = ports.bind(ports.own_host(_own_name(hvd)), 0)
        listener.listen(128)
        port = ports.OpenPort(listener)
    _joined = _Joined(found, port)
    # If an exception ends this program, the other processes do not leave the group, so this process
    # does not wait for them.
    program.on_leaving(leave)
    atexit.register(lambda: leave(orderly=not hasattr(sys, "last_value")))


def leave(orderly: bool) -> None:
    """Leaves the group; operations of others then fail, so an `orderly` end waits for them 2 s."""
    global _joined
    if _joined is None:
        return
    joined, _joined = _joined, None
    joined.port.close()
    if orderly:
        waiting = threading.Thread(target=_part, args=(joined.cluster,), daemon=True)
        waiting.start()
        waiting.join(_LEAVING_SECONDS)
    load().shutdown()


def _part(found: Cluster) -> None:
    with contextlib.suppress(tf.errors.OpError):
        HorovodCollectives(found.num_workers, found.rank, "CPU:0", 0.0).barrier("leaving")


def _meet(
    hvd: Any, found: Cluster, timeout_seconds: float, shared: bytes
) -> rendezvous.Server | ports.OpenPort | None:
    """Waits for all processes of the group; returns the port opened for them, if one is needed."""
    if not found.rank_variable:
        startup.meet(found, timeout_seconds, "horovod", shared)
        chief, _, chief_port = found.addresses[0].rpartition(":")
        place = rendezvous.variables(found, chief.strip("[]"), int(chief_port), shared)
        os.environ.update(place)
        if found.is_chief:
            return rendezvous.Server(int(chief_port), ports.own_host(chief), shared)
        listener = startup.listen(found.address, found.describe(found.rank), found.num_workers)
        return ports.OpenPort(listener)
    if found.rank_variable == "HOROVOD_RANK":
        rendezvous.meet(found, os.environ, timeout_seconds, shared)
    elif not hvd.mpi_built():
        raise ValueError(
            f"{found.rank_variable} is set, so mpirun has started this process, but Horovod was "
            f"built without MPI. Run scripts/install_horovod.sh --mpi --venv={sys.prefix}, or "
            "start by horovodrun --gloo or tfpara-launch --collectives=horovod."
        )
    return None


def _own_name(hvd: Any) -> str:
    """Returns this process's host, by a name or address that the others can reach."""
    if hvd.local_size() == hvd.size():
        return "127.0.0.1"
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def with_addresses(found: Cluster, control: Control) -> Cluster:
    """Returns the cluster with the addresses at which its processes can be probed; all call it."""
    if _joined is None or (found.addresses and not found.rank_variable):
        return found
    own = f"{_own_name(load())}:{_joined.port.port}"
    addresses = everyones(own, control, Purpose("telling its address"))
    whole = found._replace(addresses=tuple(addresses))
    # A live process behind a firewall would look dead. So the addresses are used only if this
    # process can reach all of them.
    return found if whole.unreachable(_REACH_SECONDS) else whole
