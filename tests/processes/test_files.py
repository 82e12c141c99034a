"""What Keras writes on two workers, by a script that knows nothing of them."""

import csv
import http.server
import threading
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lib.cluster_of_processes import run_all_well

pytestmark = pytest.mark.timeout(600)
ROUNDS = 2
X = np.random.default_rng(0).normal(size=(96, 16)).astype("float32")


class Ran(NamedTuple):
    folder: Path
    seen: list
    output: list
    posts: list
    scratch: list


class Posts(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.posts.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    (place / "scratch").mkdir()
    server = http.server.HTTPServer(("127.0.0.1", 0), Posts)
    server.posts = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = [
        {
            "folder": str(place / "files"),
            "scratch": str(place / "scratch"),
            "rounds": ROUNDS,
            "url": f"http://127.0.0.1:{server.server_port}",
            "out": str(place / f"{rank}.npz"),
        }
        for rank in range(2)
    ]
    results = run_all_well("write_files.py", options, timeout=500)
    server.shutdown()
    return Ran(
        place / "files",
        [dict(np.load(o["out"], allow_pickle=True)) for o in options],
        [r.output for r in results],
        server.posts,
        # Bytecode of the functions that TensorFlow has converted may be there.
        [e for e in (place / "scratch").iterdir() if e.name != "__pycache__"],
    )


@keras.saving.register_keras_serializable()
class Slow(keras.layers.Dense):
    """That of the program."""


def load(path):
    return keras.models.load_model(path, compile=False)


@pytest.mark.nightly
def test_all_files_of_callbacks_load(ran):
    new = ran.folder / "new"
    names = {p.name for p in new.glob("*.keras")} | {p.name for p in (new / "all").iterdir()}
    assert names >= {"m1.keras", "m2.keras", "m3.keras", "best.keras"}
    assert {n for n in names if n.startswith("steps-")}
    for path in [*new.rglob("*.keras"), ran.folder / "newer" / "mine.keras"]:
        load(path)
    last = load(new / "all" / "m3.keras")
    last.load_weights(new / "last.weights.h5")


@pytest.mark.nightly
def test_a_log_has_each_epoch_once(ran):
    rows = list(csv.DictReader((ran.folder / "logs" / "log.csv").open()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    appended = (ran.folder / "added.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in appended] == ["epoch", "0", "1", "2", "0", "1", "2"]


def test_tensorboard_has_each_point_once(ran):
    files = list((ran.folder / "board" / "train").glob("events*"))
    assert len(files) == 2  # of two fits
    names = ("epoch_loss", "epoch_samples_per_second", "epoch_syncs", "epoch_sync_fraction")
    points = [
        (value.tag, event.step)
        for file in files
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag in names
    ]
    assert sorted(points) == sorted([(name, k) for name in names for k in range(3)] * 2)


def test_the_chief_alone_posts_and_prints(ran):
    assert len(ran.posts) == 6
    assert ran.output[0].count("finished saving model to") == 6
    assert ran.output[1].count("finished saving model to") == 0
    assert ran.output[0].count("LearningRateScheduler setting learning rate") == 6
    assert "LearningRateScheduler" not in ran.output[1]
    assert f"Saved artifact at '{ran.folder / 'exported'}'" in ran.output[0]
    assert "Saved artifact" not in ran.output[1]


def test_all_workers_run_a_callback_of_the_users_and_its_path_stays_his(ran):
    chief, worker = ran.seen
    np.testing.assert_array_equal(chief["scores"], worker["scores"])
    assert len(chief["scores"]) == 6
    for seen in ran.seen:
        assert seen["paths"].tolist()[0] == str(ran.folder / "new" / "all" / "m{epoch}.keras")
        assert bool(seen["after fit"])
    assert ran.scratch == []


def test_all_workers_load_what_the_chief_saved(ran):
    chief, worker = ran.seen
    for name in ("saved.keras", "function.keras", "unzipped", "old.h5"):
        np.testing.assert_allclose(chief[name], worker[name], atol=1e-6)
        np.testing.assert_allclose(chief[name], chief["saved.keras"], atol=1e-6)
    for name in ("sharded", "served exported"):
        np.testing.assert_allclose(worker[name], chief["saved.keras"], atol=1e-5)
    for name in ("chief.keras", "served ema"):
        np.testing.assert_allclose(worker[name], chief["ema"], atol=1e-5)
    for seen in ran.seen:
        for name in ("served words", "served words too"):
            np.testing.assert_array_equal(seen[name], [[0, 1, 0, 0], [0, 0, 0, 1]])
    assert np.abs(chief["ema"] - chief["saved.keras"]).max() > 1e-4
    interpreter = tf.lite.Interpreter(str(ran.folder / "model.tflite"))
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], X[:1])
    interpreter.invoke()
    (output,) = interpreter.get_output_details()
    np.testing.assert_allclose(
        interpreter.get_tensor(output["index"]), chief["saved.keras"][:1], atol=1e-4
    )


def test_predict_gives_all_rows_in_order_on_each_worker(ran):
    for seen in ran.seen:
        rows = {k.removeprefix("predicted "): v for k, v in seen.items() if "predicted" in k}
        called = rows.pop("called")
        np.testing.assert_allclose(rows.pop("one row"), called[:1], atol=1e-5)
        # Each worker predicted every second row of its own accord.
        np.testing.assert_allclose(
            rows.pop("gathered"), np.concatenate([called[::2], called[1::2]]), atol=1e-5
        )
        assert set(rows) >= {"arrays", "dataset", "pydataset", "tensors"}
        for name, values in rows.items():
            np.testing.assert_allclose(values, called, atol=1e-5, err_msg=name)
    assert "predicted alone" in ran.seen[0] and "predicted alone" not in ran.seen[1]


def test_saves_in_a_row_all_load(ran):
    rounds = ran.folder / "rounds"
    for path in rounds.glob("*.keras"):
        load(path)
    for k in range(ROUNDS):
        tf.saved_model.load(str(rounds / f"exported{k}"))
    wanted = {f"{kind}{k}.keras" for k in range(ROUNDS) for kind in ("fit", "saved")}
    wanted |= {f"exported{k}" for k in range(ROUNDS)} | {"over.keras"}
    assert {p.name for p in rounds.iterdir()} == wanted


def test_backup_and_restore_is_refused_with_what_to_write(ran):
    for seen in ran.seen:
        line = f"tfpara.callbacks.Checkpoint('{ran.folder / 'backup'}')"
        assert line in str(seen["refused"])
    assert not (ran.folder / "backup").exists()


def test_models_of_no_strategy_are_saved_as_ever(ran):
    for rank in range(2):
        load(ran.folder / f"plain-{rank}.keras")
    load(ran.folder / "encoder.keras")
    assert list(ran.folder.rglob(".*")) == []
