"""The manifests of docs/engines/kubernetes keep the schemas, and their pods find each other.

There is no cluster here: the schemas are those of Kubeflow's Python package, and what an operator
sets in its pods is imitated.
"""

import concurrent.futures
import copy
import json
import os
import pathlib
import socket
import time

import pytest

if not os.environ.get("TFPARA_TEST_INSTALLED"):  # scripts/test.sh installs it, and must have it
    pytest.importorskip("kubeflow_trainer_api")

import pydantic
import yaml
from kubeflow_trainer_api import models

from tests.lib.cluster_of_processes import free_ports
from tfpara import cluster
from tfpara.cluster import exit_codes, startup

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "docs" / "engines" / "kubernetes"
DOCUMENTS = {
    (path.stem, document["kind"]): document
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
SCHEMAS = {
    "Service": models.IoK8sApiCoreV1Service,
    "PersistentVolumeClaim": models.IoK8sApiCoreV1PersistentVolumeClaim,
    "Job": models.IoK8sApiBatchV1Job,
    "JobSet": models.JobsetV1alpha2JobSet,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


class RunPolicy(pydantic.BaseModel):
    """Of TFJob, whose operator has no such package: what its API (kubeflow.org/v1) knows."""

    backoffLimit: int
    cleanPodPolicy: str


class Replicas(pydantic.BaseModel):
    replicas: int
    restartPolicy: str
    template: models.IoK8sApiCoreV1PodTemplateSpec


class TFJobSpec(pydantic.BaseModel):
    runPolicy: RunPolicy
    tfReplicaSpecs: dict[str, Replicas]


class TFJob(pydantic.BaseModel):
    apiVersion: str
    kind: str
    metadata: models.IoK8sApimachineryPkgApisMetaV1ObjectMeta
    spec: TFJobSpec


SCHEMAS["TFJob"] = TFJob


def with_quantities(value):
    """The package reads quantities, such as 8Gi, from objects of its own alone."""
    if isinstance(value, list):
        return [with_quantities(each) for each in value]
    if not isinstance(value, dict):
        return value
    quantity = models.IoK8sApimachineryPkgApiResourceQuantity
    return {
        key: {name: quantity(amount) for name, amount in each.items()}
        if key in ("limits", "requests")
        else with_quantities(each)
        for key, each in value.items()
    }


def check(document):
    SCHEMAS[document["kind"]].model_validate(with_quantities(document), extra="forbid")


def mappings(value):
    """All mappings with fixed keys in a document; names of labels and resources are free."""
    if isinstance(value, dict):
        yield value
        for key, each in value.items():
            if key not in ("labels", "selector", "limits", "requests", "jax", "tfReplicaSpecs"):
                yield from mappings(each)
            elif key == "tfReplicaSpecs":
                for replicas in each.values():
                    yield from mappings(replicas)
    elif isinstance(value, list):
        for each in value:
            yield from mappings(each)


@pytest.mark.parametrize("name", DOCUMENTS, ids="-".join)
def test_a_manifest_keeps_its_schema_and_a_misspelt_key_does_not(name):
    check(DOCUMENTS[name])
    count = len(list(mappings(DOCUMENTS[name])))
    assert count > 2
    for place in range(count):
        misspelt = copy.deepcopy(DOCUMENTS[name])
        there = list(mappings(misspelt))[place]
        there[next(iter(there)) + "z"] = 1
        with pytest.raises(pydantic.ValidationError, match="Extra inputs are not permitted"):
            check(misspelt)


# -- what the pods see ----------------------------------------------------------------------------


def job_of(stem):
    """The pod template of a manifest, and the Job's settings around it."""
    match stem:
        case "job":
            job = DOCUMENTS["job", "Job"]["spec"]
        case "jobset":
            job = DOCUMENTS["jobset", "JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        case "trainjob":
            runtime = DOCUMENTS["trainjob", "ClusterTrainingRuntime"]["spec"]
            job = runtime["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        case "tfjob":
            job = DOCUMENTS["tfjob", "TFJob"]["spec"]["tfReplicaSpecs"]["Worker"]
    return job["template"]["spec"], job


def environs(stem):
    """What each pod's container finds, in the order of ranks, and the name of the first pod."""
    pod, job = job_of(stem)
    (container,) = pod["containers"]
    own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    if stem == "tfjob":
        specs = DOCUMENTS["tfjob", "TFJob"]["spec"]["tfReplicaSpecs"]
        (port,) = (each["containerPort"] for each in container["ports"])
        spec = {
            kind.lower(): [
                f"train-{kind.lower()}-{index}.default.svc:{port}"
                for index in range(replicas["replicas"])
            ]
            for kind, replicas in specs.items()
        }
        tasks = [(kind, index) for kind, names in spec.items() for index in range(len(names))]
        configs = [
            {"cluster": spec, "task": {"type": kind, "index": index}, "environment": "cloud"}
            for kind, index in tasks
        ]
        return [own | {"TF_CONFIG": json.dumps(config)} for config in configs], spec["chief"][0]
    if stem == "trainjob":
        trainer = DOCUMENTS["trainjob", "TrainJob"]["spec"]["trainer"]
        assert "jax" in DOCUMENTS["trainjob", "ClusterTrainingRuntime"]["spec"]["mlPolicy"]
        size, host = trainer["numNodes"], "train-node-0-0.train"
        own |= {"JAX_NUM_PROCESSES": str(size), "JAX_COORDINATOR_ADDRESS": f"{host}:6666"}
        ranks = ({"JAX_PROCESS_ID": str(i), "JOB_COMPLETION_INDEX": str(i)} for i in range(size))
        return [own | rank for rank in ranks], host
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    if stem == "job":
        name, service = (DOCUMENTS["job", kind]["metadata"]["name"] for kind in ("Job", "Service"))
        assert DOCUMENTS["job", "Service"]["spec"]["selector"] == {"job-name": name}
        assert pod["subdomain"] == service
        host = f"{name}-0.{service}"
    else:
        (replicated,) = DOCUMENTS["jobset", "JobSet"]["spec"]["replicatedJobs"]
        name = DOCUMENTS["jobset", "JobSet"]["metadata"]["name"]
        host = f"{name}-{replicated['name']}-0-0.{name}"
    indices = range(job["completions"])
    return [own | {"JOB_COMPLETION_INDEX": str(index)} for index in indices], host


STEMS = ["job", "jobset", "trainjob", "tfjob"]


@pytest.mark.parametrize("stem", STEMS)
def test_each_pod_learns_its_rank_and_where_the_first_is(stem):
    pods, host = environs(stem)
    found = [cluster.read(environ) for environ in pods]
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert {each.num_workers for each in found} == {4}
    if stem == "tfjob":
        (addresses,) = {each.addresses for each in found}
        assert addresses[0] == host and len(set(addresses)) == 4
    else:
        assert {each.told.coordinator.rpartition(":")[0] for each in found} == {host}


@pytest.mark.parametrize("stem", STEMS)
def test_what_is_asked_to_end_is_started_again(stem):
    pod, job = job_of(stem)
    (container,) = pod["containers"]
    environ = environs(stem)[0][0]
    restart, lost = exit_codes.restart(environ=environ), exit_codes.lost_worker(environ=environ)
    if stem == "tfjob":
        assert job["restartPolicy"] == "ExitCode" and min(restart, lost) >= 128
    else:
        rules = job["podFailurePolicy"]["rules"]
        assert pod["restartPolicy"] == "Never"  # else a podFailurePolicy is refused
        ((action, codes),) = [(r["action"], r["onExitCodes"]) for r in rules if "onExitCodes" in r]
        assert codes["containerName"] == container["name"]
        assert restart in codes["values"]
        # One that failed counts once: where pods start again by themselves, the others do not.
        assert (action == "Ignore") == (lost in codes["values"]) == (stem == "job")
        assert action == "Ignore" or job["backoffLimit"] == 0
    assert pod["terminationGracePeriodSeconds"] > 30  # the default
    claim = DOCUMENTS["volume", "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volume["name"] == mount["name"]


def late_names(monkeypatch, names, refusals):
    """The names lead to this machine after so many questions each; returns who was refused."""
    ask, refused = socket.getaddrinfo, []

    def getaddrinfo(host, *args, **kwargs):
        if host not in names:
            return ask(host, *args, **kwargs)
        if refused.count(host) < refusals:
            refused.append(host)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return refused


def meet(environ):
    found = startup.find_each_other(cluster.read(environ), 60.0)
    startup.meet(found, 60.0)
    return found


@pytest.fixture(autouse=True)
def nobody_has_met(monkeypatch):
    monkeypatch.setattr(startup, "_found", {})
    monkeypatch.setattr(startup, "_met", None)


@pytest.mark.parametrize("stem", ["job", "trainjob"])
def test_pods_wait_for_the_name_of_the_first_and_for_its_start(stem, monkeypatch):
    """As after a restart: the others are back, their questions lead nowhere, then the first is."""
    pods, host = environs(stem)
    (port,) = free_ports(1)
    pods = [environ | {"TFPARA_COORDINATOR": f"{host}:{port}"} for environ in pods]
    refused = late_names(monkeypatch, {host}, 6)
    with concurrent.futures.ThreadPoolExecutor(len(pods)) as pool:
        others = [pool.submit(meet, environ) for environ in pods[1:]]
        while len(refused) < 6:
            assert not any(other.done() for other in others)
            time.sleep(0.01)
        first = pool.submit(meet, pods[0])
        found = [each.result() for each in (first, *others)]
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert len({each.addresses for each in found}) == 1


def test_pods_of_a_tfjob_wait_for_all_names(monkeypatch):
    """Each name is known later than its pod runs; here they have ports of their own, too."""
    pods, _ = environs("tfjob")
    names = [address.rpartition(":")[0] for address in cluster.read(pods[0]).addresses]
    ports = dict(zip(names, free_ports(4), strict=True))
    for name, port in ports.items():
        for environ in pods:
            environ["TF_CONFIG"] = environ["TF_CONFIG"].replace(f"{name}:2222", f"{name}:{port}")
    refused = late_names(monkeypatch, set(names), 3)
    with concurrent.futures.ThreadPoolExecutor(len(pods)) as pool:
        found = list(pool.map(meet, pods))
    assert sorted(refused) == sorted(names * 3)
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert found[0].addresses == tuple(f"{name}:{port}" for name, port in ports.items())
