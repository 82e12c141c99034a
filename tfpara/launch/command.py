"""The command line of the launcher, as in `tfpara-launch -n 2 -- python -m scripts.train`.

Every worker gets a free port and a TF_CONFIG, or Horovod's variables, and its output gets a prefix.
If a worker fails, the others are ended. Then the launcher restarts all, if asked to, or returns the
exit code of the worker that failed. No worker outlives the launcher, however the launcher ends.
Only the standard library is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfpara import cluster
from tfpara.cluster import asynchronous as async_cluster
from tfpara.cluster import engines, exit_codes, rendezvous, secret
from tfpara.cluster.ports import joined
from tfpara.elastic.meeting import ADDRESS
from tfpara.elastic.meeting_point import Meeting
from tfpara.launch import cards
from tfpara.launch.clusters import LaunchError, local_async_clusters, local_clusters, ports
from tfpara.launch.launcher import Launcher
from tfpara.launch.output import Console
from tfpara.launch.supervisor import SAVING_SECONDS, SETTLE_SECONDS, Policy, Process
from tfpara.status.server import StatusError, StatusServer
from tfpara.version import __version__

_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ELASTIC_RESTARTS = 100  # most restarts of each worker, if there is no --restart_workers
_START_SECONDS = 300.0  # longest wait for the first workers of an elastic run
_EPILOG = f"""
COMMAND is a program with its arguments, or a .py file. `python` is the Python that runs the
launcher. The first worker is the chief. The launcher replaces TF_CONFIG and the rank variables of
engines. Workers have an empty stdin. {_LOG_LEVEL} is 3 unless you set it: TensorFlow's
errors reach Python as exceptions anyway.

When a worker fails, the others have {SETTLE_SECONDS:g} s to report errors of their own. Then they
get SIGTERM, and SIGKILL after --grace. When the launcher gets SIGINT, SIGTERM or SIGHUP, it passes
the signal on to the workers, and sends SIGKILL after --grace, or at once on a second signal.
Without --grace, a worker that is writing a checkpoint (tfpara.callbacks.Checkpoint) has
{SAVING_SECONDS:g} s.

Unless you set TFPARA_SECRET or TFPARA_SECRET_FILE, the launcher gives each start a new secret, by
which the processes of the run know each other. tfpara's connections are on --host only. But
TensorFlow listens on all interfaces, and asks nobody for a password. On a shared network, keep
others from its ports.

With --max_restarts=K the launcher starts all workers again when one has failed (an exit code other
than 0, or a signal), at most K times. This is for programs that continue from checkpoints
(tfpara.callbacks.Checkpoint). After a signal to the launcher itself, nothing is started again.

With --elastic training continues while workers are lost. This is for programs whose strategy has
elastic=tfpara.Elastic(...). A failed worker is started again after 2 s and joins the others. If it
fails within a minute each time, the wait grows to 30 s. SIGUSR1 to the launcher adds a worker.
SIGUSR2 makes the worker that was added last leave at its next sync. To send it: kill -USR1 PID. You
may start more workers by hand, also on other machines: give the launcher --host=HOST --port=PORT,
give these workers TFPARA_MEETING=HOST:PORT, and set TFPARA_SECRET_FILE to the same for all.

With --evaluator one more process scores checkpoints while the others train. This is for programs
that call tfpara.evaluate_checkpoints where tfpara.is_evaluator() is true; in other programs this
process ends at once. It has no GPU. If it fails, training continues. The launcher waits for its
last score.

With --ps=P there are P parameter servers, and N workers besides the chief. This is for programs
with tfpara.AsyncStrategy. If a worker fails, the run continues as long as another worker is left,
or --restart_workers=R allows a restart. If the chief or a parameter server fails, the run ends.

Exit code: 0 if all workers returned 0 (with --elastic and --ps some workers may have failed). Else
it is that of the worker that failed first, or 128 + N if signal N ended this worker. 2 if the
workers could not be started. 75 means that a program got SIGTERM, wrote a checkpoint, and should be
started again: on Slurm by `sbatch --requeue` and `scontrol requeue`, on Kubernetes by a Job's
podFailurePolicy.

