"""The choice of the backend that connects the workers, and of its transport."""

from __future__ import annotations

from collections.abc import Sequence

from tfpara.cluster import RANK_VARIABLES, Cluster
from tfpara.collectives import horovod

_HOROVOD = RANK_VARIABLES[0][0]
COLLECTIVES = ("auto", "tensorflow", "horovod")
COMMUNICATIONS = ("AUTO", "RING", "NCCL")


def choose(collectives: str, found: Cluster) -> tuple[str, str]:
    """Returns the backend to use, and the reason.

    "auto" means Horovod if horovodrun or mpirun has started the process, as rank variables in its
    environment show. It means TensorFlow in a cluster of TF_CONFIG or of any other engine, and also
    under mpirun if Horovod cannot be used there. ValueError: TensorFlow does not know the addresses
    of the processes.
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


def choose_communication(
    asked: str, kind: str, cards: Sequence[str | None], *, members_change: bool = False
) -> tuple[str, str]:
    """Returns how TensorFlow's collectives connect the workers' lead devices, and the reason.

    "AUTO" is NCCL if each worker is known to have a GPU of its own, since NCCL refuses two workers
    on one card. Otherwise, and if members change, it is TensorFlow's ring over gRPC.

    Args:
        asked: one of `COMMUNICATIONS`.
        kind: kind of the workers' devices, "CPU", "GPU" or "CPU and GPU".
        cards: for each worker an identifier of the card (the physical GPU) of its lead device; None
            if unknown.
        members_change: whether workers may join and leave; `cards` may then lack some workers.
    """
    shared = _of_one_card(cards)
    if asked == "NCCL":
        if kind != "GPU":
            raise ValueError(
                f"communication='NCCL' connects GPUs, and the workers train on {kind} devices. "
                "Leave communication out, or give each worker a GPU."
            )
        if shared:
            raise ValueError(
                f"communication='NCCL' needs a GPU of its own for each worker, and workers "
                f"{shared[0]} and {shared[1]} have the same card. Leave communication out, or set "
                "another CUDA_VISIBLE_DEVICES for each worker of a machine."
            )
        return "NCCL", "asked for"
    if asked == "RING":
        return "RING", "asked for"
    if kind != "GPU":
        return "RING", "the devices are no GPUs"
    if members_change:
        return "RING", "workers may come and go"
    if shared:
        return "RING", f"workers {shared[0]} and {shared[1]} share a card"
    if None in cards:
        return "RING", "CUDA does not tell which card a worker has"
    return "NCCL", "each worker has a GPU of its own"


def _of_one_card(cards: Sequence[str | None]) -> tuple[int, int] | None:
    """Returns the ranks of the first two workers that are known to have the same card."""
    first: dict[str, int] = {}
    for rank, card in enumerate(cards):
        if card is not None and first.setdefault(card, rank) != rank:
            return first[card], rank
    return None


def of_horovod(found: Cluster) -> bool:
    """Returns whether horovodrun or mpirun gave only ranks, by which Horovod finds the others."""
    return bool(found.told) and found.rank_variable in dict(RANK_VARIABLES)
