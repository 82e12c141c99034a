"""Turns phone times into one class for each frame; each phone has three states."""

import numpy as np

from input.features import FRAME_LENGTH, FRAME_SHIFT

STATES = 3


def class_names(phones: list[str]) -> list[str]:
    """Returns the names of the classes of `phones`, in this order: "a.0", "a.1", "a.2", "b.0", …"""
    return [f"{phone}.{state}" for phone in phones for state in range(STATES)]


def frame_labels(
    phones: list[tuple[float, str]],
    duration: float,
    num_frames: int,
    inventory: dict[str, int],
    first_middle: float = FRAME_LENGTH / 2,
) -> np.ndarray:
    """Returns the class of each frame, which is the class at the frame's middle.

    A phone lasts until the next one starts, and the last one until the end of the utterance. Each
    phone is divided into three states of equal length.

    Args:
      phones: (start in seconds, name), ascending, the first at 0.
      duration: length of the utterance, in seconds.
      num_frames: number of frames; a frame starts every 10 ms.
      inventory: the number of each phone, from 0.
      first_middle: time of the first frame's middle, in seconds; by default the middle of its 25 ms
        window.

    Returns:
      int32 [num_frames]: 3 * inventory[phone] + state of each frame.
    """
    starts = np.array([start for start, _ in phones])
    lengths = np.diff(np.append(starts, duration))
    numbers = np.array([inventory[name] for _, name in phones])
    middles = first_middle + FRAME_SHIFT * np.arange(num_frames)
    phone = np.searchsorted(starts, middles, side="right") - 1
    thirds = STATES * (middles - starts[phone]) / lengths[phone]
    state = np.clip(thirds.astype(np.int64), 0, STATES - 1)
    return (STATES * numbers[phone] + state).astype(np.int32)
