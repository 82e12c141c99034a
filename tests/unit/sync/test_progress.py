"""Reports of progress: ports that cannot be, and a launcher that reads late."""

import os
import types

import pytest

from tfpara.cluster import parent
from tfpara.sync import progress


@pytest.mark.parametrize(
    ("port", "elastic", "words"),
    [
        (65536, False, "status_port=65536 is above 65535, the largest number of a port"),
        (-1, False, "status_port=-1 must be a whole number, at least 0"),
        (True, False, "status_port=True must be a whole number"),
        ("8080", False, "status_port='8080' must be a whole number"),
        (0, True, "status_port=0 with elastic=: the chief, which serves the page, may be lost"),
    ],
)
def test_ports_that_cannot_be(port, elastic, words):
    with pytest.raises(ValueError, match=words):
        progress.checked_port(port, elastic)


def test_ports_that_can_be():
    assert [progress.checked_port(port, False) for port in (None, 0, 65535)] == [None, 0, 65535]
    assert progress.checked_port(None, True) is None


class Told(progress.Progress):
    """Reports numbers, of a strategy that trains nothing."""

    count = 0

    def __init__(self):
        super().__init__(types.SimpleNamespace(company=types.SimpleNamespace(changes=False)))

    def told(self):
        self.count += 1
        return {"steps": self.count, "waits": 0.0, "place": ""}


def test_reports_wait_for_a_launcher_that_is_stopped_and_the_last_one_does_not(monkeypatch):
    told = Told()
    monkeypatch.setattr(progress, "_latest", told)
    assert parent.unread() is None
    told.report(last=True)  # there is no launcher
    assert told.count == 0
    reports = parent.Reports()
    for name, value in parent.variables(reports.writer).items():
        monkeypatch.setenv(name, value)
    assert parent.unread() == 0
    for _ in range(3):
        told.report()
    assert told.count == 1 and parent.unread() > 0
    parent.tell(saves=True)
    read = reports.read()
    assert (read["progress"]["steps"], read["saves"]) == (1, True)
    assert parent.unread() == 0
    told.report()
    told.report(last=True)
    assert reports.read()["progress"]["steps"] == 3
    monkeypatch.setattr(progress, "_latest", Told())  # a strategy that was made later
    told.report()
    assert told.count == 3
    reports.close()
    os.close(reports.writer)


def test_scores_for_which_a_report_has_no_room_are_left_out(monkeypatch):
    reports = parent.Reports()
    for name, value in parent.variables(reports.writer).items():
        monkeypatch.setenv(name, value)
    scores = {f"val_head_{k}_sparse_categorical_accuracy": k + 1 / 3 for k in range(99)}
    parent.tell_progress({"steps": 7, "scores": scores})
    read = reports.read()["progress"]
    assert read["steps"] == 7
    assert len(read["scores"]) >= 24 and read["scores"].items() <= scores.items()
    assert not parent.tell(progress={"place": "x" * 4096})
    parent.tell_progress({"place": "x" * 4096})  # nothing can be left out
    assert reports.read()["progress"] == read
    reports.close()
    os.close(reports.writer)
