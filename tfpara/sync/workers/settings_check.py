"""The comparison of settings between workers before they train together."""

from __future__ import annotations

from collections.abc import Mapping

from tfpara.cluster.call_site import Purpose
from tfpara.sync.workers.json_exchange import everyones
from tfpara.sync.workers.meetings import Control

# Advice if workers have different numbers of devices. "Start all of them with the same" would not
# help then, because the user may be unable to give all workers equally many devices.
_OF_DEVICES = (
    ". Where numbers of devices differ, start a worker for each device, or leave elastic= out."
)


class FingerprintError(ValueError):
    """Workers were started with different settings."""


def agree(settings: Mapping[str, object], control: Control, purpose: Purpose) -> None:
    """Compares the workers' settings; raises FingerprintError if they differ. All call it."""
    everyone = everyones(settings, control, purpose)
    differing = differences({f"worker {i}": theirs for i, theirs in enumerate(everyone)})
    if differing:
        raise FingerprintError(
            "the workers were started with different settings; start all of them with the same. "
            + differing
            + _OF_DEVICES * ("devices per worker" in differing)
        )


def differences(settings: Mapping[str, Mapping[str, object]]) -> str:
    """Returns which settings differ, as in "tau: worker 0 has 1, worker 1 has 2; …"; "" if none."""
    first = next(iter(settings.values()))
    return "; ".join(
        f"{key}: " + ", ".join(f"{who} has {theirs.get(key)!r}" for who, theirs in settings.items())
        for key in sorted(set().union(*settings.values()))
        if any(theirs.get(key) != first.get(key) for theirs in settings.values())
    )
