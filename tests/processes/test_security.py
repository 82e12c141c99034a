"""What the launcher's runs listen on, and the commands of docs/security.md, with real processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.cluster_of_processes import HERE
from tests.lib.horovod_here import needs_horovod
from tests.lib.launched import LAUNCH


def listeners_of(*arguments, program=()):
    """Where the launcher, and each process of its run, listen: "address port".

    The run trains on, and ends well, while a stranger speaks to all these ports.
    """
    script = HERE / "programs" / "listens.py"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TFPARA_SECRET")}
    command = [*LAUNCH, "--no-prefix", *arguments, str(script), *program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert not re.search("[0-9a-f]{64}", done.stdout + done.stderr)
    (line,) = re.findall(r"^\{.*", done.stdout, re.MULTILINE)
    found = json.loads(line)
    launcher = found.pop("launcher")
    assert not launcher["shows secret"]
    for each in found.values():
        assert each["has secret"] and not each["shows secret"]
    return [launcher["places"], *(each["places"] for _, each in sorted(found.items()))]


def hosts(places):
    return sorted(place.split()[0].replace("0.0.0.0", "::") for place in places)


@pytest.mark.nightly
def test_under_the_launcher_tensorflow_alone_listens_on_all_interfaces():
    launcher, chief, worker = listeners_of("-n", "2")
    assert launcher == []
    assert hosts(chief) == ["127.0.0.1", "::"]
    assert hosts(worker) == ["::"]


@pytest.mark.nightly
def test_under_the_launcher_an_asynchronous_run_listens():
    launcher, chief, server, worker = listeners_of("--ps", "1", "-n", "1", program=["ps"])
    assert launcher == []
    assert hosts(chief) == ["127.0.0.1", "::"]
    assert [hosts(each) for each in (server, worker)] == [["::"]] * 2


@pytest.mark.nightly
@needs_horovod
def test_under_the_launcher_horovod_listens_on_its_host():
    everything = listeners_of("-n", "2", "--collectives=horovod")
    assert len(everything) == 3
    for places in everything:
        assert set(hosts(places)) == {"127.0.0.1"}


def test_what_the_page_says_to_type(tmp_path):
    """The making of a secret; and a run in a network of its own, where Linux allows that."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    make, isolate = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    launcher = tmp_path / "tfpara-launch"
    launcher.write_text(f'#!/bin/sh\nexec {LAUNCH[0]} -m tfpara.launch "$@"\n')
    launcher.chmod(0o700)
    environ = os.environ | {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environ.pop("TFPARA_SECRET", None)

    def bash(script):
        command = ["bash", "-euc", script]
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    read = "import tfpara.cluster.secret; print(len(tfpara.cluster.secret.read()))"
    assert bash(f'{make} {LAUNCH[0]} -c "{read}"') == ("64\n", "")
    assert (tmp_path / ".tfpara-secret").stat().st_mode & 0o777 == 0o600
    if subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True).returncode:
        pytest.skip("Linux allows no namespaces here")
    interfaces = "import socket; print([name for _, name in socket.if_nameindex()])\n"
    (tmp_path / "script.py").write_text(interfaces)
    out, _ = bash(isolate)
    assert sorted(out.splitlines()) == ["[chief] ['lo']", "[worker 1] ['lo']"]
