"""The command line of the drill, as in `tfpara-chaos --every=30s -- tfpara-launch -n 4 ...`.

Only the standard library is imported.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tfpara import files
from tfpara.chaos import report
from tfpara.chaos.drill import POINTS, PROGRESS, Drill, Plan, say
from tfpara.chaos.faults import FAULTS
from tfpara.cluster import exit_codes
from tfpara.version import __version__

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_KINDS = "\n".join(f"  {kind:10} {fault.make.__doc__ or ''}" for kind, fault in FAULTS.items())
_EPILOG = f"""
COMMAND is tfpara-launch with its arguments, or what starts it. Faults begin with the training, and
are drawn from --seed: the kind, the worker, the time. Each is looked at until it has really
happened: the process is gone, stands still, or sends packets again. A command that fails after a
fault is started again, as an engine would do. What it prints is shown.

{{run}} in COMMAND and in --checkpoints is "quiet" in the quiet run and "faults" in the other, so
that each has folders of its own.

Faults:
{_KINDS}

Points: {", ".join(POINTS)}: where the library has printed that it is there.

A script may tell of its progress in the file that {PROGRESS} names, by lines of JSON:
{{"time": time.monotonic(), "pid": os.getpid(), "done": minibatches that are in the model}}.
Then faults are made in workers that have told alone, and the report has what each fault has cost.
At its end it may add {{"minibatches": {{"trained": ..., "lost": ..., "doubled": ...}}}}. A script
that does both:

  tfpara-chaos --every=20s --for=2m --faults=kill,stop,term --quiet_run -- \\
    tfpara-launch -n 4 --elastic --threads 1 -- python -m tfpara.examples.drill --out=drill-{{run}}

Exit code: that of the command, 128 + N if signal N ended it; 1 if it has ended with 0 and a
minibatch was lost or doubled, or no fault was made; 2 if the drill cannot begin; 130 after Ctrl-C;
143 after SIGTERM; 129 after SIGHUP.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the drill; returns the exit code."""
    options = _options(argv)
    # These signals raise SystemExit, so the present fault is taken back and the run is ended.
    with exit_codes.ended_by(
        *(signal.SIGTERM, signal.SIGHUP),
        say=lambda name: say(f"got {name}, so there is no report"),
    ):
        return exit_codes.with_output("tfpara-chaos", lambda: _until_ctrl_c(options))


def _until_ctrl_c(options: argparse.Namespace) -> int:
    try:
        return _run(options)
    except KeyboardInterrupt:
        say("interrupted, so there is no report")
        return exit_codes.INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    quiet = None
    if options.quiet_run:
        say("the quiet run begins")
        quiet = Drill(_words(options.command, "quiet"), Plan(starts=1)).run()
        if quiet.code:
            say(f"the quiet run has ended with {quiet.code}, so there is no drill")
            return quiet.code
    plan = Plan(**{name: getattr(options, name) for name in Plan._fields if name != "starts"})
    run = Drill(_words(options.command, "faults"), plan).run()
    quiet_seconds = quiet.seconds if quiet else options.quiet_seconds
    found = report.summary(run, report.rate(quiet.steps) if quiet else None, quiet_seconds)
    if options.report:
        try:
            with files.whole(options.report) as place:
                place.write_text(json.dumps(found))
        except OSError as error:
            print(f"tfpara-chaos: --report cannot be written: {error}", file=sys.stderr)
    print(report.text(found), flush=True)
    wrong = not run.faults or any(run.told.get(name) for name in ("lost", "doubled"))
    return run.code or int(bool(options.kinds) and wrong)


def _words(command: Sequence[str], name: str) -> list[str]:
    words = [word.replace("{run}", name) for word in command]
    if words[0] == "tfpara-launch":
        return [sys.executable, "-m", "tfpara.launch", *words[1:]]
    return [sys.executable if words[0] == "python" else words[0], *words[1:]]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tfpara-chaos",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description="Make faults in the workers of a run, and say what each has cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add("--every", type=_seconds, default=30.0, help="mean time between faults (default: 30s)")
    add("--for", dest="until", type=_seconds, default=float("inf"), metavar="FOR",
        help="time of training after which there are no more (default: until the command ends), "
        "such as 90s, 30m, 1h")  # fmt: skip
    add("--faults", dest="kinds", type=_names(FAULTS), default=["kill"], metavar="FAULTS",
        help="kinds, with commas between (default: kill)")  # fmt: skip
    add("--at", dest="points", type=_names(POINTS), default=[], metavar="AT",
        help="points at which there is one more fault: when the run first reaches them, and when "
        "it next does after each timed fault")  # fmt: skip
    add("--lasting", type=_seconds, default=8.0,
        help="duration of each fault that ends by itself (default: 8s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    add("--checkpoints", metavar="DIR", help="the folder of the run's checkpoints")
    quiet = parser.add_mutually_exclusive_group()
    quiet.add_argument("--quiet_run", action="store_true",
                       help="run the command once without faults first")  # fmt: skip
    quiet.add_argument("--quiet_seconds", type=_seconds, help="what a quiet run takes")
    add("--report", type=Path, metavar="FILE", help="JSON file for the report")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("no command. Write it last: tfpara-chaos -- tfpara-launch -n 2 script.py")
    if options.command[0] not in ("tfpara-launch", "python") and not shutil.which(
        options.command[0]
    ):
        parser.error(f"program {options.command[0]!r} was not found in PATH. Check its name.")
    if options.report and not options.report.absolute().parent.is_dir():
        parser.error(f"--report={options.report}: the folder does not exist. Make it first.")
    if options.report and options.report.is_dir():
        parser.error(f"--report={options.report} is a folder. Give a path of a file.")
    folder = options.checkpoints
    options.checkpoints = Path(folder.replace("{run}", "faults")) if folder else None
    for kind in options.kinds:
        if missing := FAULTS[kind].need(options.checkpoints):
            parser.error(f"the fault {kind!r} cannot be made here: it needs {missing}")
    return options


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 30m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            wrong = unknown[0] if unknown else text
            raise argparse.ArgumentTypeError(f"{wrong!r} is none of {', '.join(known)}")
        return names

    return parse
