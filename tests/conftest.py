"""Options, fixtures and settings for all tests."""

import functools
import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import hypothesis
import pytest

import tfpara
from tests.lib.fixtures import (  # noqa: F401
    corpus_directory,
    run,
    run_well,
    tiny,
    tiny_directory,
    tiny_options,
    uninterrupted,
)

# No deadline, since the time of an example depends on what else the machine does.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")

_NIGHTLY = Path(__file__).resolve().with_name("nightly.txt")
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
# Programs that modules of Python and numpy.testing start.
_TOOLS = {"ldconfig", "gcc", "cc", "ld", "objdump", "uname", "lscpu"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-processes", action="store_true", help="skip a test where it starts a process"
    )
    parser.addoption(
        "--no-trainings",
        action="store_true",
        help="skip a test where it trains with a strategy, unless it is marked quick",
    )
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="of a test with parameters take its first case, unless it is marked all_cases",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With --no-processes skips a test when it, or a fixture of it, starts a process."""
    if not config.getoption("--no-processes"):
        return

    def skip(event: str, arguments: tuple) -> None:
        of_a_test = "PYTEST_CURRENT_TEST" in os.environ
        if event in _STARTS and of_a_test:
            program = os.path.basename(os.fsdecode(arguments[0])) if arguments else ""
            if program not in _TOOLS:
                pytest.skip(f"starts a process: {program or event}")

    sys.addaudithook(skip)


_running: list[pytest.Item] = []  # the test that is set up or called


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[:] = [item]


@pytest.fixture(scope="session", autouse=True)
def _trainings(pytestconfig: pytest.Config) -> Iterator[None]:
    """With --no-trainings skips a test at its first step of replicas or asynchronous `fit`."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("--no-trainings"):
            patch.setattr(
                tfpara.PeriodicSyncStrategy, "run", _quick(tfpara.PeriodicSyncStrategy.run)
            )
            patch.setattr(tfpara.AsyncStrategy, "fit", _quick(tfpara.AsyncStrategy.fit))
        yield


def _quick(train: Callable) -> Callable:
    @functools.wraps(train)
    def wrapped(*args, **kwargs):
        if _running[0].get_closest_marker("quick") is None:
            pytest.skip("trains")
        return train(*args, **kwargs)

    return wrapped


def pytest_sessionstart(session: pytest.Session) -> None:
    """Makes sure that `scripts/test.sh` tests the installed wheel, not the source tree."""
    installed = Path(sysconfig.get_path("purelib"))
    found = Path(tfpara.__file__)
    if os.environ.get("TFPARA_TEST_INSTALLED") and installed not in found.parents:
        pytest.exit(f"tfpara comes from {found}, not from the wheel in {installed}", 3)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the nightly tests, and sorts the files that take longest to the front.

    So no process has such a file left at the end. First come files with tests marked `long`, then
    files by their longest time-out, then by size.
    """
    _mark_nightly(items)
    if config.getoption("--first-cases"):
        _leave_first_cases(config, items)
    long = {item.path for item in items if item.get_closest_marker("long")}
    size = {item.path: item.path.stat().st_size for item in items}
    patience = dict.fromkeys(size, 0)
    for item in items:
        for timeout in item.iter_markers("timeout"):
            patience[item.path] = max(patience[item.path], timeout.args[0])
    items.sort(
        key=lambda item: (
            item.path not in long,
            -patience[item.path],
            -size[item.path],
            item.path,
        )
    )


def _mark_nightly(items: list[pytest.Item]) -> None:
    lines = [line for line in _NIGHTLY.read_text().splitlines() if not line.startswith("#")]
    begins = tuple(line if "[" in line else f"{line}[" for line in lines)
    for item in items:
        # scripts/test.sh runs the tests through a link.
        file = item.path.resolve().relative_to(_NIGHTLY.parent).as_posix()
        if f"{file}::{item.name}[".startswith(begins):
            item.add_marker("nightly")


def _leave_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    left, others, seen = [], [], set()
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)
        first = test not in seen or item.get_closest_marker("all_cases")
        # A case marked one_version may be skipped, so another case must be left beside it.
        if item.get_closest_marker("one_version") is None:
            seen.add(test)
        (left if first else others).append(item)
    items[:] = left
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session", autouse=True)
def _logical_devices() -> None:
    """Gives the test process four logical CPU devices, few threads, few garbage collections."""
    import tensorflow as tf
    from tensorflow.python.util import tf_stack

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(4)]
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    # Tracing makes many objects, few of them garbage. The objects of imported modules never are.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 5)
    # With each operation TensorFlow keeps the Python stack that made it, deep as it is in pytest.
    # That takes a seventh of a training's time. One stack does for all.
    stack = tf_stack.extract_stack()
    assert stack[0].lineno  # looks its lines up, which threads must not do at the same time
    tf_stack.extract_stack = lambda stacklevel=1: stack
    if os.environ.get("TFPARA_TEST_GRAPPLER") == "0":
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(scope="module", autouse=True)
def _graphs() -> Iterator[None]:
    """Deletes the graphs of a test file at its end; a process would otherwise have gigabytes.

    TensorFlow keeps for ever the gradient of each all-reduce that was traced, and each Python
    function that a graph calls. These refer to the strategy, its models and all of their graphs.
    """
    yield
    import tensorflow as tf
    from tensorflow.python.framework import ops

    gradients = ops.gradient_registry._registry
    for name in [name for name in gradients if name.startswith("CustomGradient-")]:
        del gradients[name]
    called = getattr(tf.compat.v1.get_default_graph(), "_py_funcs_used_in_graph", [])
    called[:] = [f for f in called if not getattr(f, "__module__", "").startswith("tfpara.sync")]
    gc.collect()
