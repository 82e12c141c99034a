"""The folder of checkpoints with damage, links, FIFOs and hostile files in it."""

import json
import os

import pytest
import tensorflow as tf

from tests.lib import hostile, mutants
from tfpara.checkpoint import manifest as manifests
from tfpara.checkpoint.local_store import LocalStore
from tfpara.checkpoint.store import CheckpointError

CONTENT = {
    "bucket_sizes": [108],
    "position": {"epoch": 1, "finished": False, "minibatches": 8, "steps": 4},
    "replicas": 2,
    "run": {"rule": "BSP()", "sync_period": 2, "rate": 0.1},
    "states": {"history": {"epochs": [{"loss": 0.1}, {"loss": float("nan")}]}},
    "versions": {"tfpara version": "0.2.0"},
    "workers": 1,
}


@pytest.fixture
def store(tmp_path):
    """A folder with one whole checkpoint."""
    made = LocalStore(tmp_path, 3)
    made.lock()
    made.begin(1)
    files = made.write_part(1, 0, {"x": tf.constant(1.0)})
    made.commit(1, {**CONTENT, "files": files})
    yield made
    made.release()


def same(one, other):
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def test_no_damage_of_a_manifest_is_believed(store):
    """A manifest is read as it was written, or refused by the name of its file."""
    path = store.path(1) / "manifest.json"
    whole = path.read_bytes()
    written = store.read_manifest(1)
    assert same({k: written[k] for k in CONTENT}, CONTENT)
    refused = 0
    cases = [*mutants.of_bytes(whole, 1, mutants.count(400))]
    cases += map(mutants.text, mutants.of_json(json.loads(whole), 2, mutants.count(400)))
    for case in cases:
        path.write_bytes(case)
        try:
            with hostile.watched(len(case)):
                found = store.read_manifest(1)
            assert same(found, written), case[:2000]
        except CheckpointError as error:
            assert str(path) in str(error) and len(str(error)) < 1000
            refused += 1
    assert refused > 0.85 * len(cases)


def test_a_manifest_of_anything_is_refused_or_has_what_its_readers_take(store):
    path = store.path(1) / "manifest.json"
    content = json.loads(path.read_text())
    taken = 0
    for case in mutants.of_json(content, 3, mutants.count(400)):
        if isinstance(case, dict):
            case = json.loads(manifests.text(case))
        path.write_bytes(mutants.text(case))
        try:
            with hostile.watched(1000):
                found = store.read_manifest(1)
                store.check(1, found)
        except CheckpointError as error:
            assert str(store.path(1)) in str(error)
        else:
            # What was written, where it decides which files are read, and how many.
            assert (found["files"], found["workers"]) == (content["files"], content["workers"])
            assert type(found["position"]["epoch"]) is int and found["position"]["epoch"] >= 0
            assert isinstance(found["states"], dict) and isinstance(found["run"], dict)
            taken += 1
    assert 0 < taken < 0.85 * mutants.count(400)


@pytest.mark.parametrize("name", ["layers=[64,32]", "a\\b"])
def test_a_folder_that_tensorflow_takes_for_a_pattern_is_read(tmp_path, name):
    store = LocalStore(tmp_path / name, 1)
    store.lock()
    store.begin(1)
    files = store.write_part(1, 0, {"x": tf.constant(1.0)})
    store.commit(1, {**CONTENT, "files": files})
    (reader,) = store.readers(1, store.read_manifest(1))
    assert reader.get_tensor("x") == 1.0
    store.release()


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.index"])
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_fifo_or_a_device_in_place_of_a_file_is_refused(store, name, kind):
    path = store.path(1) / name
    path.unlink()
    os.mkfifo(path) if kind == "FIFO" else path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name} (cannot be (used|read) \(it is a FIFO|is)"):
        store.check(1, store.read_manifest(1))


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "FIFO"])
def test_a_lock_that_leads_to_another_file_does_not_empty_it(tmp_path, kind):
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    folder.mkdir()
    if kind == "symbolic link":
        (folder / "lock").symlink_to(precious)
    elif kind == "hard link":
        (folder / "lock").hardlink_to(precious)
    else:
        os.mkfifo(folder / "lock")
    with pytest.raises(CheckpointError, match=r"lock.*(symbolic link|is not the lock|FIFO)"):
        LocalStore(folder, 1).lock()
    assert precious.read_text() == "precious"
    (folder / "lock").unlink()
    store = LocalStore(folder, 1)
    store.lock()
    store.release()


@pytest.mark.quick
def test_a_forked_process_that_lives_longer_does_not_hold_the_lock(tmp_path):
    store = LocalStore(tmp_path, 1)
    store.lock()
    reader, writer = os.pipe()
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.write(tells, b"x")
        os.read(reader, 1)  # until the other end is closed
        os._exit(0)
    try:
        os.read(told, 1)  # until the child runs, which closes its copy first of all
        with (
            open(tmp_path / "lock", "rb+") as lock,
            pytest.raises(CheckpointError, match="in use"),
        ):
            LocalStore(tmp_path, 1)._hold(lock.fileno())
        os.close(store._lock)  # as the end of this process does, by SIGKILL too
        store._lock = None
        other = LocalStore(tmp_path, 1)
        other.lock()
        other.release()
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        for end in (reader, told, tells):
            os.close(end)


def test_links_that_look_as_if_left_by_a_kill_go_and_what_they_lead_to_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".partial-00000001-0").symlink_to(tmp_path / "mine")
    (folder / "checkpoint-00000002").symlink_to(tmp_path / "mine")
    store = LocalStore(folder, 1)
    store.lock()
    store.remove(2)
    store.release()
    assert sorted(os.listdir(folder)) == ["lock"]
    assert (tmp_path / "mine" / "precious").exists()
