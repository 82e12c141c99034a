"""Simulation of many replicas in one process, to study a rule without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpara import cluster, program
from tfpara.algorithms.rule import Rule
from tfpara.sync.data.dealt import to_replicas
from tfpara.sync.strategy import PeriodicSyncStrategy
from tfpara.sync.tensorflow.devices import check_threads
from tfpara.whole_number import checked_whole


class _Simulation(PeriodicSyncStrategy):
    _is_simulated = True

    def datasets_by_number(
        self, minibatches: Callable[[int, int], tf.data.Dataset]
    ) -> tf.distribute.DistributedDataset:
        if self.extended.balance is not None:
            minibatches = to_replicas(minibatches)
        return super().datasets_by_number(minibatches)


def simulate(
    num_replicas: int, rule: Rule, *, sync_period: int, **options: Any
) -> PeriodicSyncStrategy:
    """Returns a strategy of N replicas on logical CPU devices of this process.

    The replicas take the same steps as N workers would, with the same rule and the same division of
    the data. Only the order of additions differs. Everything that works on a cluster works here:
    `fit`, callbacks, averages, checkpoints. Speed and waiting are not simulated. The replicas share
    this machine's cores and memory; each has its own weights, gradients and slots.

    Call this function before anything else of TensorFlow.

    Args:
        num_replicas: N ≥ 1.
        rule: as `PeriodicSyncStrategy` takes it.
        sync_period: τ, minibatches of each replica between two syncs.
        **options: the other arguments of `PeriodicSyncStrategy`, except `devices` and
            `device_sync_period`, because each replica stands for a worker with one device.
            `balance` can be the record of a run of N workers; the replicas then repeat its blocks.

    Raises:
        ValueError: N is no whole number of at least 1; or TF_CONFIG, or an engine's variables, say
            that this is one of several workers.
        RuntimeError: TensorFlow has made its devices already.

    Example:
        >>> strategy = simulate(4, tfpara.BMUF(), sync_period=20)
        >>> strategy.num_replicas
        4
    """
    program.explain_errors()
    num_replicas = checked_whole("num_replicas", num_replicas)
    if cluster.read().num_workers > 1:
        raise ValueError(
            "simulate() is for one process, and this one is of several workers by TF_CONFIG or an "
            "engine's variables. Start it alone, or use PeriodicSyncStrategy."
        )
    if options.get("device_sync_period") is not None:
        raise ValueError(
            f"device_sync_period={options['device_sync_period']!r}: simulated replicas are workers "
            "of one device each. Leave it out."
        )
    make_devices(num_replicas)
    devices = [f"CPU:{number}" for number in range(num_replicas)]
    return _Simulation(rule, sync_period=sync_period, devices=devices, **options)


def make_devices(count: int) -> None:
    """Divides the CPU into at least `count` logical devices.

    Raises:
        RuntimeError: TensorFlow has made fewer already, or has started with a single thread, which
            is not enough for more than 8.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    there = tf.config.get_logical_device_configuration(cpu) or []
    check_threads(count)
    if max(1, len(there)) >= count:
        return
    try:
        configuration = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(cpu, configuration)
    except RuntimeError as error:
        raise RuntimeError(
            f"{count} logical CPU devices are needed, and TensorFlow has made {max(1, len(there))} "
            "already. Call simulate() before any tensor, variable, dataset, layer, metric, model "
            "or optimizer is made. Of several simulations in a process make the one with the most "
            "replicas first, whose devices the others take; or give each a process of its own."
        ) from error