Examples (the first runs as it is):
  tfpara-launch -n 2 -- python -m tfpara.examples.classify
  tfpara-launch -n 2 script.py
  tfpara-launch -n 4 --threads 1 script.py --epochs=3
  tfpara-launch -n 2 --max_restarts 3 -- python -m package.program
  tfpara-launch -n 2 --collectives=horovod script.py
  tfpara-launch -n 4 --elastic script.py
  tfpara-launch -n 2 --evaluator script.py
  tfpara-launch --ps 1 -n 2 --restart_workers 3 script.py
"""

_HELP = {
    "workers": "number of workers, with the chief (default: 1); with --ps, without the chief",
    "ps": "number of parameter servers, for programs with tfpara.AsyncStrategy (default: 0)",
    "restart_workers": "with --ps or --elastic: restart each worker after a failure, at most R "
    f"times, while the others train (default: 0; with --elastic {_ELASTIC_RESTARTS})",
    "elastic": "for programs with PeriodicSyncStrategy(elastic=...): serve their meeting point at "
    "--port; training continues while workers fail, and restarted workers join it",
    "spares": "with --elastic: start K more workers, which build their model and wait until "
    "another worker is lost; give Elastic(max_workers=N) (default: 0)",
    "evaluator": "start one more process, which scores the checkpoints during training",
    "host": "address of this machine on which the workers listen (default: 127.0.0.1)",
    "port": "port of the chief; workers use the next ports (default: 0, any free ports). With "
    "--collectives=horovod: the port at which the processes find each other",
    "collectives": "what connects the workers: TensorFlow, by TF_CONFIG, or Horovod over Gloo, by "
    "its HOROVOD_ variables (default: tensorflow)",
    "threads": "CPU threads per worker, in OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS and "
    "TF_NUM_INTEROP_THREADS (default: your values of these, else cores / N, at least 1)",
    "gpus_per_worker": "GPUs of each worker, in CUDA_VISIBLE_DEVICES; 0 for none (default: the "
    "GPUs of this machine, divided by the workers; if there are fewer GPUs than workers, workers "
    "share a GPU and take its memory as they need it). With --ps the chief and the servers have "
    "none",
    "grace": "time between asking workers to end and SIGKILL (default: 10, and up to "
    f"{SAVING_SECONDS:g} while a worker writes a checkpoint)",
    "max_restarts": "restart all workers after a failure, at most K times (default: 0)",
    "prefix": "start each line of output with [chief], [worker 1], ... (default: yes)",
    "status_port": "serve a live page of the run at this port; 0 for any free port. Programs of "
    "this machine can read it at the printed address, which has a token (default: no page)",
    "log_dir": "also write each worker's output to DIR/chief.log, DIR/worker-1.log, ..., with "
    "TensorFlow's notes at the start, which the terminal does not show; files that exist grow",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher; returns the exit code.

    Args:
        argv: the arguments of `tfpara-launch`. None: those of this process.
    """
    exit_codes.open_streams()
    options = _parser().parse_args(argv)
    options.host = options.host.strip("[]")
    try:
        command = _command(options.command)
        _check(options)
        if options.workers is None:
            options.workers = 1
            hint = _misplaced(options.command)
            if hint:
                print(f"tfpara-launch: {hint}", file=sys.stderr, flush=True)
        if options.log_dir is not None:
            options.log_dir.mkdir(parents=True, exist_ok=True)
        console = Console(sys.stdout.buffer, sys.stderr.buffer, options.prefix)
        with contextlib.ExitStack() as stores:
            if options.elastic:
                policy, processes = _elastic(options, stores)
            else:
                policy = Policy(options.grace, options.restart_workers or 0)
                # The store of Horovod's workers is closed before each restart, but the live page is
                # not. So the store has an ExitStack of its own.
                of_workers = stores.enter_context(contextlib.ExitStack())
                processes = functools.partial(_processes, options, of_workers)
            if options.evaluator:
                processes = functools.partial(_with_evaluator, options, processes)
            launcher = Launcher(console, policy, options.log_dir, options.max_restarts)
            if options.status_port is not None:
                given = f"--status_port={options.status_port}"
                page = StatusServer(options.status_port, launcher.status.now, given)
                stores.callback(page.close)
                print(f"tfpara-launch: live page: {page.url}", file=sys.stderr, flush=True)
            return launcher.run(command, processes)
    except (LaunchError, StatusError, secret.SecretError, OSError) as error:
        print(f"tfpara-launch: {error}", file=sys.stderr)
        return 2


