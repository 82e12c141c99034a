"""Environment variables by which an engine gives a process its rank and a meeting place.

An engine (Slurm, MPI, torchrun, ...) starts the processes of a run. It sets variables of its own
with a process's rank and the number of processes; some engines also set the host of rank 0. With
these the processes can meet and exchange addresses (`startup.find_each_other`), so TF_CONFIG is not
needed. Without an engine, set TFPARA_RANK, TFPARA_SIZE and TFPARA_COORDINATOR.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tfpara.cluster.ports import CHOSEN
from tfpara.cluster.tf_config import ADDRESSES, ClusterError, check_address, shown

RANK, SIZE, COORDINATOR = "TFPARA_RANK", "TFPARA_SIZE", "TFPARA_COORDINATOR"
_INDEX = "JOB_COMPLETION_INDEX"
_SET_COORDINATOR = (
    f"Set {COORDINATOR}=host:port to rank 0's host and a free port there, the same in all processes"
)
_SAGEMAKER_PORT = 23456
# These patterns match Slurm's compact form of a list of hosts, such as "node[01-03,7],x5". The
# first group of `_NUMBERS` is the first number; the first group of `_HOSTS` is the first item of
# the list.
_NUMBERS = r"\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_HOSTS = re.compile(rf"((?:[A-Za-z0-9_.-]|{_NUMBERS})+)(?:,.+)?")


class Engine(NamedTuple):
    """An engine and its variables."""

    name: str  # the engine's name in messages
    rank: str  # the name of the variable that has the rank
    size: str  # the name of the variable that has the number of processes
    starter: str  # name, for messages, of the program that sets both variables
    # A function of the environment and the number of processes. It returns the address of rank 0
    # ("host:port") and, in words, the source of this address; both are "" if the address is
    # unknown.
    coordinator: Callable[[Mapping[str, str], int], tuple[str, str]]
    # Whether the engine starts machines, pods or job steps, in which an inner engine may start
    # processes. Such a process has the variables of both engines. If the two engines' ranks or
    # sizes differ, the inner engine's ranks and sizes count.
    outer: bool = False
    # Names of other variables that this engine always sets. If one of them is missing, another
    # program has set the rank.
    also: tuple[str, ...] = ()


class Told(NamedTuple):
    """The rank, the size and the meeting place that an engine has given to this process."""

    engine: Engine
    rank: int  # 0 … size − 1
    size: int  # number of processes
    rank_variable: str  # name of the variable that has the rank
    coordinator: str = ""  # "host:port" at which rank 0 waits for the others; empty if unknown
    coordinator_from: str = ""  # where `coordinator` comes from, in words

    def described(self) -> str:
        """Returns these values and the variables that hold them, in words."""
        found = (
            f"{self.engine.name}: rank {self.rank} of {self.size}, from {self.rank_variable} and "
            f"{self.engine.size}"
        )
        if not self.coordinator:
            return found
        return f"{found}; all meet at {self.coordinator}, from {self.coordinator_from}"


def find(environ: Mapping[str, str] = os.environ) -> Told | None:
    """Returns the values of the engine that has started this process; None if there is none.

    Variables that describe a process (of MPI, torchrun, or TFPARA_RANK) take precedence over those
    that describe the machine or step in which it runs (Slurm, pods). TFPARA_COORDINATOR takes
    precedence over an engine's coordinator.

    Raises:
        ClusterError: variables are invalid, or contradict each other; the message names them and
            the fix.
    """
    if environ.get(SIZE, "").strip() == "1":
        return _read(_OWN, environ)  # TFPARA_SIZE=1: the process trains alone under any engine
    for outer in (False, True):
        told = [t for e in _ENGINES if e.outer == outer and (t := _read(e, environ))]
        several = [each for each in told if each.size > 1]
        if not told:
            continue
        first, *others = several or told
        for other in others:
            _check_agree(first, other)
        return first if first.size == 1 else _with_coordinator(first, environ)
    if environ.get(COORDINATOR, "").strip():
        raise ClusterError(
            f"{COORDINATOR}={environ[COORDINATOR]!r} is set, but nothing says which of the "
            f"processes this one is. Set {RANK} (from 0) and {SIZE}, or unset {COORDINATOR} to "
            "train in one process."
        )
    return None


def left_alone(environ: Mapping[str, str] = os.environ) -> str:
    """Returns a warning if this process trains alone but should perhaps be one of several; else "".

    The text is empty if TFPARA_SIZE, TF_CONFIG or an engine says that there is one process, or if
    nothing points to several processes.

    Args:
        environ: the environment.
    """
    value = {name: text.strip() for name, text in environ.items()}
    if value.get("TF_CONFIG") or find(environ):
        return ""
    number = value.get("SLURM_NTASKS", "")
    if _is_several(number) and not value.get("SLURM_STEP_ID"):
        return (
            f"SLURM_NTASKS={number}, but srun has not started this process, so it trains alone. "
            f"For {number} workers write srun before python; for one set {SIZE}=1."
        )
    number = value.get("WORLD_SIZE", "")
    missing = " and ".join(name for name in _MASTER if not value.get(name))
    if value.get("RANK") and _is_several(number) and missing:
        return (
            f"RANK={shown(value['RANK'])} and WORLD_SIZE={number} without {missing} do not "
            f"say where the others are, so this process trains alone. For {number} workers set "
            f"{missing}, as torchrun does; for one set {SIZE}=1."
        )
    return ""


def _is_several(number: str) -> bool:
    return number.isdecimal() and len(number) < 10 and int(number) > 1


def variables() -> tuple[str, ...]:
    """Returns the names of all variables of rank, size and coordinator, except outer engines'."""
    names = [(e.rank, e.size) for e in _ENGINES if not e.outer]
    return (*itertools.chain(*names), COORDINATOR)


