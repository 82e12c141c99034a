"""Applies a run's model to utterances: decodes phones, or computes log-likelihoods for Kaldi.

Priors, bigram and transitions are counted once, in the labels of the training split. The counts are
kept in RUN_DIR/decoding.json, with the fingerprint of their corpus.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from input import features, index
from input.index import CorpusIndex
from models import decoding
from scripts import common, run_files, runs, serving

FILE_NAME = "decoding.json"


class Utterance(NamedTuple):
    """An utterance: a label and log posteriors for each output of the model (frame or stack)."""

    id: str
    labels: np.ndarray  # int [num_outputs], from the corpus
    log_posteriors: np.ndarray  # float32 [num_outputs, num_classes], computed by the model


def utterances(
    model: keras.Model, description: dict[str, Any], corpus: CorpusIndex, split: str
) -> Iterator[Utterance]:
    """Yields the utterances of a split, one at a time, with the model's log posteriors.

    Args:
        model: returns logits for frames [n, dim], or for sequences of frames [1, n, dim].
        description: description of the run, for `serving.model_input`. The first `label_delay`
            outputs of a sequence are left out.
        corpus: from `runs.corpus_for`, so that it has the statistics of the training frames.
        split: "train", "validation" or "test".
    """
    stack = description.get("stack", 1)
    log_posteriors = posteriors(model, description, corpus)
    part = corpus.split(split)
    with index.open_shards(part) as files:
        for number in range(len(part)):
            frames, labels = index.read_utterance(corpus, part, files, number)
            outputs = log_posteriors(frames)
            yield Utterance(part.id[number], _of_stacks(labels, stack), outputs)


def posteriors(
    model: keras.Model, description: dict[str, Any], trained: CorpusIndex | runs.Frames
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from an utterance's frames to the log posteriors of the model.

    Args:
        model: as for `utterances`.
        description: as for `utterances`.
        trained: the width and the statistics of the training frames.

    Returns:
        A function float32 [num_frames, feature_dim] -> float32 [num_outputs, num_classes].
    """
    sequences = len(model.inputs[0].shape) == 3
    delay = serving.label_delay(description)
    to_input = serving.model_input(trained, description)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, trained.feature_dim])])
    def log_posteriors(frames: tf.Tensor) -> tf.Tensor:
        seen = to_input(frames)
        logits = model(seen[None], training=False)[0, delay:] if sequences else model(seen)
        return tf.nn.log_softmax(tf.cast(logits, tf.float32))

    return lambda frames: log_posteriors(frames).numpy()


def statistics(
    run_dir: Path, description: dict[str, Any], corpus: CorpusIndex | None = None
) -> dict[str, Any]:
    """Returns the counts of the training split of the corpus that a run was trained on.

    Args:
        run_dir: directory of the run; the counts are kept there, if it can be written to.
        description: description of the run.
        corpus: the corpus that is evaluated, if there is one. If the run was trained on it, it is
            not read again.

    Returns:
        `frames`, [K], the number of frames of each class, and, if the classes are phone states,
        `moves` and `bigram` of `models.decoding.Counts`; in a form that JSON can hold.

    Raises:
        ValueError: the corpus of the training has changed since the training.
        FileNotFoundError: the corpus of the training is gone, and no counts were kept.
    """
    path = run_dir / FILE_NAME
    mark = {
        "corpus_fingerprint": description["corpus_fingerprint"],
        "stack": description.get("stack", 1),
    }
    if path.is_file():
        kept = _read(path)
        if all(kept.get(key) == value for key, value in mark.items()):
            return kept
    if corpus is None or corpus.fingerprint != mark["corpus_fingerprint"]:
        try:
            corpus = runs.corpus_of_training(description)
        except FileNotFoundError as error:
            once = "Do so once with --decode or --write_loglikes: counts are kept, for any corpus."
            raise FileNotFoundError(f"{error} {once}") from error
    if corpus.fingerprint != mark["corpus_fingerprint"]:
        raise ValueError(
            f"corpus {corpus.directory} has changed since the run {run_dir} was trained on it, so "
            "its priors and bigram do not fit. Train again, or prepare that corpus again."
        )
    content = {**mark, **_count(corpus, mark["stack"])}
    try:
        run_files.record(run_dir, FILE_NAME)
        common.write_json(path, content)
    except OSError as error:  # The run may be another person's. The counts only save time.
        print(f"{path} cannot be written ({error.strerror}), so counts are not kept.", flush=True)
    return content


