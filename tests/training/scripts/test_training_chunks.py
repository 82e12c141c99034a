"""The training data of the asynchronous mode, and models that train on them."""

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

import tfpara
from input import index
from scripts import async_flags, async_training, runs
from scripts.data import held_out, training_chunks

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture(name="corpus", scope="module")
def _corpus(corpus_directory):
    return index.read(corpus_directory)


def described(corpus, recurrent=False):
    shape = {"input_dim": 3 * 120, "num_classes": corpus.num_classes}
    frames = {
        "kind": "dnn",
        "context": 1,
        "arguments": {**shape, "layers": 1, "width": 16, "activation": "relu"},
    }
    of_streams = {
        "kind": "lstm",
        "context": 0,
        "stack": 3,
        "streams": 4,
        "truncation": 10,
        "label_delay": 2,
        "coefficients": None,
        "arguments": {**shape, "layers": 1, "width": 8},
    }
    return of_streams if recurrent else frames


@pytest.mark.nightly
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_model_trains_on_chunks_and_is_scored_by_the_chief(corpus, recurrent):
    description = described(corpus, recurrent=recurrent)
    chunks = training_chunks(corpus, description, minibatch={0: 64}, seed=3, seconds=20.0)
    assert isinstance(chunks, tfpara.Chunks) and chunks.count > 1
    strategy = tfpara.simulate_async(2, tfpara.ASGD(), sync_period=5)
    validation = held_out(corpus, "validation", strategy, description)
    assert validation.element_spec == chunks.element_spec
    with strategy.scope():
        streams = {"streams": 4} if recurrent else {}
        model = runs.build(description, seed=1, **streams)
        model.compile(keras.optimizers.SGD(0.1), **runs.metrics(description))
    before = model.evaluate(validation, verbose=0, return_dict=True)
    strategy.fit(model, chunks, verbose=0)
    if not recurrent:
        assert strategy.statistics().samples == corpus.num_frames("train")
    after = model.evaluate(validation, verbose=0, return_dict=True)
    assert after["loss"] < before["loss"]


def test_minibatches_that_change_size_are_not_counted(corpus):
    chunks = training_chunks(
        corpus, described(corpus), minibatch={0: 32, 0.5: 128}, seed=3, seconds=10.0
    )
    assert chunks.num_minibatches is None
    for chunk, size in ((0, 32), (chunks.count - 1, 128)):
        arguments = tf.nest.map_structure(tf.convert_to_tensor, chunks.arguments(0, chunk))
        _, labels = next(iter(chunks.dataset(0, chunk, *arguments)))
        assert np.shape(labels) == (size,)


def chunked(corpus, workers, recurrent=False, **chosen):
    """The data, which `scripts.train` makes of the flags."""
    with flagsaver.flagsaver(**chosen):
        return async_training.ChunkedData(
            corpus,
            types.SimpleNamespace(num_workers=workers),
            described(corpus, recurrent=recurrent),
            seed=3,
            shuffle_frames=1000,
        )


@pytest.mark.parametrize(
    ("minutes", "most", "workers", "count"),
    [
        (30.0, 1000, 2, 8),
        (60.0, 1000, 1, 4),
        (6000.0, 10**6, 4, 100),  # of an hour, as there always were
        (480.0, 10**6, 2, 8),
        (30.0, 3, 2, 3),
        (0.07 * 8, 1000, 2, 8),
    ],
)
def test_every_worker_gets_four_chunks_of_at_most_an_hour(minutes, most, workers, count):
    length = async_flags.chunk_minutes(minutes, most, workers)
    assert length <= 60
    assert np.ceil(minutes / length) == count
    with flagsaver.flagsaver(chunk_minutes=length):  # as a run that is resumed may ask for it
        assert async_flags.chunk_minutes(minutes, most, 1) == length


def test_a_corpus_of_less_than_an_hour_gives_every_worker_work(corpus, capsys):
    data = chunked(corpus, 2, minibatch="16", sync_period="4")
    assert data.chunks.count == min(8, len(corpus.split("train")))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("recurrent", "period"), [*itertools.product((False, True), (1, 4, 7)), (False, 40)]
)
def test_a_push_fits_into_the_chunks_where_their_length_is_not_given(corpus, recurrent, period):
    data = chunked(corpus, 3, recurrent, minibatch="16", sync_period=str(period))
    count = data.chunks.count
    one = {"sync_period": "1", "chunk_minutes": 60.0}
    whole = chunked(corpus, 1, recurrent, minibatch="16", **one)
    assert whole.chunks.count == 1
    assert count == 1 or data.chunks.num_minibatches // count >= period
    assert recurrent or count == min(12, len(corpus.split("train"))) or period > 4


def test_workers_without_a_chunk_are_told_of(corpus, capsys):
    chunked(corpus, 3, sync_period="1", chunk_minutes=60.0)
    assert capsys.readouterr().out == (
        "An epoch has 1 chunk for 3 workers, so that 2 of them will be idle. Lower "
        "--chunk_minutes, or start fewer workers.\n"
    )
    chunked(corpus, 2, minibatch="16", sync_period=str(corpus.num_frames("train") // 16))
    assert "Lower --sync_period, or start fewer workers." in capsys.readouterr().out
    chunked(corpus, 99, recurrent=True, sync_period="1", model="lstm-000")
    assert "will be idle. Lower --streams, or start fewer workers." in capsys.readouterr().out
    chunked(corpus, 99, minibatch="1", sync_period="1")
    assert "Train on more utterances, or start fewer workers." in capsys.readouterr().out


def test_where_minibatches_have_several_sizes_any_period_is_taken(corpus):
    data = chunked(corpus, 2, minibatch="16,0.5:32", sync_period="20", chunk_minutes=60.0)
    assert data.chunks.count == 1 and data.num_steps is None


@pytest.mark.parametrize("chosen", [{}, {"chunk_minutes": 0.1}])
def test_a_push_that_is_longer_than_a_chunk_is_refused(corpus, chosen):
    with pytest.raises(ValueError, match="--sync_period=1000000 exceeds the .* Lower --sync_per"):
        chunked(corpus, 2, minibatch="16", sync_period="1000000", **chosen)


def test_chunks_shorter_than_an_utterance_are_refused(corpus):
    with pytest.raises(ValueError, match="which are not cut. Raise --chunk_minutes"):
        chunked(corpus, 2, chunk_minutes=1e-3)
