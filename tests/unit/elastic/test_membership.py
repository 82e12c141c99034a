"""The membership of elastic runs: by hand, and under random events against what always holds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpara.elastic.membership import Limits, Membership

TERMS = {"rule": "BSP()", "model": "(3, 2) float32"}


def limits(founders=3, min_workers=1, max_workers=None):
    return Limits(founders, min_workers, max_workers, 60.0, 30.0, 300.0)


def came(membership, address, terms, now, **more):
    """A worker comes: its number, and what is said."""
    task = membership.number()
    return task, membership.register(task, address, terms, now, **more)


def begun(founders=3, **options):
    """A run whose founders train, in generation 1."""
    membership = Membership(limits(founders, **options), 0.0)
    for number in range(founders):
        task, said = came(membership, f"host{number}:1", TERMS, 0.0)
        assert task == number
    assert [to for to, _ in said if "form" in _] == list(range(founders))
    for task in range(founders):
        said = membership.ready(task, 1, 0.0)
    assert said == [(task, {"go": 1}) for task in range(founders)]
    assert membership.phase == "training"
    membership.agreed(0, TERMS)
    return membership


def lost(task, *others, of=1):
    """What the others are told of a loss, in a generation."""
    return [(to, {"lost": task}) for to in others] + [(to, {"abort": of}) for to in others]


def test_a_member_is_lost():
    membership = begun()
    assert membership.gone(0, "is lost", 1.0) == lost(0, 1, 2)
    assert membership.met(2, 1, {"syncs": 7}, True, 1.1) == []
    said = membership.met(1, 1, {"syncs": 8}, True, 1.2)
    form = {
        "form": 2,
        "members": [[1, "host1:1"], [2, "host2:1"]],
        "reports": [{"syncs": 8}, {"syncs": 7}],
        "why": "worker 0 is lost",
        "last": "",
    }
    assert said == [(1, form), (2, form)]
    assert membership.ready(1, 2, 1.3) == []
    assert membership.ready(2, 2, 1.3) == [(1, {"go": 2}), (2, {"go": 2})]


def test_a_member_that_connects_again_is_told_the_new_generation_once_more():
    """It repeats that it has come to the meeting, because it has not heard the answer."""
    membership = begun()
    membership.gone(0, "is lost", 1.0)
    assert membership.met(2, 1, {"syncs": 7}, True, 1.1) == []
    form, _ = membership.met(1, 1, {"syncs": 8}, True, 1.2)
    assert form[0] == 1 and membership.met(1, 1, {"syncs": 8}, True, 1.3) == [form]
    assert membership.ready(1, 2, 1.4) == []
    assert membership.ready(2, 2, 1.4) == [(1, {"go": 2}), (2, {"go": 2})]
    evicted = [(1, {"evicted": "generation 1 is over"})]
    assert membership.met(1, 1, {"syncs": 8}, True, 1.5) == evicted


def test_who_is_given_up_joins_again_before_the_others_have_met():
    """They do not await it as a member, also not if it was only absent."""
    membership = begun()
    membership.gone(0, "is lost", 1.0)
    assert membership.register(0, "host0:1", TERMS, 1.1) == []
    assert membership.met(1, 1, {}, True, 1.2) == []
    said = membership.met(2, 1, {}, True, 1.3)
    assert [(to, form["why"]) for to, form in said] == [
        (to, "worker 0 is lost; worker 0 has come") for to in range(3)
    ]
    assert said[0][1]["reports"] == [None, {}, {}]
    membership.stood_still(2.0)
    assert membership.gone(0, "is lost", 2.1) == []
    assert membership.register(0, "host0:1", TERMS, 2.2) == lost(0, 1, 2, of=2)
    assert membership.met(1, 2, {}, True, 2.3) == []
    assert [form["form"] for _, form in membership.met(2, 2, {}, True, 2.4)] == [3, 3, 3]
    assert not membership.absent


def test_somebody_comes_and_somebody_leaves():
    membership = begun(max_workers=3)
    task, said = came(membership, "host3:1", TERMS, 1.0)
    assert (task, said) == (3, [])  # it waits, since there are enough
    assert membership.wants_out(1, 2.0) == [(task, {"wanted": True}) for task in range(3)]
    assert membership.wants_out(1, 2.0) == []
    for member in (0, 1):
        assert membership.met(member, 1, {}, False, 3.0) == []
    said = membership.met(2, 1, {}, False, 3.0)
    assert said[0] == (1, {"farewell": True})
    assert [to for to, message in said[1:] if message["form"] == 2] == [0, 2, 3]
    assert said[1][1]["reports"] == [{}, {}, None]
    assert said[1][1]["why"] == "worker 1 has left; worker 3 has come"


def test_only_those_are_said_to_have_come_that_are_let_in():
    membership = begun(max_workers=3)
    for name in ("one", "two", "three"):
        came(membership, f"{name}:1", TERMS, 1.0, name=name)
    membership.gone(3, "is lost", 2.0)
    membership.gone(0, "is lost", 2.0)
    membership.met(1, 1, {}, True, 3.0)
    said = membership.met(2, 1, {}, True, 3.0)
    assert [(to, message["why"]) for to, message in said] == [
        (to, "worker 0 is lost; two has come") for to in (1, 2, 4)
    ]


@pytest.mark.parametrize("stays", [True, False])
def test_members_that_meet_for_a_worker_that_cannot_join_do_not_say_that_it_has_come(stays):
    membership = begun(founders=2)
    task, said = came(membership, "host2:1", TERMS, 1.0)
    assert said == [(0, {"wanted": True}), (1, {"wanted": True})]
    if not stays:
        membership.gone(task, "is lost", 2.0)
    membership.met(0, 1, {}, False, 3.0)
    said = membership.met(1, 1, {}, False, 3.0, admits=False)
    assert [(to, message["why"]) for to, message in said] == [
        (to, "a worker wanted to join") for to in (0, 1)
    ]
    if stays:
        for member in (0, 1):
            membership.ready(member, 2, 4.0)
        membership.met(0, 2, {}, False, 5.0)
        said = membership.met(1, 2, {}, False, 5.0)
        assert [(to, message["why"]) for to, message in said] == [
            (to, "worker 2 has come") for to in (0, 1, 2)
        ]


def test_who_comes_back_to_a_generation_that_others_have_left_is_told():
    """The meeting point is new; what this member missed it learns from another."""
    membership = Membership(limits(), 0.0)
    members = {0: "host0:1", 1: "host1:1"}
    assert membership.resume(5, members, 1.0) == []
    assert membership.returned(0, 5, "") == []
    assert membership.met(0, 5, {}, True, 1.0) == [(1, {"abort": 5})]
    evicted = {"evicted": "generation 6 has begun without it"}
    assert membership.resume(6, members, 2.0) == [(0, evicted)]
    assert membership.returned(1, 6, "") == []


def test_somebody_who_wanted_out_is_gone_before_the_meeting():
    membership = begun()
    membership.wants_out(1, 1.0)
    membership.gone(1, "is lost", 2.0)
    membership.met(0, 1, {}, True, 3.0)
    said = membership.met(2, 1, {}, True, 3.0)
    assert [message["why"] for _, message in said] == ["worker 1 has left"] * 2


def test_a_member_is_lost_on_the_way_to_an_agreed_meeting():
    membership = begun()
    came(membership, "host3:1", TERMS, 1.0)
    assert membership.met(0, 1, {}, False, 2.0) == []
    # Worker 1 waits in the sync before the meeting, for one that does not come.
    told = [(0, {"lost": 2}), (1, {"lost": 2}), (1, {"abort": 1})]
    assert membership.gone(2, "is lost", 2.5) == told
    assert [message.get("form") for _, message in membership.met(1, 1, {}, True, 3.0)] == [2] * 3


def test_a_member_is_lost_before_the_new_generation_is_connected():
    membership = begun()
    membership.gone(0, "is lost", 1.0)
    membership.met(1, 1, {}, True, 1.0)
    membership.met(2, 1, {}, True, 1.0)
    membership.ready(2, 2, 1.0)
    assert membership.gone(1, "is lost", 1.5) == lost(1, 2, of=2)
    (said,) = membership.met(2, 2, {"syncs": 9}, True, 1.6)
    assert said[1]["form"] == 3
    assert said[1]["reports"] == [{"syncs": 9}]
    assert membership.ready(2, 2, 1.7) == []  # of a generation that is over
    assert membership.ready(2, 3, 1.7) == [(2, {"go": 3})]


def test_a_collective_fails_while_all_are_there():
    membership = begun()
    assert membership.met(1, 1, {}, True, 1.0) == [(0, {"abort": 1}), (2, {"abort": 1})]


def test_who_was_given_up_is_told():
    membership = begun()
    membership.gone(0, "was silent", 1.0)
    assert membership.met(0, 1, {}, True, 9.0) == [(0, {"evicted": "generation 1 is over"})]


def test_who_does_not_come_is_given_up():
    membership = begun()
    membership.met(0, 1, {}, True, 1.0)
    membership.met(1, 1, {}, True, 1.0)
    assert membership.tick(300.0) == []
    said = membership.tick(301.0)
    assert "did not come to the meeting for 300 s" in said[0][1]["evicted"]
    assert said[1:3] == [(0, {"lost": 2}), (1, {"lost": 2})]
    assert [message.get("form") for _, message in said[3:]] == [2, 2]


def test_nobody_is_late_until_a_first_member_has_come():
    """After a loss, all others may still be in a long validation."""
    membership = begun(12)
    membership.gone(11, "is lost", 60.0)
    for now in range(61, 1000):
        assert membership.tick(float(now)) == []
    for task in range(10):
        membership.met(task, 1, {}, True, 1000.0)
    assert membership.tick(1298.0) == []
    said = membership.tick(1300.0)
    assert said[0][0] == 10 and "did not come to the meeting for 300 s" in said[0][1]["evicted"]


def test_too_few_are_left():
    membership = begun(min_workers=2)
    membership.gone(0, "is lost", 1.0)
    membership.gone(1, "is lost", 1.0)
    assert membership.met(2, 1, {}, True, 2.0) == []
    assert membership.tick(31.9) == []
    [(task, said)] = membership.tick(32.0)
    assert (task, said["form"]) == (2, 2)
    assert said["last"] == "1 of at least 2 workers are left"
    # It has only to write a checkpoint and to end: who comes now is told to start anew later.
    ended = {"ended": "the run has come to its end", "complete": False}
    assert came(membership, "host3:1", TERMS, 32.5) == (3, [(3, ended)])
    membership.ready(2, 2, 33.0)
    assert membership.done(2, 34.0) == [] and membership.phase == "ended"


def test_all_are_asked_to_end():
    membership = begun(2)
    for task in range(2):
        membership.wants_out(task, 1.0)
    membership.met(0, 1, {}, False, 2.0)
    said = membership.met(1, 1, {}, False, 2.0)
    assert [message["last"] for _, message in said] == ["all workers were asked to end"] * 2
    for task in range(2):
        membership.ready(task, 2, 3.0)
    # The first to end does not make the other meet.
    assert membership.done(0, 4.0) == [] and membership.done(1, 4.0) == []


def test_the_run_ends_and_who_waits_or_comes_has_nothing_to_do():
    membership = begun(2, max_workers=2)
    task, _ = came(membership, "host2:1", TERMS, 1.0)
    assert membership.done(0, 2.0) == []
    ended = {"ended": "the run has come to its end", "complete": True}
    assert membership.done(1, 2.0) == [(task, ended)]
    assert came(membership, "host3:1", TERMS, 3.0) == (3, [(3, ended)])


def test_others_come_within_the_grace():
    membership = begun(min_workers=2)
    membership.gone(0, "is lost", 1.0)
    membership.gone(1, "is lost", 1.0)
    membership.met(2, 1, {"syncs": 4}, True, 2.0)
    task, said = came(membership, "host3:1", TERMS, 20.0)
    assert said[1][1]["members"] == [[2, "host2:1"], [3, "host3:1"]]
    assert said[1][1]["reports"] == [{"syncs": 4}, None]


NOBODY = "the run has ended, since no member of it is left"


def test_nobody_with_the_state_is_left():
    membership = begun()
    came(membership, "host3:1", TERMS, 1.0)
    for task in range(3):
        assert not any("ended" in message for _, message in membership.gone(task, "is lost", 1.0))
    assert membership.tick(30.9) == [] and not membership.is_over
    task, said = membership.tick(31.0)[-1]
    assert task == 3 and said["ended"].startswith(NOBODY) and not said["complete"]
    # Who is started again is told the same, and does not take the run for done.
    assert came(membership, "host4:1", TERMS, 40.0) == (4, [(4, said)])
    assert membership.where() == said and not membership.is_complete


def test_all_members_were_stopped_and_go_on():
    """None of them can be heard for a while; they come back to the meeting of their generation."""
    membership = begun()
    assert membership.gone(1, "was silent", 1.0) == lost(1, 0, 2)
    assert membership.gone(0, "was silent", 1.2) == lost(0, 2)
    assert membership.gone(2, "was silent", 1.4) == []
    assert membership.returned(1, 0, "") is None  # of another generation
    assert membership.returned(1, 1, "") == [(1, {"abort": 1})]
    assert membership.met(1, 1, {"syncs": 5}, True, 9.0) == []
    assert membership.returned(0, 1, "") == [(0, {"abort": 1})]
    assert membership.met(0, 1, {"syncs": 6}, True, 9.0) == []
    said = membership.tick(31.4)  # worker 2 has died
    assert said[:2] == [(0, {"lost": 2}), (1, {"lost": 2})]
    said = said[2:]
    assert [(task, message["members"]) for task, message in said] == [
        (task, [[0, "host0:1"], [1, "host1:1"]]) for task in (0, 1)
    ]
    assert said[0][1]["reports"] == [{"syncs": 6}, {"syncs": 5}]
    assert said[0][1]["why"].endswith("all were awaited; worker 2 has not come back")
    assert membership.returned(2, 1, "") is None


def test_all_that_are_awaited_are_awaited_once():
    membership = begun(1)
    membership.gone(0, "was silent", 1.0)
    assert membership.tick(30.9) == []
    membership.tick(31.0)
    assert membership.phase == "ended"
    # Who had come back and is lost again is awaited again.
    membership = begun(1)
    membership.gone(0, "was silent", 1.0)
    assert membership.returned(0, 1, "") == [(0, {"abort": 1})]
    membership.gone(0, "is lost", 30.0)
    assert membership.tick(59.9) == [] and membership.phase == "meeting"
    membership.tick(60.0)
    assert membership.phase == "ended"


def test_the_meeting_point_stood_still_and_nobody_meets_for_it():
    membership = begun()
    membership.stood_still(100.0)
    for task in range(3):
        assert membership.gone(task, "is lost", 100.1) == []  # nobody is told to be lost
    assert membership.phase == "training"
    _, said = came(membership, "host3:1", TERMS, 100.2)
    assert (0, {"wanted": True}) in said  # which is not heard there
    for task in range(2):
        assert membership.returned(task, 1, "") == [(task, {"wanted": True})]
    # Worker 2 died in the meantime: the others are told of it when their sync fails, or later.
    assert membership.tick(129.9) == []
    assert membership.tick(130.0) == lost(2, 0, 1)
    assert membership.gone(1, "is lost", 131.0) == lost(1, 0)  # as ever


def test_the_meeting_point_stood_still_within_a_meeting():
    """What members had said is said again by those that come back, since they had no answer."""
    membership = begun(2)
    membership.met(0, 1, {"syncs": 1}, True, 1.0)
    membership.stood_still(100.0)
    membership.gone(0, "is lost", 100.0)
    assert membership.met(1, 1, {"syncs": 2}, True, 100.1) == []
    assert membership.returned(0, 1, "") == [(0, {"abort": 1})]
    said = membership.met(0, 1, {"syncs": 1}, True, 100.2)
    assert [message["form"] for _, message in said] == [2, 2]
    assert membership.ready(0, 2, 100.3) == []
    membership.gone(0, "is lost", 100.4)
    assert membership.ready(1, 2, 100.5) == []
    assert membership.returned(0, 2, "") == []
    assert membership.ready(0, 2, 100.6) == [(0, {"go": 2}), (1, {"go": 2})]


def test_the_meeting_point_stood_still_while_others_were_awaited():
    membership = begun(min_workers=3)
    membership.gone(0, "is lost", 1.0)
    membership.met(1, 1, {}, True, 1.0)
    membership.stood_still(1000.0)
    assert membership.tick(1000.0) == []
    assert membership.met(2, 1, {}, True, 1001.0) == []
    assert membership.tick(1030.9) == []
    assert [message["form"] for _, message in membership.tick(1031.0)] == [2, 2]


def test_a_member_is_lost_where_another_has_done_its_work():
    membership = begun(2)
    membership.done(0, 1.0)
    membership.gone(1, "is lost", 1.0)
    assert membership.phase == "ended" and membership.is_complete


def test_founders_that_do_not_come():
    membership = Membership(limits(3, min_workers=2), 0.0)
    came(membership, "host0:1", TERMS, 0.0)
    came(membership, "host1:1", TERMS, 1.0)
    assert membership.tick(59.0) == []
    assert [message["form"] for _, message in membership.tick(60.0)] == [1, 1]
    membership = Membership(limits(3, min_workers=2), 0.0)
    came(membership, "host0:1", TERMS, 0.0)
    said = membership.tick(60.0)
    assert said == [
        (0, {"ended": "3 workers were to begin, and 1 have come within 60 s", "complete": False})
    ]


def test_who_differs_is_refused_and_the_run_goes_on():
    membership = begun()
    task, said = came(membership, "host9:1", {**TERMS, "rule": "EASGD()"}, 1.0)
    assert said == [(task, {"refused": "rule: the run has 'BSP()', this worker has 'EASGD()'"})]
    assert membership.phase == "training"
    assert membership.waiting == ()
    membership.agreed(7, {})  # no member
    assert came(membership, "host9:1", {**TERMS, "rule": "EASGD()"}, 1.0)[1][0][1].keys() == {
        "refused"
    }


def test_who_waits_for_a_call_of_fit_that_is_over_is_told():
    membership = begun(2, max_workers=2)
    task, _ = came(membership, "host2:1", TERMS, 1.0)
    assert membership.gone(1, "is lost", 1.0)
    membership.met(0, 1, {}, True, 1.0, admits=False)  # it is at the end of the call
    assert (0, {"wanted": True}) in membership.ready(0, 2, 1.0)
    where = {"fit": 1, "histories": ["first"]}
    assert membership.begins(0, 1, ["first"]) == [(task, where), (0, {"wanted": False})]
    assert membership.begins(0, 1, ["another"]) == []
    assert membership.where() == where
    # What all have alike in this call has to be told anew, and nobody is let in before.
    assert membership.agreed(0, TERMS, 0) == []
    assert membership.register(task, "host2:1", TERMS, 2.0, fit=0) == [(task, where)]
    assert membership.register(task, "host2:1", TERMS, 2.0, fit=1) == []
    assert membership.tick(2.1) == []
    membership.agreed(0, TERMS, 1)
    assert membership.tick(2.2) == [(0, {"wanted": True})]
    said = membership.met(0, 2, {}, False, 3.0)
    assert [(to, message["form"], message["why"]) for to, message in said] == [
        (0, 3, "worker 2 has come"),
        (2, 3, "worker 2 has come"),
    ]


class Worker:
    """As a worker goes by what it is told."""

    def __init__(self):
        self.inbox = []
        self.generation = 0
        self.peers = ()
        self.state = "waiting"  # training, at the meeting, enabling, out
        self.syncs = 0
        self.wish = self.failed = False


class Run:
    """A membership, and workers that are told and tell with any delay, and may die anywhere."""

    def __init__(self, seed, limits):
        self.random = random.Random(seed)
        self.now = 0.0
        self.membership = Membership(limits, 0.0)
        self.workers = {}
        self.forms = {}
        self.gos = set()
        self.last = False  # whether a generation was the last
        self.away = set()  # workers that are cut off

    def deliver(self, said):
        for task, message in said:
            if task in self.workers and task not in self.away:
                self.workers[task].inbox.append(message)
            if "form" in message:
                self.check_form(message)
            if "go" in message and message["go"] not in self.gos:  # it may be said again later
                self.gos.add(message["go"])
                # All members had connected themselves when it was said.
                members = [task for task, _ in self.forms[message["go"]]["members"]]
                assert all(
                    self.workers[each].state == "enabled"
                    and self.workers[each].generation == message["go"]
                    for each in members
                    if each in self.workers
                )
                assert set(members) <= set(self.workers)

    def check_form(self, form):
        number = form["form"]
        if self.forms.setdefault(number, form) is not form:
            assert self.forms[number] == form  # one history
        tasks = [task for task, _ in form["members"]]
        assert tasks == sorted(set(tasks))
        most = self.membership.limits.max_workers
        self.last |= bool(form["last"])
        # Who waits may not be let in yet, but it is there.
        there = len(tasks) + len(self.membership.waiting)
        assert self.last or self.membership.limits.min_workers <= there
        assert len(tasks) <= (most or len(tasks))
        if number > 1:
            assert any(report is not None for report in form["reports"])  # one has been there

    def register(self):
        task, said = came(self.membership, "host:1", TERMS, self.now)
        if task in self.membership.waiting + self.membership.members:
            self.workers[task] = Worker()
        self.deliver(said)

    def meet(self, task, failed):
        worker = self.workers[task]
        worker.state, worker.failed = "at the meeting", failed
        report = {"syncs": worker.syncs}
        self.deliver(self.membership.met(task, worker.generation, report, failed, self.now))

    def hear(self, task):
        worker = self.workers[task]
        if not worker.inbox:
            return
        message = worker.inbox.pop(0)
        match message:
            case {"wanted": wanted}:
                worker.wish = wanted
            case {"abort": generation}:
                if generation == worker.generation and worker.state != "at the meeting":
                    self.meet(task, True)
            case {"form": generation, "members": members}:
                assert generation > worker.generation
                worker.generation, worker.wish = generation, False
                worker.peers = tuple(each for each, _ in members)
                worker.state = "enabled"
                self.deliver(self.membership.ready(task, generation, self.now))
            case {"go": generation}:
                if generation == worker.generation and worker.state == "enabled":
                    worker.state = "training"
                    self.deliver(self.membership.agreed(task, TERMS))
            case {"evicted": _}:
                self.deliver(self.membership.gone(task, "is lost", self.now))
                self.join_again(task)
            case {"farewell": _} | {"ended": _}:
                worker.state = "out"

    def sync(self, task):
        """All members of a worker's generation sync, and meet if one has the wish."""
        worker = self.workers[task]
        peers = [self.workers.get(each) for each in worker.peers]
        if worker.state != "training" or any(
            p is None or p.state != "training" or p.generation != worker.generation for p in peers
        ):
            return
        for peer in peers:
            peer.syncs += 1
        if any(peer.wish for peer in peers):
            order = list(worker.peers)
            self.random.shuffle(order)
            for each in order:
                self.workers[each].state = "on the way"

    def arrive(self, task):
        if self.workers[task].state == "on the way":
            self.meet(task, False)

    def kill(self, task):
        del self.workers[task]
        if task in self.away:
            self.away.remove(task)
        else:
            self.deliver(self.membership.gone(task, "is lost", self.now))

    def cut(self, task):
        """A worker cannot be heard, nor hears, until it comes back."""
        self.away.add(task)
        self.deliver(self.membership.gone(task, "was silent", self.now))

    def come_back(self, task):
        """As `Line` does: it says where it is, and asks again for what it had no answer to."""
        self.away.remove(task)
        worker = self.workers[task]
        said = self.membership.returned(task, worker.generation, "")
        if said is None:
            self.join_again(task)
            return
        self.deliver(said)
        if worker.state == "at the meeting":
            self.meet(task, worker.failed)
        elif worker.state == "enabled":
            self.deliver(self.membership.ready(task, worker.generation, self.now))

    def join_again(self, task):
        """A worker that was given up joins in its process; the others may not have met yet."""
        self.workers[task] = Worker()
        self.deliver(self.membership.register(task, "host:1", TERMS, self.now))

    def step(self, calm):
        self.now += self.random.random()
        self.deliver(self.membership.tick(self.now))
        if not calm and self.random.random() < 0.15:
            self.register()
        if not self.workers:
            return
        task = self.random.choice(list(self.workers))
        chance = self.random.random()
        if task in self.away:
            if calm or chance < 0.3:
                self.come_back(task)
        elif not calm and chance < 0.06:
            self.kill(task)
        elif not calm and chance < 0.09:
            if self.workers[task].state == "training":
                self.meet(task, True)  # a link between two workers is cut
        elif not calm and chance < 0.12:
            self.deliver(self.membership.wants_out(task, self.now))
        elif not calm and chance < 0.15:
            if self.workers[task].state != "out" and self.workers[task].generation:
                self.cut(task)
        elif not calm and chance < 0.16:
            self.membership.stood_still(self.now)
        elif chance < 0.4:
            self.sync(task)
        elif chance < 0.6:
            self.arrive(task)
        else:
            self.hear(task)


@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, 3, 4, 5]),
)
def test_whatever_happens_there_is_one_history_and_an_end_of_each_meeting(
    seed, founders, least, most
):
    least = min(least, founders)
    most = most and max(most, founders)
    run = Run(seed, limits(founders, least, most))
    for _ in range(150):
        run.step(calm=False)
    for _ in range(4000):
        run.step(calm=True)
    membership = run.membership
    numbers = [each.number for each in membership.history]
    assert numbers == list(range(1, len(numbers) + 1))
    if membership.phase == "ended" or (membership.phase == "founding" and not run.workers):
        return
    # All that are left train in the same generation, but for spares.
    assert membership.phase == "training"
    members = membership.members
    left = {task for task, worker in run.workers.items() if worker.state != "out"}
    assert left == {*members, *membership.waiting}
    assert {run.workers[task].state for task in members} == {"training"}
    assert {run.workers[task].generation for task in members} == {membership.generation}
    assert all(run.workers[task].peers == members for task in members)
    if membership.waiting and not run.last:
        assert len(members) == most