def _check(options: argparse.Namespace) -> None:
    """Raises LaunchError for flags that contradict each other."""
    if options.restart_workers is not None and not (options.ps or options.elastic):
        raise LaunchError(
            f"--restart_workers={options.restart_workers} is for --ps and --elastic: other workers "
            "are started again all together, by --max_restarts."
        )
    if options.spares and not options.elastic:
        raise LaunchError(f"--spares={options.spares} is for --elastic.")
    if options.elastic and (options.ps or options.max_restarts):
        other = "--ps" if options.ps else "--max_restarts"
        raise LaunchError(
            f"--elastic and {other} contradict each other: an elastic run goes on while workers "
            "are started again one at a time. Leave one of them out."
        )
    if options.elastic and options.collectives != "tensorflow":
        raise LaunchError(
            f"--elastic with --collectives={options.collectives}: Horovod's groups cannot change. "
            "Leave --collectives out."
        )
    if options.ps and options.status_port is not None:
        raise LaunchError(
            f"--status_port={options.status_port} with --ps={options.ps}: the live page shows "
            "syncs, and asynchronous training has none. Leave it out; TensorBoard shows pushes and "
            "their staleness."
        )
    if options.ps and options.collectives != "tensorflow":
        raise LaunchError(
            f"--ps={options.ps} with --collectives={options.collectives}: asynchronous training "
            "has no collectives. Leave one of them out."
        )


def _command(words: Sequence[str]) -> list[str]:
    """Returns the program to run and its arguments, after checks."""
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words:
        raise LaunchError("no command. Write it last: tfpara-launch -n 2 script.py")
    program = words[0]
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise LaunchError(
                f"script {program!r} does not exist in {os.getcwd()}. Check the path."
            )
        return [sys.executable, *words]
    if program in ("python", "python3"):
        return [sys.executable, *words[1:]]
    if shutil.which(program) is None:
        raise LaunchError(
            f"program {program!r} was not found in PATH, or may not be executed. "
            "Check its name and its permissions."
        )
    return words


def _processes(options: argparse.Namespace, stores: contextlib.ExitStack) -> list[Process]:
    """Returns the processes to start, the chief first; `stores` will close Horovod's store."""
    gpus = _gpus(options, options.workers)
    if not options.ps:
        environments = _environments(options, stores)
        return [
            Process(cluster.label(rank), {**environment, **gpus[rank]})
            for rank, environment in enumerate(environments)
        ]
    views = local_async_clusters(options.workers, options.ps, options.host, options.port)
    common = _common(options, len(views))
    processes = []
    for view in views:
        is_worker = view.task_type == "worker"
        own = {
            "TF_CONFIG": view.tf_config(),
            **(gpus[view.task_index] if is_worker else cards.NONE),
        }
        name = async_cluster.label(view.task_type, view.task_index)
        processes.append(Process(name, {**common, **own}, expendable=is_worker))
    return processes


def _elastic(
    options: argparse.Namespace, stores: contextlib.ExitStack
) -> tuple[Policy, Callable[[], list[Process]]]:
    """Serves the meeting point of an elastic run until `stores` ends.

    Returns the policy for failures, and a function that returns the workers.
    """
    common = _common(options, options.workers)
    [port] = ports(options.host, options.port, 1)
    meeting = Meeting(options.host, port, options.workers, _START_SECONDS, secret.read(common))
    stores.callback(meeting.close)
    environment = {**common, ADDRESS: joined(options.host, port)}
    gpus = _gpus(options, options.workers + options.spares)

    def worker(number: int) -> Process:
        own = gpus[number % len(gpus)]
        return Process(f"worker {number}", {**environment, **own}, expendable=True)

    def takes_in(killed: bool) -> bool:
        # A worker that fails by itself before the training begins is not restarted: the cause, such
        # as a mistake in the script, would make it fail again.
        return not meeting.state.is_over and (meeting.state.has_begun or killed)

    restarts = _ELASTIC_RESTARTS if options.restart_workers is None else options.restart_workers
    policy = Policy(
        options.grace, restarts, takes_in, worker, meeting.follow, lambda: meeting.state.is_deserted
    )
    return policy, lambda: [worker(number) for number in range(options.workers + options.spares)]


def _with_evaluator(
    options: argparse.Namespace, processes: Callable[[], list[Process]]
) -> list[Process]:
    """Returns the processes and, as the last one, the evaluator."""
    others = processes()
    task = {"TF_CONFIG": json.dumps({"task": {"type": "evaluator", "index": 0}})}
    environment = {**_common(options, len(others) + 1), **cards.NONE, **task}
    return [*others, Process("evaluator", environment, beside=True)]


