"""Of the files in a run's directory only those go that the run's record names."""

import fcntl
import itertools
import re
import time
import types

import pytest
import tensorflow as tf

from scripts import run_files, runs
from tfpara.checkpoint.local_store import LocalStore
from tfpara.checkpoint.store import CheckpointError

NAMES = run_files.of_training(["model.weights.h5", "ema-0.9.weights.h5"])


def write(run_dir, *names):
    for name in names:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)


def files(run_dir):
    found = (str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())
    return {name for name in found if not name.startswith("checkpoints/")}


def add_checkpoint(run_dir):
    store = LocalStore(run_files.checkpoints(run_dir), 3)
    store.lock()
    store.begin(1)
    marks = store.write_part(1, 0, {"x": tf.constant(1.0)})
    store.commit(1, {"files": marks})
    store.release()


def begin(run_dir, start_over=False, init=None):
    """As `scripts.train` does."""
    run_files.check(run_dir, NAMES, start_over, init)
    if start_over or not run_files.can_resume(run_dir):
        run_files.begin(run_dir, NAMES, start_over)


def test_a_launcher_knows_the_run_that_it_has_begun(tmp_path, monkeypatch):
    begin(tmp_path)
    assert not run_files.is_begun_here(tmp_path)
    with pytest.raises(ValueError, match="Leave the flag out"):
        run_files.wait_for_begin(tmp_path, minutes=60)
    monkeypatch.setenv("TFPARA_RUN_ID", "1")
    assert not run_files.is_begun_here(tmp_path)
    begin(tmp_path, start_over=True)
    run_files.record(tmp_path, "decoding.json")
    assert run_files.is_begun_here(tmp_path)
    monkeypatch.setenv("TFPARA_RUN_ID", "12")
    assert not run_files.is_begun_here(tmp_path)
    with pytest.raises(ValueError, match="has not begun the new run in --run_dir="):
        run_files.wait_for_begin(tmp_path, minutes=0)
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            begin(tmp_path, start_over=True)

    # Of this module alone, since other threads of the process sleep as well.
    clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(run_files, "time", clock)
    run_files.wait_for_begin(tmp_path, minutes=60)
    assert len(looks) == 2


MINE = {"notes.json", "first.weights.h5", "tensorboard/mine", "test.json"}


def test_a_run_leaves_what_is_not_its_own_and_starting_over_removes_what_is(tmp_path):
    write(tmp_path, *MINE)
    begin(tmp_path)
    of_run = {
        "model.json",
        "flags.txt",
        "history.json",
        "held_out.csv",
        "ema-0.9.weights.h5",
        "tensorboard/events.out.tfevents.1.host.2.0.v2",
        "evaluator/scores.csv",
        "evaluator/tensorboard/events.out.tfevents.1.host.3.0.v2",
    }
    write(tmp_path, *of_run)
    run_files.record(tmp_path, "decoding.json")
    write(tmp_path, "decoding.json")
    add_checkpoint(tmp_path)
    begin(tmp_path)  # goes on
    assert files(tmp_path) == {*MINE, *of_run, "decoding.json", "files.txt"}
    assert run_files.can_resume(tmp_path)
    begin(tmp_path, start_over=True)
    assert files(tmp_path) == {*MINE, "files.txt"}
    assert not run_files.can_resume(tmp_path)
    for name in MINE:
        assert (tmp_path / name).read_text() == name


@pytest.mark.parametrize(
    ("name", "start_over"),
    itertools.product(
        ["model.json", "history.json", "model.weights.h5", "ema-0.9.weights.h5", "held_out.csv"],
        [False, True],
    ),
)
def test_files_that_no_run_has_written_are_refused_and_stay(tmp_path, name, start_over):
    write(tmp_path, name)
    with pytest.raises(ValueError, match=f"has {name}, which a run would replace"):
        begin(tmp_path, start_over)
    assert files(tmp_path) == {name}


def test_checkpoints_that_no_record_names_are_not_removed(tmp_path):
    add_checkpoint(tmp_path)
    begin(tmp_path)
    with pytest.raises(ValueError, match=r"has checkpoints/checkpoint-00000001, which"):
        begin(tmp_path, start_over=True)
    assert run_files.can_resume(tmp_path)


