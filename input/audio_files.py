"""Reads recordings (FLAC and WAV files, and entries of a `wav.scp`) as samples at one rate.

Two decoders give the same samples. soundfile (libsndfile) is the default: it works with every
version of TensorFlow, reads samples of any width and streamed headers, notices damage, and is ten
times as fast. tensorflow-io decodes plain files of 16 bits within the graph; it loads on TensorFlow
up to 2.17. With both, decoding runs in tf.data, ahead of the consumer of the samples.
"""

import hashlib
import io
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from input import audio, kaldi_tables, packages
from input.kaldi_tables import Location
from input.records import CorpusError
from tfpara.files import regular

DECODERS = ("soundfile", "tensorflow-io")
_SCALE = 32768.0  # full scale of Kaldi's samples, which have the range of 16-bit integers
# The loudest sample that a file of floats may have, as a multiple of full scale. If samples were
# much louder, their energy in float32 would be Inf.
_LOUDEST = 1e9
_RATES = (1000, 1_000_000)  # Hz; a header with a rate outside this range counts as damaged
_BLOCK = 1 << 16  # number of samples that are decoded at once
# No file has more samples per byte than this, so a header that states more is damaged. Files in
# FLAC have the most samples per byte: a frame of FLAC has at least 10 bytes and at most 65,535
# samples.
_PER_BYTE = 6554
# A length in bytes. When a WAV file is streamed, its header is written before the file's length is
# known. Such a header states this length or more. So a stated length of this size is not compared
# with the length of the file.
_UNKNOWN = 0x7FFFF000


class AudioError(CorpusError):
    """An error of a recording, which cannot be read, or is at another sample rate."""


@dataclass(frozen=True)
class Options:
    """Options for reading recordings.

    Raises:
      ValueError: a value is out of range, or the decoder's package does not load.
    """

    sample_rate: int = 16000  # rate of the result, in Hz
    resample: bool = False  # whether files at another rate are resampled; if not, they are refused
    decoder: str = "soundfile"
    parallel: int = 2  # number of files that are decoded at once
    # The channel that is read if a `Location` names no channel. If this option is also None, the
    # recording must have a single channel.
    channel: int | None = None

    def __post_init__(self) -> None:
        if self.channel is not None and self.channel < 0:
            raise ValueError(f"channel must be 0 (left) or more. Received: {self.channel}")
        if not _RATES[0] <= self.sample_rate <= _RATES[1] or self.parallel < 1:
            raise ValueError(
                f"sample_rate must lie in [{_RATES[0]}, {_RATES[1]}] Hz and parallel be at least 1."
                " Received:"
                f" sample_rate={self.sample_rate}, parallel={self.parallel}"
            )
        if self.decoder not in DECODERS:
            raise ValueError(
                f"decoder must be one of {', '.join(DECODERS)}. Received: {self.decoder!r}"
            )
        if self.decoder == "tensorflow-io":
            _tfio()
        else:
            _soundfile()


def decoded(
    recordings: Sequence[Location], options: Options
) -> Iterator[tuple[int, np.ndarray | AudioError]]:
    """Yields the samples of each recording in order, or its error.

    Yields:
      The recording's number with its samples, float32 [num_samples] on the scale of 16-bit integers
      at `options.sample_rate`; or its number with an `AudioError` that names the file.
    """
    first = 0
    # An error ends the iteration over a dataset. So after each error, a new dataset begins with the
    # next recording.
    while first < len(recordings):
        number = first
        try:
            for samples in dataset(recordings[first:], options):
                yield number, samples.numpy()
                number += 1
            return
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            yield number, _explain(recordings[number], options, error)
            first = number + 1


def dataset(recordings: Sequence[Location], options: Options) -> tf.data.Dataset:
    """Returns the samples as a tf.data.Dataset of float32 [num_samples].

    The dataset fails at the first recording that cannot be read.
    """
    if options.decoder == "tensorflow-io":
        return _tfio_dataset(recordings, options)

    def load(number: int) -> np.ndarray:
        return read(recordings[int(number)], options)

    def decode(number: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(load, [number], tf.float32), [None])

    numbers = tf.data.Dataset.range(len(recordings))
    return numbers.map(decode, num_parallel_calls=options.parallel).prefetch(1)


