"""TF_CONFIG: what is accepted, and one clear message for what is not."""

import functools
import json
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tfpara import cluster

TWO = {"chief": ["10.0.0.1:4000"], "worker": ["10.0.0.2:4000", "node-3:4000"]}


def environ(config):
    return {"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)}


def config(spec=TWO, task_type="worker", index=0):
    return {"cluster": spec, "task": {"type": task_type, "index": index}}


@pytest.mark.parametrize(
    "env",
    [
        {},
        environ(""),
        environ(" \n"),
        environ({}),
        environ({"cluster": {}}),
        environ({"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}}),
        environ({"task": {"type": "chief", "index": 0}, "environment": "cloud"}),
    ],
)
def test_one_process_without_a_cluster(env):
    alone = cluster.read(env)
    assert alone == cluster.Cluster((), "worker", 0)
    assert (alone.num_workers, alone.rank, alone.is_chief, alone.address) == (1, 0, True, "")
    assert alone.describe(0) == "chief"
    assert alone.unreachable(1.0) == []


@pytest.mark.parametrize(
    ("task_type", "index", "rank", "address"),
    [
        ("chief", 0, 0, "10.0.0.1:4000"),
        ("worker", 0, 1, "10.0.0.2:4000"),
        ("worker", 1, 2, "node-3:4000"),
    ],
)
def test_ranks_count_the_chief_first(task_type, index, rank, address):
    read = cluster.read(environ(config(TWO, task_type, index)))
    assert read.addresses == ("10.0.0.1:4000", "10.0.0.2:4000", "node-3:4000")
    assert (read.num_workers, read.rank, read.is_chief) == (3, rank, rank == 0)
    assert read.address == address
    assert (read.task_type, read.task_index) == (task_type, index)


def test_worker_0_is_the_chief_of_a_cluster_of_workers():
    spec = {"worker": ["[::1]:4000", "[fe80::2]:4000"]}
    first, second = (cluster.read(environ(config(spec, "worker", index))) for index in (0, 1))
    assert (first.rank, first.is_chief, first.address) == (0, True, "[::1]:4000")
    assert (second.rank, second.is_chief, second.address) == (1, False, "[fe80::2]:4000")
    assert [second.describe(rank) for rank in (0, 1)] == [
        "chief ([::1]:4000)",
        "worker 1 ([fe80::2]:4000)",
    ]


@pytest.mark.parametrize(
    ("env_config", "words"),
    [
        ("{'cluster': 1}", ["not JSON", "'cluster'", "unset it"]),
        ("{", ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        ("[]", ["JSON object", "[]"]),
        ('{"task": {}, "task": {}}', ["'task'", "twice"]),
        ({"cluster": ["a:1"]}, ["'cluster'", "JSON object", "['a:1']"]),
        ({"cluster": TWO}, ["no 'task'", '"index": 0']),
        ({"cluster": TWO, "task": "worker"}, ["'task'", "JSON object", "'worker'"]),
        ({"cluster": TWO, "task": {"type": "worker"}}, ["no 'index'"]),
        ({"cluster": TWO, "task": {"index": 0}}, ["no 'type'"]),
        (config(index=2), ["task worker 2", "2 worker address(es)"]),
        (config(index=-1), ["task worker -1"]),
        (config(index="0"), ["'0'", "integer", "unquoted"]),
        (config(index=1.0), ["1.0", "integer"]),
        (config(index=True), ["True", "integer"]),
        (config(index=None), ["None", "integer"]),
        (config(task_type="chief", index=1), ["task chief 1", "1 chief address(es)"]),
        (config({"worker": ["a:1"]}, "chief"), ["task chief 0", "0 chief address(es)"]),
        ({"task": {"type": "worker", "index": 1}}, ["task worker 1", "0 worker"]),
        ({"clutser": TWO, "task": {"type": "worker", "index": 0}}, ["no 'cluster'", "'clutser'"]),
        (config(task_type="trainer"), ["task type 'trainer'", "'chief'"]),
        (config(task_type=["worker"]), ["task type ['worker']"]),
        (config({**TWO, "master": ["a:1"]}), ["'master' and 'chief'", "Keep 'chief'"]),
        (config({"worker": {"1": "b:1"}}, index=1), ["{'1': 'b:1'}", "enableDynamicWorker"]),
        (config({"worker": {"0": "a:1", "2": "c:1"}}), ["each process must know all addresses"]),
        (config({"worker": {"0": "a:1", "1": "b"}}), ["'b'", "no port"]),
        (config({"ps": ["a:1"]}), ["task worker 0", "0 worker address(es)"]),
        (config(task_type="PS"), ["task type 'PS'", "'worker'"]),
        (config({"Worker": ["a:1"]}), ["'Worker'", "'worker'"]),
        (config({"chief": ["a:1", "b:1"]}), ["2 addresses", "one chief"]),
        (config({"worker": "a:1"}), ["'a:1'", "list"]),
        (config({"worker": {"0": "a:1"}}), ["{'0': 'a:1'}", "list"]),
        (config({"worker": [4000]}), ["4000", "not a string"]),
        (config({"worker": ["node1"]}), ["'node1'", "no port", "host:port"]),
        (config({"worker": ["node1:"]}), ["port ''"]),
        (config({"worker": ["node1:0"]}), ["port '0'", "65535"]),
        (config({"worker": ["node1:65536"]}), ["port '65536'"]),
        (config({"worker": ["node1:٤"]}), ["port '٤'"]),
        (config({"worker": ["node1:" + "9" * 9999]}), ["port '999", "..."]),
        (config({"worker": [":4000"]}), ["host ''"]),
        (config({"worker": ["grpc://node1:4000"]}), ["scheme"]),
        (config({"worker": ["no de:4000"]}), ["host 'no de'"]),
        (config({"worker": ["10.0.0.256:4000"]}), ["'10.0.0.256'", "not an IP address"]),
        (config({"worker": ["::1:4000"]}), ["square brackets", "'[::1]:4000'"]),
        (config({"worker": ["[node1]:4000"]}), ["'[node1]'", "not an IP address"]),
        (config({"worker": ["0.0.0.0:4000"]}), ["all interfaces"]),
        (config({"worker": ["[::]:4000"]}), ["all interfaces"]),
        (config({"worker": ["a:1", "b:1", "A:1"]}), ["'A:1'", "worker 0 and worker 2"]),
        (config({"chief": ["a:1"], "worker": ["a:1"]}), ["chief 0 and worker 0"]),
    ],
)
def test_a_fault_is_one_short_message(env_config, words):
    with pytest.raises(cluster.ClusterError) as caught:
        cluster.read(environ(env_config))
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "TF_CONFIG" in message
    assert "\n" not in message and len(message) < 600


def test_the_chief_may_be_called_master():
    spec = {"master": TWO["chief"], "worker": TWO["worker"]}
    for task in (("master", 0), ("worker", 1)):
        expected = config(TWO, *(("chief", 0) if task[0] == "master" else task))
        assert cluster.read(environ(config(spec, *task))) == cluster.read(environ(expected))
    assert cluster.read(environ(config({**TWO, "master": []}))).num_workers == 3


POOLS = '{{"cluster": {{"workerpool0": ["a:1"]}}, "task": {{"type": "workerpool{}", "index": 0}}}}'


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        (environ(config()), False),
        (environ(config({**TWO, "ps": ["p:1"]}, "ps")), False),
        (environ("{"), False),  # the strategy says what is wrong with it
        (environ(config(TWO, "evaluator")), True),
        ({"TF_CONFIG": '{"task": {"type": "evaluator", "index": 0}}'}, True),
        ({"CLUSTER_SPEC": POOLS.format(3)}, True),
        ({"CLUSTER_SPEC": POOLS.format(1)}, False),
    ],
)
def test_which_process_is_the_evaluator(env, expected):
    assert cluster.is_evaluator(env) is expected


@pytest.mark.parametrize("job", ["evaluator", "ps"])
def test_an_evaluator_and_parameter_servers_take_no_part(job, capsys):
    spec = {**TWO, job: ["not even an address"]}
    read = cluster.read(environ(config(spec)))
    assert read._replace(has_ps=False) == cluster.read(environ(config()))
    assert read.has_ps == (job == "ps")
    assert not cluster.read(environ(config({**TWO, "ps": []}))).has_ps
    for jobs in (spec, TWO):  # Vertex AI names an evaluator as a task alone
        env = environ(config(jobs, job))
        with pytest.raises(cluster.ClusterError, match=f"job '{job}' in TF_CONFIG, and noth"):
            cluster.read(env)
        with pytest.raises(SystemExit) as leaving:
            cluster.taking_part(functools.partial(cluster.read, env))
        assert leaving.value.code == 0
        assert f"tfpara: this process has the job '{job}'" in capsys.readouterr().err


def test_workers_by_index_are_a_list():
    spec = {"worker": {"1": "b:1", "0": "a:1", "2": "c:1"}}
    assert cluster.read(environ(config(spec, index=2))).addresses == ("a:1", "b:1", "c:1")


def test_a_cluster_spec_of_vertex_ai():
    pools = {"workerpool0": TWO["chief"], "workerpool1": TWO["worker"], "workerpool3": ["e:1"]}
    spec = {**config(pools, "workerpool1", 1), "environment": "cloud", "open_ports": "1-2"}
    env = {"CLUSTER_SPEC": json.dumps(spec)}
    assert cluster.read(env) == cluster.read(environ(config(TWO, "worker", 1)))
    assert cluster.read(env | environ(config(TWO, "chief", 0))).rank == 0  # TF_CONFIG wins
    for other in ("", "{", "[]", '{"cluster": {"a": ["b:1"]}, "task": {"type": "a"}}'):
        assert cluster.read({"CLUSTER_SPEC": other}) == cluster.ALONE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ADDRESS = JSON | st.builds("{}:{}".format, st.text(max_size=5), st.integers(-1, 70000))
JOB = st.sampled_from(["chief", "worker", "ps", "evaluator"]) | st.text(max_size=5)
NEARLY_RIGHT = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(JOB, JSON | st.lists(ADDRESS, max_size=3), max_size=3),
        "task": JSON | st.fixed_dictionaries({}, optional={"type": JOB | JSON, "index": JSON}),
    },
)


@given(st.text() | (JSON | NEARLY_RIGHT).map(json.dumps))
@example("1" * 5000)
@example('{"task": {"type": "worker", "index": 1e999}}')
@example('"\ud800"')
@example('{"cluster": {"\\r": {}}}')
def test_any_text_is_a_cluster_or_one_error(text):
    try:
        read = cluster.read({"TF_CONFIG": text})
    except cluster.ClusterError as error:
        assert str(error).isprintable()
    else:
        assert 0 <= read.rank < read.num_workers
        assert read.address == (read.addresses[read.rank] if read.addresses else "")


HOST = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True) | st.ip_addresses(v=4).filter(
    lambda ip: not ip.is_unspecified
).map(str)


@given(
    st.lists(st.builds("{}:{}".format, HOST, st.integers(1, 65535)), min_size=1, unique=True),
    st.booleans(),
    st.data(),
)
def test_every_cluster_survives_tf_config(addresses, has_chief_job, data):
    rank = data.draw(st.integers(0, len(addresses) - 1))
    task_type = "chief" if has_chief_job and rank == 0 else "worker"
    index = rank - (has_chief_job and task_type == "worker")
    made = cluster.Cluster(tuple(addresses), task_type, index, has_chief_job)
    assert made.rank == rank
    assert cluster.read({"TF_CONFIG": made.tf_config()}) == made


@pytest.mark.parametrize("names", cluster.RANK_VARIABLES)
def test_rank_variables_describe_a_cluster(names):
    for rank in range(3):
        read = cluster.read({names[0]: str(rank), names[1]: "3"})
        assert (read.num_workers, read.rank, read.is_chief) == (3, rank, rank == 0)
        assert (read.addresses, read.address, read.rank_variable) == ((), "", names[0])
        assert read.describe(rank) == ("chief" if rank == 0 else f"worker {rank}")
    assert cluster.read({names[0]: "0", names[1]: "1"}) == cluster.ALONE
    # horovodrun may itself use mpirun, and its variables come first.
    both = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", names[0]: "1", names[1]: "2"}
    assert cluster.read(both).rank_variable == "HOROVOD_RANK"


def test_rank_variables_and_tf_config_that_agree():
    env = environ(config(TWO, "worker", 1)) | {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "3"}
    read = cluster.read(env)
    assert (read.address, read.rank, read.num_workers) == ("node-3:4000", 2, 3)
    assert read.rank_variable == "HOROVOD_RANK"
    assert cluster.read({**env, "TF_CONFIG": "{}"}).addresses == ()


@pytest.mark.parametrize(("rank", "size"), [("1", "3"), ("2", "4"), ("0", "1")])
@pytest.mark.parametrize("names", cluster.RANK_VARIABLES)
def test_rank_variables_that_contradict_tf_config(names, rank, size):
    env = environ(config(TWO, "worker", 1)) | {names[0]: rank, names[1]: size}
    with pytest.raises(cluster.ClusterError) as error:
        cluster.read(env)
    for word in (
        f"{names[0]}={rank} of {size} processes contradicts TF_CONFIG",
        "worker 2 (node-3:4000), rank 2 of 3",
        "Unset TF_CONFIG for processes that horovodrun or mpirun start, "
        f"and {names[0]} and {names[1]} for others",
    ):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("rank", "size"),
    [("", "2"), ("0", ""), ("2", "2"), ("-1", "2"), ("x", "2"), ("0", "2.0"), ("0", "0")],
)
def test_bad_rank_variables(rank, size):
    with pytest.raises(cluster.ClusterError, match="HOROVOD_RANK='.*', HOROVOD_SIZE='.*': the fir"):
        cluster.read({"HOROVOD_RANK": rank, "HOROVOD_SIZE": size})


def test_unreachable_lists_peers_that_do_not_listen():
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # reserved, but nobody listens
        up, down = (f"127.0.0.1:{s.getsockname()[1]}" for s in (listening, bound))
        own = "127.0.0.1:1"
        made = cluster.Cluster((own, up, down, "name.invalid:4000"), "chief", 0, True)
        assert made.unreachable(10.0) == [
            f"worker 2 ({down})",
            "worker 3 (name.invalid:4000)",
        ]
        seen_by_2 = made._replace(task_type="worker", task_index=1)
        assert seen_by_2.unreachable(10.0) == [
            f"chief ({own})",
            "worker 3 (name.invalid:4000)",
        ]


def test_unreachable_waits_for_all_peers_at_once():
    """A listener with a full backlog answers nothing, as a host that drops packets does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        made = cluster.Cluster(("a:1", *[address] * 40), "chief", 0, True)
        start = time.monotonic()
        assert len(made.unreachable(0.5)) == 40
        assert time.monotonic() - start < 40 * 0.5  # one after the other would take this long
        for filler in fillers:
            filler.close()


@pytest.mark.quick
def test_tensorflow_is_not_imported():
    code = "import sys; from tfpara import cluster; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
