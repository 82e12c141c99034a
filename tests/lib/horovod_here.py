"""A mark for tests of Horovod, which skips them where Horovod is not installed."""

import os

import pytest

from tfpara.collectives import horovod

# Where scripts/test.sh has installed Horovod the tests run, so that they fail if it does not load.
needs_horovod = pytest.mark.skipif(
    not os.environ.get("TFPARA_TEST_HOROVOD") and horovod.problem() is not None,
    reason=str(horovod.problem()),
)
