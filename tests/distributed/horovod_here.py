"""Whether the tests of Horovod run."""

import os

import pytest

from tfpara.collectives import horovod

# Where scripts/test.sh has installed Horovod, a Horovod that does not load is a failure.
needs_horovod = pytest.mark.skipif(
    not os.environ.get("TFPARA_TEST_HOROVOD") and horovod.problem() is not None,
    reason=str(horovod.problem()),
)
