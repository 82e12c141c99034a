"""The systems of the suite `peers`: tfpara in its variants, its peers, and bare exchanges."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

TENSORFLOW_LOOPS = "scripts.benchmarks.peers.tensorflow_loops"
TORCH_LOOPS = "scripts.benchmarks.peers.torch_loops"
PLAIN, INDEPENDENT = "plain Keras", "plain Keras, independent"
ONE_WORKER = "tfpara, one worker"
SOCKET, HOROVOD_REDUCE, REDUCE = "bare socket copy", "bare Horovod all-reduce", "bare all-reduce"
SYNC, HOROVOD_SYNC = "sync, BMUF and EMA", "sync, BMUF and EMA, Horovod"
_TORCH_ALONE = "PyTorch, one process"
_HOROVOD = "horovod.tensorflow"


_VARIANTS: dict[str, dict[str, Any]] = {
    "Horovod": {"collectives": "horovod"},
    "overlap": {"overlap": True},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "overlap, int8": {"overlap": True, "compression": "int8"},
}


@dataclasses.dataclass(frozen=True)
class System:
    """A system, one row of the table.

    Attributes:
        name: name in the table.
        workers: number of processes.
        options: options of each process.
        module: module that each process runs.
        alone: name of the same system in one process, if there is one.
        package: package that must be installed, if the system needs one.
        family: "tfpara", "peer" or "reference".
        per_step: whether it averages at every step.
    """

    name: str
    workers: int
    options: dict[str, Any]
    module: str = "scripts.benchmarks.worker"
    alone: str | None = None
    package: str | None = None
    family: str = "peer"
    per_step: bool = False


def systems_of(sizes: dict[str, int], periods: list[int], steps: int) -> list[System]:
    """Returns all systems.

    Args:
        sizes: `batch`, `inputs`, `layers`, `width`, `classes` of the network.
        periods: sync periods of tfpara. Its variants have the two longest, the peers the longest.
        steps: timed minibatches at the longest period.
    """
    short = max(8, steps // 4)
    step = {**sizes, "steps": short, "warm_up": 3, "sync_period": None}
    return [
        *_plain({**step, "steps": steps}),
        *_tfpara(step, sorted(periods), steps),
        *_per_step_peers(step),
        *_periodic_peers(step, max(periods), steps),
        *_exchanges(sizes, short),
    ]


def _plain(step: dict[str, Any]) -> list[System]:
    plain = {**step, "system": "plain"}
    return [
        System(PLAIN, 1, plain, family="reference"),
        System(INDEPENDENT, 2, plain, alone=PLAIN, family="reference"),
    ]


def _tfpara(step: dict[str, Any], periods: list[int], steps: int) -> list[System]:
    longest = periods[-1]
    ours = functools.partial(System, family="tfpara", alone=ONE_WORKER)
    found = []
    for period in periods:
        options = {**step, "system": "tfpara", "sync_period": period}
        options["steps"] = _whole_blocks((period / longest) ** 0.5 * steps, period)
        if period == longest:
            # A run begins with a block that is not timed. At the longest period a whole block would
            # take long, so the untimed block is cut to one minibatch.
            options["first"] = 1
            found.insert(0, System(ONE_WORKER, 1, options, family="tfpara"))
        found.append(ours(f"tfpara, period {period}", 2, options))
        if period not in periods[-2:]:
            continue
        for label, strategy in _VARIANTS.items():
            package = _HOROVOD if "collectives" in strategy else None
            name = f"tfpara, period {period}, {label}"
            of_variant = {**options, "strategy": strategy}
            if "overlap" in strategy:
                # With overlap, the sync of the last block ends after the measured time, and the
                # sync of the untimed block is measured instead. This sync must be like those of the
                # timed blocks, so the untimed block is not cut.
                of_variant.pop("first", None)
            found.append(ours(name, 2, of_variant, package=package))
    return found


def _per_step_peers(step: dict[str, Any]) -> list[System]:
    tensorflow = functools.partial(System, module=TENSORFLOW_LOOPS)
    mirrored, horovod = {**step, "system": "mirrored"}, {**step, "system": "horovod"}
    alone = {name: f"{name}, one worker" for name in ("MultiWorkerMirrored", "Horovod")}
    per_step = {"per_step": True}
    return [
        tensorflow(alone["MultiWorkerMirrored"], 1, mirrored),
        *(
            tensorflow(name, 2, options, alone=alone[name], package=package, **per_step)
            for name, options, package in (
                ("MultiWorkerMirrored", mirrored, None),
                ("Horovod", horovod, _HOROVOD),
            )
        ),
        tensorflow(alone["Horovod"], 1, horovod, package=_HOROVOD),
        System(_TORCH_ALONE, 1, {**step, "system": "plain"}, TORCH_LOOPS, package="torch"),
        System(
            "PyTorch DDP",
            2,
            {**step, "system": "ddp"},
            TORCH_LOOPS,
            alone=_TORCH_ALONE,
            package="torch",
            **per_step,
        ),
    ]


def _periodic_peers(step: dict[str, Any], period: int, steps: int) -> list[System]:
    options = {**step, "steps": _whole_blocks(steps, period), "sync_period": period}
    return [
        System(
            f"{name}, period {period}",
            2,
            {**options, "system": system},
            TORCH_LOOPS,
            alone=_TORCH_ALONE,
            package=package,
        )
        for name, system, package in (
            ("PyTorch PeriodicModelAverager", "averager", "torch"),
            ("PyTorch PostLocalSGDOptimizer", "post_local", "torch"),
            ("torchft LocalSGD", "torchft_local", "torchft"),
            ("torchft DiLoCo", "torchft_diloco", "torchft"),
        )
    ]


def _exchanges(sizes: dict[str, int], syncs: int) -> list[System]:
    """Returns systems that only sync, and bare exchanges of the same bytes."""
    sync = {**sizes, "system": "syncs", "syncs": syncs, "averages": "one"}
    bare = {"elements": elements_of(sizes), "steps": 11}
    reference = functools.partial(System, family="reference")
    horovod = {**bare, "system": "horovod_all_reduce"}
    return [
        System(
            name, 2, {**sync, "strategy": {"collectives": kind}}, family="tfpara", package=package
        )
        for name, kind, package in (
            (SYNC, "tensorflow", None),
            (HOROVOD_SYNC, "horovod", _HOROVOD),
        )
    ] + [
        reference(REDUCE, 2, {**bare, "system": "all_reduce", "bucket_bytes": 8 << 20}),
        reference(HOROVOD_REDUCE, 2, horovod, TENSORFLOW_LOOPS, package=_HOROVOD),
        reference(SOCKET, 2, {**bare, "system": "copy"}, "scripts.benchmarks.peers.socket_copy"),
    ]


def _whole_blocks(steps: float, period: int) -> int:
    return max(1, round(steps / period)) * period


def elements_of(sizes: dict[str, int]) -> int:
    """Returns the number of weights and biases of the network."""
    widths = [sizes["inputs"], *[sizes["width"]] * sizes["layers"], sizes["classes"]]
    return sum((a + 1) * b for a, b in zip(widths, widths[1:], strict=False))
