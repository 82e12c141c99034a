"""Loads the packages that only the preparation of a corpus needs, not the training on one."""

import importlib
from typing import Any

_NEEDED_FOR = {
    "kaldi_native_fbank": "features of audio",
    "kaldiio": "Kaldi archives",
    "soundfile": "audio",
    "soxr": "sample rate conversion",
}


def load(module: str) -> Any:
    """Imports one of these packages, or a module of one. Call it where the package is used.

    Raises:
      ValueError: the package is not installed, or a library that it needs is missing.
    """
    package = module.split(".")[0]
    name = package.replace("_", "-")
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise ValueError(
            f"{_NEEDED_FOR[package]}: needs {name}, which does not load ({error}). Install it with:"
            f" pip install {name}"
        ) from error
