"""The common flags and work of prepare_kaldi and prepare_librispeech.

Import this module before TensorFlow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

from absl import flags

from input import audio_files, labels, preparation, sources
from input.preparation import SKIP
from scripts.made import Bars, skipped, summary

_DEFAULTS = preparation.Options()
_EXTRACTION = sources.Extraction()

_OUT = flags.DEFINE_string("out", None, "directory of the corpus to make", required=True)
common.refuse_urls(_OUT)
_DATA = flags.DEFINE_string("data", None, "directory of the training data", required=True)
_VALIDATION = flags.DEFINE_string(
    "validation_data", None, "directory of validation data; training speakers if not set"
)
_TEST = flags.DEFINE_string(
    "test_data", None, "directory of test data; training speakers if not set"
)
_VALIDATION_SHARE = flags.DEFINE_float(
    "validation_share",
    _DEFAULTS.validation_share,
    "share of the training speakers held out for validation without --validation_data, in [0, 1)",
)
_TEST_SHARE = flags.DEFINE_float(
    "test_share",
    _DEFAULTS.test_share,
    "share of the training speakers held out for testing without --test_data, in [0, 1)",
)
_ALI = flags.DEFINE_list(
    "ali",
    None,
    "Kaldi archives of pdf-ids (ali-to-pdf, not transition-ids), binary or text, gzipped or not;"
    " files or quoted patterns such as 'exp/ali/pdf.*.gz'",
)
_NUM_CLASSES = flags.DEFINE_integer(
    "num_classes",
    None,
    "number of pdf-ids of --ali (Kaldi: tree-info); the highest that occurs + 1 if not set",
    lower_bound=1,
)
_SUBSAMPLING = flags.DEFINE_integer(
    "frame_subsampling",
    1,
    "frames to a label of --ali, 3 for alignments of chain models (--frame-subsampling-factor); "
    "each label goes to as many frames",
    lower_bound=1,
)
_FRAME_SHIFT = flags.DEFINE_integer(
    "frame_shift",
    0,
    "with --frame_subsampling: frames by which the features that were aligned had been moved "
    "(shift-feats --shift)",
)
_PHONES = flags.DEFINE_list(
    "phones",
    None,
    "instead of --ali: files or patterns of lines 'UTTERANCE PHONE START DURATION', or CTM, in"
    " seconds; three classes to a phone",
)
_SILENCE = flags.DEFINE_string("silence", "SIL", "phone of --phones where no other is")
_FEATURES = flags.DEFINE_enum(
    "features",
    _EXTRACTION.kind,
    sources.KINDS,
    "what is computed from audio: log-mel filterbank energies, cepstral coefficients, or those of"
    " perceptual linear prediction",
)
_NUM_MEL = flags.DEFINE_integer("num_mel", _EXTRACTION.num_mel, "filters of --features=fbank")
_NUM_CEPS = flags.DEFINE_integer(
    "num_ceps",
    _EXTRACTION.num_ceps,
    "coefficients of --features=mfcc, at most 23, or plp, at most 13",
)
_PITCH = flags.DEFINE_bool(
    "pitch", False, "append Kaldi's three pitch features to what is computed from audio"
)
_SAMPLE_RATE = flags.DEFINE_integer(
    "sample_rate", _EXTRACTION.audio.sample_rate, "of the audio, in Hz"
)
_RESAMPLE = flags.DEFINE_bool(
    "resample", False, "convert audio of another rate; it is an error if not set"
)
_CHANNEL = flags.DEFINE_integer(
    "channel",
    None,
    "of recordings that have several, from 0 (left); a fifth column of segments goes before it; "
    "several are an error if not set",
    lower_bound=0,
)
_DECODER = flags.DEFINE_enum(
    "decoder",
    _EXTRACTION.audio.decoder,
    audio_files.DECODERS,
    "what decodes audio; tensorflow-io runs up to TensorFlow 2.17",
)
_CMVN = flags.DEFINE_enum(
    "cmvn",
    _DEFAULTS.cmvn,
    preparation.CMVN,
    "whose mean is taken off the features before deltas: of the utterance, of the speaker (read"
    " twice), or given by cmvn.scp in each data directory. Training normalises by the mean and"
    " variance of all training frames in any case",
)
_NORM_VARS = flags.DEFINE_bool("norm_vars", False, "--cmvn also makes the variance 1")
_DELTAS = flags.DEFINE_integer(
    "deltas", _DEFAULTS.deltas, "orders of deltas appended to the features, 0 for none"
)
_MISMATCH = flags.DEFINE_integer(
    "max_length_mismatch",
    _DEFAULTS.max_length_mismatch,
    "largest number of labels that an utterance may have too many or too few for its frames; the "
    "longer of the two is cut",
)
_SKIP = flags.DEFINE_list(
    "skip",
    [],
    "kinds of bad utterances to leave out and count, instead of ending with an error: "
    + "; ".join(f"{kind} ({what})" for kind, what in SKIP.items()),
)
_SHARD = flags.DEFINE_float(
    "shard_megabytes", _DEFAULTS.shard_megabytes, "size of a full shard, about, in megabytes"
)
_SEED = flags.DEFINE_integer("seed", _DEFAULTS.seed, "draws the held-out speakers, >= 0")


def run(
    open_source: Callable[[str, sources.Extraction], sources.Source],
    made_with: Mapping[str, Any],
    allow_pipes: bool = False,
) -> None:
    """Makes the corpus that the flags describe, and prints one line on it.

    Args:
      open_source: opens the source of a directory.
      made_with: the program's own options, which the index records.
      allow_pipes: whether commands in cmvn.scp are run.
    """
    started = time.monotonic()
    common.exit_on_signals()
    with common.bad_input():
        _check()
        options, extraction = _options(), _extraction()
        common.setup_tensorflow()
        bars = Bars()
        try:
            directories = _directories()
            opened = {split: open_source(path, extraction) for split, path in directories.items()}
            stats = _stats(directories, allow_pipes)
            with _labels(bars) as found:
                made = preparation.prepare(
                    _OUT.value,
                    opened,
                    found,
                    options,
                    {
                        **made_with,
                        "program": common.program(),
                        **_recorded(opened, extraction),
                        **_rate(),
                    },
                    stats,
                    bars,
                )
        finally:
            bars.close()
    print(summary(made.corpus, made.reused, time.monotonic() - started) + skipped(made.skipped))


def _check() -> None:
    """Refuses flags that have no effect with the other flags; `_recorded`, with the data."""
    cepstra = _FEATURES.value != "fbank"
    common.only_for(_CMVN.value != "none", (_NORM_VARS,), "--cmvn")
    common.only_for(bool(_PHONES.value), (_SILENCE,), "--phones")
    common.only_for(not _PHONES.value, (_SUBSAMPLING, _FRAME_SHIFT), "--ali")
    common.only_for(not cepstra, (_NUM_MEL,), "--features=fbank")
    common.only_for(cepstra, (_NUM_CEPS,), "--features=mfcc and plp")
    for data, share in ((_VALIDATION, _VALIDATION_SHARE), (_TEST, _TEST_SHARE)):
        common.only_for(not data.value, (share,), f"a corpus without --{data.name}")


def _options() -> preparation.Options:
    return preparation.Options(
        cmvn=_CMVN.value,
        norm_vars=_NORM_VARS.value,
        deltas=_DELTAS.value,
        max_length_mismatch=_MISMATCH.value,
        skip=tuple(_SKIP.value),
        validation_share=_VALIDATION_SHARE.value,
        test_share=_TEST_SHARE.value,
        shard_megabytes=_SHARD.value,
        seed=_SEED.value,
    )


def _extraction() -> sources.Extraction:
    reading = audio_files.Options(
        sample_rate=_SAMPLE_RATE.value,
        resample=_RESAMPLE.value,
        decoder=_DECODER.value,
        channel=_CHANNEL.value,
    )
    return sources.Extraction(
        _FEATURES.value, _NUM_MEL.value, _NUM_CEPS.value, _PITCH.value, reading
    )


def _recorded(opened: Mapping[str, sources.Source], extraction: sources.Extraction) -> dict:
    """Returns the features' options for the index; "given" means features of a feats.scp."""
    from_audio = {split: isinstance(source, sources.Audio) for split, source in opened.items()}
    if len(set(from_audio.values())) > 1:
        raise ValueError(
            "some data directories have a feats.scp and some have not:"
            f" {', '.join(split for split, audio in from_audio.items() if audio)} would get"
            " features from audio. Make all of the same kind, or add --from_audio"
        )
    computed = from_audio["train"]
    of_audio = (_FEATURES, _NUM_MEL, _NUM_CEPS, _PITCH, _SAMPLE_RATE, _RESAMPLE, _CHANNEL, _DECODER)
    what = "features computed from audio (with --from_audio, where there is a feats.scp)"
    common.only_for(computed, of_audio, what)
    if not computed:
        return {"features": "given"}
    channel = extraction.audio.channel
    size = "num_mel" if extraction.kind == "fbank" else "num_ceps"
    return {
        "features": extraction.kind,
        size: getattr(extraction, size),
        **({"pitch": True} if extraction.pitch else {}),
        "sample_rate": extraction.audio.sample_rate,
        "resample": extraction.audio.resample,
        **({} if channel is None else {"channel": channel}),
    }


