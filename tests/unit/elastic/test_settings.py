"""What an elastic run refuses before it begins, and a process without a meeting point."""

import json
import re

import numpy as np
import pytest

import tfpara


@pytest.mark.parametrize(
    "options,sentence",
    [
        ({"min_workers": 0}, "min_workers=0 "),
        ({"min_workers": 3, "max_workers": 2}, "max_workers=2 is less than min_workers=3"),
        ({"max_workers": 1.5}, "max_workers=1.5 "),
        ({"grace_seconds": 0}, "grace_seconds=0 must be a positive number of seconds"),
        ({"silence_seconds": float("nan")}, "silence_seconds=nan must be a positive number"),
        ({"grace_seconds": float("inf")}, "grace_seconds=inf is above 1e+09 seconds, the longest"),
        ({"silence_seconds": "5"}, "silence_seconds='5' must be a positive number of seconds"),
    ],
)
def test_numbers_outside_their_range(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tfpara.Elastic(**options)


@pytest.mark.parametrize(
    "options,sentence",
    [
        ({"aggregation": "sharded"}, "aggregation='sharded' and elastic= contradict"),
        ({"fragments": 2}, "fragments=2 and elastic= contradict"),
        ({"collectives": "horovod"}, "collectives='horovod' and elastic= contradict"),
        ({"communication": "NCCL"}, "communication='NCCL' and elastic= contradict"),
    ],
)
def test_settings_that_need_a_fixed_group(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tfpara.PeriodicSyncStrategy(
            tfpara.BSP(), sync_period=2, elastic=tfpara.Elastic(), **options
        )


def test_what_is_no_elastic():
    with pytest.raises(TypeError, match=r"elastic=True must be a tfpara.Elastic"):
        tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, elastic=True)


SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "a,b",
}
TF_CONFIG = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}


@pytest.mark.parametrize(
    "variables,who", [(SLURM, "Slurm"), ({"TF_CONFIG": json.dumps(TF_CONFIG)}, "TF_CONFIG")]
)
def test_workers_that_others_have_started_need_a_meeting_point(variables, who, monkeypatch):
    monkeypatch.delenv("TFPARA_MEETING", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sentence = f"{who} has started 2 workers without one. Give tfpara-launch --elastic"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, elastic=tfpara.Elastic())


def test_a_meeting_point_needs_elastic(monkeypatch):
    """Else each worker of tfpara-launch --elastic would train by itself, as the chief."""
    monkeypatch.setenv("TFPARA_MEETING", "127.0.0.1:4000")
    with pytest.raises(ValueError, match=r"TFPARA_MEETING='127.0.0.1:4000' .*elastic=tfpara.Elast"):
        tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2)
    # A simulation is of one process.
    assert tfpara.simulate(2, tfpara.BSP(), sync_period=2).num_replicas == 2
    # A task of another kind takes no part.
    task = {"cluster": TF_CONFIG["cluster"], "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    with pytest.raises(SystemExit) as ended:
        tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2)
    assert ended.value.code == 0


@pytest.mark.quick
def test_without_a_meeting_point_a_process_trains_alone(monkeypatch, capfd):
    import keras

    monkeypatch.delenv("TFPARA_MEETING", raising=False)
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(), sync_period=2, elastic=tfpara.Elastic(min_workers=2)
    )
    assert "TFPARA_MEETING is not set, so this process trains alone" in capfd.readouterr().err
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert strategy.statistics().syncs == 1
