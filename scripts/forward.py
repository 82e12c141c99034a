"""Writes a run's log-likelihoods of a Kaldi data directory, for Kaldi's decoders; needs no labels.

python -m scripts.forward --run_dir=runs/bmuf --data=data/test --out=exp/bmuf/loglikes

Writes OUT.ark and OUT.scp: for each utterance log posteriors minus log priors, a row for each frame
(of a model that stacks frames, for each stack), a column for each pdf-id. `latgen-faster-mapped`
reads them. A data directory is as for prepare_kaldi; its features are made as those of the corpus
that the run was trained on: kind and size, --cmvn, deltas. Priors are counted in that corpus, once;
they are kept in RUN_DIR/decoding.json.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts import common  # isort: skip  # before TensorFlow

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
_WEIGHTS = flags.DEFINE_string("weights", "global", "global, or an average such as ema-0.99")
_KINDS = ("length", "nonfinite", "audio")
_SKIP = flags.DEFINE_list(
    "skip",
    [],
    "kinds of bad utterances to leave out and count, instead of ending with an error: "
    + "; ".join(f"{kind} ({preparation.SKIP[kind]})" for kind in _KINDS),
)
_ALLOW_PIPES = flags.DEFINE_bool(
    "allow_pipes",
    False,
    "run the commands ('COMMAND |') that tables hold, in a shell: only for tables that you trust",
)
_FROM_AUDIO = flags.DEFINE_bool(
    "from_audio", False, "compute features from wav.scp even where there is a feats.scp"
)
_RESAMPLE = flags.DEFINE_bool(
    "resample", False, "convert audio of another rate; it is an error if not set"
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
    with common.bad_input(), contextlib.closing(Bars()) as bars:
        if tfpara.cluster.read().num_workers > 1:
            raise ValueError("forward runs in one process. Start it without the launcher.")
        _check_flags()
        common.setup_tensorflow()
        model, description = runs.load(Path(_RUN_DIR.value), _WEIGHTS.value)
        trained = runs.frames(description)
        part = _part(trained.options)
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
            _OUT.value, decoding.log_likelihoods(outputs(), counts)
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
    """Opens the data directory; `made` says how the features of the training were made."""
    extraction = sources.Extraction()
    if made.get("features", extraction.kind) != "given":
        reading = audio_files.Options(
            sample_rate=made.get("sample_rate", features.SAMPLE_RATE),
            resample=_RESAMPLE.value,
            decoder=_DECODER.value,
        )
        extraction = sources.Extraction(
            made.get("features", extraction.kind),
            made.get("num_mel", extraction.num_mel),
            made.get("num_ceps", extraction.num_ceps),
            made.get("pitch", False),
            reading,
        )
    source = sources.kaldi_directory(_DATA.value, extraction, _ALLOW_PIPES.value, _FROM_AUDIO.value)
    computed = isinstance(source, sources.Audio)
    if computed and made.get("features") == "given":
        raise ValueError(
            f"the run was trained on the features of a feats.scp, and --data={_DATA.value} "
            + ("is read from audio (--from_audio)." if _FROM_AUDIO.value else "has none.")
            + " Make them as those of the training."
        )
    what = "features computed from audio (with --from_audio, where there is a feats.scp)"
    common.only_for(computed, (_RESAMPLE, _DECODER), what)
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
