"""What is said where a package is missing."""

import sys

import numpy as np
import pytest

from input import audio, features, packages


@pytest.mark.parametrize(
    ("module", "use", "message"),
    [
        ("soxr", lambda: audio.resample(np.zeros(9), 8000, 16000), "sample rate conversion.* soxr"),
        (
            "kaldi_native_fbank",
            lambda: features.log_mel(np.zeros(400)),
            "audio: needs kaldi-native-fbank, .*pip install kaldi-native-fbank",
        ),
        ("kaldiio.matio", lambda: packages.load("kaldiio.matio"), "archives.*pip install kaldiio$"),
    ],
)
def test_a_missing_package_is_named_with_its_purpose(monkeypatch, module, use, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message):
        use()
