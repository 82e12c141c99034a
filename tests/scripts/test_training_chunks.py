"""The training data of the asynchronous mode, and models that train on them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpara
from input import index
from scripts import runs
from scripts.data import held_out, training_chunks


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
