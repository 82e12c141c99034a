"""Damaged and misfitting corpora: one message that says where."""

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from input import index, pipeline, records
from input.records import CorpusError


@pytest.fixture
def copy(tiny_directory, tmp_path):
    """A corpus that a test may damage."""
    return Path(shutil.copytree(tiny_directory, tmp_path / "copy"))


def edit_index(directory, change):
    path = directory / "index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def shard(directory, number=0):
    return sorted(directory.glob("train-*.tfrecord"))[number]


def rewrite_first_utterance(directory, change):
    """Puts a changed record in place of the first of the first shard, with a right checksum."""
    split = index.read(directory).split("train")
    path, old_length = shard(directory), int(split.length[0])
    whole = path.read_bytes()
    example = tf.train.Example.FromString(whole[12 : old_length - 4])
    change(example.features.feature)
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(example.SerializeToString(deterministic=True))
    record = path.read_bytes()
    path.write_bytes(record + whole[old_length:])

    def update(content):
        columns = content["splits"]["train"]["utterances"]
        columns["crc32"][0] = zlib.crc32(record)
        columns["length"][0] = len(record)
        content["splits"]["train"]["shards"][0]["bytes"] += len(record) - old_length
        in_shard = columns["shard"].count(0)
        for number in range(1, in_shard):
            columns["offset"][number] += len(record) - old_length

    edit_index(directory, update)


def test_reads_what_was_written(tiny):
    assert tiny.feature_dim == 120
    assert tiny.mean.shape == tiny.stddev.shape == (120,)
    assert tiny.num_classes == len(tiny.class_names) >= 120
    assert len(tiny.split("train").shards) > 2
    assert tiny.num_frames("train") == tiny.split("train").frames.sum() > 3000
    index.verify(tiny)


def test_shards_are_ordinary_tfrecord_files(tiny):
    split = tiny.split("validation")
    examples = [
        tf.train.Example.FromString(data.numpy()).features.feature
        for data in tf.data.TFRecordDataset(list(split.shards))
    ]
    names = [example["id"].bytes_list.value[0].decode() for example in examples]
    assert names == list(split.id)


def test_missing_directory_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist.*prepare_speech --out="):
        index.read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no index.json.*prepare_speech --out="):
        index.read(tmp_path)


def test_index_that_is_not_json(copy):
    text = (copy / "index.json").read_text()
    (copy / "index.json").write_text(text[: len(text) // 2])
    with pytest.raises(CorpusError, match=r"index.json is not JSON \(line 1"):
        index.read(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=99), "version 99; this program reads version 1"),
        (lambda content: content.pop("mean"), r"not a corpus index \(KeyError\('mean'\)"),
        (lambda content: content["mean"].pop(), "mean must be 120 finite numbers"),
        (lambda content: content.update(feature_dim=80), "mean must be 80 finite numbers"),
        (lambda content: content["stddev"].__setitem__(3, 0.0), "stddev must be positive"),
        (lambda content: content["splits"].pop("test"), "KeyError"),
        (lambda content: content["splits"]["test"]["utterances"]["id"].pop(), "of one length"),
    ],
)
def test_index_that_is_wrong(copy, change, message):
    edit_index(copy, change)
    with pytest.raises(CorpusError, match=message):
        index.read(copy)


def test_index_that_is_another_kind_of_json(copy):
    (copy / "index.json").write_text("[1, 2]")
    with pytest.raises(CorpusError, match="version None"):
        index.read(copy)


def test_missing_shard(copy):
    shard(copy, 1).unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00001-of-.*does not exist"):
        index.read(copy)


def test_truncated_shard_names_file_utterance_and_byte(copy):
    split = index.read(copy).split("train")
    last = int(np.flatnonzero(split.shard == 1)[-1])
    cut = int(split.offset[last]) + 100
    os.truncate(shard(copy, 1), cut)
    with pytest.raises(CorpusError, match=rf"train-00001-of-.*cut at {split.id[last]}, byte {cut}"):
        index.read(copy)


