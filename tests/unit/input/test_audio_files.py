"""Recordings of many kinds, good and bad, through both decoders."""

import importlib.util
import io
import os

import kaldiio
import numpy as np
import pytest
import soundfile
import tensorflow as tf

from input import audio_files, kaldi_tables
from input.audio_files import AudioError, Options

HAS_TFIO = importlib.util.find_spec("tensorflow_io") is not None
DECODERS = [
    "soundfile",
    pytest.param(
        "tensorflow-io", marks=pytest.mark.skipif(not HAS_TFIO, reason="not on this TensorFlow")
    ),
]
SAMPLES = np.random.default_rng(0).integers(-20000, 20000, 4000).astype(np.int16)


def at(text, allow_pipes=False):
    return kaldi_tables.locate(str(text), "wav.scp, line 1, rec", allow_pipes)


def tone(rate, seconds=1.0):
    return (8000 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)).astype(np.int16)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_samples_are_those_that_were_written(tmp_path, suffix, decoder):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, SAMPLES, 16000)
    (samples,) = audio_files.dataset([at(path)], Options(decoder=decoder))
    assert samples.dtype == tf.float32
    np.testing.assert_array_equal(samples, SAMPLES)


@pytest.mark.parametrize(("subtype", "atol"), [("PCM_24", 0), ("FLOAT", 0), ("ULAW", 700)])
def test_other_widths_are_on_the_scale_of_16_bits(tmp_path, subtype, atol):
    soundfile.write(tmp_path / "a.wav", SAMPLES / 32768, 16000, subtype=subtype)
    samples = audio_files.read(at(tmp_path / "a.wav"), Options())
    np.testing.assert_allclose(samples, SAMPLES, atol=atol)


@pytest.mark.parametrize("decoder", DECODERS)
def test_another_rate_is_refused_or_converted(tmp_path, decoder):
    path = tmp_path / "a.flac"
    soundfile.write(path, tone(8000), 8000)
    ((_, error),) = audio_files.decoded([at(path)], Options(decoder=decoder))
    assert isinstance(error, AudioError)
    for word in (str(path), "8000 Hz", "16000 Hz", "--resample"):
        assert word in str(error)
    options = Options(resample=True, decoder=decoder)
    ((_, samples),) = audio_files.decoded([at(path)], options)
    assert isinstance(samples, np.ndarray)
    assert len(samples) == 16000
    middle = slice(2000, 14000)  # the ends have the filter's transients
    np.testing.assert_allclose(samples[middle], tone(16000)[middle], atol=80)


