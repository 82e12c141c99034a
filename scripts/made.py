"""The summary that the preparing programs print of their corpus."""

from input import features
from input.index import CorpusIndex


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
