"""Makes a corpus from LibriSpeech, as it is downloaded, and from alignments.

python -m scripts.prepare_librispeech --data=LibriSpeech/train-clean-100 \
    --validation_data=LibriSpeech/dev-clean --test_data=LibriSpeech/test-clean \
    --phones='alignments/*.ctm' --out=corpus

A data directory holds SPEAKER/CHAPTER/*.flac and their .trans.txt. Utterances have the names of
LibriSpeech, such as 84-121123-0000. LibriSpeech has no alignments of its own. --ali takes pdf-ids
from Kaldi's recipe, and --phones takes the phones that any aligner found.
"""

from __future__ import annotations

from scripts import common, preparing  # isort: skip  # imported first: it sets TensorFlow's log level

from absl import flags

from input import sources

flags.adopt_module_key_flags(preparing)


def main() -> None:
    preparing.run(sources.librispeech, {})


if __name__ == "__main__":
    common.run(main)
