"""What scripts/install_horovod.sh says before it builds anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "install_horovod.sh"
TOOLS = ("bash", "basename", "dirname", "sed", "grep", "realpath", "env")


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """An environment that seems to have a TensorFlow, and no Horovod."""
    path = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    [packages] = path.glob("lib/python*/site-packages")
    record = packages / "tensorflow-9.9.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 9.9\n")
    return path


def install(tmp_path, *arguments, tools=()):
    """Runs the script where there are no programs but some; returns its exit code and stderr."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in TOOLS:
        (programs / name).symlink_to(shutil.which(name))
    for name, text in dict(tools).items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [shutil.which("bash"), str(SCRIPT), *arguments],
        env={"PATH": str(programs), "HOME": str(tmp_path), "LANG": os.environ.get("LANG", "C")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not (tmp_path / ".cache").exists()
    return done.returncode, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("more", "missing", "packages"),
    [
        ([], "g++ make cmake", "g++ make cmake"),
        (["--mpi"], "g++ make cmake mpicxx", "g++ make cmake libopenmpi-dev openmpi-bin"),
    ],
)
def test_missing_tools_are_named_with_their_packages(tmp_path, venv, more, missing, packages):
    code, text = install(tmp_path, f"--venv={venv}", *more)
    assert code == 1
    assert f"Horovod's build needs {missing}, not found in PATH" in text
    assert f"apt-get install {packages}\n" in text


@pytest.mark.parametrize("version", ["3.9.1", "3.12.4", "4.0.2"])
def test_a_cmake_that_does_not_fit(tmp_path, venv, version):
    tools = {"g++": "", "make": "", "cmake": f"echo cmake version {version}"}
    code, text = install(tmp_path, f"--venv={venv}", tools=tools)
    assert code == 1
    assert f"needs cmake from 3.13 to below 4, and {tmp_path}/programs/cmake is {version}" in text


def test_places_that_are_wrong(tmp_path, venv):
    assert "is no environment of Python" in install(tmp_path, f"--venv={tmp_path}/none")[1]


def test_an_environment_without_tensorflow(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    assert "has no TensorFlow" in install(tmp_path, f"--venv={tmp_path}/bare")[1]


def test_an_unknown_argument(tmp_path):
    code, text = install(tmp_path, "--foo")
    assert code == 1
    assert "unknown argument --foo. There are --venv=DIR and --mpi" in text
