"""Makes a corpus from Kaldi data directories and alignments.

python -m scripts.prepare_kaldi --data=data/train --ali='exp/tri3_ali/pdf.*.gz' --out=corpus

A data directory has utt2spk, and feats.scp or else wav.scp with or without segments. The archives
of --ali hold pdf-ids. This command makes such an archive from each ali.N.gz of Kaldi:

    ali-to-pdf final.mdl "ark:gunzip -c ali.N.gz|" "ark:|gzip -c >pdf.N.gz"
"""

from __future__ import annotations

from scripts import common, preparing  # isort: skip  # imported first: it sets TensorFlow's log level

from absl import flags

from input import sources

_ALLOW_PIPES = flags.DEFINE_bool(
    "allow_pipes",
    False,
    "run the commands ('COMMAND |') that tables hold, in a shell: only for tables that you trust",
)
_FROM_AUDIO = flags.DEFINE_bool(
    "from_audio", False, "compute features from wav.scp even where there is a feats.scp"
)
flags.adopt_module_key_flags(preparing)


def main() -> None:
    def open_source(directory: str, extraction: sources.Extraction) -> sources.Source:
        return sources.kaldi_directory(directory, extraction, _ALLOW_PIPES.value, _FROM_AUDIO.value)

    preparing.run(open_source, {"from_audio": _FROM_AUDIO.value}, _ALLOW_PIPES.value)


if __name__ == "__main__":
    common.run(main)
