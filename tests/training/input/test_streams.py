"""A recurrent net on parallel streams of a real (small) corpus."""

import keras
import numpy as np
import pytest

from input import streams
from input.streams import StreamOptions
from models import presets
from tests.lib.small import strategy_of
from tests.lib.streams import SMALL, read, utterances


@pytest.mark.nightly
def test_streams_of_two_replicas_score_as_whole_utterances_do(tiny, tmp_path):
    """Trains under the strategy, then scores in pieces of 7 frames and in one piece each."""
    options = StreamOptions(**SMALL, stack=3)
    preset = presets.get("lstm-000")
    shape = {"input_dim": options.input_dim(120), "num_classes": tiny.num_classes}
    shape |= {"scale": 0.01, "layers": 1}
    strategy = strategy_of(sync_period=5)
    plan = streams.partition(tiny, "train", options, num_replicas=2)
    assert plan.steps(0) != plan.steps(1)
    with strategy.scope():
        model = preset.build(**shape, streams=4, seed=1)
        model.compile(
            keras.optimizers.SGD(0.3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[
                keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
                keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy"),
            ],
        )
    data = strategy.distribute_datasets_from_function(
        lambda _: streams.minibatches(tiny, "train", options, num_replicas=2, replica_ids=[0, 1])
    )
    model.fit(data, verbose=0)
    assert strategy.statistics().samples == 4 * plan.num_minibatches
    scores = model.evaluate(data, verbose=0, return_dict=True)
    model.save_weights(tmp_path / "model.weights.h5")
    whole = preset.build(**shape)
    whole.load_weights(tmp_path / "model.weights.h5")
    right = entropy = total = 0.0
    for frames, labels, weights in utterances(
        read(tiny, options={"streams": 1, "truncation": 7, "stack": 3})
    ):
        real = weights > 0
        logits = whole(frames[None, real])[0].numpy()
        right += (logits.argmax(-1) == labels[real]).sum()
        log_posteriors = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        entropy -= np.take_along_axis(log_posteriors, labels[real][:, None], 1).sum()
        total += real.sum()
    np.testing.assert_allclose(scores["accuracy"], right / total, rtol=1e-6)
    np.testing.assert_allclose(scores["entropy"], entropy / total, rtol=1e-5)
