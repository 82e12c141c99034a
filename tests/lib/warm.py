"""Runs Python programs in processes that have imported TensorFlow and Keras already, for tests.

Importing TensorFlow takes seconds of a core, and tests start hundreds of programs. Here a parent
(`warm_parent.py`) imports it once, and each program runs in a fork of the parent. For the program
and the test this is like an interpreter of its own; `test_warm.py` compares the two:

- The process is the test process's own child: exit code, signals, pipes and times are real.
- It has the arguments, directory, environment and standard streams that were asked for. Variables
  that are read before TensorFlow has been imported must be as in the parent (see `_EARLY`). An
  environment in which they differ gets other parents or, if there are enough of those, a new
  interpreter.
- TensorFlow has no context and no threads yet, and nothing of ours has been imported.
- What TensorFlow says of the Python lines that made an operation is the same for all operations.
- Parents come in pairs that take turns, each with hashes of its own, so that the workers of a run
  iterate over sets in different orders, as they do between machines.

Off Linux every program has a new interpreter.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.lib.launched import default_signals

_PARENT = pathlib.Path(__file__).with_name("warm_parent.py")
_MAX_PAIRS = 2
# Prefixes of variables that are read when Python starts or TensorFlow is imported, and of those
# among them that are read later.
_EARLY = ("PYTHON", "LANG", "LC_", "LD_", "HOME", "TF", "KERAS_", "XLA_", "CUDA_", "NPY_")
_EARLY += ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_", "GRPC_")
_LATE = ("TF_CONFIG", "TF_NUM_INT", "TFPARA_")
_SET_CHILD_SUBREAPER = 36  # of prctl

_lock = threading.Lock()
_pairs: dict[frozenset[tuple[str, str]], Iterator[_Parent]] = {}


class Popen(subprocess.Popen):
    """A running Python program, otherwise as `subprocess.Popen`; signals have default handlers.

    Args:
        program: a script's path, or "-m" and a module's name; then its arguments.
        env: all environment variables.
        **options: cwd, text, stdin, stdout and stderr of `subprocess.Popen`.
    """

    def __init__(self, program: list[str], env: dict[str, str], **options) -> None:
        assert options.keys() <= {"cwd", "text", "stdin", "stdout", "stderr"}, options
        assert program[0] == "-m" or os.path.isabs(program[0]), program
        command = [sys.executable, *map(os.fspath, program)]
        super().__init__(command, env=env, preexec_fn=default_signals, **options)

    def _execute_child(self, *given) -> None:
        """Starts the process; `subprocess.Popen` calls this once it has made pipes and files."""
        of = inspect.signature(super()._execute_child).bind(*given).arguments
        parent = _parent_for(of["env"])
        if parent is None:
            super()._execute_child(*given)
            return
        request = {
            "program": of["args"][1:],
            "directory": os.path.abspath(of["cwd"] or "."),
            "environment": of["env"],
        }
        streams = [of[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = parent.fork(request, [own if fd == -1 else fd for own, fd in enumerate(streams)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(of[name] for name in pipes))


def _parent_for(environment: dict[str, str]) -> _Parent | None:
    """Returns a parent for the variables that are read early; None if there are enough others."""
    others = {k: v for k, v in environment.items() if not k.startswith(_LATE)}
    key = frozenset(item for item in others.items() if item[0].startswith(_EARLY))
    with _lock:
        if key not in _pairs:
            if len(_pairs) == _MAX_PAIRS or sys.platform != "linux":
                return None
            _pairs[key] = itertools.cycle([_Parent(others), _Parent(others)])
        return next(_pairs[key])


class _Parent:
    """A running `warm_parent.py`. It ends when its socket does, with this process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_PARENT), str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                preexec_fn=default_signals,
            )

    def fork(self, request: dict, streams: list[int]) -> int:
        """Starts a program with these standard streams; returns the number of its process."""
        with _lock:
            # The parent's fork forks again and ends. The orphan then belongs to the next process
            # above that adopts orphans, which is this one meanwhile.
            prctl = ctypes.CDLL(None, use_errno=True).prctl
            if prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "prctl")
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
                pid = self._socket.recv(100)
                ended = self._socket.recv(100)
            finally:
                prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not ended:
            raise RuntimeError(f"{_PARENT.name} has ended with code {self._process.wait()}")
        return int(pid)
