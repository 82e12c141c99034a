"""eSpeak NG: the same calls give the same bytes, and phones come with their times."""

import sys

import numpy as np
import pytest

from input import synthesis
from input.synthesis import SynthesisError, synthesise

TEXT = "The quick brown fox jumps over the lazy dog."


def test_speech_has_audio_and_timed_phones():
    speech = synthesise(TEXT, "en-us", "f3", rate=160, pitch=60)
    seconds = len(speech.samples) / speech.sample_rate
    starts = [start for start, _ in speech.phones]
    names = [name for _, name in speech.phones]
    assert speech.samples.dtype == np.int16
    assert 2 < seconds < 5
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert starts[-1] < seconds
    assert names[:2] == ["_", "ð"]
    assert names[-1] == "_"
    assert "b" in names
    assert not any(mark in name for name in names for mark in "ˈˌ")


def test_times_are_those_of_the_sounds():
    """An s has most of its power in the treble, an o has none there."""
    speech = synthesise("so so so so", "en-us", "m1", rate=100, pitch=50)
    bounds = [*speech.phones, (len(speech.samples) / speech.sample_rate, "_")]
    treble = {"s": [], "oʊ": []}
    for (start, name), (end, _) in zip(bounds[:-1], bounds[1:], strict=True):
        if name in treble:
            begin, stop = (round(time * speech.sample_rate) for time in (start, end))
            power = np.abs(np.fft.rfft(speech.samples[begin:stop].astype(float))) ** 2
            treble[name].append(power[len(power) // 4 :].sum() / power.sum())
    assert len(treble["s"]) == len(treble["oʊ"]) == 4
    assert min(treble["s"]) > 0.5 > 0.1 > max(treble["oʊ"])


def test_the_same_arguments_give_the_same_bytes_whatever_was_said_before():
    first = synthesise(TEXT, variant="m1")
    with synthesis.Synthesiser() as other:
        other.say("Something else entirely.", "en-gb-scotland", "f2", 300, 90)
        again = synthesise(TEXT, variant="m1")
    np.testing.assert_array_equal(first.samples, again.samples)
    assert first.phones == again.phones


def test_rate_pitch_variant_and_voice_change_the_sound():
    plain = synthesise(TEXT, variant="m1")
    assert len(synthesise(TEXT, variant="m1", rate=120).samples) > 1.2 * len(plain.samples)
    for change in ({"pitch": 80}, {"variant": "f2"}, {"voice": "en-gb-scotland"}):
        other = synthesise(TEXT, **{"variant": "m1", **change})
        assert not np.array_equal(other.samples, plain.samples)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"voice": "klingon-qo"}, "voice .*Received: 'klingon-qo'"),
        ({"voice": ""}, "voice .*Received: ''"),
        ({"variant": "nobody"}, "variant .*Received: 'nobody'"),
        ({"rate": 20}, r"rate \(words per minute\) must lie in \[80, 450\]. Received: 20"),
        ({"pitch": 100}, r"pitch must lie in \[0, 99\]. Received: 100"),
        ({"text": "  "}, "text must have words"),
        ({"text": "nul\0byte"}, "NUL"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(SynthesisError, match=message):
        synthesise(**{"text": TEXT, **arguments})


def test_missing_espeak_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(SynthesisError, match="pip install espeakng-loader"):
        synthesise(TEXT)


def test_broken_library_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "library.so").write_text("not a library")
    monkeypatch.setattr(synthesis, "_paths", lambda: (str(tmp_path / "library.so"), "/nowhere"))
    with pytest.raises(SynthesisError, match=r"library.so: .*pip install --force-reinstall"):
        synthesise(TEXT, variant="")


@pytest.mark.parametrize(
    ("symbol", "name"),
    [("ˈaʊ", "aʊ"), ("ˌoʊ", "oʊ"), ("t", "t"), ("_:", "_"), ("_", "_"), ("", "_"), ("ɔː", "ɔː")],
)
def test_phone_names(symbol, name):
    assert synthesis.phone_name(symbol) == name


def test_ctrl_c_while_a_sentence_is_spoken_is_not_lost():
    """ctypes drops what a callback raises."""

    class Interrupted(synthesis.Synthesiser):
        def _receive(self, *_):
            raise KeyboardInterrupt

    with Interrupted() as synthesiser, pytest.raises(KeyboardInterrupt):
        synthesiser.say("one two", "en-us", "", 175, 50)
