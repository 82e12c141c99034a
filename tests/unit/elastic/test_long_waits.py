"""The line on members for which the others of an elastic run wait, and when it comes."""

from tfpara.elastic.long_waits import LongWaits

NAMES = {0: "worker 0", 1: "worker 1", 2: "worker 2"}


def lines(seconds, waits, names=NAMES):
    """The lines by second, where `waits(task, second)` is the wait that a worker then reports."""
    here, found = LongWaits(), {}
    for second in range(seconds):
        for task in (0, 1, 2):
            if (told := waits(task, second)) is not None:
                here.hear(task, float(told), "in fit" if task == 1 else "", float(second))
        if line := here.line(names, float(second)):
            found[second] = line
    return found


def test_a_line_comes_after_10_s_and_again_when_the_wait_has_doubled():
    assert lines(45, lambda task, second: 0 if task == 1 else second) == {
        seconds: f"the other workers have waited for worker 1 (in fit) for {seconds} s"
        for seconds in (10, 20, 40)
    }


def test_the_next_wait_is_told_of_anew():
    told = lines(40, lambda task, second: 0 if task == 1 else second % 15)
    assert list(told) == [10, 25]


def test_each_worker_has_waits_of_its_own():
    """Worker 2 stands still while worker 1 is awaited, and from then on is awaited, too."""

    def waits(task, second):
        if task == 1:
            return 0
        return second if task == 0 or second < 11 else None

    told = lines(45, waits)
    assert list(told) == [10, 16, 32]
    assert "for worker 1 (in fit) for 10 s" in told[10]
    assert "for worker 1 (in fit), worker 2 for 16 s" in told[16]


def test_of_short_waits_and_where_all_wait_there_is_no_line():
    assert not lines(60, lambda task, second: 2)
    assert not lines(60, lambda task, second: second)


def test_who_is_no_member_or_has_reported_nothing_is_not_awaited():
    waits = {0: lambda second: second, 1: lambda second: 0, 2: lambda second: None}
    told = lines(15, lambda task, second: waits[task](second), {0: "worker 0", 2: "worker 2"})
    assert not told
