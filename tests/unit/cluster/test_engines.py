"""What engines tell a process, and how processes that know their ranks find each other."""

import concurrent.futures
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from tfpara import cluster
from tfpara.cluster import engines, startup

LONG = 60.0  # seconds; reached only by a hang

# As the engines set them: Slurm 22.05, Open MPI 4.1, MPICH 4.0, torchrun 2.x, JobSet's runtimes.
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[03-04,7]",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[03-04]"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "662765569",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
JAX = {
    "JAX_PROCESS_ID": "1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666",
}
PET = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SAGEMAKER = {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-1", "algo-2"]'}
OURS = {"TFPARA_RANK": "1", "TFPARA_SIZE": "2", "TFPARA_COORDINATOR": "10.0.0.1:4000"}
INDEX = {"JOB_COMPLETION_INDEX": "1", "TFPARA_SIZE": "2", "TFPARA_COORDINATOR": "job-0.job:4000"}

TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'


@pytest.mark.parametrize(
    ("environ", "rank", "size", "coordinator", "words"),
    [
        (OURS, 1, 2, "10.0.0.1:4000", "by hand: rank 1 of 2, from TFPARA_RANK and TFPARA_SIZE"),
        (INDEX, 1, 2, "job-0.job:4000", "from JOB_COMPLETION_INDEX and TFPARA_SIZE"),
        (SLURM, 1, 4, "node03:", "Slurm: rank 1 of 4, from SLURM_PROCID and SLURM_STEP_NUM_TASKS"),
        (SLURM, 1, 4, "node03:", "from SLURM_STEP_NODELIST='node[03-04,7]' and the numbers of"),
        (SLURM | {"SLURM_STEP_NODELIST": "node7"}, 1, 4, "127.0.0.1:", "step 0"),
        (OPEN_MPI, 1, 2, "127.0.0.1:", "Open MPI: rank 1 of 2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 1, 2, "", "OMPI_COMM_WORLD_SIZE"),
        (TORCHRUN, 1, 2, "node1:29501", "MASTER_PORT + 1, since torchrun itself"),
        (TORCHRUN | {"MASTER_PORT": "65535"}, 1, 2, "node1:65534", "torchrun"),
        (TORCHRUN | {"MASTER_ADDR": "fd00::2"}, 1, 2, "[fd00::2]:29501", "torchrun"),
        (PET, 1, 2, "job-node-0-0.job:29400", "PET_NODE_RANK"),
        (JAX, 1, 2, "job-node-0-0.job:6666", "JAX_COORDINATOR_ADDRESS"),
        (SAGEMAKER, 1, 2, "algo-1:23456", "SM_HOSTS"),
        # Processes that are started within others': theirs count, not those of the place.
        (SLURM | OPEN_MPI, 1, 2, "127.0.0.1:", "Open MPI"),
        (PET | TORCHRUN | {"WORLD_SIZE": "4"}, 1, 4, "node1:29501", "torchrun"),
        # One that says that it is alone, as srun --mpi=pmi2 -n 1, says nothing of others.
        ({"PMI_RANK": "0", "PMI_SIZE": "1"} | TORCHRUN, 1, 2, "node1:29501", "torchrun"),
        # What is given by hand is taken.
        (TORCHRUN | {"TFPARA_COORDINATOR": "node9:1"}, 1, 2, "node9:1", "from TFPARA_COORDINATOR"),
        (SLURM | OURS, 1, 2, "10.0.0.1:4000", "by hand"),
    ],
)
def test_what_an_engine_tells(environ, rank, size, coordinator, words):
    told = engines.find(environ)
    assert (told.rank, told.size) == (rank, size)
    assert told.coordinator.startswith(coordinator) and bool(told.coordinator) == bool(coordinator)
    assert words in told.described()
    found = cluster.read(environ)
    assert (found.rank, found.num_workers, found.addresses) == (rank, size, ())


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT,
        SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"RANK": "1", "WORLD_SIZE": "2"},  # of somebody else
        TORCHRUN | {"TFPARA_RANK": "0", "TFPARA_SIZE": "1"},
        SLURM | {"TFPARA_RANK": "0", "TFPARA_SIZE": "1"},
        {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "TFPARA_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "3", "TFPARA_SIZE": "1"},
    ],
)
def test_one_process_alone(environ):
    assert cluster.read(environ) == cluster.ALONE


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (BATCH_SCRIPT, ["SLURM_NTASKS=4, but srun", "trains alone", "write srun", "TFPARA_SIZE=1"]),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            ["RANK='1' and WORLD_SIZE=2 without MASTER_ADDR and MASTER_PORT do not", "alone"],
        ),
        (TORCHRUN | {"MASTER_PORT": ""}, ["without MASTER_PORT do not", "set MASTER_PORT,"]),
    ],
)
def test_a_process_that_nobody_tells_of_the_others_says_so(environ, words):
    assert cluster.read(environ) == cluster.ALONE
    text = cluster.left_alone(environ)
    assert [word for word in words if word not in text] == [], text
    assert cluster.read(environ | {"TFPARA_SIZE": "1"}) == cluster.ALONE
    assert cluster.left_alone(environ | {"TFPARA_SIZE": "1"}) == ""
    assert cluster.left_alone(environ | {"TF_CONFIG": TF_CONFIG}) == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT | {"SLURM_NTASKS": "1"},
        # One task of srun, in a job of four.
        SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "x", "WORLD_SIZE": "x"},
        BATCH_SCRIPT | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        BATCH_SCRIPT | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_nothing_is_said_where_one_process_is_meant(environ):
    assert cluster.left_alone(environ) == ""


