"""TF_CONFIG and the variables of engines, mutated: one sentence, or a place among processes."""

import json
import random

import pytest

from tests.lib import hostile, mutants
from tfpara import cluster
from tfpara.cluster import asynchronous, engines, exit_codes, secret, tf_config

SPEC = {"chief": ["10.0.0.1:4000"], "worker": ["node2:4000", "[::1]:4001"]}
TASK = {"type": "worker", "index": 1}
CONFIGS = [
    {"cluster": SPEC, "task": TASK},
    {"cluster": {**SPEC, "ps": ["10.0.0.4:1"]}, "task": TASK, "environment": "cloud"},
    {"cluster": {"worker": {"0": "a:1", "1": "b:2"}, "master": ["c:3"]}, "task": TASK},
]
POOLS = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}}
POOLS["task"] = {"type": "workerpool1", "index": 0}
ENGINES = [
    {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "TFPARA_COORDINATOR": "10.0.0.1:4000"},
    {"TFPARA_RANK": "2", "TFPARA_SIZE": "3", "TFPARA_COORDINATOR": "[::1]:4000"},
    {"TFPARA_SIZE": "3", "JOB_COMPLETION_INDEX": "2", "TFPARA_COORDINATOR": "pod-0.x:4000"},
    {
        **{"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        **{"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-1"},
    },
    {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},
    {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "fe80::1", "MASTER_PORT": "29500"},
    {
        **{"PET_NODE_RANK": "1", "PET_NNODES": "2"},
        **{"PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "23456"},
    },
    {
        **{"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"},
        "JAX_COORDINATOR_ADDRESS": "job-0:1234",
    },
    {"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-1", "algo-2"]'},
    {
        **{"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"},
        **{"SLURM_STEP_NODELIST": "node[01-03,7],x5", "SLURM_JOB_ID": "77"},
    },
    {"SLURM_NTASKS": "4", "RANK": "0", "WORLD_SIZE": "2"},
    {"TFPARA_RESTART_EXIT_CODE": "75", "TFPARA_LOST_WORKER_EXIT_CODE": "3"},
    {"TFPARA_SECRET": "a secret of this run"},
]


def environments(daily):
    """Yields environments in which one variable, or TF_CONFIG, is mutated."""
    number = mutants.count(daily)
    for seed, config in enumerate(CONFIGS):
        for case in mutants.of_json(config, seed, number // 6):
            yield {"TF_CONFIG": json.dumps(case)}
        for text in mutants.of_text(json.dumps(config), seed, number // 6):
            yield {"TF_CONFIG": text}
    for case in mutants.of_json(POOLS, 7, number // 8):
        yield {"CLUSTER_SPEC": json.dumps(case)}
    draw = random.Random(9)
    for seed in range(number):
        found = dict(draw.choice(ENGINES))
        if draw.random() < 0.2:
            found |= draw.choice(ENGINES)
        name = draw.choice(sorted(found))
        (found[name],) = mutants.of_text(found[name], seed, 1)
        # As os.environ has bytes that are not UTF-8; there is no "\0" in there.
        yield {
            name: text.replace("\ud800", "\udcff").replace("\0", "") for name, text in found.items()
        }


READERS = (
    *(cluster.read, asynchronous.read, engines.left_alone, secret.read),
    *((lambda environ: exit_codes.restart(None, environ)),),
    *((lambda environ: exit_codes.lost_worker(None, environ)),),
)


def checked(read, environ):
    """Reads; returns what was read, or None after checking the sentence that refuses it."""
    try:
        with hostile.watched(sum(map(len, environ.values()))):
            found = read(environ)
    except (tf_config.ClusterError, secret.SecretError, ValueError) as error:
        text = str(error)
        assert any(name in text for name in (*environ, "TF_CONFIG")), text
        assert len(text) < 1500 and text.rstrip().endswith("."), text
        return None
    if isinstance(found, cluster.Cluster):
        assert 0 <= found.rank < found.num_workers <= 10**9
        assert found.size or found.address or found.num_workers == 1
    if isinstance(found, asynchronous.AsyncCluster):
        assert len(found.jobs["chief"]) == 1
        assert 0 <= found.task_index < len(found.jobs[found.task_type])
    return found


def test_environments_of_anything():
    read = refused = 0
    for environ in environments(500):
        for reader in READERS:
            try:
                found = checked(reader, environ)
            except Exception as error:
                raise AssertionError(f"{str(environ)[:1000]}: {error!r}"[:3000]) from error
            read, refused = read + (found is not None), refused + (found is None)
    assert read > 100 and refused > 100


@pytest.mark.parametrize("key", ["9" * 5000, "00", "٣"])
def test_a_map_of_addresses_whose_index_is_none_is_refused(key):
    config = {"cluster": {"worker": {"0": "a:1", key: "b:2"}}, "task": TASK}
    assert checked(cluster.read, {"TF_CONFIG": json.dumps(config)}) is None