def no_coordinator(told: Told) -> str:
    """Returns the message that the address of rank 0 is unknown, with the fix."""
    return (
        f"{told.rank_variable}={told.rank} and {told.engine.size}={told.size} say which process "
        f"this is, but not where the others are. {_SET_COORDINATOR}."
    )


def _read(engine: Engine, environ: Mapping[str, str]) -> Told | None:
    if engine.rank == "SM_CURRENT_HOST":
        return _sagemaker(engine, environ)
    given = [environ.get(name, "").strip() for name in (engine.rank, engine.size)]
    if not all(environ.get(name, "").strip() for name in engine.also):
        return None
    if not any(given) or (engine.outer and not all(given)):
        return None
    rank_name = engine.rank
    if engine.rank == RANK and given == ["", "1"]:
        given[0] = "0"  # a single process needs no TFPARA_RANK
    elif engine.rank == RANK and not given[0] and (index := environ.get(_INDEX, "").strip()):
        # TFPARA_SIZE is set without TFPARA_RANK. In an indexed job of Kubernetes, the pod's number
        # is the rank.
        given[0], rank_name = index, _INDEX
    # isdecimal() also accepts digits that are not ASCII. That does no harm: int() reads them, too.
    whole = all(value.isdecimal() and len(value) < 10 for value in given)
    if not whole or int(given[0]) >= int(given[1]):
        text = ", ".join(
            f"{name}={shown(value)}"
            for name, value in zip((rank_name, engine.size), given, strict=True)
        )
        if rank_name == _INDEX:
            raise ClusterError(
                f"{text}: the first, which the Job sets, must be a number from 0 below the second. "
                f"Set {SIZE} to the Job's `completions`."
            )
        if engine.size == "PET_NNODES" and ":" in given[1]:
            raise ClusterError(
                f"{text}: a range of nodes is for PyTorch's elastic runs. Give one number of "
                "nodes. Workers come and go here by elastic= and tfpara-meet."
            )
        raise ClusterError(
            f"{text}: the first must be a number from 0 below the second, which counts the "
            f"processes. Both are set by {engine.starter}; unset them to train in one process, or "
            "under TF_CONFIG."
        )
    rank, size = map(int, given)
    return Told(engine, rank, size, rank_name)


def _sagemaker(engine: Engine, environ: Mapping[str, str]) -> Told | None:
    own, text = environ.get(engine.rank, "").strip(), environ.get(engine.size, "").strip()
    if not own or not text:
        return None
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not texts or own not in names:
        raise ClusterError(
            f"{engine.rank}={shown(own)} is not in {engine.size}={shown(text)}, which "
            f"must be a JSON list of hosts. Set {RANK} and {SIZE} in place of them."
        )
    return Told(engine, names.index(own), len(names), engine.rank)


def _check_agree(first: Told, theirs: Told) -> None:
    if (first.rank, first.size) != (theirs.rank, theirs.size):
        raise ClusterError(
            f"{first.rank_variable}={first.rank} of {first.engine.size}={first.size} "
            f"({first.engine.name}) contradicts {theirs.rank_variable}={theirs.rank} of "
            f"{theirs.engine.size}={theirs.size} ({theirs.engine.name}). Unset those that are left "
            f"over: {theirs.engine.starter} sets the latter."
        )


def _with_coordinator(told: Told, environ: Mapping[str, str]) -> Told:
    address, source = _address_in(COORDINATOR, environ)
    if not address:
        address, source = told.engine.coordinator(environ, told.size)
    return told._replace(coordinator=address, coordinator_from=source)


def _address_in(name: str, environ: Mapping[str, str], _size: int = 0) -> tuple[str, str]:
    """Returns the address in a variable, and its name; two empty texts if it is not set."""
    given = environ.get(name, "").strip()
    if not given:
        return "", ""
    check_address(given, f"{name}={shown(given)}", ADDRESSES)
    return given, name


def _port(*words: str) -> int:
    """Chooses a port by `words`, such as a job's number, so that all processes choose the same."""
    return CHOSEN.start + zlib.crc32(os.fsencode(" ".join(words))) % len(CHOSEN)


def _unknown(_environ: Mapping[str, str], _size: int) -> tuple[str, str]:
    return "", ""


