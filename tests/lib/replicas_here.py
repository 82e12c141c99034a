"""Replicas on logical devices of the test process, which train the network of `simulation`."""

import keras
import tensorflow as tf

import tfpara
from tests.lib import simulation

TAU = 3  # the sync period


def make(rule, replicas=2, **options):
    devices = [f"CPU:{k}" for k in range(replicas)]
    return tfpara.PeriodicSyncStrategy(rule, devices=devices, **{"sync_period": TAU, **options})


def clip(weight):
    """A constraint that somebody has written for himself."""
    return keras.ops.clip(weight, -0.3, 0.3)


# Those of `simulation.within`.
HIDDEN = {
    "kernel_constraint": keras.constraints.UnitNorm(axis=0),
    "bias_constraint": keras.constraints.NonNeg(),
}
OUTPUT = {"kernel_constraint": clip}


def network(
    strategy,
    seed=3,
    steps_per_execution=1,
    norm=False,
    constrained=False,
    optimizer=lambda: keras.optimizers.SGD(0.2, momentum=0.9),
):
    keras.utils.set_random_seed(seed)
    hidden, output = (HIDDEN, OUTPUT) if constrained else ({}, {})
    layers = [keras.Input((6,)), keras.layers.Dense(7, activation="tanh", **hidden)]
    layers += [keras.layers.BatchNormalization(momentum=0.9)] if norm else []
    with strategy.scope():
        model = keras.Sequential([*layers, keras.layers.Dense(5, **output)])
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
    return model


def data_of(strategy, minibatches):
    def examples():
        for step in range(max(map(len, minibatches))):
            for replica, sizes in enumerate(minibatches):
                size = sizes[step] if step < len(sizes) else 0
                yield simulation.batch(replica, step, size)

    spec = (tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int32))
    return strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_generator(examples, output_signature=spec)
    )


def of_replicas(strategy, model, variables=None):
    """Returns each replica's variables as a flat vector. None: the trainable ones."""
    variables = variables or model.trainable_variables
    variables = [strategy.experimental_local_results(v.value) for v in variables]
    return [simulation.flat([v[r].numpy() for v in variables]) for r in range(len(variables[0]))]
