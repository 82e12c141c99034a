"""Which backend is taken, and what is said where it cannot be."""

import json
import sys
import types

import pytest
import tensorflow as tf

import tfpara
from tfpara import cluster
from tfpara.collectives import choice, horovod
from tfpara.sync.tensorflow.links import Links

TWO = {"cluster": {"worker": ["127.0.0.1:4000", "127.0.0.1:4001"]}}
WITH_TF_CONFIG = {"TF_CONFIG": json.dumps({**TWO, "task": {"type": "worker", "index": 1}})}
WITH_RANK = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
WITH_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


def choose(collectives, environ, monkeypatch, problem=None):
    monkeypatch.setattr(horovod, "problem", lambda: problem)
    monkeypatch.setattr(horovod, "mpi_problem", lambda: problem)
    return choice.choose(collectives, cluster.read(environ))


@pytest.mark.parametrize(
    ("environ", "chosen", "word"),
    [
        ({}, "tensorflow", "TF_CONFIG"),
        (WITH_TF_CONFIG, "tensorflow", "TF_CONFIG names the workers"),
        (WITH_RANK, "horovod", "HOROVOD_RANK is set, and TF_CONFIG is not"),
        (WITH_MPI, "horovod", "OMPI_COMM_WORLD_RANK is set"),
        (WITH_TF_CONFIG | WITH_RANK, "horovod", "HOROVOD_RANK is set"),
    ],
)
def test_auto(environ, chosen, word, monkeypatch):
    found, why = choose("auto", environ, monkeypatch)
    assert found == chosen
    assert word in why


def test_auto_without_horovod(monkeypatch):
    """TensorFlow where TF_CONFIG lets it; else the choice stays, and ends in the error."""
    missing = "Horovod is not installed"
    assert choose("auto", WITH_TF_CONFIG | WITH_RANK, monkeypatch, missing) == (
        "tensorflow",
        missing,
    )
    assert choose("auto", WITH_RANK, monkeypatch, missing)[0] == "horovod"
    assert choose("auto", WITH_MPI, monkeypatch, missing) == ("tensorflow", missing)


def test_other_engines_start_tensorflow(monkeypatch):
    for names in (("TFPARA_RANK", "TFPARA_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        environ = dict(zip(names, ("1", "2"), strict=True))
        assert choose("auto", environ, monkeypatch) == ("tensorflow", f"{names[0]} is set")
        assert choose("horovod", environ, monkeypatch)[0] == "horovod"
    asked = WITH_RANK | {"TFPARA_COORDINATOR": "node1:4000"}
    assert choose("tensorflow", asked, monkeypatch)[0] == "tensorflow"


@pytest.mark.parametrize("environ", [{}, WITH_TF_CONFIG, WITH_TF_CONFIG | WITH_RANK])
@pytest.mark.parametrize("collectives", ["tensorflow", "horovod"])
def test_what_is_asked_for_is_taken(collectives, environ, monkeypatch):
    assert choose(collectives, environ, monkeypatch)[0] == collectives


def test_tensorflow_without_addresses(monkeypatch):
    with pytest.raises(ValueError, match="needs TF_CONFIG.*HOROVOD_RANK=1 of 2.*'horovod'"):
        choose("tensorflow", WITH_RANK, monkeypatch)


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="collectives='mpi' is not one of auto, tensorflow, hor"):
        tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=1, collectives="mpi")


# -- Horovod that is missing or another's ----------------------------------------------------


def found_at(path, monkeypatch):
    spec = types.SimpleNamespace(submodule_search_locations=[str(path)] if path else None)
    monkeypatch.setattr(horovod.importlib.util, "find_spec", lambda _: path and spec)


COMMAND = rf"scripts/install_horovod.sh --venv={sys.prefix}"


def test_horovod_that_is_missing(monkeypatch):
    found_at(None, monkeypatch)
    with pytest.raises(ValueError, match="Horovod is not installed") as error:
        horovod.load()
    assert COMMAND in str(error.value)


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"tensorflow": "1.15.0"}, f"built for TensorFlow 1.15.0, and this is {'TensorFlow'}"),
        ({"pytorch": "2.0"}, "built for no TensorFlow"),
        (None, "built for no TensorFlow"),
    ],
)
def test_horovod_of_another_tensorflow(tmp_path, monkeypatch, record, word):
    if record:
        (tmp_path / "metadata.json").write_text(json.dumps(record))
    found_at(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=word) as error:
        horovod.load()
    assert COMMAND in str(error.value)


