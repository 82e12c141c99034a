"""Normalises the features of a source's utterances, and appends deltas."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from input import features
from input.labels import Progress
from input.parts import Part
from input.records import CorpusError
from input.sources import Problem

CMVN = ("none", "utterance", "speaker", "given")


class Normaliser:
    """Takes a mean off the features of utterances, and appends deltas.

    Args:
      cmvn: the mean that is subtracted: one of `CMVN`.
      norm_vars: whether cmvn divides by the standard deviation too.
      deltas: number of orders of deltas that are appended.
      progress: called with (stage, number of utterances) after each utterance that is read.
    """

    def __init__(self, cmvn: str, norm_vars: bool, deltas: int, progress: Progress) -> None:
        self._cmvn = cmvn
        self._norm_vars = norm_vars
        self._deltas = deltas
        self._progress = progress
        self._dim: int | None = None
        self._apply_cmvn = tf.function(features.apply_cmvn, reduce_retracing=True)
        self._add_deltas = tf.function(features.add_deltas, reduce_retracing=True)

    def of(self, part: Part, name: str) -> Callable[[str, np.ndarray], np.ndarray]:
        """Returns a function from an utterance's id and features to its normalised features.

        If statistics of speakers are needed, `of` itself reads all utterances of the part's
        speakers first.

        Raises:
          CorpusError: features are of another width than those before them, or there are no
            statistics for them. The returned function raises it, too.
        """
        stats = self._stats(part, name)

        def normalised(utterance: str, frames: np.ndarray) -> np.ndarray:
            return self._transform(
                frames, stats(utterance, part.source.speakers[utterance], frames)
            )

        return normalised

    def check_dim(self, utterance: str, frames: np.ndarray) -> None:
        """Raises CorpusError if features are of another width than those before them."""
        if self._dim is None:
            self._dim = frames.shape[1]
        if frames.shape[1] != self._dim:
            raise CorpusError(
                f"utterance {utterance}: its frames are {frames.shape[1]} wide, those before it"
                f" {self._dim}. All data must have the same features"
            )

    def _stats(self, part: Part, name: str) -> Callable[[str, str, np.ndarray], Any]:
        """Returns a function of utterance, speaker and frames.

        It returns the statistics for `apply_cmvn`, or None if no mean is subtracted.
        """
        cmvn = self._cmvn
        if cmvn == "speaker":
            sums = self._speaker_sums(part, name)
            return lambda utterance, speaker, frames: sums[speaker]
        if cmvn == "given":
            return lambda utterance, speaker, frames: self._checked(part, utterance, frames)
        if cmvn == "utterance":
            return lambda utterance, speaker, frames: features.cmvn_stats(frames)
        return lambda utterance, speaker, frames: None

    def _checked(self, part: Part, utterance: str, frames: np.ndarray) -> np.ndarray:
        if part.stats is None:
            raise ValueError("cmvn 'given' needs the statistics of every source")
        stats = part.stats(utterance, part.source.speakers[utterance])
        if stats.shape[1] != frames.shape[1] + 1:
            raise CorpusError(
                f"utterance {utterance}: its frames are {frames.shape[1]} wide, its statistics of"
                f" cmvn.scp {stats.shape[1] - 1}"
            )
        return stats

    def _speaker_sums(self, part: Part, name: str) -> dict[str, np.ndarray]:
        """Returns the statistics of each speaker of the part.

        As in Kaldi, all of a speaker's utterances in the source count, with labels or without. An
        utterance without usable features is left out here. If it has labels, `preparation` refuses
        it later.
        """
        speakers = part.source.speakers
        mine = {speakers[utterance] for utterance in part.utterances}
        spoken = [utterance for utterance, speaker in speakers.items() if speaker in mine]
        sums: dict[str, np.ndarray] = {}
        for utterance, frames in part.source.read(spoken):
            self._progress(f"statistics of {name}", len(spoken))
            if not isinstance(frames, Problem) and len(frames):
                self.check_dim(utterance, frames)
                speaker = speakers[utterance]
                sums[speaker] = sums.get(speaker, 0.0) + features.cmvn_stats(frames).numpy()
        return sums

    def _transform(self, frames: np.ndarray, stats: Any) -> np.ndarray:
        if stats is not None:
            frames = self._apply_cmvn(frames, stats, self._norm_vars).numpy()
        if self._deltas:
            frames = self._add_deltas(frames, self._deltas).numpy()
        return frames
