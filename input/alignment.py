"""Phone times to one class per frame: three states to a phone."""

import numpy as np

from input.features import FRAME_LENGTH, FRAME_SHIFT

STATES = 3


def class_names(phones: list[str]) -> list[str]:
    """Names of the classes of `phones`: "a.0", "a.1", "a.2", and so on, in the order given."""
    return [f"{phone}.{state}" for phone in phones for state in range(STATES)]


def frame_labels(
    phones: list[tuple[float, str]],
    duration: float,
    num_frames: int,
    inventory: dict[str, int],
    first_middle: float = FRAME_LENGTH / 2,
) -> np.ndarray:
    """The class of each frame: that of its middle.

    A phone lasts until the next one starts, the last one until the end of the utterance, and is
    divided into three states of equal length.

    Args:
      phones: (start in seconds, name), ascending, the first at 0.
      duration: of the utterance, in seconds.
      num_frames: number of frames of 25 ms every 10 ms.
      inventory: number of each phone, from 0.
      first_middle: the first frame's middle, in seconds; by default that of its window.

    Returns:
      int32 [num_frames] of 3 * inventory[phone] + state.
    """
    starts = np.array([start for start, _ in phones])
    lengths = np.diff(np.append(starts, duration))
    numbers = np.array([inventory[name] for _, name in phones])
    middles = first_middle + FRAME_SHIFT * np.arange(num_frames)
    phone = np.searchsorted(starts, middles, side="right") - 1
    thirds = STATES * (middles - starts[phone]) / lengths[phone]
    state = np.clip(thirds.astype(np.int64), 0, STATES - 1)
    return (STATES * numbers[phone] + state).astype(np.int32)