def hmm(content: dict[str, Any], class_names: tuple[str, ...]) -> decoding.Hmm:
    """Returns the phone model that is estimated from the counts of `statistics`.

    Raises:
        ValueError: the classes are not phone states, or the counts are not of these classes.
    """
    states = decoding.PhoneStates.of(class_names)
    try:
        return decoding.estimate(decoding.Counts.from_json(states, content))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{FILE_NAME} does not fit the corpus: {error} Delete it.") from error


def score(
    spoken: Iterator[Utterance],
    model: decoding.Hmm,
    *,
    acoustic_scale: float,
    insertion_penalty: float,
    uncounted: Collection[str],
) -> dict[str, float]:
    """Decodes utterances and compares them with their labels.

    Args:
        spoken: from `utterances`.
        model: from `hmm`.
        acoustic_scale: see `models.decoding.decode`.
        insertion_penalty: see `models.decoding.decode`.
        uncounted: names of phones that are left out before phones are compared, such as silence.

    Returns:
        phone_error_rate and decoded_frame_error_rate in %, and the numbers of phones in the
        labels, insertions, deletions and substitutions.
    """
    left_out = [n for n, name in enumerate(model.states.phones) if name in uncounted]
    total, wrong, frames = decoding.PhoneErrors(), 0, 0
    for utterance in spoken:
        found = decoding.decode(
            utterance.log_posteriors - model.prior, model, acoustic_scale, insertion_penalty
        )
        phone, _, first = model.states.segments(utterance.labels)
        said = phone[first]
        total += decoding.count_errors(
            [n for n in said if n not in left_out], [n for n in found.phones if n not in left_out]
        )
        wrong += int((found.classes != utterance.labels).sum())
        frames += len(utterance.labels)
    return {
        "phone_error_rate": total.rate,
        "phones": total.reference,
        "insertions": total.insertions,
        "deletions": total.deletions,
        "substitutions": total.substitutions,
        "decoded_frame_error_rate": 100.0 * wrong / frames,
    }


def outputs_per_row(description: dict[str, Any], trained: runs.Frames) -> int:
    """Returns the number of a model's outputs for each row of log-likelihoods for Kaldi.

    If each label is that of F frames (`--frame_subsampling`), Kaldi's decoders take a row for every
    F frames: for frames 0, F, 2F and so on. The model has an output for each frame or each stack.

    Raises:
        ValueError: F frames are no whole number of stacks.
    """
    factor, stack = trained.options.get("frame_subsampling", 1), description.get("stack", 1)
    if factor > 1 and factor % stack:
        raise ValueError(
            f"the model stacks {stack} frames, and Kaldi's decoders expect a row for every "
            f"{factor} (--frame_subsampling of the corpus), which must be a multiple of it. Train "
            "a model of another stack."
        )
    return max(1, factor // stack)


def log_likelihoods(
    log_posteriors: Iterable[tuple[str, np.ndarray]], content: dict[str, Any], every: int = 1
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (id, log posteriors minus log priors) for Kaldi; columns have the order of classes.

    Values of a class without a training frame are about `models.decoding.UNSEEN`.

    Args:
        log_posteriors: for each utterance its id, and float32 [num_outputs, num_classes].
        content: from `statistics`.
        every: number of outputs for each row, from `outputs_per_row`; the first of them is used.
    """
    prior = decoding.log_prior(np.array(content["frames"])).astype(np.float32)
    for utterance, found in log_posteriors:
        yield utterance, found[::every] - prior


def about_unseen(content: dict[str, Any]) -> str | None:
    """Returns a sentence on the classes without a training frame; None if there are none."""
    unseen = content["frames"].count(0)
    if not unseen:
        return None
    return (
        f"{unseen} of the {len(content['frames'])} classes have no training frame. Their "
        f"log-likelihoods are about {decoding.UNSEEN:g}, so that no decoder takes them."
    )


def _of_stacks(labels: np.ndarray, count: int) -> np.ndarray:
    """Returns a label for each stack of `count` frames."""
    found: np.ndarray = features.stack_labels(labels, count).numpy()
    return found


def _count(corpus: CorpusIndex, stack: int) -> dict[str, Any]:
    """Returns all counts of the training split, or, if classes are no phone states, `frames`."""
    try:
        counts = decoding.Counts.zero(decoding.PhoneStates.of(corpus.class_names))
    except ValueError:
        counts = None
    frames = np.zeros(corpus.num_classes, np.int64)
    split = corpus.split("train")
    with index.open_shards(split) as files:
        for number in range(len(split)):
            labels = _of_stacks(index.read_utterance(corpus, split, files, number)[1], stack)
            frames += np.bincount(labels, minlength=corpus.num_classes)
            if counts is not None:
                counts.add(labels)
    return {"frames": frames.tolist()} if counts is None else counts.to_json()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}). Delete it; it is made anew.") from error
    return content if isinstance(content, dict) else {}
