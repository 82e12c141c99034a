"""Kaldi's features: log-mel and MFCC, their deltas, normalisation, splice and stacking.

`log_mel`, `energies` and `mfcc`, like the features of `input.plp` and `input.pitch`, take and
return NumPy arrays, and run kaldi-native-fbank. The other functions use TensorFlow operations and
can be traced with an unknown number of frames, for tf.data and for an exported model. A corpus is
prepared with `apply_cmvn` and `add_deltas`; training reads it through `normalise` and `splice` or
`stack`.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from input import packages

SAMPLE_RATE = 16000  # Hz
FRAME_SHIFT = 0.010  # seconds
FRAME_LENGTH = 0.025  # seconds
NUM_MEL = 40
NUM_CEPS = 13
FEATURE_DIM = 3 * NUM_MEL  # static features, deltas, and deltas of the deltas
DELTA_WINDOW = 2  # number of frames on each side
_MFCC_MEL = 23  # number of mel filters from which Kaldi computes MFCC


def log_mel(
    samples: np.ndarray, sample_rate: int = SAMPLE_RATE, num_mel: int = NUM_MEL
) -> np.ndarray:
    """Returns log-mel filterbank energies of each frame, as Kaldi's `compute-fbank-feats` does.

    The settings are: 25 ms Povey windows every 10 ms that lie entirely within the signal
    (`snip-edges`), no dither, pre-emphasis 0.97, DC removed, power spectrum, no energy column,
    filters from 20 Hz to half the sample rate.

    Args:
      samples: float or int16 [num_samples], on the scale of 16-bit integers (Kaldi's).
      sample_rate: of the samples, in Hz.
      num_mel: number of filters.

    Returns:
      float32 [num_frames, num_mel]; no frames if the signal is shorter than 25 ms.

    Raises:
      ValueError: samples is not one-dimensional, kaldi-native-fbank is not installed, or there are
        too few or too many filters for the rate.
    """
    library = _library()
    options = library.FbankOptions()
    _set_frames(options, sample_rate, num_mel)
    options.use_energy = False
    try:
        computer = library.OnlineFbank(options)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"num_mel={num_mel} filters do not fit audio of {sample_rate} Hz ({error}). Give a"
            f" usual number, such as {NUM_MEL}"
        ) from error
    return _compute(computer, samples, sample_rate, num_mel)


def energies(
    samples: np.ndarray, sample_rate: int = SAMPLE_RATE, num_mel: int = NUM_MEL
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the frames of `log_mel` before the logarithm, and each frame's log energy.

    Returns:
      float32 [num_frames, num_mel], energies of the filters; and float32 [num_frames], the log of
      the sum of squares before pre-emphasis and window (Kaldi's "raw energy"). Arguments and
      errors are those of `log_mel`.
    """
    library = _library()
    options = library.FbankOptions()
    _set_frames(options, sample_rate, num_mel)
    options.use_energy = options.raw_energy = True
    options.use_log_fbank = False
    found = _compute(library.OnlineFbank(options), samples, sample_rate, 1 + num_mel)
    return found[:, 1:], found[:, 0]


def mfcc(
    samples: np.ndarray, sample_rate: int = SAMPLE_RATE, num_ceps: int = NUM_CEPS
) -> np.ndarray:
    """Returns the MFCCs of each frame, as Kaldi's `compute-mfcc-feats --use-energy=false` does.

    The frames are those of `log_mel`. The settings are: 23 mel filters, orthonormal DCT,
    coefficients 0 to `num_ceps` - 1, liftered with 22.

    Args:
      samples: float or int16 [num_samples], on the scale of 16-bit integers (Kaldi's).
      sample_rate: of the samples, in Hz.
      num_ceps: number of coefficients, 1 to 23.

    Returns:
      float32 [num_frames, num_ceps]; no frames if the signal is shorter than 25 ms.

    Raises:
      ValueError: an argument is out of range, or kaldi-native-fbank is not installed.
    """
    if not 1 <= num_ceps <= _MFCC_MEL:
        raise ValueError(f"num_ceps must lie in [1, {_MFCC_MEL}]. Received: {num_ceps}")
    library = _library()
    options = library.MfccOptions()
    _set_frames(options, sample_rate, _MFCC_MEL)
    options.num_ceps = num_ceps
    options.use_energy = False
    return _compute(library.OnlineMfcc(options), samples, sample_rate, num_ceps)


def _library() -> Any:
    return packages.load("kaldi_native_fbank")


def _set_frames(options: Any, sample_rate: int, num_mel: int) -> None:
    options.frame_opts.samp_freq = sample_rate
    options.frame_opts.frame_shift_ms = 1000 * FRAME_SHIFT
    options.frame_opts.frame_length_ms = 1000 * FRAME_LENGTH
    options.frame_opts.dither = 0.0
    options.frame_opts.window_type = "povey"
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = num_mel


def _compute(computer: Any, samples: np.ndarray, sample_rate: int, dim: int) -> np.ndarray:
    if samples.ndim != 1:
        raise ValueError(f"samples must be one channel, [num_samples]. Received: {samples.shape}")
    computer.accept_waveform(sample_rate, samples.astype(np.float32))
    computer.input_finished()
    frames = [computer.get_frame(index) for index in range(computer.num_frames_ready)]
    return np.stack(frames) if frames else np.zeros([0, dim], np.float32)


def delta_filters(window: int = DELTA_WINDOW, order: int = 2) -> list[np.ndarray]:
    """Returns Kaldi's regression filters of orders 0 to `order`.

    Order 0 is 1, and order 1 is j / sum(j^2) for j in [-window, window]. Each higher order is the
    order below it convolved with order 1. All filters are applied to the static features. Source:
    DeltaFeatures in Kaldi's `feature-functions.cc`.

    Raises:
      ValueError: window is below 1 or order below 0.
    """
    if window < 1 or order < 0:
        raise ValueError(
            f"deltas need a window of 1 frame or more and an order of 0 or more. Received:"
            f" window={window}, order={order}"
        )
    offsets = np.arange(-window, window + 1, dtype=np.float64)
    first = offsets / np.sum(offsets**2)
    filters = [np.ones(1)]
    for _ in range(order):
        filters.append(np.convolve(filters[-1], first))
    return filters


def add_deltas(frames: tf.Tensor, order: int = 2, window: int = DELTA_WINDOW) -> tf.Tensor:
    """Appends deltas: [num_frames, dim] -> [num_frames, (order + 1) * dim], float32.

    It computes the same as Kaldi's `add-deltas`; the first and last frames are repeated beyond the
    edges.

    Args:
      frames: static features [num_frames, dim].
      order: 1 appends deltas, 2 also appends delta-deltas; 0 appends nothing.
      window: number of frames on each side that a delta depends on.

    Raises:
      ValueError: window is below 1 or order below 0.
    """
    frames = tf.convert_to_tensor(frames, tf.float32)
    num_frames = tf.shape(frames)[0]
    filters = delta_filters(window, order)
    reach = order * window
    padded = tf.concat(
        [tf.repeat(frames[:1], reach, 0), frames, tf.repeat(frames[-1:], reach, 0)], axis=0
    )
    orders = []
    for taps in filters:
        first = reach - len(taps) // 2
        terms = [
            np.float32(tap) * padded[first + j : first + j + num_frames]
            for j, tap in enumerate(taps)
            if tap != 0
        ]
        orders.append(tf.add_n(terms))
    return tf.concat(orders, axis=1)


def cmvn_stats(frames: tf.Tensor) -> tf.Tensor:
    """Returns the statistics of frames that Kaldi's `compute-cmvn-stats` gives.

    [num_frames, dim] -> float64 [2, dim + 1]: row 0 is the sum of the frames and their number,
    row 1 the sum of their squares and 0. The statistics of several utterances can be added.
    """
    wide = tf.cast(frames, tf.float64)
    count = tf.cast(tf.shape(wide)[:1], tf.float64)
    sums = tf.concat([tf.reduce_sum(wide, 0), count], 0)
    squares = tf.concat([tf.reduce_sum(tf.square(wide), 0), tf.zeros_like(count)], 0)
    return tf.stack([sums, squares])


def apply_cmvn(frames: tf.Tensor, stats: tf.Tensor, variance: bool = False) -> tf.Tensor:
    """Subtracts the mean and, with `variance`, divides by the standard deviation.

    It computes the same as Kaldi's `apply-cmvn`; `variance` is its `--norm-vars`. The variance is
    at least 1e-20.

    Args:
      frames: [num_frames, dim].
      stats: [2, dim + 1] of the utterance, of its speaker or of everything; see `cmvn_stats`.
      variance: whether to make the variance 1.

    Returns:
      float32 [num_frames, dim].
    """
    stats = tf.cast(stats, tf.float64)
    mean, square = tf.unstack(stats[:, :-1] / stats[0, -1])
    shifted = tf.cast(frames, tf.float64) - mean
    if variance:
        shifted *= tf.math.rsqrt(tf.maximum(square - tf.square(mean), 1e-20))
    return tf.cast(shifted, tf.float32)


def normalise(frames: tf.Tensor, mean: Any, stddev: Any) -> tf.Tensor:
    """Returns (frames - mean) / stddev, for each dimension: float32 [..., dim].

    Args:
      frames: [..., dim].
      mean: [dim] means of the training frames.
      stddev: [dim] standard deviations of the training frames, all positive.
    """
    mean = tf.cast(mean, tf.float32)
    return (tf.cast(frames, tf.float32) - mean) * tf.cast(1.0 / stddev, tf.float32)


def splice(frames: tf.Tensor, left: int, right: int) -> tf.Tensor:
    """Joins each frame with its neighbours, in order of time; edge frames are repeated.

    [num_frames, dim] -> [num_frames, (left + 1 + right) * dim], as Kaldi's `splice-feats`.

    Raises:
      ValueError: left or right is negative.
    """
    offsets = context_offsets(left, right)
    num_frames = tf.shape(frames)[0]
    indices = tf.range(num_frames)[:, None] + offsets[None, :]
    spliced = tf.gather(frames, tf.clip_by_value(indices, 0, num_frames - 1))
    return tf.reshape(spliced, [num_frames, len(offsets) * frames.shape[1]])


def context_offsets(left: int, right: int) -> np.ndarray:
    """Returns the offsets of the frames that `splice` joins: int32 [-left, ..., 0, ..., right]."""
    if left < 0 or right < 0:
        raise ValueError(
            f"the splice takes left and right frames of context, 0 or more. Received:"
            f" left={left}, right={right}"
        )
    return np.arange(-left, right + 1, dtype=np.int32)


def stack(frames: tf.Tensor, count: int) -> tf.Tensor:
    """Joins every `count` frames to one, without overlap, as paper 000 does (section 3.2).

    [num_frames, dim] -> [ceil(num_frames / count), count * dim]. If the utterance ends within a
    stack, the last frame is repeated, so that no frame is lost.

    Raises:
      ValueError: count is below 1.
    """
    num_frames = tf.shape(frames)[0]
    indices = tf.minimum(_stacks(num_frames, count), num_frames - 1)
    return tf.reshape(tf.gather(frames, indices), [-1, count * frames.shape[1]])


def stack_labels(labels: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the label of each stack's middle frame: [n] -> [ceil(n / count)]; see `stack`."""
    num_frames = tf.shape(labels)[0]
    middle = _stacks(num_frames, count)[:, count // 2]
    return tf.gather(labels, tf.minimum(middle, num_frames - 1))


def joined(frames: tf.Tensor, context: int, count: int, late: int = 0) -> tf.Tensor:
    """Joins frames as `stack` does, with `context` more frames on each side of every stack.

    [num_frames, dim] -> [ceil(num_frames / count) + late, (2 context + count) * dim]. The edge
    frames are repeated. The last stack is repeated `late` times, for a network whose outputs come
    `late` stacks after their inputs.

    Raises:
      ValueError: count is below 1.
    """
    num_frames = tf.shape(frames)[0]
    first = _stacks(num_frames, count)[:, 0]
    first = tf.concat([first, tf.repeat(first[-1:], late)], 0)
    indices = first[:, None] + tf.range(-context, count + context)
    gathered = tf.gather(frames, tf.clip_by_value(indices, 0, num_frames - 1))
    return tf.reshape(gathered, [-1, (2 * context + count) * frames.shape[1]])


def _stacks(num_frames: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the numbers of each stack's frames: int32 [ceil(num_frames / count), count]."""
    if count < 1:
        raise ValueError(f"a stack has 1 frame or more. Received: count={count}")
    return tf.reshape(tf.range(-(-num_frames // count) * count), [-1, count])
