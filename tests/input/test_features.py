"""Features against independent calculations."""

import numpy as np
import pytest
import tensorflow as tf

from input import features


def kaldi_mel_by_hand(samples: np.ndarray) -> np.ndarray:
    """`compute-fbank-feats --dither=0 --num-mel-bins=40` written from Kaldi's definitions."""
    length, shift, size = 400, 160, 512
    count = 1 + (len(samples) - length) // shift
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))) ** 0.85

    def mel(frequency):
        return 1127.0 * np.log(1.0 + frequency / 700.0)

    edges = np.linspace(mel(20.0), mel(8000.0), 42)
    bins = mel(np.arange(size // 2) * 16000.0 / size)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    banks = np.maximum(0.0, np.minimum(rising, falling))
    frames = []
    for index in range(count):
        frame = samples[index * shift : index * shift + length].astype(np.float64)
        frame = frame - frame.mean()
        frame = frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])
        power = np.abs(np.fft.rfft(frame * window, size)[:-1]) ** 2
        frames.append(np.log(np.maximum(banks @ power, np.finfo(np.float32).eps)))
    return np.array(frames)


def deltas_by_hand(frames: np.ndarray) -> np.ndarray:
    """Kaldi's DeltaFeatures: nested sums over offsets, each index clamped at the edges."""
    count = len(frames)
    result = np.zeros((count, 3, frames.shape[1]))
    for t in range(count):
        result[t, 0] = frames[t]
        for j in range(-2, 3):
            result[t, 1] += j / 10 * frames[np.clip(t + j, 0, count - 1)]
            for i in range(-2, 3):
                result[t, 2] += i * j / 100 * frames[np.clip(t + i + j, 0, count - 1)]
    return result.reshape(count, -1)


def test_log_mel_follows_kaldis_definition():
    generator = np.random.default_rng(0)
    time = np.arange(5000) / 16000
    samples = 3000 * np.sin(2 * np.pi * 440 * time) + 500 * generator.standard_normal(5000)
    np.testing.assert_allclose(features.log_mel(samples), kaldi_mel_by_hand(samples), atol=2e-3)


@pytest.mark.parametrize(("num_samples", "num_frames"), [(399, 0), (400, 1), (559, 1), (560, 2)])
def test_only_whole_windows_count(num_samples, num_frames):
    frames = features.log_mel(np.zeros(num_samples, np.int16))
    assert frames.shape == (num_frames, 40)
    assert frames.dtype == np.float32


def test_silence_is_the_log_of_the_smallest_energy():
    frames = features.log_mel(np.zeros(400, np.int16))
    np.testing.assert_allclose(frames, np.log(np.finfo(np.float32).eps), rtol=1e-6)


def test_log_mel_takes_one_channel():
    with pytest.raises(ValueError, match=r"one channel.*\(2, 400\)"):
        features.log_mel(np.zeros([2, 400]))


def test_deltas_of_a_ramp_by_hand():
    ramp = np.arange(9, dtype=np.float32)[:, None]
    slope = features.add_deltas(ramp).numpy()[:, 1]
    # At the start 0,0,0,1,2 stands for -2..2: (0*-2 + 0*-1 + 1*1 + 2*2) / 10 = 0.5.
    np.testing.assert_allclose(slope, [0.5, 0.8, 1, 1, 1, 1, 1, 0.8, 0.5], atol=1e-6)
    np.testing.assert_allclose(features.add_deltas(ramp).numpy()[4, 2], 0, atol=1e-6)


def test_second_order_filter_is_the_first_convolved_with_itself():
    _, _, second = features.delta_filters()
    np.testing.assert_allclose(second * 100, [4, 4, 1, -4, -10, -4, 1, 4, 4], atol=1e-12)


@pytest.mark.parametrize("num_frames", [1, 2, 3, 5, 30])
def test_deltas_follow_kaldis_definition(num_frames):
    frames = np.random.default_rng(num_frames).standard_normal((num_frames, 40))
    expected = deltas_by_hand(frames)
    np.testing.assert_allclose(features.add_deltas(frames), expected, atol=1e-5)


def test_splice_repeats_the_edges():
    frames = np.array([[0, 10], [1, 11], [2, 12]], np.float32)
    expected = [[0, 10, 0, 10, 1, 11], [0, 10, 1, 11, 2, 12], [1, 11, 2, 12, 2, 12]]
    np.testing.assert_array_equal(features.splice(frames, 1, 1), expected)


def test_splice_may_be_lopsided_and_wider_than_the_utterance():
    frames = np.array([[5.0], [6.0]], np.float32)
    expected = [[5, 5, 5, 5, 6], [5, 5, 5, 6, 6]]
    np.testing.assert_array_equal(features.splice(frames, 3, 1), expected)


def test_splice_refuses_negative_context():
    with pytest.raises(ValueError, match="left=-1"):
        features.splice(np.zeros([2, 2], np.float32), -1, 1)


def test_normalise():
    frames = np.array([[1.0, 10.0], [3.0, 30.0]])
    expected = [[-1, -0.5], [1, 1.5]]
    result = features.normalise(frames, np.array([2.0, 15.0]), np.array([1.0, 10.0]))
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("num_frames", [0, 1, 4, 50])
def test_all_can_be_traced_with_an_unknown_number_of_frames(num_frames):
    @tf.function(input_signature=[tf.TensorSpec([None, 40], tf.float32)])
    def exported(frames):
        full = features.normalise(features.add_deltas(frames), np.zeros(120), np.ones(120))
        return features.splice(full, 5, 5)

    frames = np.random.default_rng(0).standard_normal((num_frames, 40)).astype(np.float32)
    result = exported(frames)
    assert result.shape == (num_frames, 1320)
    assert exported.get_concrete_function().outputs[0].shape.as_list() == [None, 1320]
    if num_frames:
        np.testing.assert_allclose(result[:, 600:720], deltas_by_hand(frames), atol=1e-5)
