"""What holds for all tests."""

import os
import sys
import sysconfig
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import pytest

import tfpara

# Helpers that the tests of a directory share.
sys.path.insert(0, str(Path(__file__).parent / "distributed"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Under `scripts/test.sh` the installed wheel is tested, not the source tree."""
    installed = Path(sysconfig.get_path("purelib"))
    found = Path(tfpara.__file__)
    if os.environ.get("TFPARA_TEST_INSTALLED") and installed not in found.parents:
        pytest.exit(f"tfpara comes from {found}, not from the wheel in {installed}", 3)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first, so that none of them is left for one process at the end."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def _logical_devices() -> None:
    """Four logical CPU devices in the test process, and few threads."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(4)]
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
