"""Kaldi's perceptual linear prediction: cepstra of an all-pole model of the loudness spectrum."""

import numpy as np

from input import features

ORDER = 12  # number of poles of the all-pole model
NUM_CEPS = 13
_MEL = 23  # number of mel filters
_LOWEST = 20.0  # Hz; the lower edge of the lowest filter
_COMPRESSION = 0.33333
_LIFTER = 22.0


def plp(
    samples: np.ndarray, sample_rate: int = features.SAMPLE_RATE, num_ceps: int = NUM_CEPS
) -> np.ndarray:
    """Returns the PLP cepstra of each frame, as Kaldi's `compute-plp-feats --dither=0` does.

    The frames are those of `features.log_mel`. Coefficient 0 is the log energy of the frame, the
    others are c_1 to c_(num_ceps - 1) of a model of 12 poles, liftered with 22.

    Args:
      samples: float or int16 [num_samples], on the scale of 16-bit integers (Kaldi's).
      sample_rate: of the samples, in Hz.
      num_ceps: number of coefficients, 1 to 13.

    Returns:
      float32 [num_frames, num_ceps]; no frames if the signal is shorter than 25 ms. If all samples
      of a frame are equal, Kaldi gives NaN; here the cepstrum is 0.

    Raises:
      ValueError: an argument is out of range, or kaldi-native-fbank is not installed.

    Source: Hermansky, "Perceptual linear predictive (PLP) analysis of speech" (1990), on mel
    filters as in Kaldi's feature-plp.cc.
    """
    if not 1 <= num_ceps <= ORDER + 1:
        raise ValueError(f"num_ceps of PLP must lie in [1, {ORDER + 1}]. Received: {num_ceps}")
    mel, log_energy = features.energies(samples, sample_rate, _MEL)
    loud = (mel.astype(np.float64) * equal_loudness(sample_rate)) ** _COMPRESSION
    cepstra = cepstrum(linear_prediction(autocorrelation(loud)))
    index = np.arange(ORDER + 1)
    lifter = 1.0 + _LIFTER / 2.0 * np.sin(np.pi * index / _LIFTER)
    whole = np.column_stack([log_energy, cepstra * lifter[1:]])
    return whole[:, :num_ceps].astype(np.float32)


def equal_loudness(sample_rate: int) -> np.ndarray:
    """Returns the sensitivity of the ear at the middle of each filter: [num_mel].

    With f in Hz it is (f² / (f² + 1.6e5))² (f² + 1.44e6) / (f² + 9.61e6): Hermansky's equation 7 in
    HTK's form.
    """
    ends = 1127.0 * np.log1p(np.array([_LOWEST, sample_rate / 2.0]) / 700.0)
    middles = np.linspace(*ends, _MEL + 2)[1:-1]
    square = (700.0 * np.expm1(middles / 1127.0)) ** 2
    return (square / (square + 1.6e5)) ** 2 * (square + 1.44e6) / (square + 9.61e6)


def autocorrelation(spectrum: np.ndarray) -> np.ndarray:
    """Returns the autocorrelation of a power spectrum: [..., num_mel] -> [..., ORDER + 1].

    It is the inverse Fourier transform of a symmetric spectrum. One side of that is the given
    spectrum, with its first value repeated at frequency 0 and its last at the highest frequency.
    """
    whole = np.concatenate([spectrum[..., :1], spectrum, spectrum[..., -1:]], -1)
    return np.fft.irfft(whole)[..., : ORDER + 1]


def linear_prediction(correlation: np.ndarray) -> np.ndarray:
    """Returns the coefficients a_1 .. a_p of 1 / (1 + Σ a_k z^-k): [..., p + 1] -> [..., p].

    Durbin's recursion gives them. With r the autocorrelation and E = r_0 at first, for i = 1 .. p

        k = (r_i + Σ_{j<i} a_j r_{i-j}) / E,   a_i = -k,   a_j ← a_j - k a_{i-j},   E ← E (1 - k²)

    where 1 - k² is at least 1e-5, so that a pure tone has a model too.
    """
    order = correlation.shape[-1] - 1
    found = np.zeros_like(correlation[..., 1:])
    error = correlation[..., 0].copy()
    for i in range(order):
        past = found[..., :i]
        reflected = correlation[..., i + 1] + np.sum(past * correlation[..., i:0:-1], -1)
        k = np.divide(reflected, error, out=np.zeros_like(error), where=error > 0)
        found[..., :i] = past - k[..., None] * past[..., ::-1]
        found[..., i] = -k
        error *= np.maximum(1.0 - k**2, 1e-5)
    return found


def cepstrum(prediction: np.ndarray) -> np.ndarray:
    """Returns the cepstrum of 1 / (1 + Σ a_k z^-k) without c_0: [..., p] -> [..., p].

    c_i = -a_i - 1/i Σ_{j<i} (i - j) a_j c_{i-j}.
    """
    found = np.zeros_like(prediction)
    for i in range(prediction.shape[-1]):
        weights = np.arange(i, 0, -1)
        sums = np.sum(weights * prediction[..., :i] * found[..., :i][..., ::-1], -1)
        found[..., i] = -prediction[..., i] - sums / (i + 1)
    return found
