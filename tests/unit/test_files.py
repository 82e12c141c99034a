"""Tests of tfpara/files.py: what is at a path after a failure, or a kill, at every step."""

import contextlib
import errno
import os
import subprocess
import sys

import pytest

from tfpara import files

# The operations on the file system by which `whole` changes what others can see.
STEPS = ("mkdir", "open", "fsync", "rename", "replace", "rmdir", "unlink")


def write_model(folder, text):
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_text(text)
    (folder / "variables" / "data").write_text(text)


def write_set(place, text):
    """A list and the files that it names, as Keras writes weights in several files."""
    place.parent.mkdir(parents=True, exist_ok=True)
    for name in ("w.json", "w_0.h5", "w_1.h5"):
        place.with_name(name).write_text(text)


def content(folder):
    found = {p.relative_to(folder): p.read_text() for p in folder.rglob("*") if p.is_file()}
    texts = set(found.values())
    assert len(found) == 2 and len(texts) == 1, found  # both files, of one version
    return texts.pop()


class Fault(OSError):
    pass


class Faults:
    """Makes the n-th of the operations fail, before or after it was done."""

    def __init__(self, monkeypatch, after):
        self.countdown, self.after, self.fired = 0, after, False
        for name in STEPS:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, operation):
        def call(*args, **kwargs):
            self.countdown -= 1
            mine = self.countdown == 0
            self.fired |= mine
            if mine and not self.after:
                raise Fault("injected")
            result = operation(*args, **kwargs)
            if mine:
                if operation.__name__ == "open":
                    os.close(result)
                raise Fault("injected")
            return result

        return call


def failures_at_each_step(faults, folder, name, write):
    """Writes over old files again and again, with a failure one step later each time.

    Yields the step and the place, which is the first of the files or their folder. The last time
    nothing fails.
    """
    for step in range(1, 100):
        place = folder / str(step) / name
        write(place, "old")
        faults.fired, faults.countdown = False, step
        with contextlib.suppress(Fault), files.whole(place) as scratch:
            write(scratch, "new")
        faults.countdown = 0
        yield step, place
        if not faults.fired:
            break
    assert not faults.fired and step > 10


@pytest.mark.parametrize("swaps", [True, False], ids=["swapped", "renamed"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_failure_at_any_step_leaves_the_old_or_the_new(tmp_path, monkeypatch, after, swaps):
    """Also where the system cannot swap folders, so that there are two renames."""
    if not swaps:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    seen = set()
    faults = Faults(monkeypatch, after)
    for step, place in failures_at_each_step(faults, tmp_path, "model", write_model):
        assert content(place) in ("old", "new"), step
        seen.add(content(place))
        with files.whole(place) as scratch:
            write_model(scratch, "newer")
        assert content(place) == "newer"
        assert os.listdir(place.parent) == ["model"], step
    assert seen == {"old", "new"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_failure_at_any_step_leaves_all_old_files_of_several_or_all_new(
    tmp_path, monkeypatch, after
):
    seen = set()
    faults = Faults(monkeypatch, after)
    for step, place in failures_at_each_step(faults, tmp_path, "w.json", write_set):
        found = {path.read_text() for path in place.parent.glob("w*")}
        assert len(found) == 1 and len(list(place.parent.glob("w*"))) == 3, (step, found)
        seen |= found
    assert seen == {"old", "new"}


# Ends without any clean-up before the n-th operation, as SIGKILL does.
KILLED = """
import os, sys
from pathlib import Path
from tfpara import files
step, place, swaps = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
if not swaps:
    files._exchange = lambda one, other: False
done = 0
def counted(operation):
    def call(*args, **kwargs):
        global done
        done += 1
        if done == step:
            os._exit(9)
        return operation(*args, **kwargs)
    return call
with files.whole(place) as scratch:
    if place.suffix == ".json":
        for name in ("w.json", "w_0.h5", "w_1.h5"):
            scratch.with_name(name).write_text("new")
    else:
        (scratch / "variables").mkdir(parents=True)
        (scratch / "saved_model.pb").write_text("new")
        (scratch / "variables" / "data").write_text("new")
    for name in ("fsync", "rename", "replace", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
"""


@pytest.mark.quick
@pytest.mark.parametrize("swaps", [True, False], ids=["swapped", "renamed"])
def test_a_kill_at_any_step_loses_nothing(tmp_path, swaps):
    gaps = []
    for step in range(1, 100):
        place = tmp_path / str(step) / "model"
        write_model(place, "old")
        command = [sys.executable, "-c", KILLED, str(step), str(place), str(swaps)]
        ended = subprocess.run(command, timeout=60)
        gaps += [step] if not place.exists() else [content(place)]
        with pytest.raises(RuntimeError), files.whole(place):
            raise RuntimeError("the next writer fails too")
        assert content(place) in ("old", "new"), step
        assert os.listdir(place.parent) == ["model"], step
        if ended.returncode == 0:
            break
    assert ended.returncode == 0 and step > 5
    # Only two renames have a moment without a model.
    assert sum(isinstance(gap, int) for gap in gaps) == (0 if swaps else 1)
    assert gaps[0] == "old" and gaps[-1] == "new"


@pytest.mark.quick
def test_a_kill_at_any_step_mixes_no_old_and_new_files_of_several(tmp_path):
    """Without the list nothing is read; the next writer puts it back with the files it names."""
    gaps = 0
    for step in range(1, 100):
        place = tmp_path / str(step) / "w.json"
        write_set(place, "old")
        command = [sys.executable, "-c", KILLED, str(step), str(place), "True"]
        ended = subprocess.run(command, timeout=60)
        found = {path.read_text() for path in place.parent.glob("w*")}
        gaps += not place.exists()
        assert not place.exists() or len(found) == 1, step
        with pytest.raises(RuntimeError), files.whole(place):
            raise RuntimeError("the next writer fails too")
        assert len({path.read_text() for path in place.parent.glob("w*")}) == 1, step
        assert sorted(os.listdir(place.parent)) == ["w.json", "w_0.h5", "w_1.h5"], step
        if ended.returncode == 0:
            break
    assert ended.returncode == 0 and step > 5 and gaps > 2


def test_a_file_and_those_beside_it_appear_together_and_the_list_after_its_parts(tmp_path):
    order = []
    place = tmp_path / "deep" / "w.weights.json"
    with files.whole(place) as scratch:
        scratch.write_text("list")
        for k in range(2):
            scratch.with_name(f"w_{k}.weights.h5").write_text(str(k))
        assert os.listdir(place.parent) != [] and not place.exists()
        order = sorted(p.name for p in scratch.parent.iterdir())
    assert sorted(p.name for p in place.parent.iterdir()) == order
    with pytest.raises(RuntimeError), files.whole(place) as scratch:
        scratch.write_text("half")
        raise RuntimeError
    assert place.read_text() == "list"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with files.whole(tmp_path / "link") as scratch:
        scratch.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_no_file_takes_the_place_of_a_device(tmp_path):
    place = tmp_path / "fifo"
    os.mkfifo(place)
    with pytest.raises(OSError, match="a FIFO or a device"), files.whole(place) as scratch:
        scratch.write_text("new")
    assert place.is_fifo()


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/x'"),
        files.whole(tmp_path / "x"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []
