"""TF_CONFIG of a cluster with parameter servers: what is accepted, and one message for the rest."""

import json
import subprocess
import sys

import pytest

from tfpara.cluster import ClusterError
from tfpara.cluster import asynchronous as cluster

SPEC = {
    "chief": ["10.0.0.1:4000"],
    "worker": ["10.0.0.2:4000", "node-3:4000"],
    "ps": ["10.0.0.4:4000", "[::1]:4000"],
}


def environ(spec=SPEC, task_type="worker", index=0):
    config = {"cluster": spec, "task": {"type": task_type, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


def without(job):
    return {name: addresses for name, addresses in SPEC.items() if name != job}


@pytest.mark.parametrize(
    ("task_type", "index", "name"),
    [
        ("chief", 0, "chief (10.0.0.1:4000)"),
        ("worker", 1, "worker 1 (node-3:4000)"),
        ("ps", 1, "ps 1 ([::1]:4000)"),
    ],
)
def test_each_process_knows_its_place(task_type, index, name):
    read = cluster.read(environ(task_type=task_type, index=index))
    assert (read.task_type, read.task_index, read.name) == (task_type, index, name)
    assert read.address == SPEC[task_type][index]
    assert read.is_chief == (task_type == "chief")
    assert read.spec() == SPEC
    assert read.spec("10.0.0.1:4001") == SPEC | {"chief": ["10.0.0.1:4001"]}
    assert read.members == (("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1))
    assert read.describe("ps", 0) == "ps 0 (10.0.0.4:4000)"
    assert cluster.read({"TF_CONFIG": read.tf_config()}) == read


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, ["unset or empty", "tfpara-launch --ps 1", "PeriodicSyncStrategy"]),
        ({"TF_CONFIG": "{}"}, ["unset or empty", "tfpara-launch --ps 1"]),
        (environ(without("ps")), ["no 'ps'", "a synchronous strategy", "tfpara-launch --ps 1"]),
        (environ(SPEC | {"ps": []}), ["no 'ps'", "PeriodicSyncStrategy"]),
        (environ(without("chief")), ["no 'chief'", '"chief": ["host:port"]']),
        (environ(without("worker"), "ps"), ["no 'worker'", '"worker": ["host:port", ...]']),
        (environ(index=2), ["task worker 2", "2 worker address(es) and 2 ps address(es)"]),
        (environ(task_type="ps", index=2), ["task ps 2"]),
        (environ(task_type="evaluator"), ["job 'evaluator' in TF_CONFIG"]),
        (environ(SPEC | {"server": ["a:1"]}), ["'server'", "'chief' (one), 'worker' and 'ps'"]),
        (environ(SPEC | {"ps": ["10.0.0.2:4000"]}), ["worker 0 and ps 0"]),
        (environ(SPEC | {"ps": ["a"]}), ["'a'", "no port"]),
        (environ(SPEC | {"chief": ["a:1", "b:1"]}), ["2 addresses", "one chief"]),
        ({"TF_CONFIG": "{"}, ["not JSON", '"ps"', "tfpara-launch --ps 1"]),
    ],
)
def test_a_fault_is_one_short_message(env, words):
    with pytest.raises(ClusterError) as caught:
        cluster.read(env)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "TF_CONFIG" in message
    assert "\n" not in message and len(message) < 600


@pytest.mark.quick
def test_neither_cluster_nor_channel_needs_tensorflow():
    show = "import sys; from tfpara.parameter_server.control import lobby, member; "
    show += "from tfpara.cluster import asynchronous, door, messages; "
    show += "print([name for name in ('tensorflow', 'numpy') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, timeout=150)
    assert shown.stdout == b"[]\n", shown.stderr