def test_the_same_port_for_all_of_a_step_and_another_for_the_next():
    def of(**changes):
        return engines.find(SLURM | changes).coordinator

    assert of() == of(SLURM_PROCID="3") and of() != of(SLURM_STEP_ID="1") != of(SLURM_JOB_ID="78")
    assert of(SLURM_JOB_ID="\udcff") == of(SLURM_JOB_ID="\udcff", SLURM_PROCID="3")  # no UTF-8


def test_tf_config_wins():
    for environ in (SLURM, SLURM | {"SLURM_PROCID": "0"}, OURS, TORCHRUN, JAX | {"X": ""}):
        found = cluster.read(environ | {"TF_CONFIG": TF_CONFIG})
        assert (found.addresses, found.rank, found.told) == (("a:1", "b:1"), 1, None)
    with pytest.raises(cluster.ClusterError, match="TFPARA_RANK=0 of 2.*contradicts TF_CONFIG"):
        cluster.read(OURS | {"TFPARA_RANK": "0", "TF_CONFIG": TF_CONFIG})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCHRUN | OURS | {"RANK": "0"}, ["TFPARA_RANK=1", "contradicts RANK=0", "Unset"]),
        (INDEX | {"JOB_COMPLETION_INDEX": "2"}, ["JOB_COMPLETION_INDEX='2'", "`completions`"]),
        (PET | {"PET_NNODES": "1:2"}, ["PET_NNODES='1:2'", "a range of nodes"]),
        ({"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '"algo-2"'}, ["must be a JSON list of hosts"]),
        ({"SM_CURRENT_HOST": "b", "SM_HOSTS": '[1, "b"]'}, ["must be a JSON list of hosts"]),
        (OPEN_MPI | TORCHRUN | {"WORLD_SIZE": "3"}, ["OMPI_COMM_WORLD_SIZE=2", "WORLD_SIZE=3"]),
        (JAX | SLURM, ["JAX_NUM_PROCESSES=2", "SLURM_STEP_NUM_TASKS=4"]),
        ({"TFPARA_COORDINATOR": "a:1"}, ["TFPARA_COORDINATOR='a:1'", "Set TFPARA_RANK"]),
        ({"TFPARA_SIZE": "2"}, ["TFPARA_RANK=''", "TFPARA_SIZE='2'"]),
        ({"TFPARA_RANK": "2", "TFPARA_SIZE": "2"}, ["TFPARA_RANK='2'", "below the second"]),
        (OURS | {"TFPARA_COORDINATOR": "node1"}, ["'node1' has no port", "host:port"]),
        (OURS | {"TFPARA_COORDINATOR": "0.0.0.0:1"}, ["'0.0.0.0:1'", "all interfaces"]),
        (SLURM | {"SLURM_STEP_NODELIST": "node[3-"}, ["'node[3-'", "Set TFPARA_COORDINATOR"]),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST=''"]),
        (TORCHRUN | {"MASTER_PORT": "x"}, ["MASTER_PORT='x'", "not a number"]),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "job"}, ["'job' has no port"]),
        (SAGEMAKER | {"SM_HOSTS": "[]"}, ["'algo-2' is not in SM_HOSTS='[]'"]),
    ],
)
def test_a_fault_is_one_sentence_with_the_fix(environ, words):
    with pytest.raises(cluster.ClusterError) as caught:
        cluster.read(environ)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message and len(message) < 600


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "127.0.0.1"),  # it is alone
        ("node[01-03,7],x5", "node01"),
        ("a,b[8-10]", "a"),
        ("r[1-2]n[1-2].x", "r1n1.x"),
        ("n[098-101]", "n098"),
        ("n[7,1-3],m", "n7"),
    ],
)
def test_on_slurm_all_meet_at_the_first_host(nodelist, host):
    told = engines.find(SLURM | {"SLURM_STEP_NODELIST": nodelist})
    assert told.coordinator.rpartition(":")[0] == host


