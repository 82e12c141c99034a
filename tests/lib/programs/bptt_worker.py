"""A worker that trains the small LSTM on its replicas' streams, and saves the result."""

import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

# Devices must be set before anything makes a tensor.
OPTIONS = json.loads(sys.argv[1])
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration() for _ in range(OPTIONS["local_devices"])],
)

sys.path.insert(0, str(Path(__file__).parents[1]))
import bptt_example

import tfpara


def main():
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(),
        sync_period=OPTIONS["sync_period"],
        devices=[f"CPU:{i}" for i in range(OPTIONS["local_devices"])],
        timeout_seconds=60,
        startup_timeout_seconds=60,
    )
    with strategy.scope():
        model = bptt_example.compiled()
    results = {f"initial_{i}": w for i, w in enumerate(model.get_weights())}
    model.fit(bptt_example.distributed(strategy), verbose=0)
    results |= {f"weight_{i}": w for i, w in enumerate(model.get_weights())}
    for i, variable in enumerate(bptt_example.states(model)):
        parts = strategy.experimental_local_results(variable.value)
        for replica, part in zip(strategy.local_replica_ids, parts, strict=True):
            results[f"state_{replica}_{i}"] = part.numpy()
    np.savez(OPTIONS["out"], **results)


if __name__ == "__main__":
    main()
