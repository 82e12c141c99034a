"""Each fault of `tfpara-chaos`, in processes that only count, and the drill of a real run."""

import concurrent.futures
import json
import random
import subprocess
import sys
import time

import pytest

from tests.lib.launched import Launched
from tfpara.chaos import cable, faults, processes
from tfpara.chaos.drill import Drill, Plan

# A chief that answers, and workers that count what they are answered; SIGTERM ends them with 75.
TALK = """
import json, os, select, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
told = json.loads(os.environ["TF_CONFIG"])
host, _, port = told["cluster"]["chief"][0].rpartition(":")
if told["task"]["type"] == "chief":
    listener = socket.create_server((host, int(port)))
    peers = [listener.accept()[0] for _ in told["cluster"]["worker"]]
    print("all here", flush=True)
    while True:
        for peer in select.select(peers, [], [])[0]:
            said = peer.recv(100)
            peer.sendall(said) if said else peers.remove(peer)
while True:
    try:
        peer = socket.create_connection((host, int(port)))
        break
    except OSError:
        time.sleep(0.02)
path, count = sys.argv[1] + str(told["task"]["index"] + 1), 0
while True:
    peer.sendall(b"x")
    assert peer.recv(100)
    count += 1
    bytes(1 << 26)  # more than malloc keeps for the next time
    with open(path + ".new", "w") as file:
        file.write(str(count))
    os.rename(path + ".new", path)
    time.sleep(0.01)
"""


@pytest.fixture
def talking(tmp_path):
    """A launcher of three workers that talk to each other, and a function: the counts of two."""
    (tmp_path / "talk.py").write_text(TALK)

    def counts():
        return [int((tmp_path / f"count{number}").read_text()) for number in (1, 2)]

    arguments = ("-n", 3, "--grace", 1, tmp_path / "talk.py", tmp_path / "count")
    with Launched(*arguments, stderr=subprocess.STDOUT) as launched:
        launched.read_until("all here")
        until = time.monotonic() + 20.0
        while not all((tmp_path / f"count{number}").exists() for number in (1, 2)):
            assert time.monotonic() < until
            time.sleep(0.02)
        yield launched, counts


def scene(launched, seconds=1.0, checkpoints=None, only=None):
    workers = processes.workers(launched.process.pid)
    chosen = [worker for worker in workers if only in (None, worker.name)]
    return faults.Scene(launched.process.pid, chosen, random.Random(0), seconds, checkpoints)


@pytest.mark.quick
def test_workers_are_found_by_their_names_and_have_a_size(talking):
    launched, _ = talking
    found = processes.workers(launched.process.pid)
    assert [worker.name for worker in found] == ["chief", "worker 1", "worker 2"]
    size = processes.size(found[0].pid)
    assert size.bytes > 1e6 and size.descriptors > 4 and size.threads == 1
    assert processes.size(2**22 + 1) is None and processes.has_ended(2**22 + 1)


@pytest.mark.quick
def test_who_stands_still_is_silent_and_goes_on(talking):
    launched, counts = talking
    said = faults.stop(scene(launched, 0.5, only="worker 1"))
    assert "worker 1" in said and "stood still for 0.5 s" in said
    before = counts()
    until = time.monotonic() + 20.0
    while not all(new > old for new, old in zip(counts(), before, strict=True)):
        assert time.monotonic() < until, "it did not go on"
        time.sleep(0.02)


@pytest.mark.quick
def test_who_is_slow_does_less(talking):
    launched, counts = talking
    before = counts()
    said = faults.slow(scene(launched, 1.0, only="worker 2"))
    quick, slow = (new - old for new, old in zip(counts(), before, strict=True))
    assert "a quarter of its time" in said and 0 < slow < 0.7 * quick, (slow, quick)


