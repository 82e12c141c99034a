"""Archives of Kaldi where Python runs without assertions."""

import subprocess
import sys
from pathlib import Path

import kaldiio
import numpy as np
import pytest


def alignments():
    generator = np.random.default_rng(2)
    return {f"u{n}": generator.integers(0, 99, 5 + n).astype(np.int32) for n in range(4)}


ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_python_without_assertions_is_refused(tmp_path):
    kaldiio.save_ark(str(tmp_path / "a.ark"), alignments())
    code = (
        "from input import kaldi\n"
        f"with open({str(tmp_path / 'a.ark')!r}, 'rb') as file:\n"
        "    list(kaldi.read_archive(file, 'a.ark'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ValueError: kaldiio reads archives wrongly under python -O" in done.stderr
