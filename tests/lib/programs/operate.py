"""Runs every operation of a strategy's collectives, eagerly and in a function.

Options (JSON): out (npz path), moved (the dtypes that are gathered and broadcast), and sent (those
that are broadcast alone; bfloat16 is saved as float32, which NumPy's files have). Worker r
gives r + 1 times the numbers 1, 2, …; results are saved under operation/dtype/….
"""

import json
import os
import sys
import time

import numpy as np
import tensorflow as tf

import tfpara

SUMMED = ("float32", "float64", "int32", "int64")


def mine(dtype, rank, shape):
    return tf.cast((rank + 1) * np.arange(1, 1 + np.prod(shape)).reshape(shape), dtype)


def main():
    options = json.loads(sys.argv[1])
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1, timeout_seconds=60)
    collectives = strategy.extended.links.collectives
    rank, size = collectives.rank, collectives.size
    results = {"scatters_well": collectives.scatters_well}

    def both(key, operation, *inputs):
        """Runs an operation eagerly, and twice in a function."""
        function = tf.function(lambda *tensors: operation(*tensors), autograph=False)
        found = {"eagerly": operation(*inputs), "function": function(*inputs)}
        found["again"] = function(*inputs)
        for way, value in found.items():
            for number, tensor in enumerate(tf.nest.flatten(value)):
                saved = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
                results[f"{key}/{way}/{number}"] = tf.cast(tensor, saved).numpy()

    for dtype in SUMMED:
        buffers = [mine(dtype, rank, [6 * size]), mine(dtype, rank, [2 * size])]
        both(f"all_reduce/{dtype}", lambda *b: collectives.all_reduce(b, "sum"), *buffers)
        both(f"reduce_scatter/{dtype}", lambda *b: collectives.reduce_scatter(b, "cut"), *buffers)
    rows = mine("int32", rank, [size, 2, 3])
    both("all_to_all/int32", lambda r: collectives.all_to_all(r, "turn"), rows)
    for dtype in options["moved"]:
        for shape in ([], [3], [2, 2]):
            value = mine(dtype, rank, shape)
            key = f"{dtype}/{len(shape)}"
            both(f"all_gather/{key}", lambda b: collectives.all_gather(b, "stack"), value)
            both(f"broadcast/{key}", lambda b: collectives.broadcast(b, "copy"), value)
    for dtype in options["sent"]:
        value = mine(dtype, rank, [3])
        both(f"broadcast/{dtype}", lambda b: collectives.broadcast(b, "send"), value)
    if collectives.all_reduce([], "none") or collectives.reduce_scatter([], "none"):
        raise RuntimeError("of no buffers there is a sum")

    @tf.function
    def loop():
        total = tf.constant([0.0])
        for _ in tf.range(3):
            total += collectives.all_reduce([total + float(rank + 1)], "in a loop")[0]
        return total

    results["loop"] = loop().numpy()
    for number, barrier in enumerate(
        (collectives.barrier, tf.function(lambda name: collectives.barrier("in function")))
    ):
        barrier(f"before {number}")
        if rank == 1:
            time.sleep(4.0)
        began = time.monotonic()
        barrier(f"after {number}")
        results[f"waited/{number}"] = time.monotonic() - began
    results["more_threads"] = more_threads(strategy)
    results |= gathered(strategy)
    np.savez(options["out"], **results)


def more_threads(strategy):
    """Returns how many threads are left by exchanges from Python."""
    control = strategy.extended.control.collectives
    control.barrier("warm up")
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        control.barrier("many")
    return len(os.listdir("/proc/self/task")) - before


def gathered(strategy):
    """Returns what `strategy.gather` gives or says for tensors that are longer on later workers."""
    rank = strategy.worker_index
    found = {}
    for dtype in ("float32", "bfloat16", "bool", "int8", "int64"):
        value = tf.cast(tf.reshape(tf.range(3 * rank), [3, rank]) % 2 + rank, dtype)
        found[dtype] = strategy.gather(value, axis=1).numpy().astype("float64")
    for name, value in (("shape", tf.zeros([2, 3 + rank])), ("string", tf.constant(["a"]))):
        try:
            strategy.gather(value, axis=0)
        except ValueError as error:
            found[name] = str(error)
    return {f"gathered/{name}": value for name, value in found.items()}


if __name__ == "__main__":
    main()
