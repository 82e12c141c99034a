"""What workers say of where they are, and what is made of it."""

import concurrent.futures

import numpy as np
import pytest

from tfpara.cluster import Cluster
from tfpara.cluster.call_site import (
    EPOCH_END,
    EVALUATE,
    FIT_BEGIN,
    FIT_END,
    METRIC,
    PREDICT,
    CallSite,
    call,
    sentence,
)
from tfpara.cluster.status_board import Row, mute, silent, waiting_line
from tfpara.cluster.status_board import apart as wait_apart
from tfpara.sync.one_sync.reports import EPOCH, MET, PURPOSE, RUNNING, SAMPLES, are_apart

TRAINS = "trains"


def mark(purpose=TRAINS, epoch=0, met=0):
    """The mark of a worker: in a step, or come for a purpose; in `fit` if there is an epoch."""
    place = CallSite()
    place.met = met
    if purpose == TRAINS and not epoch:
        return True, place.mark()
    with place.in_fit() if epoch else place.in_callbacks():
        if epoch:
            place.epoch_begins(epoch - 1)
        if purpose == TRAINS:
            return True, place.mark()
        with place.meeting(purpose):
            return False, place.mark()


def apart(*marks, elastic=False):
    reports = np.zeros((len(marks), SAMPLES + 2))
    for row, (running, values) in zip(reports, marks, strict=True):
        row[RUNNING], row[[MET, PURPOSE, EPOCH]] = running, values
    return are_apart(reports, elastic), are_apart(reports[::-1], elastic)


@pytest.mark.parametrize(
    "marks",
    [
        [mark(), mark()],
        [mark(epoch=2), mark(epoch=2)],
        # No metric is read at the end of an epoch: one worker may be in the next.
        [mark(epoch=2), mark(epoch=3)],
        # One has less data.
        [mark(epoch=2), mark(EPOCH_END, epoch=2), mark(EPOCH_END, epoch=2)],
        [mark(epoch=2), mark(FIT_END, epoch=2)],
        [mark(), mark(call("synchronize"))],
        [mark(), mark(EVALUATE)],
        # All are there.
        [mark(EVALUATE, epoch=2), mark(EVALUATE, epoch=2)],
        [mark(METRIC, met=7), mark(METRIC, met=7)],
    ],
)
def test_workers_that_match(marks):
    assert apart(*marks) == (False, False)


@pytest.mark.parametrize(
    "marks",
    [
        [mark(met=3), mark(met=4)],
        [mark(EVALUATE, met=3), mark(EVALUATE, met=4)],
        [mark(EVALUATE), mark(METRIC)],
        [mark(epoch=1), mark(EVALUATE, epoch=1), mark(EVALUATE, epoch=1)],
        [mark(epoch=1), mark(EPOCH_END, epoch=1), mark(EVALUATE, epoch=1)],
        [mark(epoch=3), mark(FIT_END, epoch=2)],
        [mark(epoch=1), mark(EVALUATE)],
        [mark(), mark(EPOCH_END, epoch=1)],
        [mark(call("weights('global')")), mark(call("weights('ema')"))],
    ],
)
def test_workers_that_do_not(marks):
    assert apart(*marks) == (True, True)


def test_all_of_an_elastic_run_train_the_same_epoch():
    def differ(*epochs):
        return apart(*(mark(epoch=epoch) for epoch in epochs), elastic=True)

    assert differ(2, 2) == (False, False) and differ(2, 3) == differ(0, 1) == (True, True)
    assert apart(mark(epoch=2), mark(EPOCH_END, epoch=2), elastic=True) == (False, False)
    first, second = CallSite(), CallSite()
    with first.in_fit(), second.in_fit():
        first.epoch_begins(4)
        second.epoch_begins(1)
        assert sentence([first.told(), second.told()]) == (
            "worker 0 is in epoch 5 of fit, worker 1 in epoch 2 of fit; train the same epochs of "
            "the same calls of fit on every worker."
        )