def read(recording: Location, options: Options) -> np.ndarray:
    """Returns the samples of one recording; soundfile decodes files, kaldiio entries of archives.

    Raises:
      AudioError: the recording cannot be read, is at another rate, lacks the requested channel, or
        has several channels while none is requested.
    """
    if recording.channel is None:
        recording = recording._replace(channel=options.channel)
    if recording.offset:
        samples, rate = _read_in_archive(recording)
    elif recording.pipe:
        data = kaldi_tables.run_pipe(recording)
        samples, rate = _read_whole(io.BytesIO(data), len(data), recording)
    else:
        try:
            with open(recording.path, "rb", opener=regular) as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(0)
                samples, rate = _read_whole(file, size, recording)
        except OSError as error:
            raise _error(recording, f"cannot be read ({error.strerror})") from error
    return _finish(samples, rate, recording, options)


def _read_whole(file: BinaryIO, size: int, recording: Location) -> tuple[np.ndarray, int]:
    """Returns samples, float32 [num_samples] in [-1, 1), and the sample rate in Hz."""
    soundfile = _soundfile()
    if size == 0:
        raise _error(recording, "is empty")
    _check_length(file, size, recording)
    try:
        with soundfile.SoundFile(file) as sound:
            channel = _channel(sound.channels, recording)
            _check_rate(sound.samplerate, recording)
            # The file is read in blocks. A single read would allocate memory for as many samples as
            # the header states, and a damaged header may state any number.
            parts = []
            while len(part := sound.read(_BLOCK, dtype="float32", always_2d=True)[:, channel]):
                parts.append(part)
            return np.concatenate(parts or [np.zeros(0, np.float32)]), sound.samplerate
    except soundfile.LibsndfileError as error:
        raise _error(
            recording, f"is damaged, or no audio that libsndfile reads ({error.error_string})"
        ) from error


def _check_length(file: BinaryIO, size: int, recording: Location) -> bool:
    """Returns whether a WAV file starts here; `size` is the number of bytes that are left.

    Raises:
      AudioError: the length in the WAV header is more than `size`.
    """
    start = file.tell()
    head = file.read(8)
    file.seek(start)
    if head[:4] != b"RIFF" or len(head) < 8:
        return False
    length = struct.unpack("<I", head[4:])[0] + 8
    # The two lengths are compared here, because libsndfile and kaldiio do not report that a file is
    # cut short.
    if 8 < length < _UNKNOWN and length > size:
        raise _error(recording, f"is cut short: {size} of {length} bytes")
    return True


def _read_in_archive(recording: Location) -> tuple[np.ndarray, int]:
    """Reads a WAV file within a Kaldi archive, as `wav-copy` writes it."""
    wavio = packages.load("kaldiio.wavio")
    try:
        with open(recording.path, "rb", opener=regular) as file:
            left = file.seek(0, io.SEEK_END) - recording.offset
            file.seek(recording.offset)
            if not _check_length(file, left, recording):
                raise _error(recording, "is no WAV file there")
            rate, samples = wavio.read_wav(file)
    except OSError as error:
        raise _error(recording, f"cannot be read ({error.strerror})") from error
    except AudioError:
        raise
    except Exception as error:  # kaldiio does not document its errors for damaged files
        raise _error(recording, f"is damaged ({error})") from error
    if samples.dtype != np.int16:
        raise _error(recording, "has samples of 8 bits; Kaldi takes 16")
    _check_rate(rate, recording)
    samples = samples.reshape(len(samples), -1)
    chosen = samples[:, _channel(samples.shape[1], recording)]
    return (chosen / _SCALE).astype(np.float32), rate


def _channel(channels: int, recording: Location) -> int:
    """Returns the number of the channel to read, of a recording with `channels` channels."""
    if recording.channel is None and channels != 1:
        raise _error(
            recording,
            f"has {channels} channels, where one is expected. Name one with --channel (0 is the"
            " left), or in the fifth column of segments",
        )
    chosen = recording.channel or 0
    if chosen >= channels:
        raise _error(recording, f"has {channels} channel(s), numbered from 0, and none {chosen}")
    return chosen


def _check_rate(rate: int, recording: Location) -> None:
    if not _RATES[0] <= rate <= _RATES[1]:
        raise _error(recording, f"is at {rate} Hz, which is no rate of speech; it is damaged")