def test_shard_cut_between_two_records(copy):
    split = index.read(copy).split("train")
    last = int(np.flatnonzero(split.shard == 0)[-1])
    os.truncate(shard(copy), int(split.offset[last]))
    with pytest.raises(CorpusError, match=rf"cut at {split.id[last]}"):
        index.read(copy)


def test_empty_shard(copy):
    os.truncate(shard(copy), 0)
    with pytest.raises(CorpusError, match=r"train-00000-of-.*is empty where the index says"):
        index.read(copy)


def test_shard_that_has_grown(copy):
    shard(copy).write_bytes(shard(copy).read_bytes() + b"more")
    with pytest.raises(CorpusError, match=r"has \d+ bytes where the index says \d+\. Prepare"):
        index.read(copy)


def damage(directory, utterance):
    split = index.read(directory).split("train")
    place = split.place(utterance)
    content = bytearray(Path(place.path).read_bytes())
    content[place.offset + place.length // 2] ^= 1
    Path(place.path).write_bytes(content)
    return place


def test_flipped_bit_at_the_start_of_a_shard_is_found_on_opening(copy):
    place = damage(copy, 0)
    with pytest.raises(CorpusError, match=rf"utterance {place.id} at byte 0: .*damaged"):
        index.read(copy)


def test_flipped_bit_is_found_by_verify_and_when_read(copy):
    place = damage(copy, 1)
    corpus = index.read(copy)
    message = rf"{place.path}, utterance {place.id} at byte {place.offset}: the record is damaged"
    with pytest.raises(CorpusError, match=message):
        index.verify(corpus)
    dataset = pipeline.minibatches(
        corpus,
        "train",
        num_replicas=1,
        replica_ids=[0],
        minibatch=64,
        sync_period=1,
        epoch=0,
        seed=0,
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)


def narrow(feature):
    values = np.frombuffer(feature["features"].bytes_list.value[0], "<f4").reshape(-1, 120)
    feature["features"].bytes_list.value[0] = values[:, :80].tobytes()


def shorten_labels(feature):
    feature["labels"].bytes_list.value[0] = feature["labels"].bytes_list.value[0][:-4]


def wrong_class(feature):
    labels = np.frombuffer(feature["labels"].bytes_list.value[0], "<i4").copy()
    labels[7] = 9999
    feature["labels"].bytes_list.value[0] = labels.tobytes()


def not_a_number(feature):
    values = np.frombuffer(feature["features"].bytes_list.value[0], "<f4").copy()
    values[120 * 5 + 3] = np.nan
    feature["features"].bytes_list.value[0] = values.tobytes()


def rename(feature):
    feature["id"].bytes_list.value[0] = b"somebody-else"


def drop_labels(feature):
    del feature["labels"]


def odd_bytes(feature):
    feature["features"].bytes_list.value[0] += b"x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_labels, "not an example of id, labels"),
        (odd_bytes, "not an example of id, labels"),
        (narrow, "frames are 80 wide where the index says 120"),
        (shorten_labels, r"labels for \d+ frames where the index says \d+"),
        (wrong_class, r"label 9999 is not one of the \d+ classes"),
        (not_a_number, "NaN or Inf, first in frame 5"),
        (rename, "the record is that of utterance somebody-else"),
    ],
)
def test_utterance_that_does_not_fit(copy, tiny, change, message):
    rewrite_first_utterance(copy, change)
    place = tiny.split("train").place(0)
    where = rf"train-00000-of-\d+\.tfrecord, utterance {place.id} at byte 0: .*{message}"
    with pytest.raises(CorpusError, match=where):
        index.read(copy)


def test_file_that_shrinks_while_it_is_read(copy):
    corpus = index.read(copy)
    split = corpus.split("train")
    os.truncate(shard(copy), 50)
    with index.open_shards(split) as files, pytest.raises(CorpusError, match="ends after 50 of"):
        records.read(files[0], split.place(0), corpus.feature_dim)


def test_feature_dim_that_disagrees_with_the_records(copy):
    def change(content):
        content.update(feature_dim=40, mean=content["mean"][:40], stddev=content["stddev"][:40])

    edit_index(copy, change)
    with pytest.raises(CorpusError, match=r"utterance .* at byte 0: .*120 wide .* says 40"):
        index.read(copy)
