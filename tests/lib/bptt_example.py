"""A small LSTM and the streams of several replicas, for tests and the workers' program."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # `models`, where a worker starts elsewhere

import keras
import numpy as np
import tensorflow as tf

from models.lstm import lstm
from models.streaming import Streaming

DIM, CLASSES, STREAMS, T, STEPS = 3, 4, 5, 4, 8


def compiled(**options):
    model = lstm(DIM, CLASSES, layers=1, cells=6, projection=4, dense=0, streams=STREAMS, seed=3)
    model.compile(
        keras.optimizers.SGD(0.5, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="frame_accuracy")],
        jit_compile=False,  # Compiling takes longer than it saves.
        **options,
    )
    return model


def states(model):
    """Returns the state that the model carries, as Keras variables."""
    return [v for layer in model.layers if isinstance(layer, Streaming) for v in layer.states]


def replica_batches(replica):
    """Returns a replica's minibatches: inputs, labels and weights, each [STEPS, STREAMS, ...]."""
    rng = np.random.default_rng(replica)
    xs = rng.normal(size=(STEPS, STREAMS, T, DIM)).astype("float32")
    reset = (rng.uniform(size=(STEPS, STREAMS)) < 0.3).astype("float32")
    reset[0] = 1.0
    labels = rng.integers(0, CLASSES, (STEPS, STREAMS, T)).astype("int32")
    weights = (rng.uniform(size=(STEPS, STREAMS, T)) < 0.8).astype("float32")
    return {"frames": xs, "reset": reset}, labels, weights


def minibatch(replica, step, rows=STREAMS):
    return tf.nest.map_structure(lambda part: part[step][:rows], replica_batches(replica))


def dataset(replicas, steps=None):
    """Returns minibatch s of each replica in turn, for every step s.

    From step steps[replica] on, a replica's minibatches have no rows.
    """
    steps = steps or dict.fromkeys(replicas, STEPS)

    def elements():
        for step in range(max(steps[replica] for replica in replicas)):
            for replica in replicas:
                yield minibatch(replica, step, STREAMS if step < steps[replica] else 0)

    rows = STREAMS if len({steps[replica] for replica in replicas}) == 1 else None
    spec = (
        {
            "frames": tf.TensorSpec([rows, T, DIM], tf.float32),
            "reset": tf.TensorSpec([rows], tf.float32),
        },
        tf.TensorSpec([rows, T], tf.int32),
        tf.TensorSpec([rows, T], tf.float32),
    )
    return tf.data.Dataset.from_generator(elements, output_signature=spec)


def distributed(strategy, steps=None):
    return strategy.distribute_datasets_from_function(
        lambda _: dataset(strategy.local_replica_ids, steps)
    )


def averaged_by_hand(models, initial, sync_period):
    """Trains plain Keras models, one for each replica, and averages them every `sync_period`."""
    for model in models:
        model.set_weights(initial)
    for step in range(STEPS):
        for replica, model in enumerate(models):
            model.train_on_batch(*minibatch(replica, step))
        if (step + 1) % sync_period == 0 or step + 1 == STEPS:
            mean = [np.mean(ws, 0) for ws in zip(*(m.get_weights() for m in models), strict=True)]
            for model in models:
                model.set_weights(mean)
    return mean
