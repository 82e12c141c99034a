"""Makes TensorFlow's servers obey TF_CPP_MIN_LOG_LEVEL."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import tensorflow as tf

# Releases of the logging library abseil that TensorFlow has been built with; part of its symbols.
_RELEASES = ("lts_20230802", "lts_20250814")


def obey_level() -> None:
    """Applies TF_CPP_MIN_LOG_LEVEL to messages that TensorFlow writes through abseil.

    Its servers do so, among them one of 20 lines at each connection, and TensorFlow leaves that
    library at its default. Does nothing where the library is one that is not known here.
    """
    text = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
    level = int(text) if text.isdecimal() else 0
    folder = Path(tf.sysconfig.get_lib())
    for path in folder.glob("libtensorflow_framework.so*"):
        library = ctypes.CDLL(str(path))
        for release in _RELEASES:
            name = f"_ZN4absl{len(release)}{release}14SetMinLogLevelENS0_18LogSeverityAtLeastE"
            function = getattr(library, name, None)
            if function is not None:
                function(ctypes.c_int(min(level, 2)))  # fatal ones are always shown
                return
