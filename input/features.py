"""Kaldi's log-mel filterbank features, their deltas, normalisation and splice.

`log_mel` is NumPy in and out and runs kaldi-native-fbank. The others are TensorFlow functions that
can be traced with an unknown number of frames: the corpus is prepared with `add_deltas`, training
reads through `normalise` and `splice`, and an exported model runs all three.
"""

from typing import Any

import numpy as np
import tensorflow as tf

SAMPLE_RATE = 16000  # Hz
FRAME_SHIFT = 0.010  # seconds
FRAME_LENGTH = 0.025  # seconds
NUM_MEL = 40
FEATURE_DIM = 3 * NUM_MEL  # static, delta, delta-delta
DELTA_WINDOW = 2  # frames on each side


def log_mel(samples: np.ndarray) -> np.ndarray:
    """40 log-mel filterbank energies of each frame, as Kaldi's `compute-fbank-feats` gives them.

    25 ms Povey windows every 10 ms that lie whole within the signal (`snip-edges`), no dither,
    pre-emphasis 0.97, DC removed, power spectrum, no energy column.

    Args:
      samples: float or int16 [num_samples] at 16 kHz, on the scale of 16-bit integers (Kaldi's).

    Returns:
      float32 [num_frames, 40]; no frames if the signal is shorter than 25 ms.

    Raises:
      ValueError: samples is not one-dimensional, or kaldi-native-fbank is not installed.
    """
    if samples.ndim != 1:
        raise ValueError(f"samples must be one channel, [num_samples]. Received: {samples.shape}")
    fbank = _online_fbank()
    fbank.accept_waveform(SAMPLE_RATE, samples.astype(np.float32))
    fbank.input_finished()
    frames = [fbank.get_frame(index) for index in range(fbank.num_frames_ready)]
    return np.stack(frames) if frames else np.zeros([0, NUM_MEL], np.float32)


def _online_fbank() -> Any:
    try:
        import kaldi_native_fbank  # needed to prepare a corpus, not to train on it
    except ImportError as error:
        raise ValueError(
            "filterbank features need kaldi-native-fbank, which is not installed."
            " Install it with: pip install kaldi-native-fbank"
        ) from error
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq = SAMPLE_RATE
    options.frame_opts.frame_shift_ms = 1000 * FRAME_SHIFT
    options.frame_opts.frame_length_ms = 1000 * FRAME_LENGTH
    options.frame_opts.dither = 0.0
    options.frame_opts.window_type = "povey"
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = NUM_MEL
    options.use_energy = False
    return kaldi_native_fbank.OnlineFbank(options)


def delta_filters(window: int = DELTA_WINDOW) -> list[np.ndarray]:
    """Kaldi's regression filters of orders 0, 1 and 2 (`feature-functions.cc`, DeltaFeatures).

    Order 1 is j / sum(j^2) for j in [-window, window]; order 2 is order 1 convolved with itself,
    applied to the static features.
    """
    offsets = np.arange(-window, window + 1, dtype=np.float64)
    first = offsets / np.sum(offsets**2)
    return [np.ones(1), first, np.convolve(first, first)]


def add_deltas(frames: tf.Tensor) -> tf.Tensor:
    """Appends deltas and delta-deltas: [num_frames, dim] -> [num_frames, 3 * dim], float32.

    As Kaldi's `add-deltas`: window 2, orders 1 and 2, the first and last frames repeated.
    """
    frames = tf.convert_to_tensor(frames, tf.float32)
    num_frames = tf.shape(frames)[0]
    reach = 2 * DELTA_WINDOW
    padded = tf.concat(
        [tf.repeat(frames[:1], reach, 0), frames, tf.repeat(frames[-1:], reach, 0)], axis=0
    )
    orders = []
    for taps in delta_filters():
        first = reach - len(taps) // 2
        terms = [
            np.float32(tap) * padded[first + j : first + j + num_frames]
            for j, tap in enumerate(taps)
            if tap != 0
        ]
        orders.append(tf.add_n(terms))
    return tf.concat(orders, axis=1)


def normalise(frames: tf.Tensor, mean: Any, stddev: Any) -> tf.Tensor:
    """(frames - mean) / stddev, per dimension: [..., dim] -> [..., dim], float32.

    Args:
      frames: [..., dim].
      mean: [dim] means of the training frames.
      stddev: [dim] standard deviations of the training frames, all positive.
    """
    mean = tf.cast(mean, tf.float32)
    return (tf.cast(frames, tf.float32) - mean) * tf.cast(1.0 / stddev, tf.float32)


def splice(frames: tf.Tensor, left: int, right: int) -> tf.Tensor:
    """Puts each frame between its neighbours, in order of time; edge frames are repeated.

    [num_frames, dim] -> [num_frames, (left + 1 + right) * dim]: Kaldi's `splice-feats`.

    Raises:
      ValueError: left or right is negative.
    """
    offsets = context_offsets(left, right)
    num_frames = tf.shape(frames)[0]
    indices = tf.range(num_frames)[:, None] + offsets[None, :]
    spliced = tf.gather(frames, tf.clip_by_value(indices, 0, num_frames - 1))
    return tf.reshape(spliced, [num_frames, len(offsets) * frames.shape[1]])


def context_offsets(left: int, right: int) -> np.ndarray:
    """int32 [-left, ..., 0, ..., right]: which frames `splice` takes."""
    if left < 0 or right < 0:
        raise ValueError(
            f"the splice takes left and right frames of context, 0 or more. Received:"
            f" left={left}, right={right}"
        )
    return np.arange(-left, right + 1, dtype=np.int32)
