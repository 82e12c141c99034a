"""The log of an epoch and of `evaluate`, which is the same on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfpara.keras_model import array_of, flat_log
from tfpara.sync.keras.replacing import Method, for_ours
from tfpara.typing import Json, Nest


@for_ours
def of_all_workers(
    read: Method, strategy: Any, model: keras.Model, logs: dict[str, Nest]
) -> dict[str, Nest]:
    """Returns the log of an epoch, the same on all workers.

    Keras uses the metrics' values only if the last step returned exactly the metrics; otherwise its
    log is what that step returned on this worker. The log returned here has the metrics of all
    replicas. Other values that the workers' last steps returned are averaged over the workers.
    """
    if not isinstance(logs, dict):
        return read(model, logs)
    extended = strategy.extended
    with extended.metrics.reading(model):
        metrics = flat_log(model.get_metrics_result())
    # Only methods that the user has written can return values that are not metrics. All workers
    # have the same model, so either all of them exchange such values or none does.
    if not has_own(model, ("train_step", "test_step", "compute_metrics")):
        return metrics  # not `logs`, which are empty in a resumed epoch that has no step left
    purpose = extended.call_site.of_metric()
    # Reading metrics waits for all workers. But a model may have no metrics, and then other workers
    # may still be training. So all open blocks are closed before the exchange.
    extended.models.finish_blocks(purpose)
    returned = strategy.everyones(_plain(logs), purpose)
    if not any(returned):
        return metrics
    log = {}
    for name in {name: None for of_worker in returned for name in of_worker}:
        values = [of_worker[name] for of_worker in returned if name in of_worker]
        counted = name in metrics and not _counted_nothing(model, name, metrics)
        log[name] = metrics[name] if counted else _mean(values)
    return log


def has_own(model: keras.Model, names: Sequence[str]) -> bool:
    """Returns whether a model has its own version of one of these methods of `keras.Model`."""
    own = (getattr(getattr(model, name), "__func__", None) for name in names)
    return any(one is not getattr(keras.Model, name) for one, name in zip(own, names, strict=True))


def _plain(logs: dict[str, Json]) -> dict[str, Json]:
    """Returns logs as numbers, texts and lists, with nested dicts flattened."""

    def plain(value: Any) -> Any:  # tensors hold texts as bytes
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    lists = {name: array_of(value).tolist() for name, value in flat_log(logs).items()}
    return {name: keras.tree.map_structure(plain, value) for name, value in lists.items()}


def _mean(values: list[Nest]) -> Nest:
    """Returns the mean of numbers or arrays; the first value if they have no mean."""
    try:
        mean = np.mean(np.array(values, np.float64), 0)
    except (TypeError, ValueError):
        return values[0]
    return mean if mean.ndim else float(mean)


def _counted_nothing(model: keras.Model, name: str, metrics: dict[str, Nest]) -> bool:
    """Returns whether no step has updated the metric of this name.

    Keras makes a metric "loss" for each compiled model, which a custom step may leave out. All
    workers read a metric's variables together, if its value, which is the same on all, is 0.
    """
    if np.any(array_of(metrics[name])):
        return False
    of_name = [metric for metric in model.metrics if metric.name == name]
    # The metrics given to `compile` are inside a container metric, and `model.metrics` lists only
    # the container. So if no listed metric has the name `name`, the container is taken. It is found
    # by its own name, which is no key of the log.
    of_name = of_name or [metric for metric in model.metrics if metric.name not in metrics]
    values = (array_of(keras.ops.convert_to_tensor(v)) for m in of_name for v in m.variables)
    return not any(map(np.any, values))
