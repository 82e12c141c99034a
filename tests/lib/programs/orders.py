"""Prints the order of a dataset that is shuffled by a seed of its own."""

import json
import sys

import tensorflow as tf

import tfpara

if json.loads(sys.argv[1])["workers"] > 1:
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1)
    assert strategy.num_workers > 1
print("order", *tf.data.Dataset.range(50).shuffle(50, seed=3).as_numpy_iterator())