def test_results_without_a_checkpoint_are_lost_only_where_that_is_asked_for(tmp_path):
    begin(tmp_path)
    write(tmp_path, "model.json", "flags.txt", "held_out.csv")
    begin(tmp_path)  # it had ended before its first checkpoint
    write(tmp_path, "model.weights.h5")
    with pytest.raises(ValueError, match=r"results of a run \(model.weights.h5\).*--start_over"):
        begin(tmp_path)
    assert (tmp_path / "model.weights.h5").is_file()
    begin(tmp_path, start_over=True)
    assert files(tmp_path) == {"files.txt"}


def test_the_weights_to_start_from_are_not_replaced(tmp_path):
    write(tmp_path, "first.weights.h5")
    begin(tmp_path, init=str(tmp_path / "first.weights.h5"))
    write(tmp_path, "model.weights.h5")
    with pytest.raises(ValueError, match=r"--init=.*model.weights.h5 is a file that"):
        begin(tmp_path, start_over=True, init=str(tmp_path / "model.weights.h5"))
    assert files(tmp_path) == {"first.weights.h5", "model.weights.h5", "files.txt"}


def test_a_directory_in_which_a_run_is_under_way_is_left_alone(tmp_path):
    begin(tmp_path)
    write(tmp_path, "model.json")
    with (run_files.checkpoints(tmp_path) / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # by another program
        for start_over in (False, True):
            with pytest.raises(CheckpointError, match="in use by another run"):
                begin(tmp_path, start_over)
    assert files(tmp_path) == {"model.json", "files.txt"}


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints", "deep/down"])
def test_no_file_is_removed_that_a_link_leads_to(tmp_path, name):
    """A link in place of a folder is refused; one in place of a file goes, and its target stays."""
    run_dir, mine = tmp_path / "run", tmp_path / "mine"
    begin(run_dir)
    (run_dir / "deep").mkdir()
    write(mine, "events.out.tfevents.1", "checkpoint-00000001/manifest.json", "test.json")
    run_files.record(run_dir, "deep/down/test.json")
    (run_dir / "checkpoints" / "lock").unlink()
    (run_dir / "checkpoints").rmdir()
    link = run_dir / name
    link.symlink_to(mine)
    before = files(mine)
    with pytest.raises(ValueError, match=rf"files in {mine}.*a link in {run_dir} leads .{name}"):
        begin(run_dir, start_over=True)
    link.unlink()
    (run_dir / "model.weights.h5").symlink_to(mine / "test.json")
    begin(run_dir, start_over=True)
    assert not (run_dir / "model.weights.h5").is_symlink()
    assert files(mine) == before and (mine / "checkpoint-00000001").is_dir()


@pytest.mark.parametrize("name", ["**/*", "*", "[a-z]*.json", ".[0-9]*.*"])
def test_a_pattern_that_no_program_writes_removes_nothing(tmp_path, name):
    begin(tmp_path)
    write(tmp_path, "notes.json", "sub/mine")
    run_files.record(tmp_path, name)
    with pytest.raises(ValueError, match=r"files\.txt has the pattern .*Delete that line"):
        begin(tmp_path, start_over=True)
    assert files(tmp_path) == {"notes.json", "sub/mine", "files.txt"}


def test_a_record_does_not_lead_out_of_the_directory(tmp_path):
    run_dir = tmp_path / "run"
    begin(run_dir)
    write(tmp_path, "precious")
    recorded = (run_dir / "files.txt").read_text()
    for name in ("../precious", ".", str(tmp_path / "precious")):
        (run_dir / "files.txt").write_text(f"{recorded}{name}\n")
        with pytest.raises(ValueError, match=f"names {re.escape(repr(name))}, which is not in"):
            begin(run_dir, start_over=True)
    assert (tmp_path / "precious").is_file()


def test_a_summary_has_no_times_of_syncs_where_none_were_measured():
    """As with asynchronous rules, which do not sync."""
    epochs = [{"samples_per_second": 2.0}, {"samples_per_second": 6.0}]
    assert runs.speed(epochs) == {"samples_per_second": 3.0}
    assert runs.speed([{"sync_ms": 1.0}, {"sync_ms": 2.0}]) == {"sync_ms": 1.5}