def test_horovod_that_does_not_load(tmp_path, monkeypatch):
    (tmp_path / "metadata.json").write_text(json.dumps({"tensorflow": tf.__version__}))
    found_at(tmp_path, monkeypatch)

    def broken(name):
        raise tf.errors.NotFoundError(None, None, "undefined symbol: _ZN10\nmore")

    monkeypatch.setattr(horovod.importlib, "import_module", broken)
    with pytest.raises(ValueError, match=r"does not load \(.*undefined symbol: _ZN10\)") as error:
        horovod.load()
    assert COMMAND in str(error.value)


# -- what Horovod cannot add -----------------------------------------------------------------


def test_dtypes_that_horovod_cannot_add(monkeypatch):
    loaded = types.SimpleNamespace(nccl_built=lambda: False, gloo_enabled=lambda: True)
    monkeypatch.setattr(horovod, "load", lambda: loaded)
    made = horovod.HorovodCollectives(2, 0, "CPU:0", 0.0)
    assert tf.float32 in made.summed and tf.bfloat16 not in made.summed
    for operation in (made.all_reduce, made.reduce_scatter):
        with pytest.raises(ValueError, match="cannot add up bfloat16 .'w'.*collectives='tensorfl"):
            operation([tf.zeros([2], tf.bfloat16)], "w")


SHARED, UNKNOWN = "workers 1 and 2 share a card", "CUDA does not tell"


@pytest.mark.parametrize(
    ("asked", "kind", "cards", "chosen", "why"),
    [
        ("AUTO", "CPU", [None, None], "RING", "no GPUs"),
        ("AUTO", "GPU", ["a", "b", "c"], "NCCL", "a GPU of its own"),
        ("AUTO", "GPU", ["a", "b", "b"], "RING", SHARED),
        ("AUTO", "GPU", ["a", None, "c"], "RING", UNKNOWN),
        ("AUTO", "GPU", [None, None], "RING", UNKNOWN),
        ("RING", "GPU", ["a", "b"], "RING", "asked for"),
        ("NCCL", "GPU", ["a", None, "b"], "NCCL", "asked for"),
        ("NCCL", "GPU", ["a", "b", "b"], None, "workers 1 and 2 have the same card"),
        ("NCCL", "CPU and GPU", [None, None], None, "the workers train on CPU and GPU devices"),
        ("NCCL", "CPU", [None, None], None, "connects GPUs, and the workers train on CPU devices"),
    ],
)
def test_nccl_is_taken_where_each_worker_has_a_card_of_its_own(asked, kind, cards, chosen, why):
    if chosen is None:
        with pytest.raises(ValueError, match=f"communication='NCCL' .*{why}"):
            choice.choose_communication(asked, kind, cards)
        return
    found, reason = choice.choose_communication(asked, kind, cards)
    assert found == chosen and why in reason
    if asked == "AUTO":
        assert choice.choose_communication(asked, kind, cards, members_change=True)[0] == "RING"


def test_a_strategy_connects_its_workers_by_what_is_chosen():
    made = []
    links = types.SimpleNamespace(
        way="a ring over gRPC",
        _settings=types.SimpleNamespace(communication="AUTO"),
        _worker=types.SimpleNamespace(
            changes=False, devices=["/job:worker/task:0/device:GPU:0"], kinds={"GPU"}
        ),
        _between=lambda group, device, communication: made.append((group, communication)),
    )
    Links.connect_by(links, ("a", "a"))
    assert made == []
    assert links.connected_by.endswith("a ring over gRPC: workers 0 and 1 share a card")
    Links.connect_by(links, ("a", "b"))
    assert made == [(0, "NCCL")]
    assert links.connected_by.endswith("by NCCL: each worker has a GPU of its own")
    links._worker.kinds = {"CPU", "GPU"}
    Links.connect_by(links, (None, None))
    assert len(made) == 1 and links.connected_by.endswith("are connected by a ring over gRPC")
