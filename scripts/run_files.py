"""The record of the files that a run has written in its directory.

Each line of RUN_DIR/files.txt is a name, or a pattern of names. A program adds names before it
writes the files. Only files in this record are ever removed.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts import common
from tfpara.checkpoint.local_store import LocalStore
from tfpara.cluster import parent
from tfpara.cluster.tf_config import shown
from tfpara.files import append_line, no_link

RECORD = "files.txt"
_HEADER = "# Written here by the programs of a run: train --start_over removes these files alone.\n"
_BEGUN = f"# The run was begun by processes with {parent.RUN_ID}="
_CHECKPOINTS = "checkpoints"
_CHECKPOINT_NAMES = f"{_CHECKPOINTS}/checkpoint-" + 8 * "[0-9]"
_EVENTS = "tensorboard/events.out.tfevents.*"
EVALUATOR = "evaluator"  # the directory with the scores of an evaluator
_OF_EVALUATOR = (f"{EVALUATOR}/scores.csv", f"{EVALUATOR}/{_EVENTS}")
# A run writes these files before its first checkpoint, so a run without results may have them. They
# are replaced even without --start_over. All other files of a run are results.
_AT_START = ("flags.txt", "model.json", "held_out.csv", _EVENTS)
# A name in the record of a run's files has at most this many characters. Names are patterns, and
# the search for files that match a longer pattern would take too much time.
_LONGEST_NAME = 1000
_LOOK_SECONDS = 1.0  # pause between two checks whether a run has begun
# While a weights file is being written, its name begins with a prefix that fits this pattern. If
# the program is killed meanwhile, the file stays under that name, so it counts as the run's file.
_BEING_WRITTEN = ".[0-9]*."


def checkpoints(run_dir: Path) -> Path:
    """Returns the directory of a run's checkpoints."""
    return run_dir / _CHECKPOINTS


def can_resume(run_dir: Path) -> bool:
    """Returns whether there is a checkpoint from which the run can be resumed."""
    return bool(LocalStore(checkpoints(run_dir), 1).numbers())


def of_training(weights: Iterable[str]) -> list[str]:
    """Returns the names of the files that `scripts.train` writes.

    Args:
        weights: names of the files of weights.
    """
    named = [name for file in weights for name in (file, f"{_BEING_WRITTEN}{file}")]
    return [*_AT_START, "history.json", _CHECKPOINT_NAMES, *_OF_EVALUATOR, *named]


def check(run_dir: Path, names: Sequence[str], start_over: bool, init: str | None) -> None:
    """Refuses, before anything is written, a run through which files would be lost.

    Args:
        run_dir: directory of the run.
        names: names of the files that the run writes.
        start_over: whether an earlier run's files may be removed.
        init: the file of weights to start from, if there is one.

    Raises:
        ValueError: the run would replace results of an earlier run, or files that no run has
            written; or a file that would be removed is in another directory, through a link.
    """
    _check_init(run_dir, names, init)
    if start_over:
        _check_links(run_dir, [checkpoints(run_dir), *_found(run_dir, _recorded(run_dir))])
    if can_resume(run_dir) and not start_over:
        return
    own = set(_found(run_dir, _recorded(run_dir)))
    there = _found(run_dir, names)
    foreign = [path for path in there if path not in own]
    if foreign:
        raise ValueError(
            f"--run_dir={run_dir} has {foreign[0].relative_to(run_dir)}, which a run would "
            f"replace, and no {RECORD} that says that a run has written it. Move it away, or give "
            "another directory."
        )
    results = [path for path in own if path not in set(_found(run_dir, _AT_START))]
    if results and not start_over:
        listed = ", ".join(sorted(os.fspath(path.relative_to(run_dir)) for path in results))
        raise ValueError(
            f"--run_dir={run_dir} has results of a run ({listed}) and no checkpoint to go on from. "
            "Give --start_over to remove them and begin anew, or give another directory."
        )