def _on_slurm(environ: Mapping[str, str], _size: int) -> tuple[str, str]:
    nodes = environ.get("SLURM_STEP_NODELIST", "").strip()
    found = _HOSTS.fullmatch(nodes)
    if found is None:
        raise ClusterError(
            f"SLURM_STEP_NODELIST={shown(nodes)} cannot be read; Slurm writes hosts as in "
            f"node[01-03,7],x5. {_SET_COORDINATOR}."
        )
    first = re.sub(_NUMBERS, r"\1", found[1])
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    # If all tasks are on one machine, they need neither the network nor the machine's name.
    host = "127.0.0.1" if first == nodes else first
    source = f"SLURM_STEP_NODELIST={shown(nodes)} and the numbers of job {job} and step {step}"
    return f"{host}:{_port('slurm', job, step)}", source


def _under_open_mpi(environ: Mapping[str, str], size: int) -> tuple[str, str]:
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "").strip() != str(size):
        return "", ""
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"):
        job = environ.get(name, "").strip()
        if job:
            return f"127.0.0.1:{_port('mpi', job)}", f"OMPI_COMM_WORLD_LOCAL_SIZE and {name}"
    return "", ""


def _under_pmi(environ: Mapping[str, str], size: int) -> tuple[str, str]:
    if environ.get("SLURM_STEP_NUM_TASKS", "").strip() == str(size):
        return _on_slurm(environ, size)
    proxy = _ancestor("hydra_pmi_proxy")
    if environ.get("MPI_LOCALNRANKS", "").strip() != str(size) or not proxy:
        return "", ""
    return f"127.0.0.1:{_port('mpi', proxy)}", f"MPI_LOCALNRANKS and process {proxy} of mpiexec"


def _ancestor(name: str) -> str:
    """Returns the id of the nearest ancestor process with this name; empty if there is none."""
    process = os.getppid()
    while process > 1:
        try:
            words = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except OSError:
            return ""
        own, _, rest = words.partition("(")[2].rpartition(")")
        if own == name[:15]:
            return str(process)
        process = int(rest.split()[1])
    return ""


def _of_master(
    host: str, port: str, step: int, why: str, environ: Mapping[str, str], _size: int
) -> tuple[str, str]:
    """Reads the address of rank 0 from the variables `host` and `port`, which are like torchrun's.

    `step` is added to the port, or subtracted if the sum would be no port; `why` gives the reason
    for that in messages.
    """
    name, number = environ.get(host, "").strip(), environ.get(port, "").strip()
    if not name or not number:
        return "", ""
    if ":" in name and not name.startswith("["):
        name = f"[{name}]"
    if number.isdecimal() and len(number) < 6:
        number = str(int(number) + (step if int(number) + step < 65536 else -step))
    address = f"{name}:{number}"
    given = f"{host}={shown(name)}, {port}={shown(number)}: the address"
    check_address(address, given, _SET_COORDINATOR)
    return address, f"{host} and {port}{why}"


def _of_sagemaker(environ: Mapping[str, str], _size: int) -> tuple[str, str]:
    return f"{json.loads(environ['SM_HOSTS'])[0]}:{_SAGEMAKER_PORT}", "the first of SM_HOSTS"


_MPI, _PYTORCH = "horovodrun or mpirun", "PyTorch's runtime of Kubeflow"
_MASTER, _PET = ("MASTER_ADDR", "MASTER_PORT"), ("PET_MASTER_ADDR", "PET_MASTER_PORT")
_SRUN = ("SLURM_STEP_ID",)
_AFTER_TORCHRUN = " + 1, since torchrun itself listens at MASTER_PORT"
_under_torchrun = partial(_of_master, *_MASTER, 1, _AFTER_TORCHRUN)
_under_kubeflow = partial(_of_master, *_PET, 0, "")
_of_jax = partial(_address_in, "JAX_COORDINATOR_ADDRESS")
_OWN = Engine("by hand", RANK, SIZE, "whoever starts the processes", _unknown)
_ENGINES = (
    Engine("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", _MPI, _unknown),
    _OWN,
    Engine("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", _MPI, _under_open_mpi),
    Engine("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "mpirun", _unknown),
    Engine("MPI", "PMI_RANK", "PMI_SIZE", "mpiexec", _under_pmi),
    Engine("torchrun", "RANK", "WORLD_SIZE", "torchrun", _under_torchrun, also=_MASTER),
    Engine(_PYTORCH, "PET_NODE_RANK", "PET_NNODES", "Kubeflow", _under_kubeflow, True, _PET),
    Engine("JAX", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "Kubeflow", _of_jax, outer=True),
    Engine("SageMaker", "SM_CURRENT_HOST", "SM_HOSTS", "SageMaker", _of_sagemaker, outer=True),
    # A batch script has SLURM_PROCID, too, but only a task of srun is a worker. Slurm sets
    # SLURM_STEP_ID only for tasks of srun, so this variable must be there, too.
    Engine("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun", _on_slurm, True, _SRUN),
)
