"""Imports Keras without matplotlib, which takes a tenth of the CPU time of Keras' import.

Keras imports matplotlib for functions that no test calls. A test that draws imports it later.
"""

import sys

if "matplotlib" not in sys.modules:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # so that an import fails
    import keras  # noqa: F401

    del sys.modules["matplotlib"]
