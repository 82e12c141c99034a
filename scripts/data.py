"""Minibatches of a corpus for `fit` and `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

import tfpara
from input import chunks, frame_chunks, index, pipeline, stream_chunks, streams
from input.stream_plan import StreamPlan
from scripts import common
from tfpara.callbacks import WarmStart
from tfpara.schedules import Piecewise


def stream_options(description: Mapping[str, Any]) -> streams.StreamOptions:
    """Returns the options of the streams for a recurrent model that model.json describes."""
    return streams.StreamOptions(
        streams=description["streams"],
        truncation=description["truncation"],
        context=description["context"],
        stack=description["stack"],
        label_delay=description["label_delay"],
        coefficients=description["coefficients"],
        normalisation=description.get("normalisation", "global"),
    )


def is_recurrent(description: Mapping[str, Any]) -> bool:
    """Returns whether a model that model.json describes takes streams of frames."""
    return description["kind"] != "dnn"


class TrainingData:
    """The training split; a call with an epoch returns this worker's minibatches of that epoch.

    It is the function for `strategy.datasets_by_epoch`. Checkpoints keep its state: the number of
    replicas, on which the position in an epoch may depend.

    Args:
        corpus: from `index.read`.
        strategy: strategy whose replicas share the data.
        description: description of the model, as in model.json.
        minibatch: frames of a minibatch, by the position, in epochs, from which they hold. The size
            changes only when all replicas have done the same number of minibatches. Recurrent
            models do not use it.
        sync_period: minibatches between two syncs.
        seed: decides, together with the epoch, the order of the data.
        shuffle_frames: number of frames that are shuffled together, rounded up to a multiple of all
            sizes.
        warm: the callback of the warm start, in whose epochs each replica reads all data.

    Raises:
        ValueError: there are too few frames or utterances for the replicas.
    """

    def __init__(
        self,
        corpus: index.CorpusIndex,
        strategy: Any,
        description: Mapping[str, Any],
        *,
        minibatch: Mapping[float, int],
        sync_period: int,
        seed: int,
        shuffle_frames: int,
        warm: WarmStart,
    ) -> None:
        self._corpus = corpus
        self.strategy = strategy
        self.description = description
        self._positions = dict(minibatch)
        self._sizes = Piecewise(minibatch)
        self._sizes_unit = math.lcm(*minibatch.values())
        self._changes_size = len(minibatch) > 1
        self._sync_period = sync_period
        self._seed = seed
        self._shuffle = math.ceil(shuffle_frames / self._sizes_unit) * self._sizes_unit
        self._warm = warm
        self._former_replicas = strategy.num_replicas
        self._recurrent = is_recurrent(description)
        self._check(max(minibatch.values()))

    @property
    def num_frames(self) -> int:
        """Number of frames of an epoch."""
        return self._corpus.num_frames("train")

    @property
    def num_steps(self) -> int | None:
        """Number of minibatches of a replica in an epoch; None if epochs differ much."""
        replicas = self.strategy.num_replicas
        if self._changes_size or self._warm.replicas(self.strategy, 0)[0] != replicas:
            return None
        # With streams, the number of steps depends a little on the order of the utterances. The
        # differences are small, so the number of one epoch is given for all epochs.
        if self._recurrent:
            return self._streams_plan().num_steps
        return math.ceil(math.ceil(self.num_frames / self._sizes_unit) / replicas)

    def about_sizes(self) -> str | None:
        """Returns a sentence on sizes of minibatches that never occur; None if all occur."""
        if self._recurrent or not self._changes_size:
            return None
        replicas = self.strategy.num_replicas
        epochs = {epoch for position in self._positions for epoch in (position, position + 1)}
        stretches = [part for epoch in epochs for part in self._stretches(int(epoch), replicas)]
        lost = sorted(set(self._positions.values()) - {part.size for part in stretches})
        if not lost:
            return None
        return (
            f"--minibatch: no minibatch has {' or '.join(map(str, lost))} frames. The size changes "
            f"at multiples of {self._sizes_unit * replicas} frames alone, and an epoch has "
            f"{self.num_frames}. Give later positions, or sizes that divide each other."
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"replicas": self.strategy.num_replicas}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._former_replicas = state["replicas"]

    def __call__(self, epoch: int, first: int) -> tf.data.Dataset:
        """Returns this worker's minibatches of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            first: number of minibatches, of all replicas together, that are already done. They are
                left out.
        """
        replicas, ids = self._warm.replicas(self.strategy, epoch)
        total = self.strategy.num_replicas
        is_warm = replicas != total
        if first:
            self._check_replicas(epoch, is_warm)
        if self._recurrent:
            dataset = streams.minibatches(
                self._corpus,
                "train",
                stream_options(self.description),
                num_replicas=replicas,
                replica_ids=ids,
                epoch=epoch,
                seed=self._seed,
                first_step=first // total,
            )
        else:
            dataset = self._frames(epoch, first // total if is_warm else first, replicas, ids)
        return self._warm.to_every_replica(self.strategy, epoch, dataset)

    def _frames(self, epoch: int, first: int, replicas: int, ids: list[int]) -> tf.data.Dataset:
        parts = []
        for stretch in self._stretches(epoch, replicas):
            done = first if stretch.minibatches is None else min(first, stretch.minibatches)
            first -= done
            if done == stretch.minibatches:
                continue
            part = pipeline.minibatches(
                self._corpus,
                "train",
                num_replicas=replicas,
                replica_ids=ids,
                minibatch=stretch.size,
                sync_period=self._sync_period,
                epoch=epoch,
                seed=self._seed,
                context=self.description["context"],
                shuffle_frames=self._shuffle,
                first_minibatch=stretch.first + done,
            )
            if stretch.minibatches is not None:
                part = part.take((stretch.minibatches - done) // replicas * len(ids))
            parts.append(part)
        dataset = parts[0]
        for part in parts[1:]:
            dataset = dataset.concatenate(part)
        return dataset

    def _stretches(self, epoch: int, replicas: int) -> list[_Stretch]:
        """Returns the parts of an epoch that have one minibatch size each."""
        # The size changes only after a multiple of `unit` frames. After so many frames all replicas
        # have done equally many minibatches, whatever the size of a minibatch.
        unit = self._sizes_unit * replicas
        starts: dict[int, int] = {}
        for segment in self._sizes.segments(epoch, self.num_frames):
            start = unit * round(segment.first / unit)
            if start < self.num_frames:
                starts[start] = segment.value
        ends = [*list(starts)[1:], None]
        return [
            _Stretch(size, start // size, None if end is None else (end - start) // size)
            for (start, size), end in zip(starts.items(), ends, strict=True)
        ]

    def _check(self, largest: int) -> None:
        replicas = self.strategy.num_replicas
        if self._recurrent:
            self._streams_plan()
            return
        minibatches = math.ceil(self.num_frames / largest)
        if minibatches < replicas:
            raise ValueError(
                f"--minibatch={largest} makes {minibatches} minibatches of the {self.num_frames} "
                f"training frames, too few for {replicas} replicas. Lower it, or start fewer "
                "replicas."
            )

    def _streams_plan(self) -> StreamPlan:
        options, replicas = stream_options(self.description), self.strategy.num_replicas
        return streams.partition(
            self._corpus, "train", options, num_replicas=replicas, seed=self._seed
        )

    def _check_replicas(self, epoch: int, is_warm: bool) -> None:
        changes = len(self._stretches(epoch, 1)) > 1
        former, replicas = self._former_replicas, self.strategy.num_replicas
        if former != replicas and (self._recurrent or is_warm or changes):
            raise common.Failure(
                f"the run was interrupted inside an epoch with {former} replicas, and goes on with "
                f"{replicas}: streams, epochs of --warm_start_epochs and epochs in which the "
                f"minibatch changes can only be taken up with the same number. Start {former}; "
                "after that epoch it may change."
            )


class _Stretch(NamedTuple):
    """Successive minibatches of one size in an epoch.

    Attributes:
        size: frames of a minibatch.
        first: the number, from 0, that the first of these minibatches would have in the epoch if
            all minibatches had this size.
        minibatches: how many there are; None for the last stretch, which ends with the epoch.
    """

    size: int
    first: int
    minibatches: int | None


def training_chunks(
    corpus: index.CorpusIndex,
    description: Mapping[str, Any],
    *,
    minibatch: Mapping[float, int],
    seed: int,
    shuffle_frames: int = pipeline.SHUFFLE_FRAMES,
    seconds: float = chunks.SECONDS,
) -> tfpara.Chunks:
    """Returns the training split for the workers of an asynchronous strategy, in chunks.

    Args:
        corpus: from `index.read`.
        description: description of the model, as in model.json. Recurrent models get streams, which
            start anew in every chunk.
        minibatch: frames of a minibatch, by the position, in epochs, from which they hold. The
            position at a chunk's begin decides. Recurrent models do not use it.
        seed: decides, together with the epoch, the order of the data.
        shuffle_frames: number of frames of a chunk that are shuffled together.
        seconds: approximate length of a chunk, in seconds of speech.

    Raises:
        ValueError: a value is out of range, or there are more chunks than utterances.
    """
    if is_recurrent(description):
        made = stream_chunks.stream_chunks(
            corpus, "train", stream_options(description), seconds=seconds, seed=seed
        )
        return tfpara.Chunks(*made)
    made = frame_chunks.frame_chunks(
        corpus,
        "train",
        minibatch=Piecewise(minibatch),
        seconds=seconds,
        seed=seed,
        context=description["context"],
        shuffle_frames=shuffle_frames,
    )
    if len(minibatch) > 1:  # with several sizes, epochs differ in their number of minibatches
        made = made._replace(num_minibatches=None)
    return tfpara.Chunks(*made)


def held_out(
    corpus: index.CorpusIndex,
    split: str,
    strategy: Any,
    description: Mapping[str, Any],
    minibatch: int = 1024,
) -> Any:
    """Returns a split in the order of the corpus, divided between the strategy's replicas.

    No replica is left without frames.

    Args:
        corpus: from `index.read`; for a run's model, from `runs.corpus_for`.
        split: name of the split.
        strategy: strategy whose replicas share the split. If it is None, or asynchronous (so that
            only the chief scores), the result is a plain dataset of the whole split.
        description: description of the model, as in model.json. Recurrent models get as many
            streams as in training.
        minibatch: frames of a minibatch, for models that are not recurrent.

    Raises:
        ValueError: the split is empty, or the model is recurrent and the split has fewer utterances
            than replicas.
    """
    if isinstance(strategy, tfpara.AsyncStrategy):
        strategy = None
    replicas = strategy.num_replicas if strategy else 1
    ids = strategy.local_replica_ids if strategy else [0]
    utterances = len(corpus.split(split))
    if not utterances:
        raise ValueError(
            f"corpus {corpus.directory} has no {split} data. Choose another split, or prepare the "
            f"corpus with --{split}_data or --{split}_share."
        )
    if is_recurrent(description) and utterances < replicas:
        raise ValueError(
            f"the {split} split of {corpus.directory} has {utterances} utterances, and a recurrent "
            f"model needs one for each of {replicas} replicas. Start fewer replicas."
        )

    def local(_: Any = None) -> tf.data.Dataset:
        if is_recurrent(description):
            options = stream_options(description)
            return streams.minibatches(
                corpus, split, options, num_replicas=replicas, replica_ids=ids, shuffle=False
            )
        return pipeline.minibatches(
            corpus,
            split,
            num_replicas=replicas,
            replica_ids=ids,
            minibatch=max(1, min(minibatch, corpus.num_frames(split) // replicas)),
            sync_period=1,
            epoch=0,
            seed=0,
            context=description["context"],
            shuffle=False,
        )

    return strategy.distribute_datasets_from_function(local) if strategy else local()
