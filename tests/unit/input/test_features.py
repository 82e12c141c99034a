"""Features against independent calculations."""

import numpy as np
import pytest
import tensorflow as tf

from input import features


def kaldi_mel_by_hand(samples: np.ndarray, rate: int = 16000, num_mel: int = 40) -> np.ndarray:
    """`compute-fbank-feats --dither=0` written from Kaldi's definitions."""
    length, shift = rate // 40, rate // 100
    size = 1 << (length - 1).bit_length()
    count = 1 + (len(samples) - length) // shift
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))) ** 0.85

    def mel(frequency):
        return 1127.0 * np.log(1.0 + frequency / 700.0)

    edges = np.linspace(mel(20.0), mel(rate / 2), num_mel + 2)
    bins = mel(np.arange(size // 2) * rate / size)
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


def kaldi_mfcc_by_hand(samples: np.ndarray, num_ceps: int) -> np.ndarray:
    """`compute-mfcc-feats --use-energy=false --dither=0` from its definitions."""
    mel = kaldi_mel_by_hand(samples, num_mel=23)
    ceps = np.zeros((len(mel), num_ceps))
    for k in range(num_ceps):
        scale = np.sqrt((1 if k == 0 else 2) / 23)
        lifter = 1 + 11 * np.sin(np.pi * k / 22)
        ceps[:, k] = lifter * scale * (mel @ np.cos(np.pi / 23 * (np.arange(23) + 0.5) * k))
    return ceps


def noisy_tone(count: int = 5000) -> np.ndarray:
    generator = np.random.default_rng(0)
    tone = 3000 * np.sin(2 * np.pi * 440 * np.arange(count) / 16000)
    return tone + 500 * generator.standard_normal(count)


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
    samples = noisy_tone()
    np.testing.assert_allclose(features.log_mel(samples), kaldi_mel_by_hand(samples), atol=1e-3)


@pytest.mark.parametrize(("rate", "num_mel"), [(8000, 28), (16000, 80)])
def test_log_mel_at_other_rates_and_widths(rate, num_mel):
    samples = noisy_tone()
    frames = features.log_mel(samples, rate, num_mel)
    np.testing.assert_allclose(frames, kaldi_mel_by_hand(samples, rate, num_mel), atol=1e-3)


@pytest.mark.parametrize("num_ceps", [1, 13, 23])
def test_mfcc_follows_kaldis_definition(num_ceps):
    samples = noisy_tone()
    frames = features.mfcc(samples, num_ceps=num_ceps)
    np.testing.assert_allclose(frames, kaldi_mfcc_by_hand(samples, num_ceps), atol=1e-3)


def test_mfcc_refuses_more_coefficients_than_filters():
    with pytest.raises(ValueError, match=r"num_ceps must lie in \[1, 23\]. Received: 24"):
        features.mfcc(np.zeros(400), num_ceps=24)


@pytest.mark.parametrize(("num_samples", "num_frames"), [(399, 0), (400, 1), (559, 1), (560, 2)])
def test_only_whole_windows_count(num_samples, num_frames):
    frames = features.log_mel(np.zeros(num_samples, np.int16))
    assert frames.shape == (num_frames, 40)
    assert frames.dtype == np.float32


def test_silence_is_the_log_of_the_smallest_energy():
    frames = features.log_mel(np.zeros(400, np.int16))
    np.testing.assert_allclose(frames, np.log(np.finfo(np.float32).eps), rtol=1e-6)


@pytest.mark.parametrize(("num_mel", "rate"), [(2, 16000), (300, 16000), (40, 1000)])
def test_a_number_of_filters_that_does_not_fit_the_rate(num_mel, rate):
    message = f"num_mel={num_mel} filters do not fit audio of {rate} Hz .* such as 40"
    with pytest.raises(ValueError, match=message):
        features.log_mel(np.zeros(rate), rate, num_mel)


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


def test_deltas_of_another_window_and_order_by_hand():
    frames = np.array([0.0, 1, 4, 9, 16, 25], np.float32)[:, None]
    result = features.add_deltas(frames, order=1, window=1).numpy()
    # (next - previous) / 2, with the edges repeated.
    np.testing.assert_allclose(result[:, 1], [0.5, 2, 4, 6, 8, 4.5], atol=1e-6)
    assert features.add_deltas(frames, order=0).shape == (6, 1)
    third = features.add_deltas(frames, order=3, window=1).numpy()
    # Order 3 at frame 2: [-1, 0, 3, 0, -3, 0, 1] / 8 over frames -1 to 5, of which -1 is frame 0.
    assert third.shape == (6, 4)
    np.testing.assert_allclose(third[2, 3], (-0 + 3 * 1 - 3 * 9 + 25) / 8, atol=1e-6)


def test_deltas_refuse_an_empty_window():
    with pytest.raises(ValueError, match="window=0, order=2"):
        features.add_deltas(np.zeros([2, 2], np.float32), window=0)


def test_cmvn_statistics_by_hand_add_up():
    first = np.array([[1.0, 2], [3, 6]], np.float32)
    second = np.array([[5.0, 1]], np.float32)
    stats = features.cmvn_stats(first)
    np.testing.assert_array_equal(stats, [[4, 8, 2], [10, 40, 0]])
    whole = features.cmvn_stats(np.concatenate([first, second]))
    np.testing.assert_array_equal(stats + features.cmvn_stats(second), whole)


def test_apply_cmvn_takes_the_mean_off_and_scales_if_asked():
    frames = np.array([[1.0, 2], [3, 6]], np.float32)
    stats = [[4.0, 8, 2], [10, 40, 0]]
    np.testing.assert_allclose(features.apply_cmvn(frames, stats), [[-1, -2], [1, 2]])
    both = features.apply_cmvn(frames, stats, variance=True)
    np.testing.assert_allclose(both, [[-1, -1], [1, 1]], atol=1e-6)


def test_apply_cmvn_of_a_constant_dimension_stays_finite():
    frames = np.full([5, 1], 7, np.float32)
    result = features.apply_cmvn(frames, features.cmvn_stats(frames), variance=True)
    np.testing.assert_array_equal(result, np.zeros([5, 1]))


def test_normalised_frames_have_mean_0_and_variance_1():
    frames = np.random.default_rng(0).normal(15, 3, (500, 40)).astype(np.float32)
    result = features.apply_cmvn(frames, features.cmvn_stats(frames), variance=True).numpy()
    np.testing.assert_allclose(result.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(result.std(0), 1, atol=1e-5)


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


def test_stack_joins_frames_without_overlap_and_repeats_the_last():
    frames = np.arange(10, dtype=np.float32).reshape(5, 2)
    stacked = features.stack(frames, 3)
    np.testing.assert_array_equal(stacked, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 8, 9]])
    np.testing.assert_array_equal(features.stack_labels(np.arange(5), 3), [1, 4])
    np.testing.assert_array_equal(features.stack_labels(np.arange(4), 3), [1, 3])
    np.testing.assert_array_equal(features.stack(frames, 1), frames)


def test_joined_frames_are_stacks_with_context_and_go_on_where_outputs_are_late():
    frames = np.arange(5, dtype=np.float32)[:, None]
    found = features.joined(frames, 1, 2, late=1)
    np.testing.assert_array_equal(found, [[0, 0, 1, 2], [1, 2, 3, 4], [3, 4, 4, 4], [3, 4, 4, 4]])
    many = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    np.testing.assert_array_equal(features.joined(many, 2, 1), features.splice(many, 2, 2))
    np.testing.assert_array_equal(features.joined(many, 0, 3), features.stack(many, 3))


def test_stack_refuses_no_frames():
    with pytest.raises(ValueError, match="count=0"):
        features.stack(np.zeros([2, 2], np.float32), 0)


def test_normalise():
    frames = np.array([[1.0, 10.0], [3.0, 30.0]])
    expected = [[-1, -0.5], [1, 1.5]]
    result = features.normalise(frames, np.array([2.0, 15.0]), np.array([1.0, 10.0]))
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("num_frames", [0, 1, 4, 50])
def test_all_can_be_traced_with_an_unknown_number_of_frames(num_frames):
    @tf.function(input_signature=[tf.TensorSpec([None, 40], tf.float32)])
    def exported(frames):
        shifted = features.apply_cmvn(frames, tf.ones([2, 41]))
        full = features.normalise(features.add_deltas(frames), np.zeros(120), np.ones(120))
        joined = features.stack(full, 3), features.stack_labels(shifted[:, 0], 3)
        tf.debugging.assert_equal(tf.shape(joined[0])[0], tf.shape(joined[1])[0])
        return features.splice(full, 5, 5)

    frames = np.random.default_rng(0).standard_normal((num_frames, 40)).astype(np.float32)
    result = exported(frames)
    assert result.shape == (num_frames, 1320)
    assert exported.get_concrete_function().outputs[0].shape.as_list() == [None, 1320]
    if num_frames:
        np.testing.assert_allclose(result[:, 600:720], deltas_by_hand(frames), atol=1e-5)
