"""Models that are saved to a store of objects, on a server of S3's protocol."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from tests.lib.s3_server import DENIED
from tfpara.remote_files import RemoteFolder

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = X[:, :1]


def trained(callbacks=(), epochs=2):
    keras.utils.set_random_seed(1)
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=2, devices=["CPU:0", "CPU:0"], averages={"ema": tfpara.EMA(0.5)}
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return strategy, model


def local(url, tmp_path):
    """Copies a file or a folder from a URL; returns its path."""
    parent, name = url.rsplit("/", 1)
    folder = RemoteFolder(parent)
    for found in folder.sizes(name):
        folder.download(found, tmp_path / found)
    return tmp_path / name


def names(url):
    return sorted(RemoteFolder(url).sizes())


def test_models_weights_and_exports_are_what_a_local_path_gets(bucket, tmp_path, capsys):
    strategy, model = trained()
    model.save(f"{bucket}/run/model.keras")
    again = keras.models.load_model(local(f"{bucket}/run/model.keras", tmp_path))
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))
    model.save_weights(f"{bucket}/run/model.weights.h5")
    again.set_weights([0 * w for w in again.get_weights()])
    again.load_weights(local(f"{bucket}/run/model.weights.h5", tmp_path))
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    model.export(f"{bucket}/run/exported", verbose=False)
    tfpara.export(model, f"{bucket}/run/served", which="ema")
    assert f"exported to {bucket}/run/served" in capsys.readouterr().err
    with strategy.weights(model, "ema"):
        averaged = model.get_weights()
    for name, (kernel, bias) in {"exported": model.get_weights(), "served": averaged}.items():
        loaded = tf.saved_model.load(str(local(f"{bucket}/run/{name}", tmp_path)))
        np.testing.assert_allclose(loaded.serve(X), X @ kernel + bias, atol=1e-5)
    tfpara.export(model, f"{bucket}/run/served")  # in place of that one
    assert "saved_model.pb" in names(f"{bucket}/run/served")


@pytest.mark.nightly
def test_stores_of_tensorflow_io_are_not_used(bucket):
    """It has settings of its own for S3, and here knows no address."""
    pytest.importorskip("tensorflow_io")
    _, model = trained()
    model.save(f"{bucket}/model.keras")
    assert names(bucket) == ["model.keras"]


@pytest.mark.nightly
def test_model_checkpoint_writes_the_best(bucket, tmp_path):
    best = keras.callbacks.ModelCheckpoint(
        f"{bucket}/best.keras", monitor="loss", save_best_only=True
    )
    every = keras.callbacks.ModelCheckpoint(
        f"{bucket}/deep/in/it-{{epoch}}.weights.h5", save_weights_only=True
    )
    _, model = trained([best, every], epochs=3)
    assert names(bucket) == ["best.keras", *(f"deep/in/it-{n}.weights.h5" for n in (1, 2, 3))]
    again = keras.models.load_model(local(f"{bucket}/best.keras", tmp_path))
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


def test_a_place_with_other_files_is_refused_and_stays(bucket):
    _, model = trained(epochs=1)
    RemoteFolder(f"{bucket}/mine").write("precious", b"1")
    with pytest.raises(FileExistsError, match=r"/mine exists and is no SavedModel.* precious"):
        tfpara.export(model, f"{bucket}/mine")
    assert names(f"{bucket}/mine") == ["precious"]


@pytest.mark.nightly
def test_a_store_that_refuses_says_so(bucket, s3_server):
    _, model = trained(epochs=1)
    s3_server.refuse = lambda method, path: DENIED if method in ("PUT", "POST") else None
    for write in (model.save, model.save_weights):
        with pytest.raises(OSError, match="Access Denied: the account must be allowed"):
            write(
                f"{bucket}/model.weights.h5" if write == model.save_weights else f"{bucket}/m.keras"
            )
    with pytest.raises(OSError, match="Access Denied: the account must be allowed"):
        tfpara.export(model, f"{bucket}/served")
    s3_server.calm()
    assert names(bucket) == []
    with pytest.raises(ValueError, match="names no file or folder in"):
        tfpara.export(model, "memory://served")
