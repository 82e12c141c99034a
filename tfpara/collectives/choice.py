"""The choice of the backend that connects the workers."""

from __future__ import annotations

from tfpara.cluster import RANK_VARIABLES, Cluster
from tfpara.collectives import horovod

_HOROVOD = RANK_VARIABLES[0][0]
COLLECTIVES = ("auto", "tensorflow", "horovod")


def choose(collectives: str, found: Cluster) -> tuple[str, str]:
    """Returns the backend to use, and the reason.

    "auto" is Horovod if horovodrun or mpirun has started the process, as its rank variables show.
    It is TensorFlow in a cluster of TF_CONFIG or of any other engine, and also under mpirun if
    Horovod cannot be used there.

    Args:
        collectives: one of `COLLECTIVES`.
        found: this process's view of the cluster.

    Returns:
        "tensorflow" or "horovod", and the reason in a few words.

    Raises:
        ValueError: TensorFlow cannot connect the processes, having no addresses.
    """
    if collectives == "auto":
        if not found.rank_variable:
            return "tensorflow", "TF_CONFIG names the workers"
        if found.told and not of_horovod(found):
            return "tensorflow", f"{found.rank_variable} is set"
        if not found.addresses:
            problem = None if found.rank_variable == _HOROVOD else horovod.mpi_problem()
            if problem:
                return "tensorflow", problem
            return "horovod", f"{found.rank_variable} is set, and TF_CONFIG is not"
        problem = horovod.problem()
        if problem:
            return "tensorflow", problem
        return "horovod", f"{found.rank_variable} is set"
    if collectives == "tensorflow" and of_horovod(found) and not found.coordinator:
        raise ValueError(
            f"collectives='tensorflow' needs TF_CONFIG, or TFPARA_COORDINATOR=host:port, and this "
            f"process was told its place by {found.rank_variable}={found.rank} of {found.size} "
            "alone. Use collectives='horovod', or start by tfpara-launch."
        )
    return collectives, "asked for"


def of_horovod(found: Cluster) -> bool:
    """Returns whether processes that know only their ranks can find each other by Horovod."""
    return bool(found.told) and found.rank_variable in dict(RANK_VARIABLES)
