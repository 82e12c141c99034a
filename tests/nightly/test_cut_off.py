"""An elastic run whose workers lose sight of each other: two networks, and a cable between them."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from tests.lib import elastic_runs

HERE, THERE = "10.177.0.1", "10.177.0.2"
TIMEOUTS = {"timeout_seconds": 4.0, "startup_timeout_seconds": 8.0}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def networks():
    """Two network namespaces with a cable; gives their names and a function that cuts it."""
    names = [f"tfpara-{side}-{os.getpid()}" for side in ("a", "b")]
    cable = [f"tfp{side}{os.getpid() % 10**6}" for side in ("a", "b")]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, (HERE, THERE), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for link in (end, "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield names, lambda: ip("-n", names[1], "link", "set", cable[1], "down")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def two_networks():
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(networks())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield made


@pytest.mark.long
def test_one_side_goes_on_and_the_other_stops(two_networks, tmp_path):
    (here, there), cut = two_networks
    environment = {**os.environ, "TFPARA_SECRET": elastic_runs.SECRET, "TF_CPP_MIN_LOG_LEVEL": "3"}
    options = {"epochs": 6, "step_seconds": 0.1, "silence_seconds": 2.0, "of_strategy": TIMEOUTS}
    options["log"] = str(tmp_path / "{pid}.jsonl")
    processes = []

    def start(network, *command):
        words = ["ip", "netns", "exec", network, sys.executable, *map(str, command)]
        process = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    def synced(process):
        path = tmp_path / f"{process.pid}.jsonl"
        return path.read_text().count('"synced"') if path.exists() else 0

    try:
        meeting = start(here, "-m", "tfpara.launch.meet", "-n", 3, "--host", HERE, "--port", 4100)
        assert f"TFPARA_MEETING={HERE}:4100" in meeting.stdout.readline()
        environment["TFPARA_MEETING"] = f"{HERE}:4100"
        program = (elastic_runs.PROGRAM, json.dumps(options))
        workers = [start(network, *program) for network in (here, here, there)]
        until = time.monotonic() + elastic_runs.DEADLINE
        while min(map(synced, workers)) < 2:
            assert time.monotonic() < until, [worker.poll() for worker in workers]
            time.sleep(0.1)
        cut()
        before = synced(workers[2])
        output = workers[2].communicate(timeout=elastic_runs.DEADLINE)[0]
        assert workers[2].returncode != 0 and "the meeting point" in output, output
        assert synced(workers[2]) <= before + 1, "it has trained on by itself"
        for worker in workers[:2]:
            output = worker.communicate(timeout=elastic_runs.DEADLINE)[0]
            assert worker.returncode == 0, output
        told = meeting.communicate(timeout=elastic_runs.DEADLINE)[0]
        assert "was silent for 2 s" in told and "generation 2" in told
        ends = [
            json.loads((tmp_path / f"{worker.pid}.jsonl").read_text().splitlines()[-1])
            for worker in workers[:2]
        ]
        assert ends[0][0] == "end" and ends[0][1] == ends[1][1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