def _finish(samples: np.ndarray, rate: int, recording: Location, options: Options) -> np.ndarray:
    if len(samples) and not np.abs(samples).max() < _LOUDEST:  # also true if a sample is NaN
        raise _error(
            recording, f"has samples that are NaN, Inf or beyond {_LOUDEST:g} times the full scale"
        )
    scaled = samples * np.float32(_SCALE)
    if rate == options.sample_rate:
        return scaled
    if not options.resample:
        raise _error(
            recording,
            f"is at {rate} Hz, where {options.sample_rate} Hz are asked for. Convert it with"
            " --resample, or change --sample_rate",
        )
    return audio.resample(scaled, rate, options.sample_rate)


def _tfio_dataset(recordings: Sequence[Location], options: Options) -> tf.data.Dataset:
    tfio = _tfio()
    paths = []
    channels = [options.channel if r.channel is None else r.channel for r in recordings]
    recordings = [r._replace(channel=c) for r, c in zip(recordings, channels, strict=True)]
    for recording in recordings:
        if recording.pipe or recording.offset:
            raise _error(recording, "is no file of its own; read it with --decoder=soundfile")
        # TensorFlow would wait without an end for the data of a FIFO. So a path that is no
        # regular file is replaced by "". Reading "" fails, and `_explain` then finds the reason.
        paths.append(recording.path if os.path.isfile(recording.path) else "")

    def check(number: int) -> bytes:
        path = paths[int(number)]
        size = os.path.getsize(path)
        # tensorflow-io allocates memory for as many samples as the header states. So a header that
        # states more samples than the file can hold is refused.
        if _soundfile().info(path).frames > _PER_BYTE * size:
            raise _error(
                recordings[int(number)], "is damaged: it has fewer bytes than samples take"
            )
        return path.encode()

    def finish(samples: np.ndarray, number: int) -> np.ndarray:
        info = _soundfile().info(paths[int(number)])
        if len(samples) != info.frames or not _as_encoded(samples, paths[int(number)]):
            raise _error(recordings[int(number)], "is damaged")
        channel = _channel(info.channels, recordings[int(number)])
        _check_rate(info.samplerate, recordings[int(number)])
        shaped = (samples[:, channel] / _SCALE).astype(np.float32)
        return _finish(shaped, info.samplerate, recordings[int(number)], options)

    def decode(number: tf.Tensor) -> tf.Tensor:
        data = tf.io.read_file(tf.ensure_shape(tf.numpy_function(check, [number], tf.string), []))
        is_flac = tf.equal(tf.strings.substr(data, 0, 4), "fLaC")
        samples = tf.cond(
            is_flac,
            lambda: tfio.audio.decode_flac(data, dtype=tf.int16),
            lambda: tfio.audio.decode_wav(data, dtype=tf.int16),
        )
        return tf.ensure_shape(tf.numpy_function(finish, [samples, number], tf.float32), [None])

    numbers = tf.data.Dataset.range(len(paths))
    return numbers.map(decode, num_parallel_calls=options.parallel).prefetch(1)


def _as_encoded(samples: np.ndarray, path: str) -> bool:
    """Returns whether the samples have the MD5 sum in the FLAC file's header.

    For a damaged file tensorflow-io can return zeros without an error. Files of other formats have
    no such sum, and count as undamaged.
    """
    with open(path, "rb") as file:
        head = file.read(42)
    # In a FLAC file, the sum is in the bytes 26 to 41. They are 0 if the encoder has left it out.
    if head[:4] != b"fLaC" or not any(head[26:]):
        return True
    return hashlib.md5(samples.astype("<i2").tobytes()).digest() == head[26:]


def _explain(recording: Location, options: Options, error: Exception) -> AudioError:
    """Returns the error of a recording that could not be decoded in the graph."""
    try:
        read(recording, options)
    except AudioError as found:
        return found
    except CorpusError as found:  # the command of a pipe failed
        return AudioError(str(found))
    return _error(
        recording, f"cannot be decoded by {options.decoder} ({type(error).__name__}). Try soundfile"
    )


def _error(recording: Location, what: str) -> AudioError:
    name = recording.path if recording.where == recording.path else str(recording.where)
    file = "" if name == recording.path else f" ({recording.path})"
    return AudioError(f"{name}: the recording{file} {what}")


def _soundfile() -> Any:
    return packages.load("soundfile")


def _tfio() -> Any:
    try:
        import tensorflow_io
    except Exception as error:  # a wheel that was built for another TensorFlow may raise any error
        raise ValueError(
            f"tensorflow-io does not load on TensorFlow {tf.__version__}. Take --decoder=soundfile"
        ) from error
    return tensorflow_io
