"""Training on streams: each replica carries its own state, whatever the syncs do to the weights."""

import numpy as np
import pytest

import tfpara
from tests.lib.bptt_example import (
    STEPS,
    STREAMS,
    averaged_by_hand,
    compiled,
    distributed,
    minibatch,
    states,
)
from tests.lib.cluster_of_processes import run_all_well
from tests.lib.small import strategy_of

TAU = 3


def check_states(model, strategy, plain):
    """Each replica has the state of the plain model that was trained on its streams."""
    for index, variable in enumerate(states(model)):
        parts = [v.numpy() for v in strategy.experimental_local_results(variable.value)]
        assert np.abs(parts[0] - parts[1]).max() > 0.01
        for part, alone in zip(parts, plain, strict=True):
            np.testing.assert_allclose(part, states(alone)[index].numpy(), atol=2e-6)


def test_replicas_train_as_plain_models_averaged_by_hand():
    """With several steps in one call, in which the state is a loop's; two workers have one."""
    strategy = strategy_of(sync_period=TAU)
    with strategy.scope():
        model = compiled(steps_per_execution=3)
    initial = model.get_weights()
    model.fit(distributed(strategy), verbose=0)
    plain = [compiled(), compiled()]
    expected = averaged_by_hand(plain, initial, TAU)
    for got, want in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)
    assert max(np.abs(a - b).max() for a, b in zip(initial, expected, strict=True)) > 0.05
    check_states(model, strategy, plain)


@pytest.mark.nightly
def test_two_workers_train_as_plain_models_averaged_by_hand(tmp_path):
    """In two processes; the state never travels."""
    outs = [tmp_path / f"{rank}.npz" for rank in range(2)]
    options = {"local_devices": 1, "sync_period": TAU}
    run_all_well("bptt_worker.py", [{**options, "out": str(out)} for out in outs])
    workers = [dict(np.load(out)) for out in outs]
    plain = [compiled(), compiled()]
    count = len(plain[0].get_weights())
    expected = averaged_by_hand(plain, [workers[0][f"initial_{i}"] for i in range(count)], TAU)
    for replica, worker in enumerate(workers):
        for i, want in enumerate(expected):
            np.testing.assert_allclose(worker[f"weight_{i}"], want, atol=2e-6)
        for i, variable in enumerate(states(plain[replica])):
            np.testing.assert_allclose(worker[f"state_{replica}_{i}"], variable.numpy(), atol=2e-6)


@pytest.mark.nightly
def test_state_matters_to_training():
    """Without it the same data give another model: what the tests above compare is real."""
    kept, cleared = compiled(), compiled()
    for step in range(4):
        x, y, w = minibatch(0, step)
        kept.train_on_batch(x, y, w)
        cleared.train_on_batch({**x, "reset": np.ones(STREAMS)}, y, w)
    assert np.abs(kept.get_weights()[0] - cleared.get_weights()[0]).max() > 1e-4


@pytest.mark.nightly
def test_minibatches_without_rows_take_no_step_and_leave_the_state():
    """Replica 1 is at its end after 3 of 6 steps."""
    strategy = strategy_of(sync_period=100)
    with strategy.scope():
        model = compiled()
    initial = model.get_weights()
    history = model.fit(distributed(strategy, {0: 6, 1: 3}), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    plain = [compiled(), compiled()]
    for replica, (one, steps) in enumerate(zip(plain, (6, 3), strict=True)):
        one.set_weights(initial)
        for step in range(steps):
            one.train_on_batch(*minibatch(replica, step))
    # One sync, in which a replica counts by its rows.
    for got, a, b in zip(model.get_weights(), *(m.get_weights() for m in plain), strict=True):
        np.testing.assert_allclose(got, (6 * a + 3 * b) / 9, atol=2e-6)
    check_states(model, strategy, plain)


@pytest.mark.nightly
def test_evaluation_scores_frames_by_weight_and_training_goes_on():
    strategy = strategy_of(2, tfpara.BMUF(), sync_period=TAU)
    with strategy.scope():
        model = compiled()
    data = distributed(strategy)
    model.fit(data, validation_data=data, epochs=2, verbose=0)
    with strategy.weights(model, "global"):
        scores = model.evaluate(data, verbose=0, return_dict=True)
        weights = model.get_weights()
    plain = compiled()
    plain.set_weights(weights)
    right = total = 0.0
    for replica in range(2):
        for step in range(STEPS):
            x, y, w = minibatch(replica, step)
            right += (w * (plain(x).numpy().argmax(-1) == y)).sum()
            total += w.sum()
    np.testing.assert_allclose(scores["frame_accuracy"], right / total, rtol=1e-6)
