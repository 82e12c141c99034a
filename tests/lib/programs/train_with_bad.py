"""A worker of two devices that trains with minibatches that have NaN, or no rows in their place.

Options (JSON): kinds (each as `bad_minibatches` has it), runs (pairs of a rule and an optimizer),
share, elastic (whether members may change), out (npz path of each kind; `{kind}` and `{rank}` are
replaced).
"""

import json
import pathlib
import sys

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from bad_minibatches import OPTIMIZERS, RULES, by_epoch, compiled, state  # noqa: E402

import tfpara  # noqa: E402


def main():
    options = json.loads(sys.argv[1])
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, devices)
    for kind in options["kinds"]:
        train(kind, options)


def train(kind, options):
    elastic, found = tfpara.Elastic(min_workers=1, grace_seconds=5.0), {}
    for rule, optimizer in options["runs"]:
        strategy = tfpara.PeriodicSyncStrategy(
            RULES[rule],
            sync_period=2,
            devices=["CPU:0", "CPU:1"],
            timeout_seconds=60,
            elastic=elastic if options.get("elastic") else None,
            nonfinite="raise" if kind == "empty" else "skip",
            nonfinite_share=options.get("share", 0.2),
        )
        model = compiled(strategy, OPTIMIZERS[optimizer])
        log = model.fit(by_epoch(strategy, kind), epochs=2, verbose=0).history
        run = f"{rule}, {optimizer}"
        found |= {f"{run}, {k}": value for k, value in enumerate(state(strategy, model))}
        found |= {f"{run}, log {name}": values for name, values in log.items()}
    out = options["out"].replace("{kind}", kind).replace("{rank}", str(strategy.worker_index))
    np.savez(out, **found)


if __name__ == "__main__":
    main()
