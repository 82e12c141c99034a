"""Slurm on loopback: munged, slurmctld and two slurmd of this machine, as a context manager.

Debian's packages slurmctld, slurmd, slurm-client and munge have all it needs. It runs as root,
without systemd, control groups and accounting, in a folder of its own. `missing` says what it needs
and does not find.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.lib.cluster_of_processes import free_ports
from tests.lib.launched import default_signals

DEADLINE = 240.0  # seconds; reached only by a hang
# Slurm names both nodes as 127.0.0.[1-2]; workers look for rank 0 at the first address.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=127.0.0.1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=127.0.0.2 NodeHostname=localhost NodeAddr=127.0.0.2 Port={second} CPUs=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=240
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Returns why Slurm cannot be started here; empty if it can."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    absent = [name for name in programs if _found(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (CONTRIBUTING.md says how)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Slurm:
    """A running Slurm of two nodes; a context manager that leaves no process behind."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self._daemons = folder, []
        folder.mkdir(mode=0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        controller, first, second = free_ports(3)
        text = _CONFIGURATION.format(
            folder=folder, controller=controller, first=first, second=second
        )
        (folder / "slurm.conf").write_text(text)
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        try:
            files = {
                "key-file": "munge.key",
                "socket": "munge.sock",
                "pid-file": "munge.pid",
                "log-file": "munge.log",
                "seed-file": "munge.seed",
            }
            options = [f"--{name}={self.folder / file}" for name, file in files.items()]
            self._start("munged", "--foreground", "--force", *options)
            self.wait_for("munge's socket", (self.folder / "munge.sock").exists)
            self._start("slurmctld", "-D", "-i")
            for node in ("127.0.0.1", "127.0.0.2"):
                self._start("slurmd", "-D", "-N", node)
            self.wait_for("two idle nodes", self._idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        """Ends the jobs, and then the daemons, the last one first."""
        if len(self._daemons) == 4:
            subprocess.run(["scancel", "--signal=KILL", "--user=root"], env=self.env, timeout=60)
            self.wait_for("the jobs' ends", lambda: not self.tell("squeue", "-h", "-t", "R,CG"))
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def tell(self, *command: str) -> str:
        """Runs one of Slurm's commands, such as squeue; returns what it prints."""
        done = subprocess.run(
            command, env=self.env, timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.stdout.decode().strip()

    def state(self, job: str) -> dict[str, str]:
        """Returns what `scontrol show job` says of a job, by name."""
        words = self.tell("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, job: str, log: pathlib.Path, **wanted: str) -> None:
        """Waits until `state` has these values; fails if the job ends otherwise."""

        def reached() -> bool:
            found = self.state(job)
            if all(found.get(name) == value for name, value in wanted.items()):
                return True
            if found.get("JobState") in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"):
                pytest.fail(f"{found}\n{log.read_text()}")
            return False

        self.wait_for(f"{wanted} of {self.state(job)}", reached)

    def start_again(self, job: str, log: pathlib.Path, restarts: int) -> None:
        """Waits until a job is queued again, and has it begin in 15 s: Slurm waits two minutes.

        At once is too early: nodes refuse what is not at least seconds newer than the former end.
        """
        self.wait_until(job, log, Restarts=str(restarts), JobState="PENDING")
        self.tell("scontrol", "update", f"JobId={job}", "StartTime=now+15")
        self.wait_until(job, log, Restarts=str(restarts), JobState="RUNNING")

    def _idle(self) -> bool:
        return self.tell("sinfo", "-h", "-o", "%T %D") == "idle 2"

    def _start(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            command = [_found(name) or name, *arguments]
            streams = {"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL}
            self._daemons.append(
                subprocess.Popen(command, env=self.env, preexec_fn=default_signals, **streams)
            )

    def wait_for(self, what: str, reached: Callable[[], bool]) -> None:
        """Waits until something is so; fails with the daemons' logs when one of them has ended."""
        deadline = time.monotonic() + DEADLINE
        while not reached():
            if time.monotonic() > deadline or any(d.poll() is not None for d in self._daemons):
                logs = [f"{p.name}: {p.read_text()[-2000:]}" for p in self.folder.glob("*.log")]
                pytest.fail("\n".join([f"no {what}", *logs]))
            time.sleep(0.2)
