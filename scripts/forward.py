"""Computes log-likelihoods for Kaldi's decoders, from a Kaldi data directory and a run's model.

python -m scripts.forward --run_dir=runs/bmuf --data=data/test --out=exp/bmuf/loglikes

Writes OUT.ark and OUT.scp, which `latgen-faster-mapped` reads: log posteriors minus log priors of
each utterance. There is a column for each pdf-id, and a row for each frame, or for each stack if
the model stacks frames. If the labels were made with --frame_subsampling=F, there is a row for
every F frames. No labels are needed here. Features are made as for the corpus of the training: from
feats.scp or from wav.scp, with the same --cmvn and deltas. Priors are counted once in that corpus,
and kept in RUN_DIR/decoding.json.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

import numpy as np
from absl import flags

import tfpara
from input import audio_files, features, kaldi_write, preparation, sources
from input.parts import Part
from input.records import CorpusError
from scripts import decoding, runs
from scripts.made import Bars, skipped

_RUN_DIR = flags.DEFINE_string(
    "run_dir", None, "directory of a run of scripts.train", required=True
)
_DATA = flags.DEFINE_string("data", None, "Kaldi data directory", required=True)
_OUT = flags.DEFINE_string("out", None, "write OUT.ark and OUT.scp", required=True)
common.refuse_urls(_OUT)
_WEIGHTS = flags.DEFINE_string(
    "weights", "global", "global, an average such as ema-0.99, or best: by an evaluator's scores"
)
_KINDS = {
    "length": "no frames",
    "nonfinite": preparation.SKIP["nonfinite"],
    "audio": preparation.SKIP["audio"],
}
_SKIP = flags.DEFINE_list(
    "skip",
    [],
    "kinds of bad utterances to leave out and count, instead of ending with an error: "
    + "; ".join(f"{kind} ({what})" for kind, what in _KINDS.items()),
)
_ALLOW_PIPES = flags.DEFINE_bool(
    "allow_pipes",
    False,
    "run the commands ('COMMAND |') that tables hold, in a shell: only for tables that you trust",
)
_RESAMPLE = flags.DEFINE_bool(
    "resample", False, "convert audio of another rate; it is an error if not set"
)
_CHANNEL = flags.DEFINE_integer(
    "channel",
    None,
    "of recordings that have several, from 0 (left); a fifth column of segments goes before it",
    lower_bound=0,
)
_DECODER = flags.DEFINE_enum(
    "decoder",
    audio_files.Options().decoder,
    audio_files.DECODERS,
    "what decodes audio; tensorflow-io runs up to TensorFlow 2.17",
)
flags.adopt_module_key_flags(common)


def main() -> None:
    skips: Counter[str] = Counter()
    count = 0
    common.exit_on_signals()
    with common.bad_input(), contextlib.closing(Bars()) as bars:
        if tfpara.cluster.read().num_workers > 1:
            raise ValueError("forward runs in one process. Start it without the launcher.")
        _check_flags()
        common.setup_tensorflow()
        model, description = runs.load(Path(_RUN_DIR.value), _WEIGHTS.value)
        trained = runs.frames(description)
        part = _part(trained.options)
        every = decoding.outputs_per_row(description, trained)
        counts = decoding.statistics(Path(_RUN_DIR.value), description)
        about = decoding.about_unseen(counts)
        if about is not None:
            print(about, flush=True)
        posteriors = decoding.posteriors(model, description, trained)

        def outputs() -> Iterator[tuple[str, np.ndarray]]:
            nonlocal count
            read = preparation.unlabelled(part, _options(trained.options), skips, bars)
            for utterance, frames in read:
                _check_width(utterance, frames, trained)
                yield utterance, posteriors(frames)
                count += 1

        written = kaldi_write.write_matrices(
            _OUT.value, decoding.log_likelihoods(outputs(), counts, every)
        )
    print(f"wrote {written[0]} and {written[1]}: {count} utterances" + skipped(skips))


def _check_flags() -> None:
    other = [kind for kind in _SKIP.value if kind not in _KINDS]
    if other:
        raise ValueError(f"--skip={other[0]}: here it is some of {', '.join(_KINDS)}.")
    try:
        kaldi_write.prepare(_OUT.value)
    except (ValueError, OSError) as error:
        raise ValueError(f"--out={_OUT.value}: {error}") from error


def _part(made: dict[str, Any]) -> Part:
    """Opens the data directory; `made` has the options of the training's features."""
    plain = sources.Extraction()
    kind = made.get("features", plain.kind)
    computed, directory = kind != "given", Path(_DATA.value)
    table = "wav.scp" if computed else "feats.scp"
    if directory.is_dir() and not (directory / table).exists():
        how = f"{kind} computed from audio" if computed else "the features of a feats.scp"
        raise FileNotFoundError(
            f"the run was trained on {how}, and --data={directory} has no {table}."
        )
    of_audio = (_RESAMPLE, _CHANNEL, _DECODER)
    common.only_for(computed, of_audio, "runs on features computed from audio")
    extraction = plain
    if computed:
        reading = audio_files.Options(
            sample_rate=made.get("sample_rate", features.SAMPLE_RATE),
            resample=_RESAMPLE.value,
            decoder=_DECODER.value,
            channel=_CHANNEL.value,
        )
        extraction = sources.Extraction(
            kind,
            made.get("num_mel", plain.num_mel),
            made.get("num_ceps", plain.num_ceps),
            made.get("pitch", False),
            reading,
        )
    source = sources.kaldi_directory(
        str(directory), extraction, _ALLOW_PIPES.value, from_audio=computed
    )
    stats = None
    if made.get("cmvn") == "given":
        stats = sources.SpeakerStats(_DATA.value, _ALLOW_PIPES.value)
    return Part(source, list(source.speakers), stats)


def _options(made: dict[str, Any]) -> preparation.Options:
    known = {name: made[name] for name in ("cmvn", "norm_vars", "deltas") if name in made}
    return preparation.Options(**known, skip=tuple(_SKIP.value))


def _check_width(utterance: str, frames: np.ndarray, trained: runs.Frames) -> None:
    if frames.shape[1] != trained.feature_dim:
        orders = 1 + trained.options.get("deltas", preparation.Options().deltas)
        raise CorpusError(
            f"utterance {utterance}: its frames are {frames.shape[1] // orders} wide, those of the"
            f" training {trained.feature_dim // orders}. Give features of the same kind"
        )


if __name__ == "__main__":
    common.run(main)
