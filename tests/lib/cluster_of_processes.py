"""Starts the workers of a cluster on loopback as real processes, for tests."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

from tests.lib import warm
from tfpara import cluster
from tfpara.cluster import rendezvous
from tfpara.launch import clusters

HERE = pathlib.Path(__file__).resolve().parent
# A proxy for web pages, where nobody listens. The processes of a run must not be connected by it.
# Tests give it as https_proxy, which gRPC also reads, since they reach other servers by http.
DEAD_PROXY = "http://127.0.0.1:1"


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on and that the system gives to no outgoing connection."""
    return clusters.ports("127.0.0.1", 0, count)


def tf_config(addresses: list[str], rank: int) -> str:
    """Returns the TF_CONFIG of worker `rank`; the first address is the chief's."""
    cluster = {"chief": addresses[:1]}
    if len(addresses) > 1:
        cluster["worker"] = addresses[1:]
    task = {"type": "chief", "index": 0} if rank == 0 else {"type": "worker", "index": rank - 1}
    return json.dumps({"cluster": cluster, "task": task})


def finished(processes: list[subprocess.Popen], timeout: float) -> list[tuple]:
    """Returns what `communicate` gives of each process, once all have ended with code 0."""
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


@dataclasses.dataclass
class Result:
    """How a worker ended: its exit code and all that it printed."""

    returncode: int
    output: str


class Workers:
    """Running workers of one cluster; a context manager that ends them all.

    Args:
        program: the name of a file in `programs/`.
        options: the options of each worker, which it gets as JSON.
        environ: more environment variables of each worker.
        absent: how many workers of the cluster are not started.
        start: how the workers know each other: by "TF_CONFIG"; by "horovod", the variables of
            Horovod, for which this process serves the store; or by "rank", each its own.
        fresh: whether each worker has a new interpreter; else TensorFlow is imported already.
    """

    def __init__(
        self,
        program: str,
        options: list[dict],
        environ: list[dict] | None = None,
        absent: int = 0,
        start: str = "TF_CONFIG",
        fresh: bool = False,
    ):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(len(options) + absent)]
        self.addresses = addresses
        self.processes = []
        self.store = rendezvous.Server() if start == "horovod" else None
        for rank, option in enumerate(options):
            place = {"TF_CONFIG": tf_config(addresses, rank)}
            if start == "rank":
                place = {"TFPARA_RANK": str(rank), "TFPARA_SIZE": str(len(addresses))}
                place["TFPARA_COORDINATOR"] = addresses[0]
            if self.store:
                view = cluster.read(place)
                place = rendezvous.variables(view, "127.0.0.1", self.store.port)
            env = os.environ | {
                **place,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "2",
                "OMP_NUM_THREADS": "1",
                "https_proxy": DEAD_PROXY,
            }
            env |= (environ or [{}] * len(options))[rank]
            words = [str(HERE / "programs" / program), json.dumps(option)]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            if fresh:
                process = subprocess.Popen([sys.executable, *words], env=env, **streams)
            else:
                process = warm.Popen(words, env=env, **streams)
            self.processes.append(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
        if self.store:
            self.store.close()

    def results(self, timeout: float = 180) -> list[Result]:
        """Waits for all workers."""
        outputs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        return [
            Result(process.returncode, output)
            for process, output in zip(self.processes, outputs, strict=True)
        ]


def run(program: str, options: list[dict], timeout: float = 180, **kwargs) -> list[Result]:
    """Runs a program of `programs/` on len(options) workers and waits for them."""
    with Workers(program, options, **kwargs) as workers:
        return workers.results(timeout)


def run_all_well(program: str, options: list[dict], **kwargs) -> list[Result]:
    """Does what `run` does, and fails with the workers' output unless all exit with 0."""
    results = run(program, options, **kwargs)
    for rank, result in enumerate(results):
        if result.returncode:
            raise RuntimeError(f"worker {rank} exited with {result.returncode}:\n{result.output}")
    return results
