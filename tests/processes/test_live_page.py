"""The live page of real runs: the launcher's and the chief's own, and the summary at the end."""

import json
import os
import re
import signal

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tfpara
from tests.lib.launched import Launched
from tests.lib.live_page import ask, until, url_of

SECRET = "a secret that nobody is shown"
ROWS, EPOCHS = 640, 3
COUNTS = tfpara.SyncStatistics._fields
# The second start of it ends at once. Files tell it when to go on.
SCRIPT = f"""
import json, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
if (here / "over").exists():
    sys.exit()
import keras, numpy as np, tfpara
strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=5, status_port=0)
rank = strategy.worker_index
def wait_for(name):
    while not (here / name).exists(): time.sleep(0.05)
class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and batch == 3: wait_for("go")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=({ROWS}, 8))
data = dict(x=x, y=x[:, :1], batch_size=32, verbose=0)
model.fit(**data, epochs=1, callbacks=[Pause()])
history = model.fit(**data, epochs={EPOCHS}, initial_epoch=1, callbacks=[Pause()]).history
told = {{"scores": {{name: values[-1] for name, values in history.items()}}}}
told |= {{"counts": strategy.statistics()._asdict()}}
(here / f"told-{{rank}}").write_text(json.dumps(told))
wait_for("over")
"""


def counts(status):
    return [{name: row.get(name) for name in COUNTS} for row in status["workers"]]


@pytest.mark.nightly
def test_the_page_of_two_workers_is_right_and_shows_a_fault(tmp_path):
    script, errors = tmp_path / "script.py", tmp_path / "errors"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TFPARA_SECRET": SECRET}
    flags = ("-n", 2, "--status_port=0", "--max_restarts=1", script, tmp_path)
    with (
        errors.open("w") as stderr,
        Launched(*flags, stderr=stderr, env=environment) as launched,
    ):
        page = url_of(errors.read_text, "tfpara-launch")
        chiefs = url_of(errors.read_text, r"\[chief\] tfpara")
        for url in (page, chiefs):
            awaited = until(url, lambda status: status["waits_for"])
            assert awaited["waits_for"] == ["worker 1"]
            chief, worker = awaited["workers"]
            assert chief["state"].startswith("waits for ")
            assert "callbacks of epoch 1 of fit, step 4 [script.py, line" in worker["place"]
        (tmp_path / "go").touch()
        files = [tmp_path / f"told-{rank}" for rank in (0, 1)]
        until(page, lambda status: all(path.exists() for path in files))
        told = [json.loads(path.read_text()) for path in files]
        assert sum(each["counts"]["samples"] for each in told) == ROWS * EPOCHS
        for url in (page, chiefs):
            status = until(url, lambda status: counts(status) == [each["counts"] for each in told])
            assert all(row["devices"] == ["CPU:0"] and row["runs"] for row in status["workers"])
            assert status["scores"] == {"chief": {"epoch": EPOCHS, **told[0]["scores"]}}
            assert status["faults"] == 0
            families = text_string_to_metric_families(ask(url, "metrics"))
            steps = [
                s for family in families for s in family.samples if s.name == "tfpara_steps_total"
            ]
            assert [sample.value for sample in steps] == [ROWS * EPOCHS / 32] * 2
        os.kill(json.loads(ask(page, "status.json"))["workers"][1]["pid"], signal.SIGKILL)
        failed = until(page, lambda status: status["faults"])
        assert failed["events"][0]["text"] == "worker 1: killed by SIGKILL"
        (tmp_path / "over").touch()
        code, _, _ = launched.finish()
    said = errors.read_text()
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("tfpara-launch: ")]
    assert re.fullmatch(
        r"tfpara-launch: \d+\.\d s of training: [\d,]+ samples/s; workers waited in \d+% of their "
        "time; processes: 2, starts: 4",
        lines[-4],
    )
    assert re.fullmatch(r"tfpara-launch: after [\d.]+ s: worker 1: killed by SIGKILL", lines[-3])
    assert "restart 1 of 1: worker 1 failed first: killed by SIGKILL" in lines[-2]
    assert "all 2 workers done" in lines[-1]
    assert SECRET not in said


def test_the_page_stays_when_horovods_store_is_made_anew(tmp_path):
    script, errors = tmp_path / "script.py", tmp_path / "errors"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "while not (here / 'go').exists(): time.sleep(0.01)\n"
        "if not (here / 'failed').exists():\n"
        "    (here / 'failed').touch(); (here / 'go').unlink(); sys.exit(3)\n"
    )
    flags = ("-n", 1, "--collectives=horovod", "--status_port=0", "--max_restarts=1")
    with (
        errors.open("w") as stderr,
        Launched(*flags, script, tmp_path, stderr=stderr) as launched,
    ):
        page = url_of(errors.read_text, "tfpara-launch")
        for starts in (1, 2):
            until(page, lambda s, wanted=[starts]: [w["starts"] for w in s["workers"]] == wanted)
            (tmp_path / "go").touch()
        code, _, _ = launched.finish()
    assert code == 0, errors.read_text()
