"""NG-SGD in whole models: mixed with other layers, saved, exported, and on several replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lib.networks import (
    LOSS,
    compiled,
    dense_model,
    fisher_variables,
    minibatches,
    mixed_data,
    mixed_model,
)
from tests.lib.small import strategy_of
from tfpara.optimizers import NGSGD
from tfpara.optimizers.layer_plan import MATRIX, PLAIN, ROWS
from tfpara.sync.tensorflow.model_variables import replica_variables

layers = keras.layers


@pytest.mark.nightly
def test_saved_model_goes_on_as_if_never_stopped(tmp_path):
    x, y = minibatches(16)
    model = compiled(dense_model(), 0.1, 0.9, alpha=3.0)
    for step in range(13):
        model.train_on_batch(x[step], y[step])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is layers.Dense
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    loaded.optimizer.attach(loaded)
    for step in range(13, 16):
        for one in (model, loaded):
            one.train_on_batch(x[step], y[step])
    for got, want in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.nightly
def test_tensorflow_checkpoint_has_the_scatters(tmp_path):
    x, y = minibatches(3)
    model = compiled(dense_model(), 0.1, 0.9)
    model.train_on_batch(x[0], y[0])
    other = compiled(dense_model(), 0.1, 0.9)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    for one in (model, other):
        one.train_on_batch(x[1], y[1])
    for got, want in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_exported_model_needs_nothing_of_ours(tmp_path):
    model = compiled(dense_model())
    x, y = (a[0] for a in minibatches(1))
    model.train_on_batch(x, y)
    model.export(tmp_path / "export", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(loaded.serve(x), model.predict(x, verbose=0), atol=1e-6)


@pytest.mark.nightly_cases("average")
@pytest.mark.parametrize("local_state", ["reset", "average"])
def test_replicas_agree_after_a_sync_and_keep_their_own_scatters(local_state):
    strategy = strategy_of(sync_period=3, local_state=local_state)
    with strategy.scope():
        inputs = keras.Input((8, 3))
        hidden = layers.Flatten()(layers.Conv1D(6, 3, activation="relu")(inputs))
        model = compiled(keras.Model(inputs, layers.Dense(4)(hidden)), 0.05, 0.5)
    x, y = mixed_data(192)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
    losses = model.fit(data, epochs=3, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]

    def components(variables):
        found = [strategy.experimental_local_results(v.value) for v in variables]
        return zip(*[[c.numpy() for c in components] for components in found], strict=True)

    first, second = components(model.weights)
    for a, b in zip(first, second, strict=True):
        if a.dtype == np.float32:
            np.testing.assert_array_equal(a, b)
    names = replica_variables(
        model, strategy.experimental_local_results, strategy.extended.settings
    ).slot_names
    assert names and not any("scatter" in name for name in names)
    variables = [v for v in fisher_variables(model) if "basis" in v.path]
    assert len(variables) == 4
    for a, b in zip(*components(variables), strict=True):
        assert not np.array_equal(a, b)
        for basis in (a, b):
            np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=2e-3)


def test_two_replicas_equal_two_models_averaged_by_hand():
    x, y = minibatches(8, 32)
    strategy = strategy_of()
    with strategy.scope():
        model = compiled(dense_model(), 0.1, 0.9)
    start = model.get_weights()
    data = tf.data.Dataset.from_tensor_slices((x, y))
    model.fit(strategy.distribute_datasets_from_function(lambda _: data), verbose=0)
    alone = [compiled(dense_model(), 0.1, 0.9) for _ in range(2)]
    for one in alone:
        one.set_weights(start)
    for step in range(4):
        for replica, one in enumerate(alone):
            one.train_on_batch(x[2 * step + replica], y[2 * step + replica])
        if step % 2:
            mean = [np.mean(w, 0) for w in zip(*(m.get_weights() for m in alone), strict=True)]
            for one in alone:
                one.set_weights(mean)
    for got, want in zip(model.get_weights(), mean, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.nightly
def test_attached_after_a_fit_that_was_refused_trains_as_if_attached_before():
    x, y = minibatches(8, 32)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    trained = []
    for late in (False, True):
        keras.utils.set_random_seed(0)
        strategy = strategy_of()
        with strategy.scope():
            model, optimizer = dense_model(), NGSGD(0.1, 0.9)
            if not late:
                optimizer.attach(model)
            model.compile(optimizer, LOSS, metrics=["accuracy"])
        of_strategy = strategy.distribute_datasets_from_function(lambda _: data)
        if late:
            with pytest.raises(ValueError, match="NGSGD has not been shown the model"):
                model.fit(of_strategy, verbose=0)
            assert optimizer.built
            optimizer.attach(model)
        model.fit(of_strategy, verbose=0)
        trained.append((model.get_weights(), fisher_variables(model)))
    (before, scatters), (after, late_scatters) = trained
    for got, want in zip(after, before, strict=True):
        np.testing.assert_array_equal(got, want)
    assert [v.shape for v in late_scatters] == [v.shape for v in scatters] != []


@pytest.mark.nightly
def test_the_remedy_after_loading_a_model_of_mixed_float16(tmp_path):
    x, y = (a[0] for a in minibatches(1))
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = compiled(dense_model())
        model.train_on_batch(x, y)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        said = r"In mixed_float16, call model\.optimizer\.inner_optimizer\.attach\(model\)"
        with pytest.raises(ValueError, match=said):
            loaded.train_on_batch(x, y)
        loaded.optimizer.inner_optimizer.attach(loaded)
        loaded.train_on_batch(x, y)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.nightly
def test_mixed_precision_with_loss_scaling():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(0)
        convolution = layers.Conv1D(6, 3, activation="relu")
        output = layers.Dense(4, dtype="float32")
        model = keras.Sequential([keras.Input((8, 3)), convolution, layers.Flatten(), output])
        model.compile(NGSGD(0.05, 0.9).attach(model), LOSS)
        assert type(model.optimizer).__name__ == "LossScaleOptimizer"
        model.optimizer.initial_scale = 2.0**40  # the first gradients overflow
        losses = model.fit(*mixed_data(), batch_size=16, epochs=8, verbose=0).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert losses[-1] < 0.8 * losses[0]
    assert all(np.isfinite(v.numpy()).all() for v in model.optimizer.variables)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [{"clipnorm": 1.0}, {"gradient_accumulation_steps": 2, "weight_decay": 1e-4, "nesterov": True}],
    ids=str,
)
def test_any_mixture_of_layers_learns(options):
    keras.utils.set_random_seed(0)
    model = mixed_model()
    model.compile(NGSGD(0.05, 0.9, **options).attach(model), LOSS, steps_per_execution=3)
    kinds = [entry["kind"] for entry in model.optimizer.get_config()["layers"]]
    assert sorted(kinds) == sorted([MATRIX, PLAIN, PLAIN, ROWS, ROWS])
    losses = model.fit(*mixed_data(), batch_size=16, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
