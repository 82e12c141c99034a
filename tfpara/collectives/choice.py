"""Which backend connects the workers."""

from __future__ import annotations

from tfpara.cluster import Cluster
from tfpara.collectives import horovod

COLLECTIVES = ("auto", "tensorflow", "horovod")


def choose(collectives: str, found: Cluster) -> tuple[str, str]:
    """The backend that is asked for, and why it is taken.

    "auto" is Horovod where rank variables say that horovodrun or mpirun has started the process;
    TensorFlow in a cluster of TF_CONFIG, also under rank variables if Horovod cannot be used.

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
        if not found.addresses:
            return "horovod", f"{found.rank_variable} is set, and TF_CONFIG is not"
        problem = horovod.problem()
        if problem:
            return "tensorflow", problem
        return "horovod", f"{found.rank_variable} is set"
    if collectives == "tensorflow" and found.num_workers > 1 and not found.addresses:
        raise ValueError(
            f"collectives='tensorflow' needs TF_CONFIG, and this process was told its place by "
            f"{found.rank_variable}={found.rank} of {found.size} alone. Use "
            "collectives='horovod', or start by tfpara-launch."
        )
    return collectives, "asked for"
