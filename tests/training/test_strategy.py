"""The strategy in one process of several logical CPU devices.

The reference is N plain Keras models, each trained alone on its replica's minibatches, whose
weights are averaged by hand every τ steps.
"""

import contextlib
import functools
import gc
import math
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tfpara.steps import without_tuner
from tfpara.sync.tensorflow import device_datasets
from tfpara.sync.tensorflow.run_steps import predicting

pytestmark = pytest.mark.latest

DEVICES = ["CPU:0", "CPU:1"]
STEPS, TAU, BATCH = 8, 3, 6


def make_strategy(rule=None, sync_period=TAU, devices=DEVICES, **options):
    return tfpara.PeriodicSyncStrategy(
        rule or tfpara.BSP(), sync_period=sync_period, devices=devices, **options
    )


def dense_model():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    )


def batchnorm_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dense(4),
        ]
    )


def recurrent_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Lambda(lambda x: tf.cast(tf.abs(x) * 5, tf.int32) % 11),
            keras.layers.Embedding(11, 3),
            keras.layers.LSTM(5),
            keras.layers.Dense(4),
        ]
    )


def frozen_model():
    model = dense_model()
    model.layers[0].trainable = False
    return model


MODELS = {
    "dense": (dense_model, lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "clipped": (dense_model, lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.05)),
    "global-clipped": (dense_model, lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05)),
    "accumulated": (
        dense_model,
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    ),
    "batchnorm": (batchnorm_model, lambda: keras.optimizers.SGD(0.1)),
    "muon": (dense_model, lambda: keras.optimizers.Muon(0.02)),
    "recurrent": (recurrent_model, lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "frozen": (frozen_model, lambda: keras.optimizers.SGD(0.1)),
}


def compiled(build, optimizer, **options):
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], **options)
    return model


def replica_batches(replica, steps=STEPS, batch=BATCH):
    rng = np.random.default_rng(replica)
    x = rng.normal(size=(steps, batch, 6)).astype("float32")
    return x, rng.integers(0, 4, (steps, batch)).astype("int32")


def distributed(strategy, steps=STEPS, batch=BATCH):
    """Minibatch s of replica r is the s-th that replica_batches(r) gives."""
    of_replicas = [replica_batches(r, steps, batch) for r in strategy.local_replica_ids]
    x = np.stack([xs for xs, _ in of_replicas], 1).reshape(-1, batch, 6)
    y = np.stack([ys for _, ys in of_replicas], 1).reshape(-1, batch)
    return strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices((x, y))
    )


def averaged_by_hand(build, optimizer, initial, replicas, tau=TAU, steps=STEPS):
    """N plain Keras models, which take turns in one; returns the weights they have in common."""
    model = compiled(build, optimizer)
    model.set_weights(initial)
    model.optimizer.build(model.trainable_variables)
    slots = [v.numpy() for v in model.optimizer.variables]
    states = [(initial, slots)] * replicas
    for step in range(steps):
        for replica, (weights, slots) in enumerate(states):
            model.set_weights(weights)
            for variable, value in zip(model.optimizer.variables, slots, strict=True):
                variable.assign(value)
            x, y = replica_batches(replica)
            model.train_on_batch(x[step], y[step])
            slots = [v.numpy() for v in model.optimizer.variables]
            states[replica] = model.get_weights(), slots
        if (step + 1) % tau == 0 or step + 1 == steps:
            mean = [np.mean(ws, 0) for ws in zip(*(w for w, _ in states), strict=True)]
            states = [(mean, slots) for _, slots in states]
    return mean


def trained_alone(build, optimizer, initial, replica):
    """The weights of a plain Keras model that is trained on a replica's minibatches."""
    model = compiled(build, optimizer)
    model.set_weights(initial)
    for x, y in zip(*replica_batches(replica), strict=True):
        model.train_on_batch(x, y)
    return model.get_weights()


def components(strategy, model):
    """The weights of each local replica."""
    variables = [strategy.experimental_local_results(v.value) for v in model.weights]
    return [[v[r].numpy() for v in variables] for r in range(len(variables[0]))]


# Frozen weights, and AdamW: test_compiling_anew_and_freezing_start_a_new_block.
@pytest.mark.nightly_cases("clipped-3", "global-clipped-1", "muon-1")
@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    [("clipped", 3), ("global-clipped", 1), ("accumulated", 3), ("batchnorm", 3), ("recurrent", 1)]
    + [("muon", 1)],
)
def test_equals_plain_keras_models_averaged_by_hand(name, steps_per_execution):
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS[name], steps_per_execution=steps_per_execution)
    initial = model.get_weights()
    model.fit(distributed(strategy), verbose=0)
    expected = averaged_by_hand(*MODELS[name], initial, replicas=2)
    for replica in components(strategy, model):
        for got, want in zip(replica, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)
    assert strategy.statistics().steps == STEPS
    assert strategy.statistics().syncs == 3


