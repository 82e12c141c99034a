"""PLP and pitch against the values of Kaldi's own code, and PLP's parts against other ways."""

from pathlib import Path

import kaldi_native_fbank
import numpy as np
import pytest

from input import features, pitch, plp
from input.sources import Extraction

DATA = Path(__file__).parents[2] / "data" / "kaldi"
HAS_PITCH = hasattr(kaldi_native_fbank, "compute_and_process_kaldi_pitch")
needs_pitch = pytest.mark.skipif(not HAS_PITCH, reason="kaldi-native-fbank is older than 1.23")


def signal(rate):
    """0.8 s of a voice that rises from 110 to 170 Hz and ends after 0.6 s, with a little noise."""
    n = int(0.8 * rate)
    t = np.arange(n) / rate
    phase = 2 * np.pi * np.cumsum(110 + 60 * t / t[-1]) / rate
    voiced = sum(np.cos(k * phase) / k for k in range(1, 21))
    loudness = np.where(t < 0.75 * t[-1], 1.0, 0.0) * np.minimum(1, 8 * t / t[-1])
    noise = np.arange(n) * 7919 % 1009 / 1009 - 0.5
    return np.round(3000 * loudness * voiced + 200 * noise).astype(np.int16)


@pytest.mark.parametrize("rate", [16000, 8000])
def test_plp_is_that_of_kaldi(rate):
    expected = np.loadtxt(DATA / f"plp_pitch_{rate}.txt")[:, :13]
    np.testing.assert_allclose(plp.plp(signal(rate), rate), expected, atol=1e-3)
    few = plp.plp(signal(rate), rate, num_ceps=5)
    np.testing.assert_allclose(few, expected[:, :5], atol=1e-3)


@needs_pitch
@pytest.mark.parametrize("rate", [16000, 8000])
def test_pitch_is_that_of_kaldi(rate):
    expected = np.loadtxt(DATA / f"plp_pitch_{rate}.txt")[:, 13:]
    found = pitch.pitch(signal(rate), rate, delta_noise=0.0)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.ptp(found[:, 1]) > 0.5  # the voice rises by half an octave


@needs_pitch
def test_noise_on_the_derivative_of_the_pitch_is_small_and_always_the_same():
    clean, noisy, again = (pitch.pitch(signal(16000), delta_noise=d) for d in (0.0, 0.005, 0.005))
    np.testing.assert_array_equal(noisy, again)
    np.testing.assert_array_equal(noisy[:, :2], clean[:, :2])
    assert 0.02 < np.std(noisy[:, 2] - clean[:, 2]) < 0.1  # 10 * 0.005


def test_linear_prediction_solves_the_normal_equations():
    """Of Yule and Walker: Σ_j r_|i-j| a_j = -r_i."""
    spectra = np.random.default_rng(0).uniform(0.5, 3, (20, 23))
    r = plp.autocorrelation(spectra)
    found = plp.linear_prediction(r)
    lags = np.abs(np.subtract.outer(np.arange(12), np.arange(12)))
    for row, a in zip(r, found, strict=True):
        np.testing.assert_allclose(a, np.linalg.solve(row[lags], -row[1:]), atol=1e-9)


def test_autocorrelation_is_the_cosine_transform_of_the_spectrum():
    spectrum = np.random.default_rng(1).uniform(1, 2, 23)
    whole = np.array([spectrum[0], *spectrum, spectrum[-1]])
    angles = np.pi * np.outer(np.arange(13), np.arange(25)) / 24
    ends = np.where((np.arange(25) == 0) | (np.arange(25) == 24), 1.0, 2.0)
    expected = (np.cos(angles) * ends) @ whole / 48
    np.testing.assert_allclose(plp.autocorrelation(spectrum), expected, atol=1e-12)


def test_cepstrum_is_that_of_the_models_log_spectrum():
    spectra = np.random.default_rng(2).uniform(0.5, 3, (5, 23))
    a = plp.linear_prediction(plp.autocorrelation(spectra))
    size = 1 << 12
    ones = np.ones([5, 1])
    spectrum = 1 / np.abs(np.fft.fft(np.concatenate([ones, a], 1), size)) ** 2
    expected = np.fft.ifft(np.log(spectrum)).real[:, 1:13]  # twice c_i / 2 each side
    np.testing.assert_allclose(plp.cepstrum(a), expected, atol=1e-6)


def test_silence_and_pure_tones_have_finite_features():
    tone = np.round(8000 * np.sin(2 * np.pi * 440 / 16000 * np.arange(1600)))
    for samples in (np.zeros(1600), np.full(1600, 7.0), tone):
        found = plp.plp(samples)
        assert found.shape == (8, 13)
        assert np.isfinite(found).all()
    np.testing.assert_array_equal(plp.plp(np.zeros(1600))[:, 1:], 0)


def test_energies_are_those_of_log_mel():
    mel, log_energy = features.energies(signal(16000))
    np.testing.assert_allclose(np.log(mel), features.log_mel(signal(16000)), atol=1e-4)
    frame = signal(16000)[160:560].astype(np.float64)
    expected = np.log(np.sum((frame - frame.mean()) ** 2))
    assert log_energy[1] == pytest.approx(expected, abs=1e-4)


@needs_pitch
def test_extraction_joins_them():
    samples = signal(16000)
    found = Extraction("plp", pitch=True)(samples)
    expected = np.concatenate([plp.plp(samples), pitch.pitch(samples)], 1)
    np.testing.assert_array_equal(found, expected)
    assert Extraction("fbank", pitch=True)(samples).shape == (78, 43)
    assert len(Extraction("fbank", pitch=True)(samples[:399])) == 0


def test_frames_and_pitches_may_differ_by_two():
    frames, pitches = np.ones([7, 2]), np.zeros([9, 3])
    assert pitch.append(frames, pitches).shape == (7, 5)
    with pytest.raises(ValueError, match="6 frames and 9 pitches"):
        pitch.append(frames[:6], pitches)


def test_what_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"num_ceps of PLP must lie in \[1, 13\]. Received: 14"):
        plp.plp(np.zeros(400), num_ceps=14)
    with pytest.raises(ValueError, match="one channel"):
        plp.plp(np.zeros([2, 400]))
    if HAS_PITCH:
        with pytest.raises(ValueError, match="one channel"):
            pitch.pitch(np.zeros([2, 400]))
        monkeypatch.delattr(kaldi_native_fbank, "compute_and_process_kaldi_pitch")
    with pytest.raises(ValueError, match="pitch needs kaldi-native-fbank 1.23 or later"):
        pitch.pitch(np.zeros(400))
