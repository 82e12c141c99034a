"""Options, fixtures and settings for all tests."""

import collections
import fnmatch
import functools
import gc
import itertools
import os
import re
import resource
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported

import tests.lib.lean_keras  # noqa: F401  # before others import Keras

# isort: split
import hypothesis
import keras
import pytest

import tfpara
from tests.lib.fixtures import (  # noqa: F401
    browser,
    bucket,
    corpus_directory,
    may_make_links,
    run,
    run_well,
    s3_server,
    tiny,
    tiny_directory,
    tiny_options,
    uninterrupted,
)

# No deadline, since the time of an example depends on what else the machine does. Other examples at
# each run; scripts/test.sh --all asks for more of them, and --fast for fewer.
hypothesis.settings.register_profile("fast", deadline=None, max_examples=8)
hypothesis.settings.register_profile("each change", deadline=None, max_examples=40)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=200)
hypothesis.settings.load_profile("each change")

_TIER = re.compile(r"tests/(unit|training|processes|programs|nightly)/")
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
# Programs that modules of Python and numpy.testing start.
_TOOLS = {"ldconfig", "gcc", "cc", "ld", "objdump", "uname", "lscpu"}
_running: list[pytest.Item] = []  # the test that is set up or called
_began: list[float] = []  # the CPU seconds until then


def _tier(node: str) -> str:
    """Returns the folder of a test: its tier."""
    found = _TIER.search(node)
    return found[1] if found else "other"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="of a test with parameters take its first case, unless it is marked all_cases",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Lets a test of tests/unit fail where it, or a fixture of it, starts a process."""

    def check(event: str, arguments: tuple) -> None:
        if event in _STARTS:
            program = os.path.basename(os.fsdecode(arguments[0])) if arguments else ""
            if program not in _TOOLS:
                _refuse_in_unit(f"starts a process ({program or event})", "processes")

    sys.addaudithook(check)


def _refuse_in_unit(what: str, tier: str) -> None:
    test = _running[0] if _running else None
    if test and _tier(test.nodeid) == "unit" and test.get_closest_marker("quick") is None:
        pytest.fail(f"This test {what}: it belongs in tests/{tier}, or is marked quick.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[:] = [item]
    _began[:] = [_cpu_seconds()]
    # Else what a test draws would depend on the tests that its process ran before.
    keras.utils.set_random_seed(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.user_properties.append(("cpu", round(_cpu_seconds() - _began.pop(), 2)))
    _running.clear()


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of those that it started and that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.fixture(scope="session", autouse=True)
def _trainings() -> Iterator[None]:
    """Lets a test of tests/unit fail at its first step of replicas or asynchronous `fit`."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((tfpara.PeriodicSyncStrategy, "run"), (tfpara.AsyncStrategy, "fit")):
            patch.setattr(owner, name, _refused_in_unit(getattr(owner, name)))
        yield


def _refused_in_unit(train: Callable) -> Callable:
    @functools.wraps(train)
    def wrapped(*args, **kwargs):
        _refuse_in_unit("trains with a strategy", "training")
        return train(*args, **kwargs)

    return wrapped


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the tests that took most of the CPU, and the number and the seconds of each tier's.

    CPU seconds are those of a test and its processes: unlike the others, they hardly depend on what
    else the machine does.
    """
    tests: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    cpu: collections.Counter[str] = collections.Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[_tier(report.nodeid)] += report.duration
            tests[_tier(report.nodeid)] += report.when == "call"
            if report.when == "teardown":
                cpu[report.nodeid] += dict(report.user_properties).get("cpu", 0)
    terminalreporter.section("CPU seconds")
    for node, used in cpu.most_common(30):
        terminalreporter.line(f"{used:7.1f} {node}")
    terminalreporter.section("tiers")
    for tier in tests:
        used = sum(one for node, one in cpu.items() if _tier(node) == tier)
        terminalreporter.line(
            f"{tier:10} {tests[tier]:5} tests {seconds[tier]:7.0f} s, {used:7.0f} CPU seconds"
        )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Makes sure that `scripts/test.sh` tests the installed wheel, not the source tree."""
    installed = Path(sysconfig.get_path("purelib"))
    found = Path(tfpara.__file__)
    if os.environ.get("TFPARA_TEST_INSTALLED") and installed not in found.parents:
        pytest.exit(f"tfpara comes from {found}, not from the wheel in {installed}", 3)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests with their tier, and sorts the files that take longest to the front.

    So no process has such a file left at the end. First come files with tests marked `long`, then
    files by their longest time-out, then by size.
    """
    _mark_tiers(config, items)
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


def _mark_tiers(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests with their tier, and cases that match `nightly_cases` as nightly."""
    unknown = set()
    for item in items:
        if _tier(item.nodeid) != "other":
            item.add_marker(_tier(item.nodeid))
        for mark in item.iter_markers("nightly_cases"):
            unknown |= {(item.path, item.originalname, pattern) for pattern in mark.args}
    for item in items:
        for mark in item.iter_markers("nightly_cases"):
            for pattern in mark.args:
                if fnmatch.fnmatchcase(item.callspec.id, pattern):
                    item.add_marker("nightly")
                    unknown.discard((item.path, item.originalname, pattern))
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"nightly_cases names cases that are not there: {sorted(unknown)}")


def _leave_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    left, others, seen = [], [], set()
    for item in items:
        test = item.path, getattr(item, "originalname", item.name)
        first = test not in seen or item.get_closest_marker("all_cases")
        # Cases with these marks may be left out, so another case must be left beside them.
        if not any(map(item.get_closest_marker, ("one_version", "nightly"))):
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
    if os.environ.get("TFPARA_TEST_GRAPPLER") in ("0", "programs"):
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
