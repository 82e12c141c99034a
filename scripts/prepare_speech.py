"""Makes a corpus of synthetic speech with a phone-state label for every frame.

python -m scripts.prepare_speech --out=corpus --train_minutes=60
"""

from __future__ import annotations

import time

from scripts import common  # isort: skip  # imported first: it sets TensorFlow's log level

from absl import flags
from tqdm import tqdm

from input import corpus, text
from input.index import SPLITS
from scripts.made import summary

_DEFAULTS = corpus.Options()

_OUT = flags.DEFINE_string("out", None, "directory of the corpus to make", required=True)
common.refuse_urls(_OUT)
_TEXT = flags.DEFINE_string(
    "text", None, "UTF-8 file of English sentences to read aloud; Python's documentation if not set"
)
_SEED = flags.DEFINE_integer("seed", _DEFAULTS.seed, "seed of everything that is drawn, >= 0")
_MINUTES = {
    split: flags.DEFINE_float(
        f"{split}_minutes", _DEFAULTS.minutes(split), f"speech of the {split} split, in minutes"
    )
    for split in SPLITS
}
_SPEAKERS = {
    split: flags.DEFINE_integer(
        f"{split}_speakers", _DEFAULTS.speakers(split), f"number of speakers of the {split} split"
    )
    for split in SPLITS
}
_VOICES = flags.DEFINE_list(
    "voices", list(_DEFAULTS.voices), "eSpeak NG voices to draw from, such as en-us,en-gb-x-rp"
)
_MIN_SNR = flags.DEFINE_float("min_snr", _DEFAULTS.min_snr, "lowest signal-to-noise ratio, in dB")
_MAX_SNR = flags.DEFINE_float("max_snr", _DEFAULTS.max_snr, "highest signal-to-noise ratio, in dB")
_EXPONENT = flags.DEFINE_float(
    "max_noise_exponent",
    _DEFAULTS.max_noise_exponent,
    "the noise's power falls as 1/frequency^x, x drawn between 0 (white) and this",
)
_SHARD = flags.DEFINE_float(
    "shard_megabytes", _DEFAULTS.shard_megabytes, "largest size of a shard, about, in megabytes"
)


class _Bars:
    """A progress bar for each stage, in seconds of speech."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stage = ""
        self._bar: tqdm | None = None

    def __call__(self, stage: str, seconds: float) -> None:
        if self._bar is None or self._stage != stage:
            self.close()
            self._stage = stage
            self._bar = tqdm(
                desc=stage,
                total=round(self._seconds),
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s of speech"
                " [{elapsed}<{remaining}]",
                disable=None,  # with None, tqdm shows the bar on terminals only
            )
        # The last utterance may be longer than the speech that was still missing. Then the total is
        # raised, so that the bar does not pass 100 %.
        self._bar.total = max(self._bar.total, self._bar.n + seconds)
        self._bar.update(seconds)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def main() -> None:
    started = time.monotonic()
    common.exit_on_signals()
    with common.bad_input():
        options = _options()
        source = text.read(_TEXT.value) if _TEXT.value else None
        bars = _Bars(60 * sum(options.minutes(split) for split in SPLITS))
        try:
            made, reused = corpus.prepare(_OUT.value, options, source, bars)
        finally:
            bars.close()
    print(summary(made, reused, time.monotonic() - started))


def _options() -> corpus.Options:
    return corpus.Options(
        **{f"{split}_minutes": flag.value for split, flag in _MINUTES.items()},
        **{f"{split}_speakers": flag.value for split, flag in _SPEAKERS.items()},
        voices=tuple(_VOICES.value),
        min_snr=_MIN_SNR.value,
        max_snr=_MAX_SNR.value,
        max_noise_exponent=_EXPONENT.value,
        shard_megabytes=_SHARD.value,
        seed=_SEED.value,
    )


if __name__ == "__main__":
    common.run(main)
