"""The live page of an elastic run in a browser, while a worker is killed, and joins again."""

import html
import os
import re
import signal

from scripts.docs import check
from tests.lib.launched import Launched
from tests.lib.live_page import until, url_of

SCRIPT = """
import pathlib, sys, time
import keras, numpy as np, tfpara
elastic = tfpara.Elastic(min_workers=1, grace_seconds=5)
strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5, elastic=elastic)
over = pathlib.Path(sys.argv[1]) / "over"
class Pace(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None): time.sleep(0.02)
    def on_epoch_end(self, epoch, logs=None): logs["<b>bold</b>"] = float("nan")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(640, 8))
stop = tfpara.callbacks.StopTogether()
class End(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None): self.model.stop_training |= over.exists()
model.fit(x, x[:, :1], epochs=100_000, verbose=0, callbacks=[Pace(), End(), stop])
"""


def cells(shown, table):
    body = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', shown, re.S)[1]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.S)
    return [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]


def test_a_browser_shows_who_is_there_and_what_has_failed(browser, tmp_path):
    script, errors = tmp_path / "script.py", tmp_path / "errors"
    script.write_text(SCRIPT)
    flags = ("-n", 2, "--elastic", "--status_port=0", script, tmp_path)
    with errors.open("w") as stderr, Launched(*flags, stderr=stderr) as launched:
        url = url_of(errors.read_text, "tfpara-launch")

        def train(status):
            return [row["state"] for row in status["workers"]] == ["trains"] * 2

        status = until(url, lambda status: train(status) and status["scores"])
        os.kill(status["workers"][1]["pid"], signal.SIGKILL)
        until(url, lambda status: status["workers"][1]["starts"] == 2 and train(status))
        size = "--window-size=1280,720"
        with check.browsing(browser, url, "--virtual-time-budget=8000", "--dump-dom") as console:
            pass
        assert console == []
        workers = cells(console.shown, "workers")
        assert [row[:3] for row in workers] == [
            ["worker 0", "trains", "CPU:0"],
            ["worker 1", "trains", "CPU:0"],
        ]
        assert [row[-1] for row in workers] == ["1", "2"]
        scores = {row[1]: row[2] for row in cells(console.shown, "scores")}
        assert scores["<b>bold</b>"] == "nan" and float(scores["loss"]) >= 0.0
        events = [text for _, text in cells(console.shown, "events")]
        assert "worker 1: killed by SIGKILL" in events
        assert any("restart 1 of 100" in text for text in events)
        assert "2 of 2 processes run" in console.shown
        picture = tmp_path / "page.png"
        shot = f"--screenshot={picture}"
        with check.browsing(browser, url, "--virtual-time-budget=8000", size, shot):
            pass
        assert picture.stat().st_size > 10_000
        without = url.partition("?")[0]
        with check.browsing(
            browser, without, "--virtual-time-budget=1000", "--dump-dom"
        ) as console:
            pass
        assert "The address needs the token" in console.shown and "worker" not in console.shown
        (tmp_path / "over").touch()
        code, _, _ = launched.finish()
    assert code == 0, errors.read_text()
