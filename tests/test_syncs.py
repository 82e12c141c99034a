"""Overlapped, fragmented and hierarchical syncs in one process of several logical CPU devices.

The reference is `distributed/stepwise_simulation.py`, NumPy alone.
"""

import keras
import numpy as np
import pytest
import simulation
import stepwise_simulation
import tensorflow as tf

import tfpara

RULES = {
    "bsp": (tfpara.BSP(), "bsp", {}),
    "bmuf": (tfpara.BMUF(0.6, 1.2), "nesterov", {"eta": 0.6, "zeta": 1.2}),
    "classical": (tfpara.BMUF(0.5, nesterov=False), "classical", {"eta": 0.5}),
    "easgd": (tfpara.EASGD(0.2), "elastic", {"alpha": 0.2}),
    "diloco": (tfpara.DiLoCo(0.8, 0.6), "nesterov", {"eta": 0.6, "zeta": 0.8}),
}
TAU = 3
EVEN = [[4] * 10] * 2
UNEVEN = [[4] * 10, [4] * 6 + [2]]
# The runs of variables, of 42, 7, 35 and 5 elements, that are fragments.
RUNS = {1: [(0, 4)], 2: [(0, 1), (1, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}


def make(rule, replicas=2, **options):
    devices = [f"CPU:{k}" for k in range(replicas)]
    return tfpara.PeriodicSyncStrategy(rule, devices=devices, **{"sync_period": TAU, **options})


def network(strategy, seed=3, steps_per_execution=1, norm=False):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(7, activation="tanh")]
    layers += [keras.layers.BatchNormalization(momentum=0.9)] if norm else []
    with strategy.scope():
        model = keras.Sequential([*layers, keras.layers.Dense(5)])
        model.compile(
            keras.optimizers.SGD(0.2, momentum=0.9),
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


def of_replicas(strategy, model):
    """The flat weights of each replica."""
    variables = [strategy.experimental_local_results(v.value) for v in model.trainable_variables]
    return [simulation.flat([v[r].numpy() for v in variables]) for r in range(len(variables[0]))]


def check(name, minibatches, epochs=2, delay=0, fragments=1, steps_per_execution=1, **options):
    rule, kind, settings = RULES[name]
    strategy = make(rule, len(minibatches), fragments=fragments, **options)
    model = network(strategy, steps_per_execution=steps_per_execution)
    initial = model.get_weights()
    fit = model.fit(data_of(strategy, minibatches), epochs=epochs, verbose=0)
    devices = {}
    if options.get("device_sync_period"):
        devices = {"device_period": options["device_sync_period"], "devices": len(minibatches)}
    local, points, loss = stepwise_simulation.simulate(
        kind,
        initial,
        minibatches,
        TAU,
        lambda: simulation.Momentum(0.2, 0.9),
        epochs=epochs,
        delay=delay,
        runs=RUNS[fragments],
        **devices,
        **settings,
    )
    for got, want in zip(of_replicas(strategy, model), local, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    center = points[name == "diloco"]  # its W is the point that replicas go on from
    with strategy.weights(model, "global"):
        np.testing.assert_allclose(simulation.flat(model.get_weights()), center, atol=1e-5)
    np.testing.assert_allclose(fit.history["loss"][-1], loss, rtol=1e-5)
    return strategy, model


@pytest.mark.parametrize("name", RULES)
def test_an_overlapped_sync_is_merged_where_the_next_begins(name):
    check(name, UNEVEN, overlap=True, delay=TAU)


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_a_delay_is_that_many_steps(delay, steps_per_execution):
    check("bmuf", EVEN, overlap=delay, delay=delay, steps_per_execution=steps_per_execution)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("fragments", [2, 4])
def test_fragments_take_turns(fragments, delay):
    check("bmuf", UNEVEN, fragments=fragments, overlap=delay or False, delay=delay)


@pytest.mark.parametrize("name", ["bsp", "easgd"])
@pytest.mark.parametrize("overlap", [False, True])
def test_devices_of_a_worker_are_averaged_more_often(name, overlap):
    check(name, UNEVEN, device_sync_period=1, overlap=overlap, delay=TAU if overlap else 0)
