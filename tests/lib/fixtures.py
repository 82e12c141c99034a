"""Fixtures: runs that nothing interrupts, tiny corpora, and functions that run the programs.

What imports TensorFlow is imported by the fixtures that need it, since conftest.py imports this
file also in the process that only hands tests out.
"""

import dataclasses
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib import warm

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Ended:
    """A program that has ended."""

    returncode: int
    out: str
    err: str


@pytest.fixture(scope="session")
def corpus_directory(tmp_path_factory):
    from input import corpus

    directory = str(tmp_path_factory.mktemp("corpus") / "tiny")
    options = corpus.Options(
        train_minutes=0.5,
        validation_minutes=0.1,
        test_minutes=0.1,
        train_speakers=3,
        validation_speakers=1,
        test_speakers=1,
        seed=41,
    )
    # The default text is Python's documentation, which differs between versions of Python.
    corpus.prepare(directory, options, (ROOT / "tests/data/sentences.txt").read_text())
    return directory


@pytest.fixture(scope="session")
def run():
    """A function: run("train", "--flag", ..., workers=2) runs scripts.train with the launcher.

    With one worker it runs without the launcher. launcher: more flags of the launcher.
    """

    def call(program, *flags, workers=1, launcher=()):
        command = ["-m", f"scripts.{program}", *map(str, flags)]
        if workers > 1:
            launch = ["-m", "tfpara.launch", "-n", str(workers), "--threads", "1"]
            command = [*launch, *launcher, "--", sys.executable, *command]
        environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        environ |= dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
        environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # as the programs set it themselves
        options = {"cwd": ROOT, "env": environ, "text": True}
        options |= dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        if workers > 1:  # the launcher imports no TensorFlow
            process = subprocess.Popen([sys.executable, *command], **options)
        else:
            process = warm.Popen(command, **options)
        with process:
            try:
                out, err = process.communicate(timeout=500)  # less than the timeout of a test
            finally:
                process.kill()
        return Ended(process.returncode, out, err)

    return call


@pytest.fixture(scope="session")
def run_well(run):
    """A function like `run`, except that it fails unless the program succeeds."""

    def call(*arguments, **more):
        ended = run(*arguments, **more)
        assert ended.returncode == 0, ended.out + ended.err
        return ended

    return call


@pytest.fixture(scope="session")
def s3_server():
    """A server of S3's protocol in this process."""
    from tests.lib import s3_server

    server = s3_server.Server()
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """The URL of an empty bucket of `s3_server`; processes that the test starts can use it, too."""
    import boto3
    import s3fs

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{secrets.token_hex(4)}"
    boto3.client("s3").create_bucket(Bucket=name)
    yield f"s3://{name}"
    s3_server.calm()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """A function of the number of workers: what each ends with in a run without interruption."""
    from tests.lib import resumable_runs

    ends = {}

    def of(workers):
        if workers not in ends:
            run = resumable_runs.Run(tmp_path_factory.mktemp("whole") / "run", workers)
            ends[workers] = run.to_the_end()
        return ends[workers]

    return of


@pytest.fixture(scope="session")
def tiny_options():
    from input import corpus

    return corpus.Options(
        train_minutes=0.6,
        validation_minutes=0.15,
        test_minutes=0.3,
        train_speakers=5,
        validation_speakers=2,
        test_speakers=3,
        shard_megabytes=0.7,
        seed=3,
    )


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory, tiny_options):
    """A corpus of 0.9 minutes in several shards. Tests must not change it."""
    from input import corpus

    directory = str(tmp_path_factory.mktemp("corpus") / "tiny")
    _, reused = corpus.prepare(directory, tiny_options)
    assert not reused
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory):
    from input import index

    return index.read(tiny_directory)


@pytest.fixture(scope="session")
def may_make_links():
    """Skips tests where this process may not make links; to find out takes many commands."""
    from scripts.benchmarks import links

    problem = links.problem()
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(scope="session")
def browser():
    from scripts.docs import check

    program = check.browser()
    if program is None:
        pytest.skip("There is no Chromium; on Debian apt-get install chromium gives one.")
    return program
