"""`python -m tfpara`: versions, commands and environment variables, without TensorFlow."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from tfpara.version import __version__

_TEXT = """\
tfpara {version} (tensorflow {tensorflow}, keras {keras}, Python {python})

Start a script of yours on two workers of this machine:
  tfpara-launch -n 2 script.py              or: python -m tfpara.launch -n 2 script.py
Examples, to run and to read:
  tfpara-launch -n 2 -- python -m tfpara.examples.classify
  tfpara-launch -n 2 -- python -m tfpara.examples.loop
  tfpara-launch -n 3 --elastic -- python -m tfpara.examples.elastic
Faults in a run of yours, and what each has cost:
  tfpara-chaos --every=30s --for=10m --faults=kill,stop -- tfpara-launch -n 4 --elastic script.py
Which sync period a link needs, from your numbers or by a short run of your script:
  tfpara-plan --step_ms=110 --model_mb=50 --link_mbit=1000
  tfpara-plan --measure script.py
In Python:
  import tfpara; help(tfpara.PeriodicSyncStrategy)
Environment variables:
{variables}"""

# The environment variables of tfpara itself. docs/engines.md lists those of TensorFlow and of
# engines such as Horovod.
VARIABLES = {
    "TFPARA_COORDINATOR": "HOST:PORT at which the worker of rank 0 listens for the others",
    "TFPARA_SIZE": "the number of workers",
    "TFPARA_RANK": "this worker, from 0 to TFPARA_SIZE - 1",
    "TFPARA_MEETING": "HOST:PORT of the meeting point of an elastic run (tfpara-meet)",
    "TFPARA_WORKER_NAME": "a name of this worker in the messages of an elastic run",
    "TFPARA_SECRET": "the secret with which the messages of the run are signed",
    "TFPARA_SECRET_FILE": "a file with the secret; only its owner may have the right to read it",
    "TFPARA_RESTART_EXIT_CODE": "exit code of a program that should be started again (default: 75)",
    "TFPARA_LOST_WORKER_EXIT_CODE": "exit code if another worker was lost (default: 1)",
    "TFPARA_TRACEBACK": "1: errors that tfpara explains in one sentence also show their traceback",
    "TFPARA_TENSORBOARD": "0: TensorBoard shows no speed and no syncs, as under plain Keras",
    "TFPARA_CHAOS_PROGRESS": "set only by tfpara-chaos: the file of a script's progress",
    "TFPARA_MEASURE": "set only by tfpara-plan --measure: the program ends after its first fit",
    "TFPARA_RUN_ID": "set only by tfpara-launch: tells its runs apart; a restart keeps it",
    "TFPARA_LAUNCHER": "set only by tfpara-launch: how a program tells the launcher why it ends",
}


def main(arguments: Sequence[str]) -> int:
    """Prints versions and commands; returns the exit code, which is 2 for unknown arguments."""
    if not set(arguments) <= {"-h", "--help", "--version"}:
        print(
            f"python -m tfpara starts nothing, and was given {' '.join(arguments)!r}. Write "
            "tfpara-launch, or python -m tfpara.launch, and the same.",
            file=sys.stderr,
        )
        return 2
    found = {name: _version(name) for name in ("tensorflow", "keras")}
    variables = "\n".join(f"  {name:<30}{text}" for name, text in VARIABLES.items())
    python = platform.python_version()
    print(_TEXT.format(version=__version__, python=python, variables=variables, **found))
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed under that name"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
