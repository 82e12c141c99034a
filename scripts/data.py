"""Minibatches of a corpus for `fit` and `evaluate`, with a strategy or (None) without."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from input import index, pipeline


def training_epoch(corpus: index.CorpusIndex, strategy: Any, epoch: int, **plan: int) -> Any:
    """The training split in the order of one epoch; `plan` as `pipeline.minibatches` takes it."""
    return _distributed(corpus, "train", strategy, epoch=epoch, **plan)


def held_out(
    corpus: index.CorpusIndex, split: str, strategy: Any, minibatch: int, context: int
) -> Any:
    """A split in its own order, shared by the strategy's replicas; none is left without frames."""
    replicas = strategy.num_replicas if strategy else 1
    minibatch = max(1, min(minibatch, corpus.num_frames(split) // replicas))
    plan = {"minibatch": minibatch, "context": context, "shuffle": False}
    return _distributed(corpus, split, strategy, sync_period=1, epoch=0, seed=0, **plan)


def _distributed(corpus: index.CorpusIndex, split: str, strategy: Any, **plan: int) -> Any:
    def local(_: Any = None) -> tf.data.Dataset:
        return pipeline.minibatches(
            corpus,
            split,
            num_replicas=strategy.num_replicas if strategy else 1,
            replica_ids=strategy.local_replica_ids if strategy else [0],
            **plan,
        )

    return strategy.distribute_datasets_from_function(local) if strategy else local()
