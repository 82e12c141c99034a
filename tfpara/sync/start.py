"""The start of a strategy: its worker finds the others, and compares its settings with theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfpara import cluster, program
from tfpara.cluster import failures, quiet, startup
from tfpara.collectives.choice import choose, of_horovod
from tfpara.elastic.meeting import ADDRESS as MEETING
from tfpara.elastic.settings import Elastic, meeting_point
from tfpara.sync.elastic.company import Elastic as ElasticCompany
from tfpara.sync.keras import hooks, scope
from tfpara.sync.progress import Progress, checked_port
from tfpara.sync.settings import Settings
from tfpara.sync.start_line import say, start_line
from tfpara.sync.tensorflow import average_loss, links
from tfpara.sync.tensorflow.devices import check_threads, named_devices
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.workers import horovod_group
from tfpara.sync.workers.company import Company
from tfpara.whole_number import checked_seconds

_log = logging.getLogger(__name__)


def start(
    strategy: Any,
    settings: Settings,
    devices: Sequence[str] | None,
    elastic: Elastic | None,
    startup_timeout_seconds: float,
    status_port: int | None,
) -> None:
    """Joins the other workers, and initializes the base classes of this worker's strategy."""
    is_simulated = strategy._is_simulated
    checked_seconds("startup_timeout_seconds", startup_timeout_seconds)
    status_port = checked_port(status_port, elastic is not None)
    # The devices of this process are listed before the processes are connected, because TensorFlow
    # lists the devices of all connected processes afterwards.
    devices = named_devices(devices)
    check_threads(len(devices))
    found, settings, starting = workers_of(settings, elastic, startup_timeout_seconds, is_simulated)
    with starting as company, _starting_first():
        if company.changes:
            links.prepare_for_changes(devices)
        extended = PeriodicSyncExtended(strategy, settings, devices, found, company)
        # The constructor of MultiWorkerMirroredStrategy would make TensorFlow's own extended
        # object, so the constructor of its base class is called instead.
        tf.distribute.Strategy.__init__(strategy, extended)
    failures.know(found, settings.timeout_seconds)
    extended.begin()
    if found.num_workers > 1:
        found = horovod_group.with_addresses(found, extended.control)
    program.watch(strategy, found, settings.timeout_seconds)
    extended.links.compare()
    extended.progress = Progress(strategy)
    extended.waits.progress = extended.progress.told
    if found.num_workers > 1:
        extended.waits.connect(found)
    scope.watch(strategy)
    hooks.install()
    quiet.install()
    average_loss.install()
    if company.joining:
        say("joins a run that is under way")
    elif strategy.is_chief:
        # The line shows the number of workers, so that a mistake in TF_CONFIG is seen.
        line = start_line(
            strategy.num_workers,
            extended.worker_devices,
            extended.models.rule,
            strategy.sync_period,
            strategy.averages,
            extended.links.way,
            divided=not company.changes,
            unlike=company.unlike_devices,
            kinds=company.kinds,
            options=settings.of_syncs(),
        )
        alone = found.num_workers == 1 and not is_simulated and not company.changes
        hint = cluster.left_alone() if alone else ""
        for text in filter(None, (line, extended.links.connected_by, hint)):
            say(text)
    extended.progress.begin(status_port)


def workers_of(
    settings: Settings,
    elastic: Elastic | None,
    startup_timeout_seconds: float,
    is_simulated: bool,
) -> tuple[cluster.Cluster, Settings, contextlib.AbstractContextManager[Company]]:
    """Finds the other workers.

    Returns the cluster, which in an elastic run is this worker alone; the settings that depend on
    the workers filled in; and a context in which TensorFlow's server starts. It yields the company.
    """
    if elastic is not None:
        settings = _checked_elastic(settings, elastic)
        if meeting_point():
            if elastic.rule_follows:
                settings = dataclasses.replace(settings, following_rule=settings.rule)
            return cluster.ALONE, settings, _elastic_company(elastic, startup_timeout_seconds)
        say(f"elastic=: {MEETING} is not set, so this process trains alone")
    found = _found(settings, is_simulated)
    chosen, why = choose(settings.collectives, found)
    if found.num_workers > 1 and found.is_chief and settings.collectives == "auto":
        # If "auto" had a choice between backends, the result is logged as a warning, because
        # warnings are shown by default.
        chose = found.rank_variable and (of_horovod(found) or not found.told)
        level = logging.WARNING if chose else logging.DEBUG
        _log.log(level, "tfpara: collectives=%s: %s", chosen, why)
    settings = dataclasses.replace(settings, collectives=chosen)
    if chosen == "tensorflow" or not of_horovod(found):
        found = startup.find_each_other(found, startup_timeout_seconds, chosen)
    return found, settings, _fixed_company(found, settings, startup_timeout_seconds)


