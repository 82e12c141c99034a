"""A small synthetic corpus, and the content of corpora, for comparisons."""

import hashlib
from pathlib import Path

from input import corpus as _corpus
from input import index

PROSE = "The cat sat on the mat. A dog ran to the big house. Nobody knows why they did it."
SMALL = _corpus.Options(
    train_minutes=0.1,
    validation_minutes=0.03,
    test_minutes=0.03,
    train_speakers=2,
    validation_speakers=1,
    test_speakers=1,
)


def content(corpus):
    """Returns features, labels and split of every utterance of a corpus."""
    found = {}
    for name, split in corpus.splits.items():
        with index.open_shards(split) as files:
            for number, utterance in enumerate(split.id):
                found[utterance] = (*index.read_utterance(corpus, split, files, number), name)
    return found


def digest(directory):
    """One hash of every name and byte in a directory."""
    total = hashlib.sha256()
    for path in sorted(Path(directory).iterdir()):
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()
