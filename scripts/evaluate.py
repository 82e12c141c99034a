"""Scores a run on held-out speech: frame error rate, cross-entropy and phone error rate.

python -m scripts.evaluate --run_dir=runs/bmuf --split=test --decode

Prints a line, with --decode two, and writes RUN_DIR/SPLIT.json. Under the launcher the workers
share the frames; decoding, and writing log-likelihoods for Kaldi, is done in one process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

import tensorflow as tf
from absl import flags

import tfpara
from input import index, kaldi_write
from models.decoding import Hmm, PhoneStates
from scripts import decoding, run_files, runs
from scripts.data import held_out, is_recurrent, stream_options
from tfpara import remote_files
from tfpara.algorithms import BSP
from tfpara.sync.strategy import PeriodicSyncStrategy

_SILENCE = "_"  # eSpeak NG's name for silence; used if the corpus has no name for silence

_RUN_DIR = flags.DEFINE_string(
    "run_dir", None, "directory of a run of scripts.train", required=True
)
_CORPUS = flags.DEFINE_string("corpus", None, "directory of a corpus; that of the run if not set")
_SPLIT = flags.DEFINE_enum("split", "test", index.SPLITS, "the part of the corpus")
_WEIGHTS = flags.DEFINE_string(
    "weights", "global", "global, an average such as ema-0.99, or best: by an evaluator's scores"
)
_OUT = flags.DEFINE_string("out", None, "JSON file or URL to write; RUN_DIR/SPLIT.json if not set")
_MINIBATCH = flags.DEFINE_integer("minibatch", 1024, "frames of a minibatch", lower_bound=1)
_DECODE = flags.DEFINE_boolean("decode", False, "find the phones, and report their error rate")
_ACOUSTIC_SCALE = flags.DEFINE_float(
    "acoustic_scale", 0.5, "weight of the model's scores against bigram and transitions, above 0"
)
_INSERTION_PENALTY = flags.DEFINE_float(
    "insertion_penalty", 0.0, "taken off (natural logarithm) for every phone that is decoded"
)
_UNCOUNTED = flags.DEFINE_list(
    "uncounted_phones",
    None,
    "phones that the phone error rate leaves out; the silence of the corpus if not set",
)
_LOGLIKES = flags.DEFINE_string(
    "write_loglikes",
    None,
    "write PREFIX.ark and PREFIX.scp: log-likelihoods (log posteriors minus log priors) for "
    "Kaldi's decoders; about -100000 for classes without a training frame",
)
common.refuse_urls(_LOGLIKES)
flags.adopt_module_key_flags(common)


def main() -> None:
    with common.bad_input():
        _check_flags()
        devices = common.setup_tensorflow()
        strategy = _strategy(devices)
        with (strategy or tf.distribute.get_strategy()).scope():
            model, description = runs.load(Path(_RUN_DIR.value), _WEIGHTS.value, streams=True)
            model.compile(optimizer=None, **runs.metrics(description))
        frames = not is_recurrent(description)
        common.only_for(
            frames, (_MINIBATCH,), "models of single frames; streams are as in training"
        )
        corpus = runs.corpus_for(description, _CORPUS.value)
        dataset = held_out(corpus, _SPLIT.value, strategy, description, _MINIBATCH.value)
        statistics, hmm = _statistics(corpus, description)
        every = decoding.outputs_per_row(description, runs.frames(description))
    scores = model.evaluate(dataset, verbose=0, return_dict=True)
    phones: dict[str, float] = {}
    with common.bad_input():
        if statistics is not None and is_recurrent(description):
            # The model above reads streams, but decoding needs one that takes whole utterances.
            model, _ = runs.load(Path(_RUN_DIR.value), _WEIGHTS.value)
        spoken = functools.partial(decoding.utterances, model, description, corpus, _SPLIT.value)
        if hmm is not None:
            phones = _decode(spoken(), hmm, _uncounted(corpus))
    if strategy is None or strategy.is_chief:
        _report(scores, _frames(corpus, description), phones)
    if _LOGLIKES.value:
        common.exit_on_signals()
        with common.bad_input():
            posteriors = ((each.id, each.log_posteriors) for each in spoken())
            matrices = decoding.log_likelihoods(posteriors, statistics, every)
            written = kaldi_write.write_matrices(_LOGLIKES.value, matrices)
        print(f"wrote log-likelihoods to {written[0]} and {written[1]}")


def _check_flags() -> None:
    """Refuses wrong flags now, which would otherwise fail after all frames are scored."""
    if (_DECODE.value or _LOGLIKES.value) and tfpara.cluster.read().num_workers > 1:
        raise ValueError(
            "--decode and --write_loglikes run in one process. Start evaluate without the launcher."
        )
    of_decoding = (_ACOUSTIC_SCALE, _INSERTION_PENALTY, _UNCOUNTED)
    common.only_for(_DECODE.value, of_decoding, "--decode")
    if not 0.0 < _ACOUSTIC_SCALE.value < float("inf"):
        raise ValueError(f"--acoustic_scale={_ACOUSTIC_SCALE.value} must be a positive number.")
    if not math.isfinite(_INSERTION_PENALTY.value):
        raise ValueError(f"--insertion_penalty={_INSERTION_PENALTY.value} must be a finite number.")
    if _OUT.value and remote_files.is_url(_OUT.value):
        remote_files.parent(_OUT.value)  # raises an error for a URL that cannot be used
    if _LOGLIKES.value:
        try:
            kaldi_write.prepare(_LOGLIKES.value)
        except (ValueError, OSError) as error:
            raise ValueError(f"--write_loglikes={_LOGLIKES.value}: {error}") from error


def _statistics(corpus: index.CorpusIndex, description: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the counts of the training labels, and the phone model, if the flags need them."""
    if not (_DECODE.value or _LOGLIKES.value):
        return None, None
    if _DECODE.value:
        phones = PhoneStates.of(corpus.class_names).phones
        unknown = set(_UNCOUNTED.value or []).difference(phones)
        if unknown:
            raise ValueError(
                f"--uncounted_phones: the corpus has no {', '.join(sorted(unknown))}. Its phones "
                f"are {' '.join(phones)}."
            )
    counts = decoding.statistics(Path(_RUN_DIR.value), description, corpus)
    about = decoding.about_unseen(counts)
    if about is not None:
        print(about, flush=True)
    return counts, decoding.hmm(counts, corpus.class_names) if _DECODE.value else None


