"""The GPUs (cards) that the launcher gives to each process. TensorFlow is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfpara.cluster import cuda
from tfpara.launch.clusters import LaunchError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE = {_VISIBLE: "-1"}  # with this environment variable, a process gets no card


def of_machine(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the cards that processes with this environment would see."""
    if _VISIBLE in environ:
        names = [name.strip() for name in environ[_VISIBLE].split(",")]
        # CUDA ignores an entry of −1 and all entries after it.
        end = names.index("-1") if "-1" in names else len(names)
        return [name for name in names[:end] if name]
    return [str(number) for number in range(cuda.count())]


def divided(cards: Sequence[str], workers: int, per_worker: int | None) -> list[dict[str, str]]:
    """Returns for each worker the environment that gives it its cards, of those of `of_machine`.

    If `per_worker` is None and there are fewer cards than workers, workers share cards. TensorFlow
    then allocates a card's memory when it needs some, instead of all at once. If there are more,
    all cards are divided among the workers. Raises LaunchError for fewer cards than requested.
    """
    if not cards and per_worker is None:
        return [{}] * workers
    if per_worker is None and len(cards) < workers:
        shared = [cards[worker * len(cards) // workers] for worker in range(workers)]
        return [{_VISIBLE: card, "TF_FORCE_GPU_ALLOW_GROWTH": "true"} for card in shared]
    each = len(cards) // workers if per_worker is None else per_worker
    if each * workers > len(cards):
        raise LaunchError(
            f"--gpus_per_worker={each} and {workers} workers need {each * workers} GPUs, and this "
            f"machine shows {len(cards)} ({_VISIBLE}, and CUDA's driver, tell how many). Start "
            "fewer workers, or leave --gpus_per_worker out, so that workers share GPUs."
        )
    parts = [cards[worker * each : (worker + 1) * each] for worker in range(workers)]
    return [{_VISIBLE: ",".join(part)} if part else NONE for part in parts]
