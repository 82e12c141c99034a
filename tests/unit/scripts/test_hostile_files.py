"""Files of flags and records of a run's files, mutated: one line with their name, or a use."""

import re
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

import scripts.train  # noqa: F401 - its flags
from scripts import common, run_files
from tests.lib import hostile, mutants

ROOT = Path(__file__).resolve().parents[3]
RECIPE = (ROOT / "scripts" / "recipes" / "001.flags").read_bytes()
# Flags that must have a value; some are of other programs, whose tests may have run before.
REQUIRED = ("corpus", "run_dir", "data", "out", "results")


def cases_of(content, daily, seed):
    number = mutants.count(daily)
    yield from mutants.of_bytes(content, seed, number // 2)
    for text in mutants.of_text(content.decode(), seed, number // 2):
        yield text.encode("utf-8", "surrogatepass")


@pytest.mark.nightly_cases(" ")
@pytest.mark.parametrize("between", ["=", " "])
def test_a_file_of_flags_of_anything_is_one_line_or_is_taken(between, tmp_path, capsys):
    path = tmp_path / "run.flags"
    given = [
        *f"--flagfile{between}{path}".split(),
        *(f"--{name}=-" for name in REQUIRED if name in flags.FLAGS),
    ]
    taken = refused = 0
    for case in cases_of(RECIPE, 120, len(between)):
        path.write_bytes(case)
        with flagsaver.flagsaver():
            try:
                with hostile.watched(len(case), tmp_path):
                    common._parse(["train", *given])
                taken += 1
            except SystemExit as ended:
                said = capsys.readouterr().err
                assert ended.code == 2 and said.count("\n") == 1 and len(said) < 5000, case[:500]
                refused += 1
            finally:
                flags.FLAGS.mark_as_parsed()
    assert taken > 10 and refused > 10


def test_a_record_of_anything_names_no_file_elsewhere(tmp_path):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    names = run_files.of_training(["model.weights.h5"])
    run_dir.mkdir()
    other.write_text("precious")
    record = run_dir / run_files.RECORD
    whole = (run_files._HEADER + "".join(f"{name}\n" for name in names)).encode()
    taken = refused = 0
    for number, case in enumerate(cases_of(whole, 200, 1)):
        case += b"" if number % 8 else b"\n../other\n"
        record.write_bytes(case)
        (run_dir / "mine.txt").write_text("x")
        try:
            with hostile.watched(len(case), run_dir):
                run_files.check(run_dir, names, True, None)
                found = run_files._recorded(run_dir)
                paths = run_files._found(run_dir, found)
            assert all(run_dir in path.parents for path in paths), case
            taken += 1
        except ValueError as error:
            assert re.search(rf"{record}|{run_dir}", str(error)) and len(str(error)) < 2000, case
            refused += 1
    assert other.read_text() == "precious" and (run_dir / "mine.txt").exists()
    assert taken and refused > 20
