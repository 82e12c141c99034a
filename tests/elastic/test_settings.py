"""What an elastic run refuses before it begins, and a process without a meeting point."""

import json
import re
import types

import numpy as np
import pytest

import tfpara
from tfpara.sync import arrays, keras_hooks


@pytest.mark.parametrize(
    "options,sentence",
    [
        ({"min_workers": 0}, "min_workers=0 "),
        ({"min_workers": 3, "max_workers": 2}, "max_workers=2 is less than min_workers=3"),
        ({"max_workers": 1.5}, "max_workers=1.5 "),
        ({"grace_seconds": 0}, "grace_seconds=0 must be a positive number of seconds"),
        ({"silence_seconds": float("nan")}, "silence_seconds=nan must be a positive number"),
    ],
)
def test_numbers_outside_their_range(options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tfpara.Elastic(**options)


@pytest.mark.parametrize(
    "options,sentence",
    [
        ({"aggregation": "sharded"}, "aggregation='sharded' and elastic= contradict"),
        ({"compression": "int8"}, "compression='int8' and elastic= contradict"),
        ({"overlap": True}, "overlap=True and elastic= contradict"),
        ({"fragments": 2}, "fragments=2 and elastic= contradict"),
        ({"collectives": "horovod"}, "collectives='horovod' and elastic= contradict"),
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
    sentence = f"{who} has started 2 workers without one. Start tfpara-meet --workers=2"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, elastic=tfpara.Elastic())


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


def test_arrays_of_different_lengths():
    with pytest.raises(ValueError, match=r"the arrays have 4, 3 rows"):
        arrays.deal_out_arrays(None, 2, {"x": np.ones((4, 2)), "y": np.ones((3, 1))})


def dealt_out(rows, replicas, workers, epochs, **given):
    """The rows of each minibatch of each epoch, in the order of their numbers."""
    order, elastic = types.SimpleNamespace(seed=7), types.SimpleNamespace(joining=True)
    extended = types.SimpleNamespace(order=order, elastic=elastic)
    found = [{} for _ in range(epochs)]
    for rank in range(workers):
        strategy = types.SimpleNamespace(
            extended=extended,
            num_replicas=workers,
            local_replica_ids=[rank],
            datasets_by_epoch=lambda minibatches: minibatches,
        )
        arguments = {"x": np.arange(rows), **given}
        arrays.deal_out_arrays(strategy, replicas, arguments)
        for epoch in range(epochs):
            for n, own in enumerate(arguments["x"](epoch, 0)):
                found[epoch][n * workers + rank] = own.numpy().tolist()
    return [[epoch[n] for n in range(len(epoch))] for epoch in found]


@pytest.mark.parametrize("workers", [2, 3])
def test_epochs_of_so_many_steps_go_on_in_the_arrays(workers):
    """Three steps of two replicas, with two rows of a minibatch of four each; ten rows."""
    given = {"batch_size": 4, "steps_per_epoch": 3}
    first, second, third = dealt_out(10, 2, workers, 3, shuffle=False, **given)
    ordered = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert first == [*ordered, ordered[0]]
    assert second == [*ordered[1:], *ordered[:2]]
    assert third == [*ordered[2:], *ordered[:3]]
    shuffled = [row for epoch in dealt_out(10, 2, workers, 5, **given) for row in sum(epoch, [])]
    passes = [shuffled[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len({tuple(each) for each in passes}) == 6


def test_arrays_are_divided_and_weighted_as_by_fit():
    x, y = np.arange(10.0), np.arange(10) % 3
    given = {"x": x, "y": y, "validation_split": 0.3, "class_weight": {0: 2.0, 2: 0.5}}
    keras_hooks._divide_and_weight(given)
    assert given["x"].tolist() == x[:7].tolist() and given["y"].tolist() == y[:7].tolist()
    assert given["sample_weight"].tolist() == [2.0, 1.0, 0.5, 2.0, 1.0, 0.5, 2.0]
    assert [part.tolist() for part in given["validation_data"][:2]] == [[7, 8, 9], [1, 2, 0]]
    assert not given["validation_split"] and given["class_weight"] is None
    with pytest.raises(ValueError, match="class_weight weighs the only labels"):
        keras_hooks._divide_and_weight({"x": x, "y": y, "sample_weight": x, "class_weight": {0: 1}})


def test_what_is_no_array_is_left_alone():
    given = {"x": iter([]), "batch_size": 3}
    arrays.deal_out_arrays(None, 2, given)
    assert given["batch_size"] == 3