@pytest.mark.quick
def test_who_is_cut_off_hears_nothing_until_the_cable_is_mended(talking):
    if missing := cable.need():
        pytest.skip(missing)
    launched, counts = talking
    with concurrent.futures.ThreadPoolExecutor() as pool:
        cutting = pool.submit(faults.partition, scene(launched, 2.0, only="worker 1"))
        gains = []  # of each worker in each half of a second
        while not cutting.done():
            before = counts()
            time.sleep(0.5)
            gains.append([new - old for new, old in zip(counts(), before, strict=True)])
    assert "packets sent again" in cutting.result()
    assert any(cut == 0 < other for cut, other in gains), gains
    until, now = time.monotonic() + 20.0, counts()[0]
    while counts()[0] < now + 5:
        assert time.monotonic() < until, "the cut was not mended"
        time.sleep(0.05)


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "code"), [("kill", 128 + 9), ("term", 75)])
def test_who_is_killed_is_gone(kind, code, talking):
    launched, _ = talking
    said = faults.FAULTS[kind].make(scene(launched, only="worker 2"))
    assert "worker 2" in said
    assert launched.finish()[0] == code


@pytest.mark.quick
def test_who_gets_no_memory_ends(talking):
    launched, _ = talking
    said = faults.memory(scene(launched, only="worker 1"))
    assert "worker 1" in said and "got no memory" in said
    code, output, _ = launched.finish()
    assert code == 1 and "MemoryError" in output


@pytest.mark.quick
def test_a_checkpoint_is_damaged_where_another_is_left(talking, tmp_path):
    launched, _ = talking
    folder = tmp_path / "checkpoints"
    with pytest.raises(faults.Missed, match="is not there yet"):
        faults.corrupt(scene(launched, checkpoints=folder))
    for number in (1, 2):
        (folder / f"checkpoint-{number:08}").mkdir(parents=True)
        (folder / f"checkpoint-{number:08}" / "part").write_bytes(bytes(100))
        if number == 1:
            with pytest.raises(faults.Missed, match="has 1 checkpoints, and none is to be lost"):
                faults.corrupt(scene(launched, checkpoints=folder))
    said = faults.corrupt(scene(launched, checkpoints=folder))
    assert "checkpoint-00000002/part was changed" in said
    first, second = sorted(folder.rglob("part"))
    assert first.read_bytes() == bytes(100) and second.read_bytes().count(0) == 99
    assert launched.process.wait() == -9


@pytest.mark.quick
def test_a_disk_is_full_for_a_while(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        assert faults.FAULTS["disk_full"].need(tmp_path / "checkpoints") == ""
        filling = faults.Scene(0, [], random.Random(0), 0.3, tmp_path)
        said = faults.disk_full(filling)
        assert "was full for 0.3 s: 'No space left on device'" in said
        assert not list(tmp_path.iterdir())
        (tmp_path / "again").write_bytes(bytes(1 << 16))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_time_for_faults_begins_with_training():
    """A start may take longer than that; no worker is there to be killed, which is noted."""
    told = "import time; print('1 worker, 1 replica; BSP', flush=True); time.sleep(3)"
    drill = Drill([sys.executable, "-c", told], Plan(["kill"], every=0.1, until=60.0))
    drill._begin -= 100.0
    assert {made.kind for made in drill.run().missed} == {"kill"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kinds", "options", "launcher", "least"),
    [
        ("kill,stop,term,partition", "--every=12s --for=40s --lasting=3s --at=join", "-n 3", 3),
        ("kill", "--every=6s --for=60s", "-n 4 --spares=1", 6),
        ("memory,slow", "--every=12s --for=30s", "-n 3", 1),
    ],
    ids=["all kinds", "kills in a row", "memory and slow"],
)
def test_a_drill_of_a_real_run_loses_and_doubles_nothing(kinds, options, launcher, least, tmp_path):
    """By the program; of the first also at the points where another worker joins."""
    if "partition" in kinds and (missing := cable.need()):
        pytest.skip(missing)
    report = tmp_path / "report.json"
    words = f"{options} --faults={kinds} --report={report} --seed=1 -- tfpara-launch {launcher}"
    words += f" --elastic --threads=1 -- python -m tfpara.examples.drill --out={tmp_path}/run"
    words += " --epochs=4 --minibatches=900"
    command = [sys.executable, "-m", "tfpara.chaos", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    found = json.loads(report.read_text())
    assert found["minibatches"] == {"trained": 3600, "lost": 0, "doubled": 0}
    assert len(found["faults"]) >= least and found["starts"] == 1
    assert any(fault["point"] for fault in found["faults"]) == ("--at" in options)
    assert "by kind:" in ended.stdout and "descriptors" in ended.stdout
