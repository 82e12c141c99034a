"""A process of several that cannot use what was asked for."""

import subprocess
import sys

import pytest

from tfpara.collectives import horovod

WITH_RANK = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
COMMAND = rf"scripts/install_horovod.sh --venv={sys.prefix}"


@pytest.mark.nightly
def test_a_process_of_several_says_so_at_once(tmp_path):
    """In a program of its own, from which Horovod is hidden."""
    program = tmp_path / "program.py"
    program.write_text(
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'horovod' else find(n, *a)\n"
        "import tfpara\n"
        "tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1)\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**horovod.os.environ, **WITH_RANK},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "ValueError: collectives='horovod': Horovod is not installed in" in done.stderr
    assert COMMAND in done.stderr