@pytest.mark.parametrize("bad", ["", ",", "a,", "n[", "n[]", "n[1-]", "a b", "[" * 9999])
def test_what_is_no_nodelist(bad):
    with pytest.raises(cluster.ClusterError, match="SLURM_STEP_NODELIST=.* cannot be read"):
        engines.find(SLURM | {"SLURM_STEP_NODELIST": bad})


# -- the meeting ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nobody_has_met(monkeypatch):
    monkeypatch.setattr(startup, "_found", {})
    monkeypatch.setattr(startup, "_met", None)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def meet_all(ranks, timeouts=None, sizes=None, host="127.0.0.1"):
    """What each process of a rank comes to: its cluster, or the error's message."""
    coordinator = f"{host}:{free_port()}"
    sizes = sizes or [len(ranks)] * len(ranks)

    def meet(rank, size, timeout):
        environ = {"TFPARA_RANK": str(rank), "TFPARA_SIZE": str(size)}
        try:
            found = cluster.read(environ | {"TFPARA_COORDINATOR": coordinator})
            found = startup.find_each_other(found, timeout)
            startup.meet(found, timeout)
            return found
        except startup.StartupError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(meet, ranks, sizes, timeouts or [LONG] * len(ranks))), coordinator


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0]])
def test_processes_that_know_their_ranks_find_each_other(ranks):
    found, coordinator = meet_all(ranks)
    by_rank = dict(zip(ranks, found, strict=True))
    (addresses,) = {each.addresses for each in found}
    assert len(set(addresses)) == 3 and coordinator not in addresses
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    for rank, each in by_rank.items():
        assert (each.rank, each.num_workers, each.rank_variable) == (rank, 3, "")
        assert cluster.read({"TF_CONFIG": each.tf_config()}) == each


def test_an_address_of_the_network_is_told_as_it_is_reached():
    """Who came by loopback is told to the others by the address at which these reach the chief."""

    guests = {
        1: startup._Guest("127.0.0.1", "127.0.0.1:11"),
        2: startup._Guest("10.0.0.1", "10.0.0.2:12"),
        3: startup._Guest("fd00::1", "[fd00::3]:13"),
    }
    expected = ["10.0.0.1:10", "10.0.0.1:11", "10.0.0.2:12", "[fd00::3]:13"]
    assert startup._addresses(10, guests) == expected