def damaged_files(directory):
    """Files that cannot be read, and what is said of each."""
    good = io.BytesIO()
    soundfile.write(good, SAMPLES, 16000, format="FLAC")
    flac = good.getvalue()
    good = io.BytesIO()
    soundfile.write(good, SAMPLES, 16000, format="WAV")
    wav = good.getvalue()
    flipped = bytearray(flac)
    flipped[len(flac) // 2] ^= 0xFF
    endless = flac[:21] + b"\xff" * 5 + flac[26:]  # 2^36 - 1 samples, says the header
    noise = np.random.default_rng(0).bytes(500)
    contents = {
        "cut.flac": (flac[: len(flac) // 2], "is damaged"),
        "flipped.flac": (bytes(flipped), "is damaged"),
        "endless.flac": (endless, "is damaged"),
        "cut.wav": (wav[:3000], f"is cut short: 3000 of {len(wav)} bytes"),
        "noise.flac": (noise, "is damaged, or no audio"),
        "noise.wav": (noise, "is damaged, or no audio"),
        "empty.wav": (b"", "is empty"),
    }
    soundfile.write(directory / "stereo.wav", np.stack([SAMPLES, SAMPLES], 1), 16000)
    for name, (content, _) in contents.items():
        (directory / name).write_bytes(content)
    said = {name: message for name, (_, message) in contents.items()}
    os.mkfifo(directory / "pipe.wav")  # which has no writer, so whoever opened it would wait
    said |= {"stereo.wav": "has 2 channels", "missing.wav": "cannot be read"}
    return said | {"pipe.wav": "cannot be read (it is a FIFO or a device"}


@pytest.mark.parametrize("decoder", DECODERS)
def test_bad_files_are_named_and_the_others_still_read(tmp_path, decoder):
    said = damaged_files(tmp_path)
    soundfile.write(tmp_path / "good.flac", SAMPLES, 16000)
    paths = [path for name in said for path in (tmp_path / "good.flac", tmp_path / name)]
    results = audio_files.decoded([at(path) for path in paths], Options(decoder=decoder))
    for (number, result), path in zip(results, paths, strict=True):
        assert paths[number] == path
        if path.name == "good.flac":
            assert isinstance(result, np.ndarray)
            np.testing.assert_array_equal(result, SAMPLES)
        else:
            assert isinstance(result, AudioError)
            assert f"wav.scp, line 1, rec: the recording ({path}) {said[path.name]}" in str(result)


@pytest.mark.quick
def test_a_wav_with_a_streams_header(tmp_path):
    stream = io.BytesIO()
    soundfile.write(stream, SAMPLES, 16000, format="WAV")
    content = bytearray(stream.getvalue())
    content[4:8] = content[40:44] = b"\xff" * 4  # sox and flac write it so to a pipe
    (tmp_path / "a.wav").write_bytes(content)
    np.testing.assert_array_equal(audio_files.read(at(tmp_path / "a.wav"), Options()), SAMPLES)
    piped = at(f"cat {tmp_path}/a.wav |", True)
    np.testing.assert_array_equal(audio_files.read(piped, Options()), SAMPLES)


@pytest.mark.quick
def test_a_command_that_fails(tmp_path):
    ((_, error),) = audio_files.decoded([at("echo oh no >&2; false |", True)], Options())
    assert isinstance(error, AudioError)
    assert "ended with code 1: oh no" in str(error)
    with pytest.raises(AudioError, match="is empty"):
        audio_files.read(at("true |", True), Options())


def test_wav_within_an_archive(tmp_path):
    path = tmp_path / "wav.ark"
    kaldiio.save_ark(str(path), {"rec1": (16000, SAMPLES), "rec2": (16000, SAMPLES[::-1].copy())})
    second = path.read_bytes().rindex(b"rec2 ") + 5
    read = audio_files.read(at(f"{path}:{second}"), Options())
    np.testing.assert_array_equal(read, SAMPLES[::-1])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(AudioError, match="is cut short"):
        audio_files.read(at(f"{path}:{second}"), Options())
    with pytest.raises(AudioError, match="is no WAV file there"):
        audio_files.read(at(f"{path}:{second + 1}"), Options())


STEREO = np.stack([SAMPLES, SAMPLES[::-1] // 2], 1)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_a_channel_of_several(tmp_path, suffix, decoder):
    soundfile.write(tmp_path / f"a.{suffix}", STEREO, 16000)
    place = at(tmp_path / f"a.{suffix}")
    for channel in (0, 1):
        (samples,) = audio_files.dataset([place], Options(decoder=decoder, channel=channel))
        np.testing.assert_array_equal(samples, STEREO[:, channel])
    wanted = [place._replace(channel=1), place, place._replace(channel=2)]  # before the option's
    found = [value for _, value in audio_files.decoded(wanted, Options(decoder=decoder, channel=0))]
    np.testing.assert_array_equal(found[0], STEREO[:, 1])
    np.testing.assert_array_equal(found[1], STEREO[:, 0])
    assert "has 2 channel(s), numbered from 0, and none 2" in str(found[2])
    ((_, error),) = audio_files.decoded([place], Options(decoder=decoder))
    assert "has 2 channels, where one is expected. Name one with --channel" in str(error)


@pytest.mark.quick
def test_a_channel_of_a_command_and_of_an_archive(tmp_path):
    soundfile.write(tmp_path / "a.wav", STEREO, 16000)
    piped = at(f"cat {tmp_path}/a.wav |", True)._replace(channel=1)
    np.testing.assert_array_equal(audio_files.read(piped, Options()), STEREO[:, 1])
    kaldiio.save_ark(f"{tmp_path}/wav.ark", {"rec": (16000, STEREO), "sec": (16000, SAMPLES)})
    stored = at(f"{tmp_path}/wav.ark:4")
    np.testing.assert_array_equal(audio_files.read(stored, Options(channel=1)), STEREO[:, 1])
    with pytest.raises(AudioError, match="has 2 channels, where one is expected"):
        audio_files.read(stored, Options())
    second = (tmp_path / "wav.ark").read_bytes().rindex(b"sec ") + 4
    with pytest.raises(AudioError, match=r"has 1 channel\(s\), numbered from 0, and none 1"):
        audio_files.read(at(f"{tmp_path}/wav.ark:{second}"), Options(channel=1))


def test_a_channel_is_resampled_like_a_recording_of_it_alone(tmp_path):
    left, right = tone(8000), tone(8000)[::-1].copy()
    soundfile.write(tmp_path / "both.wav", np.stack([left, right], 1), 8000)
    soundfile.write(tmp_path / "right.wav", right, 8000)
    alone = audio_files.read(at(tmp_path / "right.wav"), Options(resample=True))
    taken = audio_files.read(at(tmp_path / "both.wav"), Options(resample=True, channel=1))
    np.testing.assert_array_equal(taken, alone)


def test_options_out_of_range():
    with pytest.raises(ValueError, match="channel must be 0 .* Received: -1"):
        Options(channel=-1)
    with pytest.raises(ValueError, match="decoder must be one of .* Received: 'sox'"):
        Options(decoder="sox")
    with pytest.raises(ValueError, match="sample_rate=0"):
        Options(sample_rate=0)


@pytest.mark.skipif(HAS_TFIO, reason="only where tensorflow-io does not load")
def test_tensorflow_io_that_does_not_load():
    with pytest.raises(ValueError, match="tensorflow-io does not load on TensorFlow"):
        Options(decoder="tensorflow-io")
