"""Checkpoints at URLs: a server of S3's protocol, and fsspec's own store in memory."""

import importlib
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf

from tests.lib.s3_server import DENIED, SLOW_DOWN
from tfpara import remote_files
from tfpara.checkpoint import lease
from tfpara.checkpoint.base import store_at
from tfpara.checkpoint.store import CheckpointError
from tfpara.remote_files import RefusedError, RemoteFolder

CONTENT = {
    "position": {"epoch": 1, "finished": False, "within": False},
    **{"run": {}, "states": {}, "versions": {}, "workers": 1},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Leases and waits that are short, and no lease that is renewed after the test."""
    taken = []
    take = lease.Lease.take
    monkeypatch.setattr(lease.Lease, "take", lambda self: (taken.append(self), take(self)))
    monkeypatch.setattr(lease, "SECONDS", 0.6)
    monkeypatch.setattr(lease, "_LOOK", 0.02)
    monkeypatch.setattr(lease, "_SETTLE", 0.1037)  # nothing else sleeps for so long
    monkeypatch.setattr(remote_files, "_WAITS", (0.01, 0.01, 0.01))
    yield
    for each in taken:
        each._ended.set()


@pytest.fixture(params=["s3", "memory"])
def url(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/some/run"
    return f"memory://{tmp_path.name}/run"


def store_of(url, mark, keep=2):
    store = store_at(url, keep)
    store.mark = mark
    return store


def save(store, number, value=None):
    store.begin(number)
    files = store.write_part(number, 0, {"x": tf.constant(value or float(number))})
    store.commit(number, {**CONTENT, "files": files})


def value_in(store, number):
    manifest = store.read_manifest(number)
    store.check(number, manifest)
    (reader,) = store.readers(number, manifest)
    value = float(reader.get_tensor("x"))
    store.drop_copies()
    return value


def stand_still(store):
    """Does what a process that is stopped or killed does: renews no lease."""
    store._lease._ended.set()
    for thread in threading.enumerate():
        if thread.name == lease.THREAD:
            thread.join()
    store._lease._ended = threading.Event()  # a renewal of its own would still be made


def test_the_newest_stay_and_nothing_is_left_beside_them(url):
    store = store_of(url, "aa")
    store.lock()
    for number in range(1, 5):
        save(store, number)
    assert store.numbers() == [4, 3]
    assert [value_in(store, number) for number in (4, 3)] == [4.0, 3.0]
    store.release()
    there = RemoteFolder(url).sizes()
    files = ("manifest.json", "aa/part-00000.data-00000-of-00001", "aa/part-00000.index")
    assert set(there) == {f"checkpoint-0000000{n}/{file}" for n in (3, 4) for file in files}
    assert not list(Path(tempfile.gettempdir()).glob(f"{remote_files._TEMPORARY}*"))


def test_a_checkpoint_may_be_copied_to_a_local_directory_and_back(url, tmp_path):
    store = store_of(url, "aa")
    store.lock()
    save(store, 1)
    store.release()
    folder = RemoteFolder(url)
    for name in folder.sizes():
        folder.download(name, tmp_path / name)
    assert value_in(store_at(tmp_path, 2), 1) == 1.0
    other = RemoteFolder(f"{url}-copy")
    for path in tmp_path.rglob("*.*"):
        other.upload(path, path.relative_to(tmp_path).as_posix())
    assert value_in(store_at(f"{url}-copy", 2), 1) == 1.0


def test_what_a_killed_run_has_begun_goes_and_its_lease_is_over_in_time(url, capsys):
    dead = store_of(url, "aa")
    dead.lock()
    save(dead, 1)
    dead.begin(2)
    dead.write_part(2, 0, {"x": tf.constant(2.0)})
    stand_still(dead)
    store = store_of(url, "bb")
    since = time.monotonic()
    forget_locks()
    store.lock()
    assert 0.6 < time.monotonic() - since < 6
    assert "waits for at most 1 s to see whether that run still uses it" in capsys.readouterr().err
    assert store.numbers() == [1] and value_in(store, 1) == 1.0
    assert not [
        name for name in RemoteFolder(url).sizes() if name.startswith("checkpoint-00000002")
    ]
    store.release()


def forget_locks():
    """Has the next store be as in another process."""
    from tfpara.checkpoint import store

    store._LOCKS.clear()


def test_a_second_run_is_refused_while_the_first_renews_its_lease(url):
    first = store_of(url, "aa")
    first.lock()
    time.sleep(1.0)  # longer than the lease without renewals
    forget_locks()
    with pytest.raises(CheckpointError, match=r"in use by another run \(process \d+ on .*\)"):
        store_of(url, "bb").lock()
    save(first, 1)
    first.release()
    second = store_of(url, "bb")
    second.lock()
    second.release()


def test_another_worker_of_the_same_run_takes_the_lease_over_at_once(url):
    chief = store_of(url, "aa")
    chief.lock()
    forget_locks()
    since = time.monotonic()
    heir = store_of(url, "aa")
    heir.lock()
    assert time.monotonic() - since < 0.6 + 1.0  # of several requests and a look at the end
    save(heir, 1)
    with pytest.raises(CheckpointError, match="in use by another run"):
        save(chief, 2)
    heir.release()


def test_a_lease_that_is_renewed_as_it_is_taken_over_is_taken_again(bucket):
    folder = RemoteFolder(f"{bucket}/run")
    lost, heir = lease.Lease(folder, "aa"), lease.Lease(RemoteFolder(folder.url), "aa")
    folder.create(lease.LOCK, lost._text())
    create, read = heir._folder.create, heir._read
    created = []

    def create_before_the_other_writes(name, content):
        created.append(create(name, content))
        if created == [False, True]:
            folder.write(lease.LOCK, lost._text())
        return created[-1]

    heir._folder.create = create_before_the_other_writes
    heir.take()
    assert created == [False, True, False] and read()["token"] == heir._token
    heir.give_back()


def test_a_run_that_stood_still_cannot_damage_what_the_next_one_wrote(url):
    former = store_of(url, "aa")
    former.lock()
    former.begin(1)
    files = former.write_part(1, 0, {"x": tf.constant(7.0)})
    stand_still(former)
    forget_locks()
    store = store_of(url, "bb")
    store.lock()
    save(store, 1)
    former.write_part(1, 0, {"x": tf.constant(7.0)})  # a worker of it that did not know
    with pytest.raises(CheckpointError, match="in use by another run"):
        former.commit(1, {**CONTENT, "files": files})
    former._lease.renew = lambda: None  # as if it had looked a moment before
    with pytest.raises(CheckpointError, match="was written by another run meanwhile"):
        former.commit(1, {**CONTENT, "files": files})
    former.abandon(1)
    former.release()
    assert value_in(store, 1) == 1.0
    save(store, 2)  # it still has its lease
    store.release()


def test_a_run_that_stood_still_leaves_the_parts_of_the_next_one_alone(url):
    former = locked(url, "aa")
    stand_still(former)
    forget_locks()
    store = locked(url, "bb")
    store.begin(1)
    files = store.write_part(1, 0, {"x": tf.constant(1.0)})
    former.begin(1)  # it wakes up where its own first checkpoint begins
    former.abandon(1)
    store.commit(1, {**CONTENT, "files": files})
    assert value_in(store, 1) == 1.0
    store.release()


def test_who_gets_the_lease_only_with_parts_written_keeps_them(url):
    """As a chief of an elastic run that could not lock the directory before."""
    store = store_of(url, "aa")
    save(store, 1)
    assert value_in(store, 1) == 1.0
    store.release()
    assert "lock" not in RemoteFolder(url).sizes()


def test_a_lock_that_is_gone_is_not_that_of_an_unknown_run(url):
    """As where the next run has come and ended while this one stood still."""
    store = locked(url, "aa")
    RemoteFolder(url).remove(["lock"])
    with pytest.raises(CheckpointError, match="run/lock, by which this run holds .* is gone: ano"):
        save(store, 1)
    store.release()
    assert store.numbers() == []


def test_two_that_wait_for_a_lease_do_not_both_get_it(bucket, monkeypatch):
    """The second removes the lease of the first, having seen the old one just before."""
    url = f"{bucket}/run"
    stand_still(locked(url, "aa"))
    second = lease.Lease(RemoteFolder(url), "cc")
    old = second._read()
    forget_locks()
    original = time.sleep

    def meanwhile(seconds):
        if seconds == lease._SETTLE:
            monkeypatch.setattr(time, "sleep", original)
            monkeypatch.setattr(second, "_read", iter([old, old, old]).__next__)
            monkeypatch.setattr(second, "_limit", lambda lease: -1.0)
            assert second._remove_stale()
            monkeypatch.undo()
            assert second._folder.create(lease.LOCK, second._text())
        original(seconds)

    monkeypatch.setattr(time, "sleep", meanwhile)
    with pytest.raises(CheckpointError, match="in use by another run"):
        locked(url, "bb")


def locked(url, mark):
    store = store_of(url, mark)
    store.lock()
    return store


def test_a_store_that_ignores_the_condition_is_noticed(bucket, monkeypatch):
    """Where `create` writes over another's lease, who was overwritten sees it a moment later."""
    folder = RemoteFolder(f"{bucket}/run")
    mine, theirs = lease.Lease(folder, "aa"), lease.Lease(folder, "bb")
    monkeypatch.setattr(
        RemoteFolder, "create", lambda self, name, content: self.write(name, content) or True
    )
    original, slept = time.sleep, []

    def sleep(seconds):  # of other threads, too
        if seconds == lease._SETTLE:
            slept.append(seconds)
            folder.write(lease.LOCK, theirs._text())
        original(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(CheckpointError, match="in use by another run"):
        mine.take()
    assert slept == [lease._SETTLE]


def test_an_error_that_passes_is_tried_again(bucket, s3_server):
    store = locked(f"{bucket}/run", "aa")
    s3_server.refuse = lambda method, path: SLOW_DOWN if s3_server.refused < 4 else None
    save(store, 1)
    assert s3_server.refused == 4
    assert value_in(store, 1) == 1.0
    store.release()


@pytest.mark.parametrize("reads", ["manifest", "part"])
def test_a_store_that_does_not_answer_is_no_damage(bucket, s3_server, reads):
    store = locked(f"{bucket}/run", "aa")
    save(store, 1)
    manifest = store.read_manifest(1)
    s3_server.refuse = lambda method, path: DENIED if method in ("GET", "HEAD") else None
    with pytest.raises(RefusedError, match="must be allowed to list, read, write and delete"):
        store.read_manifest(1) if reads == "manifest" else store.check(1, manifest)
    s3_server.calm()
    store.release()


@pytest.mark.parametrize("damage", ["other bytes", "longer", "gone", "no manifest"])
def test_damage_is_found(url, damage):
    store = locked(url, "aa")
    save(store, 1)
    folder, part = RemoteFolder(url), "checkpoint-00000001/aa/part-00000.data-00000-of-00001"
    manifest = store.read_manifest(1)
    if damage == "no manifest":
        folder.write("checkpoint-00000001/manifest.json", b"{}")
        with pytest.raises(CheckpointError, match=r"001/manifest.json cannot be used"):
            store.read_manifest(1)
    elif damage == "gone":
        folder.remove([part])
    else:
        folder.write(part, b"1234" if damage == "other bytes" else b"12345")
    if damage != "no manifest":
        with pytest.raises(CheckpointError, match=rf"{part} (is damaged|cannot be read)"):
            store.check(1, manifest)
    store.drop_copies()
    store.release()


def test_parts_that_the_chief_does_not_see_are_no_checkpoint(url):
    store, elsewhere = locked(url, "aa"), store_of(f"{url}-elsewhere", "aa")
    store.begin(1)
    files = elsewhere.write_part(1, 0, {"x": tf.constant(1.0)})
    with pytest.raises(CheckpointError, match="must be one directory that all workers share"):
        store.commit(1, {**CONTENT, "files": files})
    assert store.numbers() == []
    store.release()


def test_a_lock_that_is_something_else_stays(url):
    folder = RemoteFolder(url)
    folder.write("lock", b"precious")
    with pytest.raises(
        CheckpointError, match="is not the lock of a run: it begins with b'precious'"
    ):
        locked(url, "aa")
    assert folder.read("lock") == b"precious"


def test_where_the_store_refuses_one_sentence_says_so(bucket, s3_server, monkeypatch):
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises(
        CheckpointError, match=r"s3://no-such-one/run cannot be written to .*make the bucket first"
    ):
        locked("s3://no-such-one/run", "aa")
    s3_server.refuse = lambda method, path: DENIED
    with pytest.raises(CheckpointError, match=r"Access Denied: the account must be allowed to"):
        locked(f"{bucket}/run", "aa")
    s3_server.refuse = lambda method, path: SLOW_DOWN
    with pytest.raises(CheckpointError, match=r"4 tries have failed: .*reduce your request rate"):
        locked(f"{bucket}/run", "aa")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"credentials: set the credentials for s3://"):
        locked(f"{bucket}/run", "aa")


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("nonesuch://x/y", ValueError, "no URL that fsspec knows: Protocol not known"),
        ("file:///tmp/x", ValueError, "give its path, without file://"),
        ("local:///tmp/x", ValueError, "give its path, without local://"),
        ("s3://", ValueError, "'s3://' must be a URL such as"),
        ("://x", ValueError, "'://x' must be a URL such as"),
        ("s3://bucket/run[1]", ValueError, "must have none of"),
        (
            Path("s3://bucket/run"),
            ValueError,
            "a Path drops one of its slashes",
        ),
    ],
)
def test_a_url_that_cannot_serve_is_refused_where_the_callback_is_made(url, error, words):
    import tfpara

    for kind in (tfpara.callbacks.Checkpoint, tfpara.AsyncCheckpoint):
        with pytest.raises(error, match=words):
            kind(url)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("fsspec", r"pip install 'tfpara\[remote\]'"), ("s3fs", "needs fsspec's package for s3://")],
)
def test_without_the_extra_the_error_says_what_to_install(monkeypatch, missing, words):
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=words):
        RemoteFolder("s3://bucket/run")


def test_copies_of_a_killed_process_go_and_those_of_a_living_one_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{remote_files._TEMPORARY}of-a-killed-one"
    left.mkdir()
    (left / "part").write_text("x")
    with remote_files.temporary_folder() as mine:
        assert not left.exists()
        with remote_files.temporary_folder():
            assert mine.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_record_grows_line_by_line(url):
    store = store_at(url, 1)
    store.append("generations.jsonl", "1")
    store.append("generations.jsonl", "2")
    assert RemoteFolder(url).read("generations.jsonl") == b"1\n2\n"