def test_all_are_told_of_a_rank_that_is_missing():
    messages, coordinator = meet_all([0, 1], [1.0, LONG], sizes=[3, 3])
    assert messages[0] == messages[1]
    assert "after 1 s these workers have not started: worker 2." in messages[0]
    assert "each rank below TFPARA_SIZE=3 within startup_timeout_seconds" in messages[0]
    assert coordinator in messages[0]


def test_all_are_told_of_a_rank_that_is_there_twice():
    messages, _ = meet_all([0, 1, 1], sizes=[3, 3, 3])
    assert set(messages) == {
        "two processes have the same rank: both have TFPARA_RANK=1. Give each a rank of its own, "
        "from 0 to 2."
    }


def test_all_are_told_of_another_size():
    messages, _ = meet_all([0, 1], sizes=[2, 3])
    assert messages[0] == messages[1]
    assert "the chief has TFPARA_SIZE=2, and the process with rank 1 counts 3." in messages[0]


def test_nobody_serves_the_coordinator():
    (message,), coordinator = meet_all([1], [0.5], sizes=[2])
    assert f"after 0.5 s this worker has not started: chief ({coordinator})" in message
    assert "refused" in message
    assert "rank 0 where this address leads, which is from TFPARA_COORDINATOR" in message


def test_the_coordinators_port_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        environ = {"TFPARA_RANK": "0", "TFPARA_SIZE": "2", "TFPARA_COORDINATOR": address}
        with pytest.raises(
            startup.StartupError, match=f"rank 0 cannot listen at {address}.*in use"
        ):
            startup.find_each_other(cluster.read(environ), LONG)


def test_it_is_not_known_where_rank_0_is():
    found = cluster.read({"PMI_RANK": "1", "PMI_SIZE": "2"})
    with pytest.raises(cluster.ClusterError, match="PMI_RANK=1 and PMI_SIZE=2.*TFPARA_COORDIN"):
        startup.find_each_other(found, LONG)


# -- started by engines ---------------------------------------------------------------------------

PROGRAM = """
from tfpara import cluster
from tfpara.cluster import startup
found = startup.find_each_other(cluster.read(), 60.0)
startup.meet(found, 60.0)
print(f"met: {found.rank} {found.addresses}", flush=True)
"""


@pytest.mark.parametrize(
    ("starter", "engine"),
    [
        (["mpirun.openmpi", "--oversubscribe"], "Open MPI: rank 0 of 2, from OMPI_COMM_WORLD_RANK"),
        (["mpiexec.hydra"], "MPI: rank 0 of 2, from PMI_RANK"),
        (["srun", "--overcommit"], "Slurm: rank 0 of 2, from SLURM_PROCID"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_a_real_engine_starts_two_processes(starter, engine):
    if shutil.which(starter[0]) is None:
        pytest.skip(f"{starter[0]} is not installed")
    if starter[0] == "srun" and subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("Slurm is installed, but no slurmctld answers")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*starter, "-n", "2", sys.executable, "-c", PROGRAM],
        env=os.environ | as_root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    met = sorted(line for line in done.stdout.splitlines() if "met: " in line)
    assert [line.partition("met: ")[2][0] for line in met] == ["0", "1"], done.stdout
    assert len({line.partition("(")[2] for line in met}) == 1 and engine in done.stdout


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["Ray", "Spark"])
def test_an_engine_that_is_not_installed_is_one_sentence(engine):
    page = pathlib.Path(__file__).resolve().parents[3] / "docs" / "engines" / engine.lower()
    without_packages = [sys.executable, "-S", str(page / "train.py"), "folder"]
    done = subprocess.run(without_packages, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{engine} is not installed: pip install ")
    assert done.stderr.count("\n") == 1