def _common(options: argparse.Namespace, count: int) -> dict[str, str]:
    """Returns the environment that all `count` processes share."""
    share = max(1, len(os.sched_getaffinity(0)) // count)
    default = dict.fromkeys(_THREADS, str(share))
    asked = dict.fromkeys(_THREADS, str(options.threads)) if options.threads else {}
    common = {"PYTHONUNBUFFERED": "1", _LOG_LEVEL: "3", **default, **os.environ, **asked}
    for name in ("TF_CONFIG", *engines.variables()):
        common.pop(name, None)
    return common | secret.for_start(common)


def _gpus(options: argparse.Namespace, workers: int) -> list[dict[str, str]]:
    """Returns the environment variables by which each worker gets its GPUs."""
    return cards.divided(cards.of_machine(os.environ), workers, options.gpus_per_worker)


def _environments(
    options: argparse.Namespace, stores: contextlib.ExitStack
) -> list[dict[str, str]]:
    """Returns one environment for each worker, by rank."""
    count = options.workers
    common = _common(options, count)
    if options.collectives == "tensorflow":
        clusters = local_clusters(count, options.host, options.port)
        return [{**common, "TF_CONFIG": each.tf_config()} for each in clusters]
    # The former store has addresses of workers that have ended. So it is closed, and each start of
    # the workers gets a new store.
    stores.close()
    [port] = ports(options.host, options.port, 1)
    shared = secret.read(common)
    store = rendezvous.Server(port, options.host, shared)
    stores.callback(store.close)
    return [
        {**common, **rendezvous.variables(each, options.host, port, shared)}
        for each in local_clusters(count, options.host)
    ]


def in_range(
    kind: Callable[[str], float], low: float, high: float, unit: str
) -> Callable[..., float]:
    """Returns a parser of numbers from `low` to `high`, for argparse; `unit` is for its errors."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {unit} from {low} to {high}")
        return value

    return parse


def _workers(text: str) -> float:
    if text.startswith("p"):  # argparse reads "-np 2" as "-n" with the value "p"
        raise argparse.ArgumentTypeError("-np is of mpirun and horovodrun: here it is -n")
    return in_range(int, 1, 10000, "a whole number")(text)


def _misplaced(words: Sequence[str]) -> str:
    """Returns a hint if the launcher's number of workers seems to come after the program."""
    text = " ".join(words)
    found = re.search(r" (-n|-np|--workers)[ =]?(\d+)(?= |$)", text)
    if found is None or words[:1] == ["--"]:
        return ""
    return (
        f"one worker is started, since {found[0].strip()} stands behind the program, and so is the "
        f"program's. For {found[2]} workers write it first: tfpara-launch -n {found[2]} {words[0]} "
        "…; else -- before the program."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfpara-launch",
        usage="%(prog)s [options] [--] COMMAND [ARGUMENT ...]",
        description="Start the workers of a cluster on this machine and wait for them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole, many = functools.partial(in_range, int, unit="a whole number"), 10**9

    def add(*flags: str, **settings: Any) -> None:
        parser.add_argument(*flags, help=_HELP[flags[-1].lstrip("-")], **settings)

    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add("-n", "--workers", type=_workers, metavar="N")
    add("--ps", type=whole(0, 10000), default=0, metavar="P")
    add("--restart_workers", type=whole(0, many), metavar="R")
    add("--elastic", action="store_true")
    add("--evaluator", action="store_true")
    add("--spares", type=whole(0, many), default=0, metavar="K")
    add("--host", default="127.0.0.1")
    add("--port", type=whole(0, 65535), default=0)
    add("--collectives", choices=("tensorflow", "horovod"), default="tensorflow")
    add("--threads", type=whole(1, 10000), default=0, metavar="T")
    add("--gpus_per_worker", type=whole(0, 1000), metavar="G")
    add("--grace", type=in_range(float, 0, 86400, "a number of seconds"), metavar="SECONDS")
    add("--max_restarts", type=whole(0, many), default=0, metavar="K")
    add("--prefix", action=argparse.BooleanOptionalAction, default=True)
    add("--status_port", type=whole(0, 65535), metavar="PORT")
    add("--log_dir", type=Path, metavar="DIR")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
