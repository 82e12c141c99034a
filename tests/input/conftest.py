import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest

from input import corpus, index

sys.path.insert(0, str(Path(__file__).parent))  # for the module that the tests share

OPTIONS = corpus.Options(
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
def tiny_options():
    return OPTIONS


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """A corpus of 0.9 minutes in several shards. Tests must not change it."""
    directory = str(tmp_path_factory.mktemp("corpus") / "tiny")
    _, reused = corpus.prepare(directory, OPTIONS)
    assert not reused
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory):
    return index.read(tiny_directory)
