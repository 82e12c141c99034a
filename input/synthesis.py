"""English speech with phone times from eSpeak NG, called through ctypes.

eSpeak NG is GPL-3, so it is an optional extra (`pip install espeakng-loader`) that is loaded at
run time and never vendored. Its state is global to the loaded library and outlives a call: the
phase of the voicing and of the noise generator carries over, so a sentence sounds different after
another one. So every `Synthesiser` loads a private copy of the library. Then its speech depends
only on the calls made to it, not on anything else in the process.

Source: `speak_lib.h` of eSpeak NG 1.52 (https://github.com/espeak-ng/espeak-ng).
"""

import _ctypes
import ctypes
import functools
import os
import shutil
import sys
import tempfile
from typing import NamedTuple

import numpy as np

SILENCE = "_"
# In words per minute: eSpeak's constants espeakRATE_MINIMUM and espeakRATE_MAXIMUM.
MIN_RATE, MAX_RATE = 80, 450

# AUDIO_OUTPUT_SYNCHRONOUS: espeak_Synth gives all audio to the callback before it returns.
_SYNCHRONOUS = 2
# espeakINITIALIZE_PHONEME_EVENTS and espeakINITIALIZE_PHONEME_IPA: there are events for phones, and
# they name the phones in IPA.
_PHONEME_EVENTS = 0x0003
# espeakINITIALIZE_DONT_EXIT: if the data cannot be read, espeak_Initialize returns a code. Without
# this flag it would end the process.
_DONT_EXIT = 0x8000
_RATE, _PITCH = 1, 3  # the numbers of eSpeak's parameters espeakRATE and espeakPITCH
_UTF8 = 1  # espeakCHARS_UTF8: the text is given in UTF-8
_LIST_TERMINATED, _PHONEME = 0, 7  # types of events, from espeak_EVENT_TYPE
_MARKS = "ˈˌ',%="


class SynthesisError(ValueError):
    """An error of speech synthesis: eSpeak NG is missing, or refused an argument or a text."""


class Speech(NamedTuple):
    """An utterance that the synthesiser has spoken. A phone lasts until the next, or the end."""

    samples: np.ndarray  # int16 [num_samples], mono
    sample_rate: int  # Hz
    phones: list[tuple[float, str]]  # (start in seconds, name), in the order of time


