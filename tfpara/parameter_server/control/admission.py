"""The checks of the processes at the start of an asynchronous run, and their messages."""

from __future__ import annotations

import contextlib
import itertools

from tfpara import version
from tfpara.cluster import reach, startup
from tfpara.cluster.asynchronous import AsyncCluster

_ANSWER_SECONDS = 10.0
_FIRST_FREE_PORT = 1024


def absent(cluster: AsyncCluster, names: str, seconds: float) -> str:
    """Returns the message that some processes have not come in time."""
    return (
        f"after {seconds:g} s these processes have not started: {names}. Start one process for "
        "each address of TF_CONFIG within startup_timeout_seconds, and see to it that they reach "
        f"the chief at {cluster.address}."
    )


def astray(cluster: AsyncCluster) -> str | None:
    """Returns the message on addresses at which nothing accepts a connection; None if all do.

    TensorFlow would wait for them without end.
    """
    addresses = {
        cluster.describe(job, index): cluster.spec()[job][index] for job, index in cluster.members
    }
    found = reach.accepting(tuple(addresses.values()), _ANSWER_SECONDS)
    names = [name for name, address in addresses.items() if address not in found]
    if not names:
        return None
    return (
        f"{', '.join(names)} came to the chief, but the chief cannot connect to the address. "
        "Correct it in TF_CONFIG, or open the port in the firewall."
    )


def objection(
    cluster: AsyncCluster, member: tuple[str, int], view: object, their_version: object
) -> str | None:
    """Returns the message why a process that says hello is refused; None if it is not.

    Its job and index, addresses by job and version are what it has sent.
    """
    name = " ".join(map(str, member))
    if view != cluster.spec() or member not in cluster.members:
        return (
            f"TF_CONFIG differs between processes: {cluster.name} has the cluster "
            f"{cluster.spec()}, {name} has {view}. Give all processes the same cluster; only the "
            "task differs."
        )
    if their_version != version.__version__:
        return (
            f"tfpara differs between processes: {cluster.name} has version {version.__version__}, "
            f"{cluster.describe(*member)} has {their_version}. Install the same version everywhere."
        )
    return None


def twins(cluster: AsyncCluster, member: tuple[str, int]) -> str:
    """Returns the message that two processes have the same job and index."""
    return (
        "two processes have the same task in TF_CONFIG: both are "
        f"{cluster.describe(*member)}. Give each process an index of its own."
    )


def free_address(cluster: AsyncCluster) -> str:
    """Returns "host:port": the chief's host, and a free port that no address of the cluster has.

    The search goes up from the chief's own port, and then from 1024.

    Raises:
        tfpara.StartupError: no port is free.
    """
    host, _, own = cluster.address.rpartition(":")
    addresses = itertools.chain.from_iterable(cluster.spec().values())
    taken = {int(address.rpartition(":")[2]) for address in addresses}
    for port in itertools.chain(range(int(own) + 1, 1 << 16), range(_FIRST_FREE_PORT, int(own))):
        if port not in taken:
            address = f"{host}:{port}"
            with contextlib.suppress(startup.StartupError), startup.listen(address, cluster.name):
                return address
    raise startup.StartupError(f"the host of {cluster.name} has no free port for TensorFlow.")