def test_the_end_of_an_epoch_is_where_fit_itself_reads_metrics():
    place = CallSite()
    assert place.of_metric() == METRIC
    with place.in_fit():
        assert place.of_data() == FIT_BEGIN
        place.epoch_begins(0)
        assert place.of_data() == EVALUATE
        assert place.of_metric() == EPOCH_END
        with place.in_callbacks():
            assert place.of_metric() == METRIC
            with place.in_call(EVALUATE):
                assert place.of_metric() == EVALUATE
            with place.in_fit():  # of another model, in a callback
                assert place.of_metric() == EPOCH_END
            assert place.of_metric() == METRIC
    assert place.of_metric() == METRIC


def test_a_thread_that_predicts_is_not_where_fit_is():
    """It reads data for `fit`; both may begin and end calls in any order."""
    place = CallSite()

    def predicting():
        with place.in_call(PREDICT):
            yield place.calls

    with place.in_fit(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        place.epoch_begins(0)
        thread = predicting()
        assert pool.submit(next, thread).result() == (PREDICT,)
        assert not place.calls and place.of_metric() == EPOCH_END
        with place.in_call(EVALUATE):
            assert pool.submit(next, thread, None).result() is None
            assert place.of_metric() == EVALUATE
        assert not place.calls


def test_an_exchange_that_fails_is_not_counted():
    place = CallSite()
    with pytest.raises(KeyError), place.meeting(METRIC):
        raise KeyError
    assert place.met == 0 and place.text() == "in a training step"
    with place.meeting(METRIC):
        pass
    assert place.met == 1


def test_the_sentence_has_the_advice_of_who_is_elsewhere():
    train, end, odd = CallSite(), CallSite(), CallSite()
    with train.in_fit(), end.in_fit(), end.meeting(EPOCH_END), odd.meeting(EVALUATE):
        for place in (train, end):
            place.epoch_begins(1)
        train.step_begins(11)
        told = [place.told() for place in (train, end, odd, train)]
    assert sentence(told) == (
        "workers 0, 3 are in epoch 2 of fit (step 12), worker 1 at the end of epoch 2 of fit, "
        "worker 2 in evaluate; call evaluate on every worker or on none."
    )


def test_for_whom_is_waited():
    here, there = Row("in epoch 1 of fit (step 3)", waits=["model0"]), Row("in evaluate")
    assert waiting_line([here, there], 0, 10.2) == (
        "Waiting for worker 1 in a sync for 10 s: it is in evaluate."
    )
    assert waiting_line([there, here, Row("")], 1, 40.0) == (
        "Waiting for workers 0, 2 in a sync for 40 s: worker 0 is in evaluate, worker 2 does not "
        "answer."
    )
    assert waiting_line([here, Row("in evaluate", waits=["model0"])], 0, 20.0) == (
        "All workers have been in a sync for 20 s: worker 0 in epoch 1 of fit (step 3), worker 1 "
        "in evaluate."
    )
    found = Cluster(("a:1", "b:2", "c:3"), "worker", 0)
    assert (
        silent([here, there, Row("")], found) == "worker 1 (b:2), in evaluate, and worker 2 (c:3)"
    )
    assert silent([here, here, here], found) == silent(None, found) == ""
    assert mute([here, there, Row("")], found) == "worker 2 (c:3)"
    assert mute([here, there, here], found) == mute(None, found) == ""


def test_a_wait_in_different_exchanges_has_no_end():
    first, second = Row("in a training step", ["model0"]), Row("in evaluate", ["model1"])
    assert wait_apart([first, second]) == (
        "worker 0 is in a training step, worker 1 in evaluate; do the same on every worker, in the "
        "same order"
    )
    assert wait_apart([first, second._replace(waits=["model1", "model0"])]) == ""
    assert wait_apart([first, Row("in evaluate")]) == ""
