"""Training with parameter servers, for `scripts.train`: data in chunks, and the strategy's own fit.

Import this module before TensorFlow, and after `scripts.common`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

import tfpara
from input.features import FRAME_SHIFT
from input.index import CorpusIndex
from scripts import async_flags, run_files, schedule_flags


class ChunkedData:
    """The training split in chunks, with the attributes that `scripts.train` reads.

    The constructor prints a line if there are fewer chunks than workers.

    Args:
        corpus: from `index.read`.
        strategy: a `tfpara.AsyncStrategy`.
        description: description of the model, as in model.json.
        seed: decides, together with the epoch, the order of the data.
        shuffle_frames: number of frames that are shuffled together.

    Raises:
        ValueError: the chunks are too short for the utterances, or for a push.
    """

    def __init__(
        self,
        corpus: CorpusIndex,
        strategy: Any,
        description: Mapping[str, Any],
        *,
        seed: int,
        shuffle_frames: int,
    ) -> None:
        from scripts.data import is_recurrent, stream_options, training_chunks

        self.strategy = strategy
        self.description = description
        self.num_frames = corpus.num_frames("train")
        utterances = len(corpus.split("train"))
        minibatch = max(schedule_flags.minibatches().values())
        if is_recurrent(description):
            streams = stream_options(description)
            utterances //= streams.streams
            minibatch = streams.streams * streams.truncation * streams.stack
        # Each chunk must have enough minibatches for one push, and one utterance for each stream.
        # So there can be at most `pushes` chunks, and at most `utterances`.
        period = next(iter(schedule_flags.sync_periods().values()))
        pushes = self.num_frames // (minibatch * period)
        workers = strategy.num_workers
        self.chunk_minutes = async_flags.chunk_minutes(
            self.num_frames * FRAME_SHIFT / 60.0, max(1, min(utterances, pushes)), workers
        )
        self.chunks = training_chunks(
            corpus,
            description,
            minibatch=schedule_flags.minibatches(),
            seed=seed,
            seconds=60.0 * self.chunk_minutes,
            shuffle_frames=shuffle_frames,
        )
        self.num_steps = self.chunks.num_minibatches
        # If minibatches have several sizes, their number is not known before the run. Then
        # `num_steps` is None, and the sync period is not checked.
        smallest = None if self.num_steps is None else max(1, self.num_steps // self.chunks.count)
        if smallest is not None and period > smallest:
            raise ValueError(
                f"--sync_period={period} exceeds the {smallest} minibatches of a chunk of "
                f"{self.chunk_minutes:g} minutes. Lower --sync_period or --minibatch, or raise "
                "--chunk_minutes."
            )
        idle = async_flags.about_idle(self.chunks.count, workers, utterances)
        if idle is not None:
            print(idle, flush=True)


def fit(
    model: keras.Model,
    data: ChunkedData,
    callbacks: keras.callbacks.CallbackList,
) -> None:
    """Trains the model on the workers.

    Args:
        model: the compiled model.
        data: the training data.
        callbacks: all callbacks.
    """
    data.strategy.fit(
        model,
        data.chunks,
        epochs=schedule_flags.epochs(),
        callbacks=callbacks,
        search_rate=async_flags.rate_search(),
    )


def checkpoint(
    run_dir: Path, data: ChunkedData, minutes: float | None, keep: int, plan: Mapping[str, Any]
) -> tfpara.AsyncCheckpoint:
    """Returns the callback that writes checkpoints.

    Args:
        run_dir: directory of the run.
        data: the training data. A resumed run must have chunks of the same length.
        minutes: time between checkpoints within epochs; None for none within epochs.
        keep: number of checkpoints that are kept.
        plan: settings that must be the same when the run is resumed.
    """
    plan = {**plan, "chunk_minutes": str(data.chunk_minutes)}
    matters = () if schedule_flags.epochs_matter() else ("epochs",)
    return tfpara.AsyncCheckpoint(
        run_files.checkpoints(run_dir),
        every_minutes=minutes,
        keep=keep,
        data_plan={key: value for key, value in plan.items() if key not in matters},
    )


def before_scores(data: ChunkedData, validation: Any) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that averaged ASGD needs before those that score the model."""
    if not isinstance(data.strategy.rule, tfpara.AveragedASGD):
        return []
    return [tfpara.StartMean(validation, async_flags.start_mean_chunks())]