@pytest.mark.one_version
def test_frozen_weights_do_not_move_by_a_bit():
    strategy = make_strategy(devices=["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        model = compiled(*MODELS["frozen"])
    before = [w.copy() for w in model.layers[0].get_weights()]
    model.fit(distributed(strategy), epochs=3, verbose=0)
    for replica in components(strategy, model):
        for got, want in zip(replica, before, strict=False):
            np.testing.assert_array_equal(got, want)


@pytest.mark.quick
def test_one_replica_is_plain_keras_bit_for_bit():
    strategy = make_strategy(devices=["CPU:0"])
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    initial = model.get_weights()
    history = model.fit(distributed(strategy), epochs=2, verbose=0).history
    plain = compiled(*MODELS["dense"])
    plain.set_weights(initial)
    x, y = replica_batches(0)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    expected = plain.fit(data, epochs=2, verbose=0).history
    assert history == expected
    for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_bsp_at_every_step_with_plain_sgd_is_stock_gradient_averaging():
    x = np.random.default_rng(1).normal(size=(48, 6)).astype("float32")
    y = np.random.default_rng(2).integers(0, 4, 48)
    results = []
    weights = None
    for strategy in (make_strategy(sync_period=1), tf.distribute.MirroredStrategy(DEVICES)):
        with strategy.scope():
            model = compiled(dense_model, lambda: keras.optimizers.SGD(0.3))
        if weights is None:
            weights = model.get_weights()
        model.set_weights(weights)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
        history = model.fit(data, epochs=3, verbose=0).history
        results.append((model.get_weights(), history))
    (ours, our_history), (stock, stock_history) = results
    for got, want in zip(ours, stock, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(our_history["loss"], stock_history["loss"], rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.one_version
def test_easgd_without_elasticity_is_independent_models():
    strategy = make_strategy(tfpara.EASGD(0.0))
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    initial = model.get_weights()
    model.fit(distributed(strategy), verbose=0)
    for replica, weights in enumerate(components(strategy, model)):
        alone = trained_alone(*MODELS["dense"], initial, replica)
        for got, want in zip(weights, alone, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)
    with strategy.weights(model, "global"):
        for got, want in zip(model.get_weights(), initial, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.one_version
def test_averages_do_not_touch_training():
    weights = []
    for averages in (None, {"ema": tfpara.EMA(0.9), "ma": tfpara.MA()}):
        strategy = make_strategy(tfpara.BMUF(), averages=averages)
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = compiled(*MODELS["dense"])
        model.fit(distributed(strategy), epochs=2, verbose=0)
        weights.append(components(strategy, model))
    for plain, averaged in zip(*weights, strict=True):
        for a, b in zip(plain, averaged, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
@pytest.mark.one_version
def test_sharded_state_gives_the_same_numbers_in_less_memory():
    """Three replicas and 104 weights: the parts are padded."""
    seen, held = [], []
    for aggregation in ("replicated", "sharded"):
        averages = {"ema": tfpara.EMA(0.9, num_updates=True), "ma": tfpara.MA()}
        strategy = make_strategy(
            tfpara.SlowMo(slow_momentum=0.5),
            devices=["CPU:0", "CPU:1", "CPU:2"],
            averages=averages,
            aggregation=aggregation,
        )
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = compiled(*MODELS["batchnorm"])
        model.fit(distributed(strategy), epochs=2, verbose=0)
        weights = components(strategy, model)
        model.layers[0].set_weights([w + 0.01 for w in model.layers[0].get_weights()])
        model.layers[0].trainable = False  # The next synchronizer adopts this one's state.
        with strategy.scope():
            model.compile("sgd", model.loss)
        model.fit(distributed(strategy), verbose=0)
        for which in ("global", "ema", "ma"):
            with strategy.weights(model, which):
                weights += components(strategy, model)
        seen.append(weights)
        held.append(strategy.extended.models.synchronizers[0].graph.global_state.nbytes)
        assert strategy.statistics().distance > 0
    for replicated, sharded in zip(*seen, strict=True):
        for a, b in zip(replicated, sharded, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-7)
    assert len(held[1]) == 3
    assert max(held[1]) < held[0][0] / 3 + 200


@pytest.mark.nightly
@pytest.mark.one_version
def test_the_distance_of_the_replicas_is_that_before_the_sync():
    def trained(synchronised, **options):
        keras.utils.set_random_seed(3)
        strategy = make_strategy(**options)
        if not synchronised:
            strategy.set_sync_period(None)
        with strategy.scope():
            model = compiled(*MODELS["dense"])
        model.fit(distributed(strategy, steps=TAU), verbose=0)
        return strategy, model

    replicas = components(*trained(synchronised=False))
    apart = [np.concatenate([w.ravel() for w in own]) for own in replicas]
    mean = np.mean(apart, 0)
    want = np.linalg.norm(apart[0] - mean) / np.linalg.norm(mean)
    for aggregation in ("replicated", "sharded"):
        strategy, _ = trained(synchronised=True, aggregation=aggregation)
        got = strategy.statistics().distance
        np.testing.assert_allclose(got, want, rtol=1e-4, err_msg=aggregation)


def final_weights(rule, optimizer, **options):
    strategy = make_strategy(rule, **options)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = compiled(dense_model, optimizer)
    model.fit(distributed(strategy), epochs=2, verbose=0)
    return components(strategy, model)


@pytest.mark.nightly
@pytest.mark.one_version
def test_outer_optimizers_are_the_rules_that_they_generalise():
    """The others: tests/unit/algorithms/test_outer.py."""
    rules = tfpara.DiLoCo(1.0, 0.8), tfpara.BMUF(0.8)
    for first, second in zip(
        *(final_weights(rule, lambda: keras.optimizers.SGD(0.05)) for rule in rules), strict=True
    ):
        for a, b in zip(first, second, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_bmuf_adam_filters_the_moments():
    """Against the rule's own functions, applied by hand to plain Keras models."""
    rule = tfpara.BMUFAdam(0.6).resolve(2)
    got = final_weights(rule, lambda: keras.optimizers.Adam(0.01), aggregation="sharded")
    keras.utils.set_random_seed(3)
    models = [compiled(dense_model, lambda: keras.optimizers.Adam(0.01)) for _ in range(2)]
    strategy = make_strategy(rule)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        initial = dense_model().get_weights()

    def flat(tensors):
        return np.concatenate([np.ravel(t) for t in tensors]).astype("float64")

    for model in models:
        model.set_weights(initial)
        model.optimizer.build(model.trainable_variables)
    state = rule.init(flat(initial))
    moments = rule.init_moments(0.0 * state.global_model, 0.0 * state.global_model)
    taken = 0
    for _ in range(2):
        for start in range(0, STEPS, TAU):
            steps = min(TAU, STEPS - start)
            for replica, model in enumerate(models):
                for x, y in list(zip(*replica_batches(replica), strict=True))[start : start + TAU]:
                    model.train_on_batch(x, y)
            taken += steps
            mean = np.mean([flat(m.get_weights()) for m in models], 0)
            slots = [
                [flat(getattr(m.optimizer, kind)) for m in models]
                for kind in ("_momentums", "_velocities")
            ]
            part = steps / TAU
            before, state = state, rule.update(state, mean, 2, part)
            point = rule.broadcast(before, state)
            moments = rule.update_moments(
                moments,
                *(np.mean(s, 0) for s in slots),
                steps=float(steps),
                iterations=float(taken),
                num_replicas=2,
                share=part,
            )
            for model in models:
                at = 0
                for variable, m, v in zip(
                    model.trainable_variables,
                    model.optimizer._momentums,
                    model.optimizer._velocities,
                    strict=True,
                ):
                    for target, values in zip(
                        (variable, m, v), (point, moments.momentum, moments.velocity), strict=True
                    ):
                        size = int(np.prod(variable.shape))
                        target.assign(values[at : at + size].reshape(variable.shape))
                    at += size
    for replica in got:
        for a, b in zip(replica, models[0].get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.nightly
def test_bmuf_adam_refuses_what_it_cannot_filter():
    with pytest.raises(ValueError, match="Leave local_state out"):
        make_strategy(tfpara.BMUFAdam(), local_state="average")
    strategy = make_strategy(tfpara.BMUFAdam())
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    with pytest.raises(ValueError, match="keras.optimizers.Adam"):
        model.fit(distributed(strategy), verbose=0)
    with strategy.scope():
        model.compile(keras.optimizers.Adam(gradient_accumulation_steps=2), model.loss)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2: BMUFAdam takes each"):
        model.fit(distributed(strategy), verbose=0)
    with strategy.scope():
        model.layers[0].quantize("float8")
        model.compile(keras.optimizers.Adam(), model.loss)
    with pytest.raises(ValueError, match="no moments of '.*scale', and BMUFAdam filters"):
        model.fit(distributed(strategy), verbose=0)


@pytest.mark.nightly
@pytest.mark.parametrize("early", [True, False])
def test_slots_are_found_whether_or_not_the_optimizer_is_built(early):
    """state_bytes before fit needs the synchronizer, and that the slots that fit would make."""
    strategy = make_strategy(local_state="reset")
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    if early:
        assert sum(strategy.state_bytes(model)) > 0
    model.fit(distributed(strategy, steps=TAU), verbose=0)
    for slot in model.optimizer.momentums:
        assert not slot.numpy().any()


@pytest.mark.nightly
@pytest.mark.one_version
def test_bmuf_adam_filters_what_is_left_after_freezing():
    strategy = make_strategy(tfpara.BMUFAdam())
    with strategy.scope():
        model = compiled(dense_model, lambda: keras.optimizers.Adam(0.01))
    model.fit(distributed(strategy), verbose=0)
    model.layers[0].trainable = False
    with strategy.scope():
        model.compile(model.optimizer, model.loss)
    losses = model.fit(distributed(strategy), epochs=2, verbose=0).history["loss"]
    assert np.isfinite(losses).all()


@pytest.mark.nightly
def test_weights_are_not_set_while_others_are_shown():
    strategy = make_strategy(tfpara.EASGD(0.2))
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    before = components(strategy, model)
    with (
        pytest.raises(ValueError, match="would be lost at the end of the with block"),
        strategy.weights(model, "global"),
    ):
        model.set_weights([0 * w for w in model.get_weights()])
    with (
        pytest.raises(ValueError, match="would be lost at the end of the with block"),
        strategy.weights(model, "global"),
    ):
        model.fit(distributed(strategy), verbose=0)
    for kept, now in zip(before, components(strategy, model), strict=True):
        for a, b in zip(kept, now, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_weights_are_shown_within_others():
    strategy = make_strategy(tfpara.EASGD(0.2), averages={"ma": tfpara.MA()})
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)

    def seen(which=None):
        with strategy.weights(model, which) if which else contextlib.nullcontext():
            return components(strategy, model)

    def assert_equal(got, want):
        for of_device, others in zip(got, want, strict=True):
            for a, b in zip(of_device, others, strict=True):
                np.testing.assert_array_equal(a, b)

    own, alone = seen(), {which: seen(which) for which in ("global", "ma")}
    for outer, inner in (("global", "ma"), ("ma", "global"), ("global", "global")):
        with strategy.weights(model, outer):
            assert_equal(seen(inner), alone[inner])
            assert_equal(seen("local"), own)
            assert_equal(seen(), alone[outer])
            with pytest.raises(ValueError, match="would be lost at the end of the with block"):
                model.set_weights([0 * w for w in model.get_weights()])
        assert_equal(seen(), own)
    with strategy.weights(model, "local"):
        model.set_weights([0 * w for w in model.get_weights()])


@pytest.mark.nightly
@pytest.mark.one_version
def test_training_weights_of_another_model_than_the_tracked_one_is_refused():
    strategy = make_strategy()
    with strategy.scope():
        models = [compiled(*MODELS["dense"]) for _ in range(2)]
    strategy.track(models[0])

    def step(x, y):
        for model in models:
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(model(x, training=True) ** 2)
            weights = model.trainable_variables
            pairs = zip(tape.gradient(value, weights), weights, strict=True)
            model.optimizer.apply_gradients(pairs)

    @tf.function
    def train(iterator):
        strategy.run(step, args=next(iterator))

    with pytest.raises(ValueError, match="drift apart"):
        train(iter(distributed(strategy)))


@pytest.mark.nightly
@pytest.mark.one_version
def test_outer_optimizers_count_syncs_alike_in_every_part():
    """Also after some weights were set: sharded state stays what replicated is."""
    ends = []
    for aggregation in ("replicated", "sharded"):
        rule = tfpara.Outer(lambda: keras.optimizers.Adam(0.1))
        strategy = make_strategy(rule, aggregation=aggregation)
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = compiled(dense_model, lambda: keras.optimizers.SGD(0.05))
        model.fit(distributed(strategy), verbose=0)
        model.layers[0].set_weights(model.layers[0].get_weights())
        model.fit(distributed(strategy), verbose=0)
        ends.append(model.get_weights())
    for a, b in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_auto_shards_models_of_16_megabytes():
    kinds = []
    for width in (8, 2100):
        strategy = make_strategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
            model.compile("sgd", "mse")
        synchronizer = strategy.synchronizer_of(model)
        kinds.append(len(synchronizer.graph.global_state.nbytes))
    assert kinds == [1, 2]


@pytest.mark.nightly
def test_without_a_period_replicas_stay_apart_until_one_is_broadcast():
    strategy = make_strategy(tfpara.BMUF(0.9), averages={"ema": tfpara.EMA(0.9)})
    with strategy.scope():
        model = compiled(*MODELS["batchnorm"])
    initial = model.get_weights()
    strategy.set_sync_period(None)
    model.fit(distributed(strategy), epochs=2, verbose=0)
    assert strategy.statistics().syncs == 0
    apart = components(strategy, model)
    assert np.abs(apart[0][0] - apart[1][0]).max() > 1e-3
    with strategy.weights(model, "global"):
        np.testing.assert_array_equal(model.get_weights()[0], initial[0])
    strategy.broadcast_replica(model, 1)
    strategy.set_sync_period(TAU)
    for replica in components(strategy, model):
        for got, want in zip(replica, apart[1], strict=True):
            np.testing.assert_array_equal(got, want)
    with strategy.weights(model, "ema"):
        np.testing.assert_array_equal(model.get_weights()[0], apart[1][0])
    model.fit(distributed(strategy), verbose=0)
    assert strategy.statistics().syncs == 3
    with pytest.raises(ValueError, match="replica=2 is not one of 0 … 1"):
        strategy.broadcast_replica(model, 2)


@pytest.mark.one_version
def test_the_sync_period_changes_between_epochs():
    strategy = make_strategy(sync_period=1)
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    periods = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: strategy.set_sync_period([1, 4, 8][epoch])
    )
    model.fit(distributed(strategy), epochs=3, verbose=0, callbacks=[periods])
    assert strategy.statistics().syncs == 8 + 2 + 1
    assert strategy.sync_period == 8
    inside = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: strategy.set_sync_period(2)
    )
    with pytest.raises(ValueError, match="inside a block"):
        model.fit(distributed(strategy), verbose=0, callbacks=[inside])


@pytest.mark.one_version
def test_averages_of_one_replica_are_those_of_plain_sgd():
    """Polyak averaging: EMA and MA of the weights after each step of a single plain run."""
    strategy = make_strategy(
        tfpara.BSP(),
        sync_period=1,
        devices=["CPU:0"],
        averages={"ema": tfpara.EMA(0.8, num_updates=True), "ma": tfpara.MA()},
    )
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    plain = compiled(*MODELS["dense"])
    plain.set_weights(model.get_weights())
    model.fit(distributed(strategy), epochs=2, verbose=0)
    shadows = [tf.Variable(w) for w in plain.get_weights()]
    count = tf.Variable(0.0)
    reference = tf.train.ExponentialMovingAverage(0.8, count)
    reference.apply(shadows)  # Creates its own shadows; nothing moves.
    seen = []
    for x, y in 2 * list(zip(*replica_batches(0), strict=True)):
        plain.train_on_batch(x, y)
        seen.append(plain.get_weights())
        for shadow, weight in zip(shadows, seen[-1], strict=True):
            shadow.assign(weight)
        reference.apply(shadows)
        count.assign_add(1.0)
    with strategy.weights(model, "ema"):
        for got, shadow in zip(model.get_weights(), shadows, strict=True):
            np.testing.assert_allclose(got, reference.average(shadow).numpy(), atol=1e-6)
    with strategy.weights(model, "ma"):
        for got, *models in zip(model.get_weights(), *seen, strict=True):
            np.testing.assert_allclose(got, np.mean(models, 0), atol=1e-6)


def test_every_replica_has_dropout_masks_of_its_own():
    strategy = make_strategy(tfpara.EASGD(0.0), sync_period=100)
    with strategy.scope():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dropout(0.5)(keras.layers.Dense(64)(inputs)))
        model.compile(keras.optimizers.SGD(0.0), "mse")
    ones = tf.data.Dataset.from_tensors((np.ones((4, 6), "float32"), np.ones((4, 64), "float32")))

    @tf.function
    def masks(iterator):
        return strategy.run(lambda x, _: model(x, training=True) == 0.0, args=next(iterator))

    iterator = iter(strategy.experimental_distribute_dataset(ones))
    first, second = strategy.experimental_local_results(masks(iterator))
    assert 0.3 < np.mean(first) < 0.7
    assert 0.3 < np.mean(first.numpy() != second.numpy()) < 0.7


def test_mixed_precision_trains_and_keeps_replicas_together():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        strategy = make_strategy(tfpara.BMUF())
        with strategy.scope():
            model = compiled(*MODELS["dense"])
        losses = model.fit(distributed(strategy), epochs=12, verbose=0).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert losses[-1] < losses[0]
    first, second = components(strategy, model)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_a_first_batch_that_replicas_share_unevenly():
    """Keras looks at it to build the metrics."""
    with make_strategy(devices=["CPU:0", "CPU:1"]).scope():
        model = compiled(*MODELS["dense"])
    x, y = np.ones((5, 6), "float32"), np.zeros(5, "int32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    mean = model.evaluate(data, verbose=0)
    one = model.evaluate(data.unbatch().batch(4), verbose=0)
    np.testing.assert_allclose(mean, one, rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_independent_replicas_do_otherwise_than_plain_keras_is_said_once(capsys, replicas):
    layers = keras.layers
    with make_strategy(tfpara.BSP(), 1, devices=DEVICES[:replicas]).scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.BatchNormalization(synchronized=True), layers.Dense(4)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        model.compile(keras.optimizers.SGD(0.01), loss)
    x, y = np.ones((8, 6), "float32"), np.arange(8) % 4
    for _ in range(2):
        model.fit(x, y, batch_size=4, verbose=0)
    said = capsys.readouterr().err
    assert said.count('reduction="sum"') == said.count("all_reduce in a") == replicas - 1


def test_a_step_of_a_summed_loss_and_no_more_is_told_of_its_size(capsys):
    """With N replicas it is 1/N of plain Keras'; optimizers' own all_reduce is not remarked on."""
    x, y = replica_batches(0, 1, 8)
    moved = []
    for strategy in (make_strategy(tfpara.BSP(), 1), None):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
            model.compile(keras.optimizers.SGD(0.01), loss)
        before = model.get_weights()[0]
        model.fit(x[0], y[0], batch_size=8, verbose=0)
        moved.append(model.get_weights()[0] - before)
    np.testing.assert_allclose(len(DEVICES) * moved[0], moved[1], atol=1e-5)
    said = capsys.readouterr().err
    assert 'reduction="sum"' in said and "all_reduce" not in said


@pytest.mark.nightly
def test_a_first_batch_of_which_this_worker_has_no_row():
    """Keras would divide by the number of its rows where it builds loss and metrics."""
    x = np.random.default_rng(1).normal(size=(4, 3, 2)).astype("float32")
    y = np.arange(4)
    trained = []
    for strategy in (make_strategy(tfpara.BSP(), devices=["CPU:0"]), None):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.layers.LSTM(4, kernel_regularizer="l2"), keras.layers.Dense(4)]
            model = keras.Sequential([keras.Input((3, 2)), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        if strategy:
            empty = tf.data.Dataset.from_tensors((x[:0], y[:0]))
            whole = empty.concatenate(rows)
            rows = strategy.distribute_datasets_from_function(lambda _, data=whole: data)
        history = model.fit(rows, verbose=0).history
        trained.append([*model.get_weights(), history["loss"], history["accuracy"]])
    for ours, plain in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


class WithOptionalInput(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs["a"] if inputs["b"] is None else inputs["a"] + inputs["b"])


def test_an_input_that_is_none():
    """With plain SGD and a period of 1 the replicas take the steps of the whole batches."""
    x = np.random.default_rng(1).normal(size=(9, 6)).astype("float32")
    with make_strategy(tfpara.BSP(), 1).scope():
        model = WithOptionalInput()
        model.dense.build((None, 6))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    kernel, bias = model.get_weights()

    def batches():
        for begin in range(0, 9, 4):
            rows = x[begin : begin + 4]
            yield {"a": rows, "b": None}, rows[:, :2]

    model.fit({"a": x, "b": None}, x[:, :2], batch_size=9, verbose=0)
    model.fit(batches(), verbose=0)
    for rows in (x, x[:4], x[4:8], x[8:]):
        error = rows @ kernel + bias - rows[:, :2]
        kernel -= 0.2 / error.size * rows.T @ error
        bias -= 0.2 / error.size * error.sum(0)
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.get_weights()[1], bias, rtol=1e-5, atol=1e-6)


def test_uneven_batches_and_dataset_splitting_use_every_sample_once():
    """A plain dataset whose last batch leaves one replica empty-handed."""
    strategy = make_strategy(devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    x = np.random.default_rng(1).normal(size=(25, 6)).astype("float32")
    y = np.random.default_rng(2).integers(0, 4, 25)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
    assert strategy.statistics().samples == 50
    assert np.isfinite(history["loss"]).all()
    with strategy.weights(model, "global"):
        loss, accuracy = model.evaluate(data, verbose=0)
        logits = model.predict(data, verbose=0)
    assert logits.shape == (25, 4)
    plain = compiled(*MODELS["dense"])
    with strategy.weights(model, "global"):
        plain.set_weights(model.get_weights())
    np.testing.assert_allclose(logits, plain.predict(x, verbose=0), atol=1e-5)
    np.testing.assert_allclose(
        [loss, accuracy], plain.evaluate(x, y, verbose=0, batch_size=25), rtol=1e-5
    )
    np.testing.assert_allclose(history["val_loss"][-1], loss, rtol=1e-6)


@pytest.mark.one_version
def test_minibatches_of_a_fixed_size_are_not_dropped_at_an_uneven_end():
    strategy = make_strategy(devices=["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    x, y = replica_batches(0, 7)  # for three replicas
    assert tf.data.Dataset.from_tensor_slices((x, y)).element_spec[0].shape == (BATCH, 6)
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices((x, y))
    )
    model.fit(data, verbose=0)
    assert strategy.statistics().samples == 7 * BATCH
    as_dicts = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices({"x": x, "y": y})
    )
    sizes = []
    for element in as_dicts:
        parts = strategy.experimental_local_results(element)
        sizes.append([len(part["x"]) for part in parts])
    assert sizes == [[6, 6, 6], [6, 6, 6], [6, 0, 0]]


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["shared", "own", "whole"])
def test_a_pass_owns_the_dataset_that_it_reads(monkeypatch, way):
    """Its thread that reads ahead asks that dataset for types; freed, it ended the process."""
    strategy = make_strategy()
    data = tf.data.Dataset.from_tensor_slices(np.arange(96.0)).batch(4)
    made = []

    def remembering(self, options, *more):
        found = with_options(self, options, *more)
        if options.experimental_distribute.num_devices is not None:  # by the iterator itself
            made.append(weakref.ref(found))
        return found

    with_options = tf.data.Dataset.with_options
    monkeypatch.setattr(tf.data.Dataset, "with_options", remembering)
    if way == "own":
        distributed = strategy.distribute_datasets_from_function(lambda _: data)
    else:
        with predicting() if way == "whole" else contextlib.nullcontext():
            distributed = strategy.experimental_distribute_dataset(data)
    iterator = iter(distributed)
    next(iterator)
    del distributed
    gc.collect()
    assert len(made) == 1 and made[0]() is not None
    del iterator
    gc.collect()
    assert made[0]() is None


@pytest.mark.nightly
def test_passes_over_data_of_one_kind_share_their_functions(monkeypatch):
    """They read each row once all the same, also where passes over two datasets take turns."""
    made = []
    make = device_datasets._Generator.__init__

    def noted(self, *args, **kwargs):
        made.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(device_datasets._Generator, "__init__", noted)
    strategy = make_strategy()
    kinds = np.arange(24.0), np.arange(24), np.arange(100.0, 124.0)
    datasets = [
        strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(4))
        for rows in kinds
    ]
    for _ in range(2):
        read = [[] for _ in kinds]
        for elements in zip(*datasets, strict=True):
            for rows, element in zip(read, elements, strict=True):
                parts = strategy.experimental_local_results(element)
                assert [len(part) for part in parts] == [2, 2]
                rows += np.concatenate(parts).tolist()
        assert read == [list(rows) for rows in kinds]
        assert len(made) <= 4  # two types of numbers on two devices; other tests may have made them


def test_datasets_go_without_the_tuner_unless_they_ask_for_it():
    data = tf.data.Dataset.range(3)
    assert without_tuner(data).options().autotune.enabled is False
    options = tf.data.Options()
    options.autotune.enabled = True
    assert without_tuner(data.with_options(options)).options().autotune.enabled is True


def test_numpy_arrays_and_early_stopping_work_as_in_keras():
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    x, y = replica_batches(0, 1, 40)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1)
    history = model.fit(x[0], y[0], batch_size=8, epochs=9, callbacks=[stop], verbose=0)
    assert len(history.history["loss"]) == 2


@pytest.mark.nightly
def test_rates_and_counts_are_numbers_to_python():
    """As in callbacks that log the rate."""
    strategy = make_strategy(devices=DEVICES)
    with strategy.scope():
        model = compiled(dense_model, lambda: keras.optimizers.Adam(0.25))
    optimizer, seen = model.optimizer, []
    looks = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(
            (float(optimizer.learning_rate), int(optimizer.iterations))
        )
    )
    halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(distributed(strategy), epochs=2, verbose=0, callbacks=[halves, looks])
    assert seen == [(0.125, STEPS), (0.0625, 2 * STEPS)]
    assert float(optimizer.learning_rate) == 0.0625 and int(optimizer.iterations) == 2 * STEPS
    (loss,) = (metric for metric in model.metrics if metric.name == "loss")
    assert int(loss.count) == float(loss.count) == 2 * STEPS * BATCH
    with pytest.raises(TypeError, match="calar"):
        float(model.weights[0])


@pytest.mark.nightly
def test_run_eagerly():
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS["dense"], run_eagerly=True)
    initial = model.get_weights()
    model.fit(distributed(strategy), verbose=0)
    expected = averaged_by_hand(*MODELS["dense"], initial, replicas=2)
    for got, want in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_custom_loop():
    strategy = make_strategy()
    with strategy.scope():
        model = dense_model()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer)
    initial = model.get_weights()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    strategy.track(model)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))

    @tf.function
    def train(iterator):
        strategy.run(step, args=next(iterator))

    iterator = iter(distributed(strategy))
    for _ in range(STEPS):
        train(iterator)
    strategy.synchronize()
    expected = averaged_by_hand(*MODELS["dense"], initial, replicas=2)
    for got, want in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.one_version