def begin(run_dir: Path, names: Sequence[str], start_over: bool) -> None:
    """Prepares the directory for a new run, and records the run's files. Call `check` first.

    Args:
        run_dir: directory of the run.
        names: names of the files that the run writes.
        start_over: whether the files of an earlier run are removed.

    Raises:
        CheckpointError: another run is still writing there.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    store = LocalStore(checkpoints(run_dir), 1)
    store.lock()
    try:
        if start_over:
            _remove(run_dir, store)
        mark = f"{_BEGUN}{os.environ.get(parent.RUN_ID, '')}\n"
        common.write_text(run_dir / RECORD, _HEADER + mark + "".join(f"{n}\n" for n in names))
    finally:
        store.release()


def is_begun_here(run_dir: Path) -> bool:
    """Returns whether the launcher of this process has begun the run, perhaps before a restart."""
    run_id = os.environ.get(parent.RUN_ID)
    return bool(run_id) and f"{_BEGUN}{run_id}" in _lines(run_dir)


def wait_for_begin(run_dir: Path, minutes: float) -> None:
    """Waits until the launcher of this process has begun the run, and removed the former one.

    Raises:
        ValueError: no launcher has started this process, or the run has not begun for `minutes`.
    """
    if not os.environ.get(parent.RUN_ID):
        raise ValueError(
            "--start_over: only an evaluator of tfpara-launch --evaluator can tell the new run "
            f"from the former run in --run_dir={run_dir}. Leave the flag out, and start this "
            "program after the workers have printed their first epoch."
        )
    until = time.monotonic() + 60 * minutes
    if not is_begun_here(run_dir):
        print(f"The evaluator waits until the chief has begun the new run in {run_dir}.")
    while not is_begun_here(run_dir):
        if time.monotonic() > until:
            raise ValueError(
                f"--start_over: the chief has not begun the new run in --run_dir={run_dir} for "
                f"{minutes:g} minutes. Give all processes the same --run_dir."
            )
        time.sleep(_LOOK_SECONDS)


def record(run_dir: Path, name: str) -> None:
    """Adds a name to the record; call it before writing the file."""
    if name in _recorded(run_dir):
        return
    path = run_dir / RECORD
    append_line(path, name if path.is_file() and path.stat().st_size else f"{_HEADER}{name}")


def _remove(run_dir: Path, store: LocalStore) -> None:
    """Removes the files in the record.

    The checkpoints go first, so that no run is resumed if only a part of the files is removed.
    """
    recorded = _recorded(run_dir)
    if _CHECKPOINT_NAMES in recorded:
        for number in store.numbers():
            store.remove(number)
    for path in _found(run_dir, recorded):
        if path.is_symlink() or not path.is_dir():
            path.unlink()


def _lines(run_dir: Path) -> list[str]:
    path = run_dir / RECORD
    if not path.is_file():
        return []
    with open(path, "rb", opener=no_link) as file:
        return file.read().decode(errors="replace").splitlines()


def _recorded(run_dir: Path) -> list[str]:
    path = run_dir / RECORD
    names = [line for line in _lines(run_dir) if line and not line.startswith("#")]
    for name in names:
        parts = Path(name).parts
        outside = Path(name).is_absolute() or ".." in parts or not parts
        if outside or "\0" in name or len(name) > _LONGEST_NAME:
            raise ValueError(
                f"{path} names {shown(name)}, which is not in {run_dir}. Delete that line."
            )
        known = name in (_CHECKPOINT_NAMES, _EVENTS, *_OF_EVALUATOR)
        if not known and glob.has_magic(name.removeprefix(_BEING_WRITTEN)):
            raise ValueError(
                f"{path} has the pattern {shown(name)}, which no program writes there, and which "
                "may mean files that are not of a run. Delete that line."
            )
    return names


def _check_links(run_dir: Path, found: Iterable[Path]) -> None:
    """Refuses to remove files that are in another folder, to which a link in `run_dir` leads.

    A file that is itself a link is no problem: only the link is removed.
    """
    inside = run_dir.resolve()
    for path in found:
        folder = path if path.is_dir() else path.parent
        if not folder.resolve().is_relative_to(inside):
            raise ValueError(
                f"--start_over would remove files in {folder.resolve()}, to which a link in "
                f"{run_dir} leads ({folder.relative_to(run_dir)}). Remove the link, or give "
                "another directory."
            )


def _found(run_dir: Path, names: Iterable[str]) -> list[Path]:
    return sorted({path for name in names for path in run_dir.glob(name)})


def _check_init(run_dir: Path, names: Iterable[str], init: str | None) -> None:
    if init is None or Path(init).resolve().parent != run_dir.resolve():
        return
    if any(fnmatch.fnmatchcase(Path(init).name, name) for name in names):
        raise ValueError(
            f"--init={init} is a file that a run in --run_dir={run_dir} replaces. Give another "
            "directory, or a copy under another name."
        )