@contextlib.contextmanager
def _elastic_company(elastic: Elastic, startup_timeout_seconds: float) -> Iterator[Company]:
    """A context in which to start TensorFlow's server; it first connects to the meeting point."""
    with startup.elastic_run():
        company = ElasticCompany(elastic, startup_timeout_seconds)
        with quiet.starting():
            yield company


@contextlib.contextmanager
def _fixed_company(
    found: cluster.Cluster, settings: Settings, startup_timeout_seconds: float
) -> Iterator[Company]:
    """A context in which to start TensorFlow's server; if Horovod is used, it first joins that."""
    by_horovod = found.num_workers > 1 and settings.collectives == "horovod"
    starting: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if by_horovod:
        horovod_group.join(found, startup_timeout_seconds, settings.timeout_seconds)
    else:
        starting = startup.guard(found, startup_timeout_seconds)
    with starting:
        yield Company(found, by_horovod)


def _found(settings: Settings, is_simulated: bool) -> cluster.Cluster:
    """Returns the cluster of TF_CONFIG, or of an engine's variables; the run is not elastic."""
    found = cluster.taking_part(cluster.read)
    if meeting_point() and found.num_workers == 1 and not is_simulated:
        raise ValueError(
            f"{MEETING}={meeting_point()!r} is where the workers of an elastic run meet, and "
            "with elastic=None each of them would train by itself. Give this strategy "
            f"elastic=tfpara.Elastic(), or start the program without --elastic and {MEETING}."
        )
    if found.has_ps and found.is_chief:
        _log.warning(
            "tfpara: TF_CONFIG lists 'ps', which a synchronous strategy leaves out: the chief and "
            "the workers train without them. tfpara.AsyncStrategy uses them."
        )
    return found


def _checked_elastic(settings: Settings, elastic: object) -> Settings:
    """Returns the settings for an elastic run, once all that it needs is checked."""
    if not isinstance(elastic, Elastic):
        raise TypeError(f"elastic={elastic!r} must be a tfpara.Elastic(...), or None.")
    try:
        found = cluster.taking_part(cluster.read)
    except cluster.ClusterError:
        if not meeting_point():
            raise
        return settings.elastic()  # an elastic run uses no TF_CONFIG, so errors in it do no harm
    if found.num_workers > 1:
        told = found.told.engine.name if found.told else "TF_CONFIG"
        if not meeting_point():
            raise ValueError(
                f"elastic= needs a meeting point, and {told} has started {found.num_workers} "
                "workers without one. Give tfpara-launch --elastic. Without tfpara-launch, start "
                f"tfpara-meet --workers={found.num_workers} --host=0.0.0.0 --port=4000 on one "
                f"machine, and set {MEETING}=HOST:4000, with its name, for all workers."
            )
        if found.is_chief:
            say(f"workers meet at {MEETING}; ranks and addresses of {told} are not used")
    return settings.elastic()


@contextlib.contextmanager
def _starting_first() -> Iterator[None]:
    """Replaces TensorFlow's error if TensorFlow was used before the strategy was made."""
    try:
        yield
    except RuntimeError as error:
        if "at program startup" not in str(error):
            raise
        raise RuntimeError(
            "TensorFlow was used before the strategy was made, and cannot join a cluster any more. "
            "Make the strategy before any tensor, variable, dataset, layer, metric, model or "
            "optimizer; give tfpara.Outer a function, as in "
            "Outer(lambda: keras.optimizers.Adam(0.1, epsilon=1e-3))."
        ) from None
