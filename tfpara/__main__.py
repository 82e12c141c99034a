"""`python -m tfpara`, which prints versions and commands. It does not import TensorFlow."""

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
Which sync period a link needs:
  tfpara-plan --step_ms=110 --model_mb=50 --link_mbit=1000
In Python:
  import tfpara; help(tfpara.PeriodicSyncStrategy)"""


def main(arguments: Sequence[str]) -> int:
    """Prints versions and commands; returns the exit code, 2 for arguments it does not know."""
    if not set(arguments) <= {"-h", "--help", "--version"}:
        print(
            f"python -m tfpara starts nothing, and was given {' '.join(arguments)!r}. Write "
            "tfpara-launch, or python -m tfpara.launch, and the same.",
            file=sys.stderr,
        )
        return 2
    found = {name: _version(name) for name in ("tensorflow", "keras")}
    print(_TEXT.format(version=__version__, python=platform.python_version(), **found))
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed under that name"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
