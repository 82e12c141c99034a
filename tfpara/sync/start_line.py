"""The line that a strategy prints when it is made, and words for other lines."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence

from tfpara.algorithms.rule import Average, Rule


def start_line(
    workers: int,
    devices: Sequence[str],
    rule: Rule,
    period: int | None,
    averages: Mapping[str, Average],
    way: str,
    divided: bool = True,
    unlike: Sequence[int] = (),
    kinds: Collection[str] = (),
    options: Mapping[str, object] | None = None,
) -> str:
    """Returns a line about the workers, their part of a batch, the rule and the devices.

    Args:
        devices: TensorFlow's names of the devices of this worker, the chief.
        way: how the workers are connected, in words; "" for one worker.
        divided: whether batches are divided among the replicas of all workers.
        unlike: the number of devices of each worker, if they differ; else empty.
        kinds: the kinds of all workers' devices, such as "CPU"; empty if they are not known.
        options: those of the strategy that say how syncs work, and are not the defaults.

    Example:
        >>> start_line(1, ["/device:GPU:0"], tfpara.BSP(), 20, {}, "")
        '1 worker, 1 replica; BSP every 20 steps; on GPU:0'
    """
    replicas = sum(unlike) or workers * len(devices)
    size = f"{counted(workers, 'worker')}, {counted(replicas, 'replica')}"
    if replicas > 1 and divided:
        rows = max(1, 64 // replicas)
        size += f": each batch is divided, for example {rows * replicas} rows into {rows} each"
    every = ", no syncs" if period is None else f" every {period} steps"
    told = [f", {name}={value!r}" for name, value in (options or {}).items()]
    parts = [size, in_words(rule) + (" every step" if period == 1 else every) + "".join(told)]
    parts += [f"average {name!r}: {in_words(average)}" for name, average in averages.items()]
    names = [device.split("device:")[-1] for device in devices]
    where = ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"
    if unlike or len(kinds) > 1:
        *first, last = unlike[1:] or [len(devices)] * (workers - 1)
        others = counted(last, "device") + " each" * bool(first)
        if set(first) - {last}:
            others = f"{', '.join(map(str, first))} and {last} devices"
        who = "the others" if first else "worker 1"
        what = f"{' and '.join(sorted(f'{kind}s' for kind in kinds))} " * (len(kinds) > 1)
        parts.append(f"worker 0 on {where}, {who} on {others}, {what}connected by {way}")
    elif workers > 1:
        parts.append(f"workers on {where}{' each' * (len(names) > 1)}, connected by {way}")
    else:
        parts.append(f"on {where}")
    return "; ".join(parts)


def in_words(given: Rule | Average) -> str:
    """Returns the name of a rule or average with the settings that differ from its defaults."""
    if not dataclasses.is_dataclass(given):
        return repr(given)
    values = {each.name: getattr(given, each.name) for each in dataclasses.fields(given)}
    if not all(isinstance(value, (int, float, str, type(None))) for value in values.values()):
        return repr(given)  # a setting is an optimizer, and the repr shows its settings
    told = [
        f"{each.name}={_shown(values[each.name])}"
        for each in dataclasses.fields(given)
        if each.repr and values[each.name] != each.default
    ]
    return type(given).__name__ + (f" ({', '.join(told)})" if told else "")


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def say(text: str) -> None:
    """Prints a line for the user."""
    print(f"tfpara: {text}", file=sys.stderr, flush=True)


def counted(number: int, what: str) -> str:
    """Returns a number of things in words, such as "1 row" or "2 rows"."""
    return f"{number} {what}{'s' if number != 1 else ''}"