def _rate() -> dict[str, int]:
    """Returns the options of labels at a fraction of the frame rate, for the index."""
    if _SUBSAMPLING.value == 1:
        return {}
    return {"frame_subsampling": _SUBSAMPLING.value, "frame_shift": _FRAME_SHIFT.value}


def _directories() -> dict[str, str]:
    given = {"train": _DATA.value, "validation": _VALIDATION.value, "test": _TEST.value}
    return {split: path for split, path in given.items() if path}


def _stats(directories: dict[str, str], allow_pipes: bool) -> dict[str, preparation.Stats]:
    if _CMVN.value != "given":
        return {}
    return {split: sources.SpeakerStats(path, allow_pipes) for split, path in directories.items()}


def _labels(bars: Bars) -> labels.KaldiAlignments | labels.PhoneTimes:
    if bool(_ALI.value) == bool(_PHONES.value):
        raise ValueError("give the labels with one of --ali and --phones")
    if _PHONES.value:
        if _NUM_CLASSES.value:
            raise ValueError("--num_classes goes with --ali; --phones has three to a phone")
        return labels.PhoneTimes(_PHONES.value, _SILENCE.value, bars)
    return labels.KaldiAlignments(
        _ALI.value or [], _NUM_CLASSES.value, bars, _SUBSAMPLING.value, _FRAME_SHIFT.value
    )
