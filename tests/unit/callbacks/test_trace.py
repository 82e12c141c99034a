"""Timelines out of recordings made by hand, and what `tfpara.callbacks.Trace` refuses."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfpara
from tfpara.callbacks import timeline
from tfpara.callbacks.timeline import Span

MICRO = 1_000_000  # picoseconds


def recording(operations, steps, begins_at=1_000_000):
    """An XSpace of two threads: operations as (name, begin, end) and steps as (number, begin, end,
    clock), in microseconds."""
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    plane.stat_metadata[1].name = "step"
    plane.stat_metadata[2].name = "clock_ns"

    def add(line, name, begin, end):
        number = len(plane.event_metadata) + 1
        plane.event_metadata[number].name = name
        duration = (end - begin) * MICRO
        return line.events.add(
            metadata_id=number, offset_ps=begin * MICRO, duration_ps=int(duration)
        )

    line = plane.lines.add(name="tf_Compute", timestamp_ns=begins_at)
    for name, begin, end in operations:
        add(line, name, begin, end)
    line = plane.lines.add(name="python", timestamp_ns=begins_at)
    for number, begin, end, clock in steps:
        event = add(line, timeline.STEP, begin, end)
        event.stats.add(metadata_id=1, int64_value=number)
        event.stats.add(metadata_id=2, int64_value=clock)
    return space


def test_operations_become_spans_on_the_clock():
    space = recording(
        [
            ("cond/then/_0/cond/sync/pack/concat:ConcatV2", 10, 12),
            ("cond/then/_0/cond/sync/pack/mul:Mul", 13, 15),
            ("dense/MatMul:MatMul", 2, 9),
            ("sync/reduce_1/CollectiveReduceV2:CollectiveReduceV2", 16, 40),
            ("sync/rule/cond/sync/reduce/CollectiveGatherV2:CollectiveGatherV2", 30, 50),
            ("sync/rule/mul:Mul", 51, 52),
            ("sync/pack/Const:Const", 1, 1),
            ("_send_sync/rule/y_0:_Send", 1, 1),
        ],
        # The clock was read 3 µs and 1 µs before the profiler's.
        [(7, 0, 60, 5_000_000_000 - 3000), (8, 100, 110, 5_000_100_000 - 1000)],
    )
    zero = 5_000_000_000 - 1000  # where the profiler's time is its line's begin
    assert timeline.spans(space) == [
        Span("step", zero, zero + 60_000, 7),
        Span("pack", zero + 10_000, zero + 15_000, 2),
        Span("reduce", zero + 16_000, zero + 50_000, 2),
        Span("rule", zero + 51_000, zero + 52_000, 1),
        Span("step", zero + 100_000, zero + 110_000, 8),
    ]


def test_a_collective_is_over_where_its_thread_goes_on_to_what_follows():
    space = recording(
        [
            ("sync/reduce/CollectiveReduceV2:CollectiveReduceV2", 10, 30),
            ("CollectiveExecutor::ExecuteAsync::Done", 15, 29),
            ("sync/unpack/AssignVariableOp:AssignVariableOp", 16, 28),
        ],
        [(0, 0, 40, 0)],
    )
    found = [(s.phase, s.began // 1000, s.ended // 1000) for s in timeline.spans(space)]
    assert found == [("step", 0, 40), ("reduce", 10, 15), ("unpack", 16, 28)]


def test_a_phase_ends_where_another_begins_or_a_step():
    space = recording(
        [
            ("sync/reduce/a:A", 10, 12),
            ("sync/rule/b:B", 13, 14),
            ("sync/reduce/c:C", 15, 16),
            ("sync/unpack/d:D", 18, 19),
            ("sync/unpack/e:E", 32, 33),
        ],
        [(0, 0, 20, 0), (1, 30, 40, 30_000)],
    )
    found = [(s.phase, s.began // 1000, s.ended // 1000) for s in timeline.spans(space)]
    assert found == [
        ("step", 0, 20),
        ("reduce", 10, 12),
        ("rule", 13, 14),
        ("reduce", 15, 16),
        ("unpack", 18, 19),
        ("step", 30, 40),
        ("unpack", 32, 33),
    ]


def test_a_recording_without_steps_is_refused():
    with pytest.raises(ValueError, match="recorded no training step"):
        timeline.spans(recording([("sync/pack/a:A", 1, 2)], []))


def test_chrome_trace_counts_from_the_earliest_span_in_microseconds():
    trace = timeline.chrome_trace(
        {"worker 0": [Span("step", 2_000_000, 5_000_000, 3)], "worker 1": [["rule", 1000, 2500, 4]]}
    )
    shown = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["ts"], e["dur"], e["args"]) for e in shown] == [
        ("step", 0, 1999.0, 3000.0, {"step": 3}),
        ("rule", 1, 0.0, 1.5, {"operations": 4}),
    ]


def fit(callback, strategy=None, minibatches=8):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    x = np.ones((4 * minibatches, 4), "float32")
    y = np.ones((4 * minibatches, 3), "float32")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])


def shown(folder, phase):
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [e["args"] for e in events if e["name"] == phase and e["ph"] == "X"]


@pytest.mark.quick
def test_by_default_the_steps_around_the_second_sync_are_recorded(tmp_path):
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=30)
    fit(tfpara.callbacks.Trace(tmp_path), strategy, minibatches=70)
    assert [args["step"] for args in shown(tmp_path, "step")] == list(range(40, 65))
    assert len(shown(tmp_path, "rule")) >= 1


def test_plain_training_is_recorded_too(tmp_path):
    fit(tfpara.callbacks.Trace(tmp_path / "new", steps=(2, 3)))
    assert [args["step"] for args in shown(tmp_path / "new", "step")] == [2, 3]
    assert shown(tmp_path / "new", "rule") == []


def test_a_run_that_is_too_short_says_so(tmp_path):
    with pytest.warns(UserWarning, match="took 8 steps, and step 20 was to be the first"):
        fit(tfpara.callbacks.Trace(tmp_path, steps=(20, 30)))
    assert shown(tmp_path, "step") == []


def test_a_profiler_that_runs_already_is_named(tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        with pytest.raises(ValueError, match="profiler is running already"):
            fit(tfpara.callbacks.Trace(tmp_path / "mine", steps=(0, 1)))
    finally:
        tf.profiler.experimental.stop(save=False)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((3, 2), r"steps\[1\]=2 must be a whole number, at least 3"),
        ((-1, 2), r"steps\[0\]=-1 must be a whole number, at least 0"),
        ((1,), "must be the first and the last step to record, such as"),
        ((1.0, 2), r"steps\[0\]=1.0 must be a whole number"),
        ((True, 2), r"steps\[0\]=True must be a whole number"),
    ],
)
def test_steps_that_are_no_range_are_refused(tmp_path, steps, message):
    with pytest.raises(ValueError, match=message):
        tfpara.callbacks.Trace(tmp_path, steps=steps)


def test_folders_that_cannot_be_written_are_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path / 'none'}"):
        tfpara.callbacks.Trace(tmp_path / "none" / "trace")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        tfpara.callbacks.Trace(tmp_path / "file")
    # As for a user who may not write there; the tests may run as one who may write everywhere.
    monkeypatch.setattr("os.access", lambda place, mode: False)
    with pytest.raises(PermissionError, match="may not be written"):
        tfpara.callbacks.Trace(tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
