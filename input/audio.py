"""Sample rate conversion and additive noise."""

import numpy as np

from input import packages


def resample(samples: np.ndarray, source_rate: int, target_rate: int) -> np.ndarray:
    """Changes the sample rate, with the SoX resampler at high quality.

    Args:
      samples: int16 or float [num_samples].
      source_rate: samples per second of the input.
      target_rate: samples per second of the result.

    Returns:
      float32 [about num_samples * target_rate / source_rate], on the scale of the input.

    Raises:
      ValueError: soxr is not installed.
    """
    soxr = packages.load("soxr")
    # soxr adds dither, which is noise, to integers but not to floats. So the samples are converted.
    wide = samples.astype(np.float32)
    converted: np.ndarray = soxr.resample(wide, source_rate, target_rate, quality="HQ")
    return converted


def coloured_noise(num_samples: int, exponent: float, generator: np.random.Generator) -> np.ndarray:
    """Returns Gaussian noise of unit power; its power spectrum is 1 / frequency ** exponent.

    Args:
      num_samples: number of samples.
      exponent: 0 is white, 1 pink, 2 brown noise.
      generator: source of the randomness.

    Returns:
      float64 [num_samples].
    """
    white = np.fft.rfft(generator.standard_normal(num_samples))
    frequency = np.maximum(np.arange(len(white)), 1.0)
    noise = np.fft.irfft(white * frequency ** (-exponent / 2), num_samples)
    return noise / np.sqrt(np.mean(noise**2))


def add_noise(samples: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Adds noise of unit power, scaled to a signal-to-noise ratio.

    Args:
      samples: int16 or float [num_samples].
      noise: float [num_samples], of unit power.
      snr: signal-to-noise ratio over all of `samples`, in dB.

    Returns:
      float64 [num_samples].
    """
    power = np.mean(np.square(samples, dtype=np.float64))
    return samples + noise * np.sqrt(power / 10 ** (snr / 10))