def _frames(corpus: index.CorpusIndex, description: dict[str, Any]) -> int:
    """Returns the number of scored frames; a stack of frames counts as one."""
    frames = corpus.split(_SPLIT.value).frames
    if not is_recurrent(description):
        return int(frames.sum())
    options = stream_options(description)
    return int((options.lengths(frames) - options.label_delay).sum())


def _uncounted(corpus: index.CorpusIndex) -> list[str]:
    """Returns the phones that the phone error rate leaves out."""
    if _UNCOUNTED.value is not None:
        return _UNCOUNTED.value
    return [corpus.options.get("silence", _SILENCE)]


def _decode(
    spoken: Iterator[decoding.Utterance], hmm: Hmm, uncounted: list[str]
) -> dict[str, float]:
    options = {
        "acoustic_scale": _ACOUSTIC_SCALE.value,
        "insertion_penalty": _INSERTION_PENALTY.value,
    }
    return {**decoding.score(spoken, hmm, uncounted=uncounted, **options), **options}


def _strategy(devices: list[str] | None) -> Any:
    if tfpara.cluster.read().num_workers == 1 and devices is None:
        return None
    return PeriodicSyncStrategy(BSP(), sync_period=1, devices=devices)


def _report(scores: dict[str, float], frames: int, phones: dict[str, float]) -> None:
    result = {
        "run": _RUN_DIR.value,
        "split": _SPLIT.value,
        "weights": _WEIGHTS.value,
        "frames": frames,
        **runs.named_scores(scores),
        **phones,
    }
    print(
        f"{result['split']} ({frames} frames), {result['weights']} weights: frame error rate "
        f"{result['frame_error_rate']:.2f} %, cross-entropy {result['cross_entropy']:.4f} nats"
    )
    if phones:
        print(
            f"{result['split']} ({phones['phones']} phones), decoded: phone error rate "
            f"{phones['phone_error_rate']:.2f} % ({phones['insertions']} insertions, "
            f"{phones['deletions']} deletions, {phones['substitutions']} substitutions), frame "
            f"error rate {phones['decoded_frame_error_rate']:.2f} %"
        )
    run_dir, name = Path(_RUN_DIR.value), f"{_SPLIT.value}.json"
    with common.bad_input():
        if _OUT.value is None:
            run_files.record(run_dir, name)
        common.write_json(_OUT.value or run_dir / name, result)


if __name__ == "__main__":
    common.run(main)
