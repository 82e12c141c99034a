"""Progress bars, and the last line of output, of the programs that make corpora or read speech."""

from __future__ import annotations

from collections.abc import Mapping

from tqdm import tqdm

from input import features
from input.index import CorpusIndex
from input.preparation import SKIP


class Bars:
    """A progress bar for each stage, in utterances. Call it after each utterance."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm | None = None

    def __call__(self, stage: str, total: int | None) -> None:
        if self._bar is None or self._stage != stage:
            self.close()
            self._stage = stage
            self._bar = tqdm(
                desc=stage,
                total=total,
                unit=" utterances",
                disable=None,  # with None, tqdm shows the bar on terminals only
            )
        self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def summary(made: CorpusIndex, reused: bool, seconds: float) -> str:
    """Returns one line about the contents of the corpus."""
    splits = made.splits.values()
    frames = sum(int(split.frames.sum()) for split in splits)
    return (
        f"{'reused' if reused else 'made'} {made.directory}:"
        f" {frames * features.FRAME_SHIFT / 60:.1f} minutes,"
        f" {sum(map(len, splits))} utterances,"
        f" {len({name for split in splits for name in split.speaker})} speakers,"
        f" {made.num_classes} classes,"
        f" {sum(len(split.shards) for split in splits)} shards,"
        f" {seconds:.1f} seconds"
    )


def skipped(counts: Mapping[str, int]) -> str:
    """Returns the end of a program's last line: how many utterances it left out, and why."""
    if not counts:
        return ""
    return "; skipped " + ", ".join(
        f"{count} with {SKIP[kind]}" if kind != "audio" else f"{count} of {SKIP[kind]}"
        for kind, count in counts.items()
    )
