"""`tfpara-plan --measure` with scripts that know nothing of it."""

import json
import re

import pytest

from tfpara import plan

SCRIPT = """
import pathlib, sys
import keras, numpy as np, tfpara

folder = pathlib.Path(sys.argv[1])
strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=40, **eval(sys.argv[2]))
with strategy.scope():
    frozen = keras.layers.Dense(1000, trainable=False)
    model = keras.Sequential([keras.Input((1000,)), frozen, keras.layers.Dense(1000)])
    model.compile(keras.optimizers.Adam(0.001), "mse")
x = np.zeros((64, 1000), "float32")
model.fit(x, x, batch_size=16, epochs=int(sys.argv[3]), callbacks=[
    keras.callbacks.TensorBoard(folder / "board"),
    tfpara.callbacks.Checkpoint(folder / "checkpoints"),
    keras.callbacks.LambdaCallback(on_train_begin=lambda _: (folder / "callback").touch()),
])
(folder / "after").touch()
"""


@pytest.fixture
def measured(tmp_path, capfd, monkeypatch):
    """A function that measures the script with a strategy's options, and returns what it says."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)

    def call(options, *flags, epochs=1000):
        of_script = ("--measure", "script.py", str(tmp_path / "run"), repr(options), str(epochs))
        code = plan.main(["--out=plan.json", *flags, *of_script])
        return code, capfd.readouterr()

    return call


@pytest.mark.nightly
def test_a_script_is_measured_and_nothing_of_it_is_written(measured, tmp_path):
    """Epochs of four minibatches; a period of 40, in whose place is one of two; frozen weights."""
    code, said = measured({})
    assert code == 0, said.err
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["model_mb"] == pytest.approx(4 * 1001e3 / 1e6)
    assert found["step_ms"] > 0 and found["slowdown"] >= 1 and found["link_mbit"] > 0
    assert found["sync_ms"] > 0 and found["assumed"] == {} and len(found["plans"]) == 4
    assert "Measured with 8 samples in a minibatch of a worker." in said.out  # 16 of two
    told = [line for line in said.err.splitlines() if line.startswith("measuring: ")]
    assert told[0] == "measuring: 1 worker: starting"
    assert told[-1].startswith("measuring: 2 workers on this machine: block ")
    assert re.fullmatch(r".*block (\d+) of \1", told[-1])
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.nightly
def test_syncs_beside_training_and_a_link_that_is_given(measured, tmp_path):
    code, said = measured({"overlap": True, "compression": "int8"}, "--link_mbit=100")
    assert code == 0, said.err
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["link_mbit"] == 100 and found["slowdown"] == 1
    assert found["assumed"] == {"link_delay_ms": 0.0}
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.nightly
def test_a_fit_that_is_too_short_is_named(measured, tmp_path):
    code, said = measured({}, epochs=1)
    assert code == 1
    assert "fit is too short to measure, with 4 minibatches of each worker: give" in said.err
    assert not any((tmp_path / "run").iterdir())