def test_weights_are_swapped_exactly_and_per_device():
    strategy = make_strategy(tfpara.EASGD(0.3), averages={"ema": tfpara.EMA(0.5)})
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    before = components(strategy, model)
    assert np.abs(before[0][0] - before[1][0]).max() > 1e-4
    seen = {}
    with pytest.raises(RuntimeError, match="inside"), strategy.weights(model, "ema"):
        raise RuntimeError("inside")
    for which in ("global", "local", "ema"):
        with strategy.weights(model, which):
            seen[which] = components(strategy, model)
        for kept, now in zip(before, components(strategy, model), strict=True):
            for a, b in zip(kept, now, strict=True):
                np.testing.assert_array_equal(a, b)
    for which in ("global", "ema"):
        np.testing.assert_array_equal(seen[which][0][0], seen[which][1][0])
    assert np.abs(seen["global"][0][0] - seen["ema"][0][0]).max() > 1e-5
    np.testing.assert_array_equal(seen["local"][1][0], before[1][0])


@pytest.mark.one_version
def test_weights_set_by_the_user_become_the_global_model():
    strategy = make_strategy(tfpara.BMUF(0.9), averages={"ema": tfpara.EMA(0.5)})
    with strategy.scope():
        model = compiled(dense_model, lambda: keras.optimizers.SGD(0.1))
    initial = model.get_weights()
    model.fit(distributed(strategy), verbose=0)
    first = model.get_weights()
    model.set_weights(initial)
    model.fit(distributed(strategy), verbose=0)
    for a, b in zip(first, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_compiling_anew_and_freezing_start_a_new_block():
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    initial = model.get_weights()
    model.layers[0].trainable = False
    build, optimizer = frozen_model, lambda: keras.optimizers.AdamW(0.01)
    with strategy.scope():
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(distributed(strategy), verbose=0)
    expected = averaged_by_hand(build, optimizer, initial, replicas=2)
    for replica in components(strategy, model):
        for got, want in zip(replica, sorted_like(model, expected), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.one_version
def test_freezing_without_compiling_anew_starts_a_new_block():
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    before = model.get_weights()
    model.layers[0].trainable = False
    # This asks for the syncs of the model before its first step, as `Checkpoint` does.
    asks = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: strategy.state_bytes(model))
    model.fit(distributed(strategy), callbacks=[asks], verbose=0)
    assert strategy.statistics().steps == 2 * STEPS
    one, other = components(strategy, model)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    moved = [np.abs(a - b).max() > 0.0 for a, b in zip(one, before, strict=True)]
    assert moved == [False, False, True, True]


@pytest.mark.nightly
@pytest.mark.one_version
def test_compiling_anew_keeps_the_global_model_and_the_counts():
    strategy = make_strategy(tfpara.EASGD(0.2), averages={"ma": tfpara.MA()})
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    before = {}
    for which in ("global", "ma"):
        with strategy.weights(model, which):
            before[which] = model.get_weights()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    model.fit(distributed(strategy, steps=1), verbose=0)
    with strategy.weights(model, "global"):
        local = [np.mean(ws, 0) for ws in zip(*components(strategy, model), strict=True)]
        for got, want in zip(local, before["global"], strict=True):
            assert np.abs(got - want).max() < 0.1  # One sync further, not a replica's model.
    assert strategy.statistics().steps == STEPS + 1
    assert strategy.statistics().syncs == 4


@pytest.mark.nightly
def test_another_kind_of_optimizer_leaves_the_point_from_which_replicas_start():
    """The default block momentum of Adam is lower in the first syncs, so the global model moves."""
    strategy = make_strategy(tfpara.BMUF(), devices=["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        model = compiled(dense_model, lambda: keras.optimizers.SGD(0.1))
    model.fit(distributed(strategy), verbose=0)
    (former,) = strategy.extended.models.synchronizers
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), model.loss)
    synchronizer = strategy.synchronizer_of(model)
    assert synchronizer is not former
    rules = [each.graph.global_state.rule.last() for each in (former, synchronizer)]
    assert rules[0].warmup != rules[1].warmup
    for now, before, local in zip(
        synchronizer.broadcast_point(), former.broadcast_point(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(now, before, atol=1e-6)
        np.testing.assert_allclose(now, local, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.one_version
@pytest.mark.parametrize("independent", [False, True])
def test_a_layer_that_is_frozen_has_one_set_of_weights(independent):
    """Of EASGD's replicas that of the global model; of independent ones that of the first."""
    strategy = make_strategy(tfpara.EASGD(0.2))
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    if independent:
        strategy.set_sync_period(None)
        model.fit(distributed(strategy), verbose=0)
    with strategy.weights(model, "local" if independent else "global"):
        want = model.get_weights()
    model.layers[0].trainable = False
    for train_again in (False, True):
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.fit(distributed(strategy), verbose=0)
        one, other = components(strategy, model)
        if not train_again:
            for got in (one, other):
                np.testing.assert_array_equal(got[0], want[0])
            assert np.abs(one[2] - other[2]).max() > 0.0
        with strategy.weights(model, "global"):
            for a, b in zip(*components(strategy, model), strict=True):
                np.testing.assert_array_equal(a, b)
        model.layers[0].trainable = True


def sorted_like(model, weights):
    """Weights of frozen_model() in the order of `model.weights`, which freezing does not change."""
    by_shape = {w.shape: w for w in weights}
    return [by_shape[tuple(v.shape)] for v in model.weights]


@pytest.mark.one_version
@pytest.mark.quick
def test_nan_on_one_replica_is_an_error_that_names_it_and_reaches_nobody_else():
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    good = components(strategy, model)[0]
    strategy.experimental_local_results(model.layers[1].bias.value)[1].assign(np.full(4, np.nan))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        strategy.synchronize()
    assert "replica 1 (worker 0) has NaN or Inf in weight" in str(error.value)
    assert model.layers[1].bias.path in str(error.value)
    for a, b in zip(good, components(strategy, model)[0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_nan_in_statistics_or_averaged_slots_is_an_error():
    strategy = make_strategy(local_state="average")
    with strategy.scope():
        model = compiled(batchnorm_model, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    model.fit(distributed(strategy), verbose=0)
    for variable in (model.layers[1].moving_mean, model.optimizer.variables[-1]):
        other, component = strategy.experimental_local_results(variable.value)
        good = component.numpy()
        component.assign(np.full(component.shape, np.inf))
        with pytest.raises(tf.errors.InvalidArgumentError, match="replica 1 .* has NaN or Inf"):
            strategy.synchronize()
        assert np.isfinite(other.numpy()).all()
        component.assign(good)


class Masked(keras.layers.Layer):
    """Adds a mask of huge numbers, or infinite ones, to what softmax gets."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def build(self, shape):
        start = keras.initializers.Constant(self.value)
        self.mask = self.add_weight(shape=(8,), initializer=start, trainable=False, name="mask")

    def call(self, x):
        masked = x[:, :, None] + keras.ops.where(keras.ops.arange(8) < 3, 0.0, self.mask)
        return keras.ops.softmax(masked)[:, :, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("value", [float(np.finfo("float32").min), -math.inf], ids=["huge", "inf"])
@pytest.mark.parametrize("device_sync_period", [None, 1])
def test_state_of_huge_numbers_that_does_not_move_is_no_error(value, device_sync_period):
    strategy = make_strategy(device_sync_period=device_sync_period)
    with strategy.scope():
        layers = [keras.layers.Dense(8), Masked(value), keras.layers.Dense(4)]
        model = compiled(
            lambda: keras.Sequential([keras.Input((6,)), *layers]),
            lambda: keras.optimizers.SGD(0.1),
        )
    model.fit(distributed(strategy), verbose=0)
    for weights in components(strategy, model):
        assert all(np.isfinite(w).all() for w in (*weights[:2], *weights[3:]))
        np.testing.assert_array_equal(weights[2], np.full(8, value, "float32"))


@pytest.mark.nightly
def test_a_block_whose_sample_weights_are_all_0_is_synced():
    """Momentum, and decay, move the replicas in it."""
    strategy = make_strategy(sync_period=4)
    with strategy.scope():
        model = dense_model()
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    x, y = replica_batches(0, 2 * STEPS)
    weight = np.ones(y.shape, "float32")
    weight[STEPS:] = 0.0
    flat = [a.reshape(-1, *a.shape[2:]) for a in (x, y, weight)]
    model.fit(*flat[:2], sample_weight=flat[2], batch_size=2 * BATCH, shuffle=False, verbose=0)
    assert strategy.statistics().syncs == 2
    with strategy.weights(model, "global"):
        want = model.get_weights()
    for weights in components(strategy, model):
        for a, b in zip(weights, want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
@pytest.mark.parametrize("period", [None, 1, 2])
@pytest.mark.parametrize("weight", [100.0, 1.0, 0.001])
def test_small_sample_weights_give_each_device_its_share(period, weight):
    """One device has target 0, and the other one target 1."""
    devices = ["CPU:0", "CPU:1"]
    strategy = make_strategy(sync_period=2, device_sync_period=period, devices=devices)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.1), loss)
    x, y = np.ones((8, 1), "float32"), np.float32([[0], [0], [1], [1]] * 2)
    data = tf.data.Dataset.from_tensor_slices((x, y, np.full(8, weight, "float32"))).batch(4)
    model.fit(data, verbose=0)
    # Each step moves w by 0.2 (target - w), so after two steps the devices have 0 and 0.36.
    np.testing.assert_allclose(layer.kernel.numpy(), [[0.18]], rtol=1e-5)


@pytest.mark.nightly
def test_rounding_weights_of_float64_is_told(capsys):
    strategy = make_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, dtype="float64")])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(distributed(strategy), verbose=0)
    assert "weights of float64" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.one_version
def test_averages_start_again_from_a_weight_that_is_set():
    strategy = make_strategy(averages={"e": tfpara.EMA(0.5, zero_debias=True), "ma": tfpara.MA()})
    with strategy.scope():
        model = compiled(dense_model, lambda: keras.optimizers.SGD(0.0))
    model.fit(distributed(strategy), verbose=0)
    for bias in ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]):
        model.layers[1].bias.assign(bias)
        _expect_averages_equal_to_the_model(strategy, model)
    model.fit(distributed(strategy), verbose=0)
    _expect_averages_equal_to_the_model(strategy, model)


def _expect_averages_equal_to_the_model(strategy, model):
    expected = model.get_weights()
    for which in ("e", "ma"):
        with strategy.weights(model, which):
            for got, want in zip(model.get_weights(), expected, strict=True):
                np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.one_version
def test_the_average_of_a_layer_that_is_trained_later_begins_with_its_weights():
    ema = tfpara.EMA(0.9, num_updates=False, zero_debias=True)
    strategy = make_strategy(averages={"e": ema, "ma": tfpara.MA()})
    with strategy.scope():
        model = compiled(frozen_model, lambda: keras.optimizers.SGD(0.0))
    for fits in range(3):
        if fits == 1:
            model.layers[0].trainable = True
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.0), model.loss)
        model.fit(distributed(strategy), verbose=0)
        _expect_averages_equal_to_the_model(strategy, model)


class HandWritten(keras.Sequential):
    """Updates its weights without an optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for g, v in zip(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True
        ):
            v.value.assign_sub(0.1 * g)
        return {"loss": loss}


@pytest.mark.nightly_cases("tf.function", "assigned")
@pytest.mark.parametrize("way", ["method", "tf.function", "assigned"])
def test_a_hand_written_train_step_is_synced(way):
    strategy, kind = make_strategy(), HandWritten
    if way == "tf.function":
        step = tf.function(HandWritten.train_step, autograph=False)
        kind = type("Decorated", (HandWritten,), {"train_step": step})
    with strategy.scope():
        layers = dense_model().layers
        model = compiled(
            lambda: kind([keras.Input((6,)), *layers]), lambda: keras.optimizers.SGD(0.1)
        )
    if way == "assigned":
        model.train_step = functools.partial(model.train_step)
    initial = model.get_weights()
    model.fit(distributed(strategy), verbose=0)
    expected = averaged_by_hand(dense_model, lambda: keras.optimizers.SGD(0.1), initial, replicas=2)
    for replica in components(strategy, model):
        for got, want in zip(replica, expected, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_custom_step_may_branch_and_return_nothing():
    """With an unknown batch size, which empties a replica, and AutoGraph."""
    strategy = make_strategy()
    with strategy.scope():
        total = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    data = tf.data.Dataset.from_tensor_slices(np.arange(5, dtype="float32")).batch(2)

    def step(x):
        if tf.reduce_sum(x) > 2.0:
            total.assign_add(tf.reduce_sum(x))

    @tf.function
    def run(batch):
        strategy.run(step, args=(batch,))

    for batch in strategy.experimental_distribute_dataset(data):
        run(batch)
    assert float(total.read_value()) == 3.0 + 4.0


class WithWeight(keras.layers.Layer):
    """A layer with a trainable weight, which it does not use."""

    def __init__(self, dtype):
        super().__init__()
        self.other = self.add_weight(shape=(2,), dtype=dtype, initializer="ones", name="other")

    def call(self, x):
        return x


def model_with_weight(dtype):
    return keras.Sequential([keras.Input((6,)), WithWeight(dtype), keras.layers.Dense(4)])


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (dense_model, {"use_ema": True}, "use_ema=True"),
        (lambda: model_with_weight("int32"), {}, "other' is of int32, and a sync averages"),
        (lambda: model_with_weight("complex64"), {}, "other' is of complex64"),
    ],
)
def test_what_cannot_work_is_refused(build, options, message):
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(build, lambda: keras.optimizers.SGD(0.1, **options))
    with pytest.raises(ValueError, match=message):
        model.fit(distributed(strategy), verbose=0)


@pytest.mark.one_version
def test_a_metric_that_says_no_aggregation_is_refused():
    """A variable of booleans is refused at once: resetting it would fail in TensorFlow."""
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS["dense"])
        metric = keras.metrics.SparseCategoricalAccuracy()
        metric.add_variable((), "zeros", aggregation="none", name="last")
        with pytest.raises(ValueError, match="seen.* is of bool"):
            keras.metrics.Mean().add_variable((), "zeros", dtype="bool", name="seen")
        model.compile("sgd", model.loss, metrics=[metric])
    for call in (model.fit, metric.variables[-1].numpy):
        with pytest.raises(ValueError, match='last.* has aggregation="none"'):
            call(*[distributed(strategy)] * (call == model.fit))


def with_new_head(model, units=4):
    """A model of the layers of another one but the last, which is new."""
    layers = [*model.layers[:-1], keras.layers.Dense(units)]
    return keras.Sequential([keras.Input((6,)), *layers])


@pytest.mark.nightly
@pytest.mark.one_version
def test_models_that_share_weights_are_refused():
    strategy = make_strategy()
    with strategy.scope():
        model = compiled(*MODELS["dense"])
        other = compiled(lambda: with_new_head(model), MODELS["dense"][1])
    model.fit(distributed(strategy), verbose=0)
    with (
        pytest.raises(ValueError, match="has no 'global' weights of its own"),
        strategy.weights(other, "global"),
    ):
        pass
    with pytest.raises(ValueError, match=r"shares weights with another.* strategy.forget\(other\)"):
        other.fit(distributed(strategy), verbose=0)


@pytest.mark.nightly
@pytest.mark.parametrize(("rule", "way"), [(None, "forgotten"), (tfpara.EASGD(0.0), "deleted")])
@pytest.mark.one_version
def test_a_new_head_is_trained_on_layers_that_were_trained_before(rule, way):
    """EASGD leaves the layers apart, and they begin again at the former global model."""
    strategy = make_strategy(rule)
    with strategy.scope():
        former = compiled(*MODELS["dense"])
    former.fit(distributed(strategy), verbose=0)
    with strategy.weights(former, "global"):
        initial = former.get_weights()
    with strategy.scope():
        model = compiled(lambda: with_new_head(former), MODELS["dense"][1])
    initial = [*initial[:-2], *model.get_weights()[-2:]]
    if way == "forgotten":
        strategy.forget(former)
    else:
        del former
    model.fit(distributed(strategy), verbose=0)
    assert strategy.statistics().steps == 2 * STEPS
    plain = lambda: with_new_head(dense_model()), MODELS["dense"][1], initial
    if rule is None:
        expected = [averaged_by_hand(*plain, replicas=2)] * 2
    else:
        expected = [trained_alone(*plain, replica) for replica in range(2)]
    for found, of_replica in zip(components(strategy, model), expected, strict=True):
        for value, want in zip(found, of_replica, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [tfpara.BMUF(0.5), tfpara.EASGD(0.3)], ids=str)
@pytest.mark.one_version
def test_frozen_layers_of_another_model_are_saved_as_the_new_head_was_trained_on_them(
    rule, tmp_path
):
    strategy = make_strategy(rule)
    with strategy.scope():
        former = compiled(*MODELS["dense"])
    former.fit(distributed(strategy), verbose=0)
    with strategy.weights(former, "global"):
        center = former.get_weights()[0]
    former.trainable = False
    with strategy.scope():
        model = compiled(lambda: with_new_head(former), MODELS["dense"][1])
    model.fit(distributed(strategy), verbose=0)
    of_replicas = [own[:-2] for own in components(strategy, model)]
    for one, other in zip(*of_replicas, strict=True):
        np.testing.assert_array_equal(one, other)
    with strategy.weights(model, "global"):
        wanted = model.get_weights()
    # The momentum of BMUF has taken the layers beyond their global weights.
    assert np.array_equal(wanted[0], center) == (rule != tfpara.BMUF(0.5))
    model.save(tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras", compile=False)
    for found, want in zip(saved.get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(found, want)


@pytest.mark.nightly
def test_forgotten_replicas_go_on_from_the_global_model():
    strategy = make_strategy(tfpara.EASGD(0.3), averages={"ema": tfpara.EMA(0.5)})
    with strategy.scope():
        model = compiled(*MODELS["dense"])
        never = compiled(*MODELS["dense"])
    model.fit(distributed(strategy), verbose=0)
    with strategy.weights(model, "global"):
        expected = model.get_weights()
    with strategy.weights(model, "ema"), pytest.raises(ValueError, match="inside strategy.weights"):
        strategy.forget(model)
    asks = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: strategy.forget(model))
    with pytest.raises(ValueError, match="in a callback of fit"):
        never.fit(distributed(strategy), verbose=0, callbacks=[asks])
    strategy.forget(model)
    strategy.forget(model)  # nothing happens
    for found in components(strategy, model):
        for value, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(value, want)
    syncs = strategy.statistics().syncs
    # The syncs of the step that was compiled are those of what is forgotten.
    model.fit(distributed(strategy), verbose=0)
    assert strategy.statistics().syncs == syncs + 3
    (last,) = strategy.extended.models.synchronizers
    assert last.graph.statistics().syncs == 3


@pytest.mark.nightly
def test_a_loop_whose_models_are_forgotten_tracks_them_anew():
    strategy = make_strategy()
    with strategy.scope():
        models = [dense_model(), dense_model()]
        optimizer = keras.optimizers.SGD(0.1)

    def step(x, y):
        weights = models[0].trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((models[0](x) - models[1](x)) ** 2)
        optimizer.apply(tape.gradient(loss, weights), weights)

    batch = next(iter(distributed(strategy)))
    for _ in range(2):
        strategy.track(models)
        strategy.run(step, args=batch)
        strategy.forget(models[1])
        assert not strategy.extended.models.synchronizers
        with pytest.raises(ValueError, match=r"strategy.track\(model\)"):
            strategy.run(step, args=batch)


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_deleted_model_goes_while_the_loop_of_another_is_traced():
    strategy = make_strategy()

    def loop():
        with strategy.scope():
            model, optimizer = dense_model(), keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
        strategy.track(model)

        def step(x, y):
            weights = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            optimizer.apply(tape.gradient(loss, weights), weights)

        run = tf.function(lambda *batch: strategy.run(step, args=batch))
        for batch in distributed(strategy):
            run(*batch)

    for _ in range(3):  # the former's last block is open
        loop()
        assert len(strategy.extended.models.synchronizers) == 1
    strategy.synchronize()
    assert strategy.statistics().steps == 3 * STEPS
    assert strategy.statistics().syncs == 3 * 3


@pytest.mark.nightly
def test_models_that_are_deleted_do_not_stay():
    strategy = make_strategy()
    models, optimizers = [], []
    for _ in range(3):
        with strategy.scope():
            model = compiled(*MODELS["dense"])
        model.fit(distributed(strategy), verbose=0)
        if not models:
            model.evaluate(distributed(strategy), verbose=0)
        models.append(weakref.ref(model))
        optimizers.append(weakref.ref(model.optimizer))
        assert len(strategy.extended.models.synchronizers) <= 2
    strategy.synchronize()
    assert strategy.statistics().steps == 3 * STEPS
    del model
    gc.collect()
    assert [each() for each in models] == [None] * 3
    assert optimizers[0]() is None


@pytest.mark.nightly
@pytest.mark.one_version
def test_a_part_of_a_trained_model_has_its_weights():
    strategy = make_strategy(averages={"ema": tfpara.EMA(0.5)})
    with strategy.scope():
        inner = compiled(*MODELS["batchnorm"])
        inner.layers[0].trainable = False
        outer = compiled(lambda: keras.Sequential([keras.Input((6,)), inner]), MODELS["dense"][1])
    outer.fit(distributed(strategy), verbose=0)
    for which in ("global", "ema"):
        with strategy.weights(outer, which):
            expected = inner.get_weights()
        with strategy.weights(inner, which):
            found = inner.get_weights()
        for value, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(value, want)
    assert any((a != b).any() for a, b in zip(found, inner.get_weights(), strict=True))


@pytest.mark.parametrize(
    ("rule", "options", "error", "message"),
    [
        ("bmuf", {}, TypeError, r"Write tfpara.BMUF\(\), not its name"),
        (tfpara.BMUF, {}, TypeError, r"write tfpara.BMUF\(\) with parentheses"),
        (None, {"sync_period": 0}, ValueError, "sync_period=0 must be a whole number"),
        (None, {"sync_period": 2.5}, ValueError, "sync_period=2.5"),
        (None, {"sync_period": {0: 5}}, ValueError, r"callback tfpara.callbacks.SyncPeriod"),
        (None, {"sync_period": 2**62}, ValueError, "sync_period=4611686018427387904 is above"),
        (None, {"local_state": "drop"}, ValueError, "local_state='drop' is not one of auto"),
        (None, {"averages": {"ema": 0.9}}, TypeError, r"averages\['ema'\]=0.9"),
        (None, {"averages": {"ema": tfpara.EMA}}, TypeError, "the class; write it with its arg"),
        (None, {"averages": [tfpara.EMA(0.9)]}, TypeError, r"averages=\[EMA.* must map names"),
        (None, {"averages": [tfpara.EMA]}, TypeError, 'averages={"ema": tfpara.EMA'),
        (None, {"averages": tfpara.EMA}, TypeError, r"averages=<class .*EMA'> must map names"),
        (None, {"averages": []}, TypeError, r"averages=\[\] must map names"),
        (None, {"averages": {1: tfpara.MA()}}, TypeError, "must map names"),
        (None, {"averages": {"global": tfpara.MA()}}, ValueError, "'global' is taken"),
        (None, {"averages": {"all": tfpara.MA()}}, ValueError, "'all' is taken"),
        (None, {"averages": {"": tfpara.MA()}}, ValueError, "'' is empty"),
        (None, {"devices": ["CPU:9"]}, ValueError, r"devices=\['CPU:9'\]"),
        (None, {"communication": "RNIG"}, ValueError, "communication='RNIG' is not one of"),
        (None, {"timeout_seconds": -5}, ValueError, "timeout_seconds=-5 must be a positive"),
        (tfpara.EASGD(0.7), {}, ValueError, "unstable with 2 replicas"),
    ],
)
def test_bad_arguments(rule, options, error, message):
    options = {"sync_period": 3, "devices": DEVICES, **options}
    with pytest.raises(error, match=message):
        tfpara.PeriodicSyncStrategy(tfpara.BSP() if rule is None else rule, **options)


@pytest.mark.nightly
@pytest.mark.one_version
def test_unknown_weights_are_refused_with_a_list():
    strategy = make_strategy(averages={"ema": tfpara.EMA(0.9)})
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    with (
        pytest.raises(ValueError, match="which='em' is unknown. There are: local, global, ema"),
        strategy.weights(model, "em"),
    ):
        pass


@pytest.mark.nightly
def test_classical_bmuf_warns_where_kept_momentum_outlasts_the_block():
    strategy = make_strategy(tfpara.BMUF(nesterov=False), local_state="keep")
    with strategy.scope():
        model = compiled(*MODELS["dense"])
    with pytest.warns(UserWarning, match="momentum 0.9 remembers about 10 steps"):
        model.fit(distributed(strategy), verbose=0)
