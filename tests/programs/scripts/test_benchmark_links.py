"""Limited links between network namespaces; skipped where this process may not make them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import common
from scripts.benchmarks import links
from scripts.benchmarks.processes import measure
from tests.lib.launched import default_signals

may_make_links = pytest.mark.usefixtures("may_make_links")


def namespaces():
    """Those of this machine that a benchmark has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    hosts = {path.name for path in Path("/etc/netns").glob("tfpara-*")}
    return hosts | {line.split()[0] for line in listed.splitlines() if line.startswith("tfpara-")}


@may_make_links
def test_a_limited_link_is_as_fast_as_it_says_and_is_removed():
    before = namespaces()
    with links.limited(40) as place:
        assert len(namespaces() - before) == 3  # and the switch
        options = {"system": "copy", "elements": 500_000, "steps": 3}
        module = "scripts.benchmarks.peers.socket_copy"
        limited = measure(2, options, module=module, place=place)["sync_ms"]
    assert namespaces() == before
    # 2 MB at 5 MB/s, of which the bucket lets 128 kB through at once.
    assert 350 < limited < 2000
    assert measure(2, options, module=module)["sync_ms"] < limited


@may_make_links
def test_an_error_inside_removes_everything():
    before = namespaces()
    with pytest.raises(RuntimeError), links.limited(100):
        raise RuntimeError
    assert namespaces() == before


@may_make_links
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_remove_everything(number):
    before = namespaces()
    program = (
        "import time\n"
        "from scripts import common\n"
        "from scripts.benchmarks import links\n"
        "common.exit_on_signals()\n"
        "with links.limited(100) as place:\n"
        "    print('made', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        preexec_fn=default_signals,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout.readline() == "made\n"
        assert len(namespaces() - before) == 3
        process.send_signal(number)
        assert process.wait(120) != 0
    finally:
        process.kill()
        process.stdout.close()
    for _ in range(50):
        if namespaces() == before:
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {namespaces() - before}")


def test_without_the_tools_the_cause_is_named(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    assert "ip and tc of iproute2 cannot be found" in links.problem()


def test_without_permission_the_command_is_named(monkeypatch, tmp_path):
    fake = tmp_path / "ip"
    fake.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin:/usr/bin")
    with (
        pytest.raises(common.Failure, match="`ip netns add .*`: Operation not permitted.*root"),
        links.limited(100),
    ):
        pass
