"""Kaldi's pitch features."""

import numpy as np

from input import features, packages

DIM = 3


def pitch(
    samples: np.ndarray,
    sample_rate: int = features.SAMPLE_RATE,
    delta_noise: float = 0.005,
) -> np.ndarray:
    """Returns voicing and pitch, as Kaldi's `compute-and-process-kaldi-pitch-feats` does.

    This is the method of Ghahremani et al., "A pitch extraction algorithm tuned for automatic
    speech recognition" (2014), with Kaldi's defaults: pitches from 50 to 400 Hz, frames of 25 ms
    every 10 ms.

    Args:
      samples: float or int16 [num_samples], on the scale of 16-bit integers (Kaldi's).
      sample_rate: of the samples, in Hz; above 2000.
      delta_noise: standard deviation of noise that is added to the derivative, since the search
        finds pitch in steps. The noise is the same in every run, so it differs from Kaldi's.

    Returns:
      float32 [num_frames, 3]: warped correlation (how voiced), log pitch less its mean over 1.5 s,
      and its derivative. About as many frames as `features.log_mel`; see `append`.

    Raises:
      ValueError: samples is not one-dimensional, or kaldi-native-fbank is older than 1.23.
    """
    library = packages.load("kaldi_native_fbank")
    if not hasattr(library, "compute_and_process_kaldi_pitch"):
        raise ValueError(
            "pitch needs kaldi-native-fbank 1.23 or later. Install it with: pip install"
            " --upgrade kaldi-native-fbank"
        )
    if samples.ndim != 1:
        raise ValueError(f"samples must be one channel, [num_samples]. Received: {samples.shape}")
    extraction = library.PitchExtractionOptions()
    extraction.samp_freq = sample_rate
    extraction.frame_shift_ms = 1000 * features.FRAME_SHIFT
    extraction.frame_length_ms = 1000 * features.FRAME_LENGTH
    processing = library.ProcessPitchOptions()
    processing.delta_pitch_noise_stddev = delta_noise
    wave = samples.astype(np.float32)
    found: np.ndarray = library.compute_and_process_kaldi_pitch(extraction, processing, wave)
    return found


def append(frames: np.ndarray, pitches: np.ndarray) -> np.ndarray:
    """Appends pitch to other features: [n, dim] and [m, 3] -> [min(n, m), dim + 3].

    n and m may differ by 2, as with Kaldi's `paste-feats --length-tolerance=2`.

    Raises:
      ValueError: n and m differ by more than 2.
    """
    count = min(len(frames), len(pitches))
    if max(len(frames), len(pitches)) - count > 2:
        raise ValueError(f"{len(frames)} frames and {len(pitches)} pitches do not go together")
    return np.concatenate([frames[:count], pitches[:count]], axis=1)
