"""The synthetic corpus: speech of many speakers in noise, with a class for every frame.

The corpus is made in two passes, since the classes must be known before the first label is written.
`_plan` speaks every sentence to learn its length and phones. `_write` speaks the sentence again,
adds noise and computes the features. eSpeak NG runs at hundreds of times real time, and says the
same both times. Memory holds one utterance's audio at a time.

The classes are three states of each phone that occurs anywhere in the corpus, sorted by name. A
phone that only a held-out speaker says is a class without training frames, so its frames will be
classified wrongly. The same options and text give the same bytes.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from input import alignment, audio, features, index, shards, speakers, synthesis, text
from input.index import SPLITS, CorpusIndex
from input.speakers import Speaker

# Speakers get no voice variant with one of these words in its name, because it does not sound like
# a usual human voice.
_NOT_HUMAN = ("whisper", "robo", "Robot", "Demonic", "croak")

Progress = Callable[[str, float], None]  # (stage, seconds of speech done since the last call)


@dataclass(frozen=True)
class Options:
    """Options of a corpus. Minutes are minutes of speech, SNR is in dB.

    Raises:
      ValueError: a value is out of range.
    """

    train_minutes: float = 20.0
    validation_minutes: float = 2.0
    test_minutes: float = 2.0
    train_speakers: int = 60
    validation_speakers: int = 10
    test_speakers: int = 20
    voices: tuple[str, ...] = ("en-us",)
    min_snr: float = 0.0
    max_snr: float = 20.0
    max_noise_exponent: float = 2.0
    shard_megabytes: float = 64.0
    seed: int = 0

    def __post_init__(self) -> None:
        for split in SPLITS:
            _check(f"{split}_minutes", self.minutes(split), self.minutes(split) > 0, "positive")
            _check(f"{split}_speakers", self.speakers(split), self.speakers(split) >= 1, ">= 1")
        _check("voices", self.voices, len(self.voices) > 0, "one eSpeak NG voice or more")
        for name, value in (("min_snr", self.min_snr), ("max_snr", self.max_snr)):
            _check(name, value, abs(value) <= 200, "in [-200, 200] dB")
        _check("max_snr", self.max_snr, self.max_snr >= self.min_snr, f">= {self.min_snr} dB")
        exponent = self.max_noise_exponent
        _check("max_noise_exponent", exponent, 0 <= exponent <= 4, "in [0, 4]")
        _check("shard_megabytes", self.shard_megabytes, self.shard_megabytes > 0, "positive")
        _check("seed", self.seed, self.seed >= 0, ">= 0")

    def minutes(self, split: str) -> float:
        return getattr(self, f"{split}_minutes")

    def speakers(self, split: str) -> int:
        return getattr(self, f"{split}_speakers")


class Utterance(NamedTuple):
    """A sentence that a speaker says."""

    id: str
    speaker: Speaker
    text: str
    seconds: float
    phones: frozenset[str]


def prepare(
    directory: str,
    options: Options,
    source: str | None = None,
    progress: Progress = lambda stage, seconds: None,
) -> tuple[CorpusIndex, bool]:
    """Makes a corpus in `directory`, or finds it there already.

    Args:
      directory: directory of the corpus. It appears whole or not at all.
      options: options of the corpus.
      source: text to read aloud; None for `text.default()`.
      progress: called with ("planning" or "writing", seconds of speech) after each utterance.

    Returns:
      The corpus' index, and whether it was there already, made with the same options and text.

    Raises:
      ValueError: `directory` holds something else, the text has no usable sentence, a voice is
        unknown, or a package is missing.
    """
    sentences = text.sentences(text.default() if source is None else source)
    if not sentences:
        raise ValueError(
            f"the text has no sentence of {text.MIN_WORDS} to {text.MAX_WORDS} words made of"
            " English letters. Give plain English prose"
        )
    digest = hashlib.sha256("\n".join(sentences).encode()).hexdigest()
    made_with = {**asdict(options), "voices": list(options.voices), "sentences_sha256": digest}
    if shards.exists(directory, made_with):
        return index.read(directory), True
    plan = _plan(options, sentences, progress)
    phones = sorted(frozenset().union(*(u.phones for split in plan.values() for u in split)))
    with shards.CorpusWriter(directory, made_with, alignment.class_names(phones)) as writer:
        _write(writer, plan, phones, options, progress)
    return index.read(directory), False


def _plan(options: Options, sentences: list[str], progress: Progress) -> dict[str, list[Utterance]]:
    """Returns the utterances of each split.

    The sentences are taken in a random order; none is repeated until all have been said.
    """
    cast = speakers.draw(
        {split: options.speakers(split) for split in SPLITS},
        list(options.voices),
        human_variants(),
        _generator(options.seed, 0),
    )
    order = _generator(options.seed, 1).permutation(len(sentences))
    texts = (sentences[number] for number in _cycle(order))
    return {
        split: list(_plan_split(split, cast[split], 60 * options.minutes(split), texts, progress))
        for split in SPLITS
    }


def _plan_split(
    split: str, cast: list[Speaker], seconds: float, texts: Iterator[str], progress: Progress
) -> Iterator[Utterance]:
    """Yields the utterances of a split: the speakers in turn, for equal shares of `seconds`.

    Each speaker says at least one sentence.
    """
    done, count = 0.0, 0
    for number, speaker in enumerate(cast):
        share, before = seconds * (number + 1) / len(cast), done
        with synthesis.Synthesiser() as synthesiser:
            while done < share or done == before:
                sentence = next(texts)
                speech = synthesiser.say(sentence, *speaker[1:])
                length = len(speech.samples) / speech.sample_rate
                names = frozenset(name for _, name in speech.phones)
                yield Utterance(f"{speaker.name}-{count:06d}", speaker, sentence, length, names)
                progress("planning", length)
                done += length
                count += 1


def _write(
    writer: shards.CorpusWriter,
    plan: dict[str, list[Utterance]],
    phones: list[str],
    options: Options,
    progress: Progress,
) -> None:
    inventory = {phone: number for number, phone in enumerate(phones)}
    add_deltas = tf.function(
        features.add_deltas,
        input_signature=[tf.TensorSpec([None, features.NUM_MEL], tf.float32)],
    )
    frame_bytes = 4 * (features.FEATURE_DIM + 1)
    for split_number, (split, utterances) in enumerate(plan.items()):
        megabytes = sum(u.seconds for u in utterances) / features.FRAME_SHIFT * frame_bytes / 1e6
        writer.start_split(split, -(-megabytes // options.shard_megabytes), len(utterances))
        for number, (utterance, speech) in enumerate(_speak(utterances)):
            generator = _generator(options.seed, 2, split_number, number)
            noisy = _add_noise(speech, options, generator)
            frames = add_deltas(features.log_mel(noisy)).numpy()
            labels = alignment.frame_labels(
                speech.phones, len(noisy) / features.SAMPLE_RATE, len(frames), inventory
            )
            writer.add(frames, labels, utterance.id, utterance.speaker.name)
            progress("writing", utterance.seconds)


def _speak(utterances: list[Utterance]) -> Iterator[tuple[Utterance, synthesis.Speech]]:
    """Speaks the utterances as `_plan_split` did, with a new synthesiser for each speaker."""
    speaker, synthesiser = None, None
    for utterance in utterances:
        if utterance.speaker != speaker:
            if synthesiser is not None:
                synthesiser.close()
            speaker, synthesiser = utterance.speaker, synthesis.Synthesiser()
        yield utterance, synthesiser.say(utterance.text, *speaker[1:])
    if synthesiser is not None:
        synthesiser.close()


def _add_noise(
    speech: synthesis.Speech, options: Options, generator: np.random.Generator
) -> np.ndarray:
    """Returns the speech at 16 kHz, with noise of a random colour at a random SNR."""
    samples = audio.resample(speech.samples, speech.sample_rate, features.SAMPLE_RATE)
    exponent = generator.uniform(0, options.max_noise_exponent)
    noise = audio.coloured_noise(len(samples), exponent, generator)
    return audio.add_noise(samples, noise, generator.uniform(options.min_snr, options.max_snr))


def human_variants() -> list[str]:
    """Returns the voice variants of eSpeak NG that speakers are drawn from."""
    return [name for name in synthesis.variants() if not any(word in name for word in _NOT_HUMAN)]


def _cycle(order: np.ndarray) -> Iterator[int]:
    while True:
        yield from order


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _check(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise ValueError(f"{name} must be {rule}. Received: {value!r}")
