"""Checks of arguments of both kinds of strategy, and the versions on which a run depends."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from tfpara import algorithms
from tfpara.algorithms.asgd import AsyncAverage
from tfpara.version import __version__
from tfpara.whole_number import LARGEST_COUNT, checked_whole

OLDEST_KERAS = 3, 12
# Within an epoch, fewer left-out minibatches than this are allowed: their share says little yet.
_FEW_LEFT_OUT = 10


def versions() -> dict[str, str]:
    """Returns the versions of the libraries on which the numbers of a run depend."""
    return {
        "tfpara version": __version__,
        "tensorflow version": tf.__version__,
        "keras version": keras.__version__,
        "numpy version": np.__version__,
    }


def check_libraries() -> None:
    """Raises ImportError if Keras is too old, ValueError if it does not compute by TensorFlow."""
    if tuple(map(int, keras.__version__.split(".")[:2])) < OLDEST_KERAS:
        oldest = ".".join(map(str, OLDEST_KERAS))
        raise ImportError(
            f"Keras {keras.__version__} is installed, and tfpara needs Keras {oldest} or later. "
            f"Install it: pip install 'keras>={oldest}'"
        )
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Keras has the backend {backend!r}, and tfpara needs the backend 'tensorflow'. Set "
            "KERAS_BACKEND=tensorflow in the environment, before Python imports keras."
        )


def checked_period(sync_period: int) -> int:
    """Returns the period if it is a whole number of at least 1, else raises ValueError."""
    if isinstance(sync_period, Mapping) or callable(sync_period):
        raise ValueError(
            f"sync_period={sync_period!r} must be a whole number of minibatches. For a period that "
            "changes give the first one here, and fit the callback "
            "tfpara.callbacks.SyncPeriod(...)."
        )
    return checked_whole("sync_period", sync_period, of="minibatches", at_most=LARGEST_COUNT)


def checked_nonfinite(nonfinite: str, share: float) -> None:
    """Raises ValueError unless `nonfinite` is "raise" or "skip", and the share in [0, 1]."""
    if nonfinite not in ("raise", "skip"):
        raise ValueError(
            f'nonfinite={nonfinite!r} must be "raise", which ends the run for a weight with NaN or '
            'Inf, or "skip", which leaves out minibatches that would bring them.'
        )
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0.0 <= share <= 1.0:
        raise ValueError(
            f"nonfinite_share={share!r} must be a number from 0 to 1: the share of an epoch's "
            "minibatches that may be left out."
        )


def too_many_left_out(left_out: float, of_epoch: float, share: float, is_over: bool) -> bool:
    """Returns whether more than a share of an epoch's minibatches were left out for NaN or Inf."""
    return left_out > share * of_epoch and (is_over or left_out >= _FEW_LEFT_OUT)


def checked_averages(
    averages: Mapping[str, AsyncAverage] | None, asynchronous: bool = False
) -> dict[str, AsyncAverage]:
    """Returns the averages if they are average objects under valid names, else raises.

    `asynchronous`: whether the strategy can start a mean, so that RunningThenMean makes sense.
    """
    kinds: tuple[type, ...] = algorithms.AVERAGES
    if asynchronous:
        kinds += (algorithms.RunningThenMean,)
    known = ", ".join(f"tfpara.{kind.__name__}(...)" for kind in kinds)
    if averages is None:
        return {}
    if not isinstance(averages, Mapping) or not all(isinstance(name, str) for name in averages):
        raise TypeError(
            f"averages={averages!r} must map names, which are yours to choose, to average objects: "
            f'averages={{"ema": tfpara.EMA(0.99)}}. There are: {known}.'
        )
    for name, average in averages.items():
        if not isinstance(average, (algorithms.Average, *kinds)):
            hint = ""
            if isinstance(average, type) and issubclass(average, (algorithms.Average, *kinds)):
                hint = ", but the class; write it with its arguments"
            elif isinstance(average, int | float):
                hint = f", but a number; write tfpara.EMA({average!r}) if it is to be the decay"
            elif isinstance(average, algorithms.RunningThenMean):
                hint = " of synchronous training: only tfpara.AsyncStrategy can start its mean"
            raise TypeError(
                f"averages[{name!r}]={average!r} is not an average object{hint}. There are: "
                f"{known}; or one of your own (tfpara.Average)."
            )
        if name in ("", "all", "global", "local"):
            what = "is taken" if name else "is empty"
            raise ValueError(f"averages: the name {name!r} {what}. Choose another.")
    return dict(averages)
