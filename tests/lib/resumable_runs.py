"""Runs of programs/train_resumable.py that are started again and again, for tests."""

import json
import random
import signal
import sys
import time

import numpy as np
import pytest

from tests.lib.cluster_of_processes import HERE, Workers
from tfpara.remote_files import RemoteFolder

EPOCHS = 5
RULES = {1: "tfpara.BMUF(0.5)", 2: "tfpara.EASGD(0.2)"}  # by the number of workers
DEADLINE = 240.0  # seconds; reached only by a hang


class Run:
    """A run of one process of two devices, or two of one, in a directory of its own."""

    def __init__(self, path, workers, **options):
        self.path, self.workers = path, workers
        path.mkdir()
        self.marks = path / "marks"
        self.options = {
            "rule": RULES[workers],
            "local_devices": 2 // workers,
            "directory": str(path / "checkpoints"),
            "out": str(path / "{rank}.npz"),
            "epochs": EPOCHS,
            **options,
        }

    def checkpoints(self):
        """Returns the numbers of the checkpoints that are visible."""
        return [int(p.name[-8:]) for p in (self.path / "checkpoints").glob("checkpoint-*")]

    def newest(self):
        """Returns the path of the newest checkpoint."""
        return max((self.path / "checkpoints").glob("checkpoint-*"))

    def start(self, **of_a_worker):
        """Starts the processes. Arguments: options that differ by worker, as lists by rank."""
        mine = [
            {**self._options(), **{name: values[rank] for name, values in of_a_worker.items()}}
            for rank in range(self.workers)
        ]
        environ = [{"TF_CONFIG": ""}] if self.workers == 1 else None
        return Workers("train_resumable.py", mine, environ=environ)

    def start_slowly(self):
        """Starts the processes with steps that last long enough for a test to meddle."""
        self.marks.unlink(missing_ok=True)
        slow = {"marks": str(self.marks), "step_seconds": 0.1}
        return self.start(**{name: [value] * self.workers for name, value in slow.items()})

    def launch_command(self, *arguments, **options):
        """Returns the command that starts the workers under the launcher."""
        program = str(HERE / "programs" / "train_resumable.py")
        launch = [sys.executable, "-m", "tfpara.launch", "-n", str(self.workers), "--threads=1"]
        return [*launch, *arguments, program, json.dumps({**self._options(), **options})]

    def to_the_end(self):
        """Starts the run and waits for its end; returns what each worker ended with."""
        with self.start() as workers:
            for result in workers.results(DEADLINE):
                assert result.returncode == 0, result.output
        return self.ends()

    def ends(self):
        """Returns what each worker ended with: arrays by name."""
        return [dict(np.load(self.path / f"{rank}.npz")) for rank in range(self.workers)]

    def wait_for_steps(self, processes):
        """Waits until the first step after `start_slowly` was taken."""
        deadline = time.monotonic() + DEADLINE
        while not self.marks.exists():
            if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
                for process in processes:
                    process.kill()
                pytest.fail("\n".join(str(p.communicate()) for p in processes))
            time.sleep(0.01)

    def kill_at(self, place, times, killed):
        """Starts the run; the workers in `killed` are killed at `place`, and then the others."""
        if place is None:
            with self.start_slowly() as workers:
                self.wait_for_steps(workers.processes)
                time.sleep(times)
                for rank in killed:
                    workers.processes[rank].kill()
                for rank in killed:
                    workers.processes[rank].communicate(timeout=DEADLINE)
            return
        kills = [[place, times] if rank in killed else None for rank in range(self.workers)]
        with self.start(kill=kills) as workers:
            for rank in killed:
                output = workers.processes[rank].communicate(timeout=DEADLINE)[0]
                assert workers.processes[rank].returncode == -signal.SIGKILL, output
                assert f"killed: {place}" in output

    def kill_again_and_again(self, kills):
        """Kills the run at the first place, then at the others; returns its newest checkpoint."""
        first, *others = kills
        random.Random(7).shuffle(others)
        seen = 0
        for kill in (first, *others):
            self.kill_at(*kill)
            newest = max(self.checkpoints(), default=0)
            assert newest >= seen, kill
            seen = newest
        return seen

    def _options(self):
        # Each start has another seed, so that all it knows of the run is in the checkpoint.
        return {**self.options, "seed": 1 + max(self.checkpoints(), default=0)}


class RemoteRun(Run):
    """A run whose checkpoints are at a URL, under leases of 2 s."""

    def __init__(self, path, workers, url, **options):
        super().__init__(path, workers, directory=url, lease_seconds=2.0, **options)

    def names(self):
        """Returns the names of all files at the URL."""
        return sorted(RemoteFolder(self.options["directory"]).sizes())

    def checkpoints(self):
        found = (name.split("/") for name in self.names())
        return [int(at[-8:]) for at, *rest in found if rest == ["manifest.json"]]


def assert_same(ends, others):
    """Fails unless the workers of two runs ended with the same values, bit for bit."""
    for mine, theirs in zip(ends, others, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
