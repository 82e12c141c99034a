"""The script that makes a synthetic corpus, and the same corpus in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from input import corpus, index
from tests.lib.contents import PROSE, SMALL, digest


@pytest.mark.nightly
def test_same_seed_same_bytes_in_another_process(tmp_path):
    # Not in this process, which may be without TensorFlow's graph optimiser: last bits differ.
    for name, hash_seed in (("first", "1"), ("second", "2")):
        run_script(tmp_path, name, PYTHONHASHSEED=hash_seed).check_returncode()
    assert digest(tmp_path / "second") == digest(tmp_path / "first")
    first, second = (index.read(tmp_path / name) for name in ("first", "second"))
    assert second.fingerprint == first.fingerprint


def run_script(directory, name, *changes, **environment):
    """`prepare_speech` with the options of SMALL and the text PROSE."""
    (directory / "prose.txt").write_text(PROSE)
    sizes = [
        f"--{split}_{what}={getattr(SMALL, f'{split}_{what}')}"
        for split in index.SPLITS
        for what in ("minutes", "speakers")
    ]
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    flags = [f"--out={directory / name}", f"--text={directory / 'prose.txt'}", *sizes, *changes]
    return subprocess.run(
        [sys.executable, "-m", "scripts.prepare_speech", *flags],
        cwd=Path(corpus.__file__).parents[1],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.nightly
def test_script_ends_with_a_line_of_what_it_made(tmp_path):
    for word in ("made", "reused"):
        done = run_script(tmp_path, "corpus")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"{word} {tmp_path / 'corpus'}: 0.")
        assert " 4 speakers, " in lines[0]


@pytest.mark.nightly_cases(
    "--text=/nowhere/prose.txt-*", "--voices=klingon-qo-voice must*", "--test_minutes=-1-*"
)
@pytest.mark.parametrize(
    ("change", "message", "code"),
    [
        ("--voices=klingon-qo", "voice must be an eSpeak NG voice", 1),
        ("--text=/nowhere/prose.txt", "text file /nowhere/prose.txt does not exist", 1),
        ("--test_minutes=-1", "test_minutes must be positive. Received: -1.0", 1),
        ("--test_minute=1", "Unknown command line flag 'test_minute'", 2),
    ],
)
def test_script_fails_with_one_message(tmp_path, change, message, code):
    done = run_script(tmp_path, "corpus", change)
    assert done.returncode == code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]  # TensorFlow 2.21 may speak before it
    assert last.startswith("prepare_speech: ")
    assert message in last