class _Id(ctypes.Union):
    _fields_ = [
        ("number", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("string", ctypes.c_char * 8),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    ]


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class Synthesiser:
    """A private copy of eSpeak NG, whose state depends only on the calls made to it.

    Use it as a context manager, or call `close`. Two new synthesisers that are given the same
    sequence of calls return the same bytes, whatever else the process has synthesised.

    Raises:
      SynthesisError: espeakng-loader is not installed, or its library or data cannot be loaded.
    """

    def __init__(self) -> None:
        library, data = _paths()
        self._library = _load_private_copy(library)
        self._audio: list[bytes] = []
        self._phones: list[tuple[int, str]] = []
        rate = self._library.espeak_Initialize(
            _SYNCHRONOUS, 0, os.fsencode(data), _PHONEME_EVENTS | _DONT_EXIT
        )
        if rate <= 0:
            raise SynthesisError(
                f"eSpeak NG cannot read its voices at {data} (code {rate}). Reinstall them with:"
                " pip install --force-reinstall espeakng-loader"
            )
        self.sample_rate: int = rate
        # The attribute keeps the callback alive, because the library has only a pointer to it.
        self._callback = _Callback(self._receive)
        self._library.espeak_SetSynthCallback(self._callback)

    def __enter__(self) -> "Synthesiser":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the library. The object cannot speak after that."""
        if self._library is not None:
            self._library.espeak_Terminate()
            _ctypes.dlclose(self._library._handle)
            self._library = None

    def say(self, text: str, voice: str, variant: str, rate: int, pitch: int) -> Speech:
        """Speaks `text`.

        Args:
          text: plain text, without markup.
          voice: an eSpeak NG language or voice name such as "en-us".
          variant: a voice variant, one of `variants()`, or "" for none.
          rate: speed in words per minute, 80 to 450.
          pitch: base pitch, 0 to 99; 50 is the variant's own.

        Returns:
          The audio and its phones. Phones are named in the International Phonetic Alphabet,
          without stress marks; every pause is `SILENCE`, and the first phone starts at 0 seconds.

        Raises:
          SynthesisError: an argument is out of range, or eSpeak NG returns an error.
        """
        self._set_voice(voice, variant, rate, pitch)
        if not text.strip() or "\0" in text:
            raise SynthesisError(f"text must have words and no NUL characters. Received: {text!r}")
        self._audio.clear()
        self._phones.clear()
        encoded = text.encode()
        # If a callback raises an error, ctypes only passes it to `sys.unraisablehook`. So the hook
        # collects the errors, and they are raised after the call. Errors of signal handlers mostly
        # come this way, too, because during the call Python runs handlers only in callbacks.
        raised: list[BaseException | None] = []
        former, sys.unraisablehook = sys.unraisablehook, lambda lost: raised.append(lost.exc_value)
        try:
            code = self._library.espeak_Synth(
                encoded, ctypes.c_size_t(len(encoded) + 1), 0, 1, 0, _UTF8, None, None
            )
        finally:
            sys.unraisablehook = former
        for error in filter(None, raised):
            raise error
        if code:
            raise SynthesisError(f"eSpeak NG failed with code {code} on text {text!r}")
        samples = np.frombuffer(b"".join(self._audio), np.int16)
        return Speech(samples, self.sample_rate, self._timed_phones(len(samples)))

    def _set_voice(self, voice: str, variant: str, rate: int, pitch: int) -> None:
        if variant and variant not in variants():  # eSpeak NG would ignore an unknown variant
            raise SynthesisError(
                f"variant must be one of eSpeak NG's voice variants, such as 'f3' or 'm1'."
                f" Received: {variant!r}"
            )
        for name, value, low, high in (
            ("rate (words per minute)", rate, MIN_RATE, MAX_RATE),
            ("pitch", pitch, 0, 99),
        ):
            if not low <= value <= high:
                raise SynthesisError(f"{name} must lie in [{low}, {high}]. Received: {value!r}")
        name = f"{voice}+{variant}" if variant else voice
        if not voice or self._library.espeak_SetVoiceByName(name.encode()):
            raise SynthesisError(
                f"voice must be an eSpeak NG voice such as 'en-us', 'en-gb-scotland' or"
                f" 'en-gb-x-rp'. Received: {voice!r}"
            )
        self._library.espeak_SetParameter(_RATE, int(rate), 0)
        self._library.espeak_SetParameter(_PITCH, int(pitch), 0)

    def _receive(self, wave: object, num_samples: int, events: object) -> int:
        if wave and num_samples > 0:
            self._audio.append(ctypes.string_at(wave, 2 * num_samples))
        index = 0
        while events[index].type != _LIST_TERMINATED:
            event = events[index]
            if event.type == _PHONEME:
                self._phones.append((event.sample, event.id.string.decode("utf-8", "ignore")))
            index += 1
        return 0

    def _timed_phones(self, num_samples: int) -> list[tuple[float, str]]:
        phones = [(0, SILENCE)]
        for sample, symbol in self._phones:
            name = phone_name(symbol)
            if sample >= num_samples:
                break
            # If two phones begin at the same sample, the earlier one has no length. It is dropped.
            if sample == phones[-1][0]:
                phones.pop()
            if not phones or name != SILENCE or phones[-1][1] != SILENCE:
                phones.append((sample, name))
        return [(sample / self.sample_rate, name) for sample, name in phones]


def synthesise(
    text: str, voice: str = "en-us", variant: str = "", rate: int = 175, pitch: int = 50
) -> Speech:
    """Speaks on a new synthesiser (`Synthesiser.say`): equal arguments give equal bytes."""
    with Synthesiser() as synthesiser:
        return synthesiser.say(text, voice, variant, rate, pitch)


def phone_name(symbol: str) -> str:
    """Returns eSpeak's phone name without stress marks; pauses ("_:", "_", "") are `SILENCE`."""
    name = symbol.strip(_MARKS)
    return name if name.strip("_:!|") else SILENCE


@functools.cache
def variants() -> tuple[str, ...]:
    """Returns the names of the installed voice variants, sorted."""
    return tuple(sorted(os.listdir(os.path.join(_paths()[1], "voices", "!v"))))


def _paths() -> tuple[str, str]:
    try:
        # The import is here because this package is optional: it contains eSpeak NG, which has the
        # licence GPL-3.
        import espeakng_loader
    except ImportError as error:
        raise SynthesisError(
            "speech synthesis needs eSpeak NG, which is not installed."
            " Install it with: pip install espeakng-loader"
        ) from error
    return espeakng_loader.get_library_path(), espeakng_loader.get_data_path()


def _load_private_copy(library: str) -> ctypes.CDLL:
    """Loads `library` from a temporary copy, since a file that is loaded twice would be shared."""
    with tempfile.TemporaryDirectory(prefix="espeak-") as directory:
        try:
            return ctypes.CDLL(shutil.copy(library, directory))
        except OSError as error:
            raise SynthesisError(
                f"eSpeak NG cannot be loaded from {library}: {error}. Reinstall it with:"
                " pip install --force-reinstall espeakng-loader"
            ) from error
