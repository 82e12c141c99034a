"""Imports TensorFlow and Keras, and forks for each program that a test asks for; see `warm.py`."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import socket
import sys
import time

_imported: list[str] = []  # packages' modules that the parent has imported


@atexit.register  # before all others, so it is called after them
def _keep_what_was_imported() -> None:
    """Leaves the parent's modules as they are where the interpreter ends.

    To take them apart copies their memory, which all forks share, and is half of the CPU time of a
    short program. TensorFlow's context, models and strategies are not deleted there in any case.
    """
    kept = [sys.modules.pop(name) for name in _imported if name in sys.modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


# Before TensorFlow, which imports Keras; by its path, since PYTHONPATH may not lead to the tests.
runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "lean_keras.py"))

# isort: split
import numpy as np
import tensorflow as tf
from tensorflow.python.util import tf_stack


def program_to_run(connection: socket.socket) -> dict | None:
    """Forks for each request. Returns the request in the process that has to run it."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return None  # The tests are over.
        forked = os.fork()
        if forked == 0:
            between = os.getpid()
            runs = os.fork()
            if runs == 0:
                while os.getppid() == between:  # until the tests have adopted it
                    time.sleep(0.001)
                for own, stream in enumerate(streams):
                    os.dup2(stream, own)
                    os.close(stream)
                return json.loads(message)
            connection.send(str(runs).encode())
            os._exit(0)
        for stream in streams:
            os.close(stream)
        os.waitpid(forked, 0)
        connection.send(b"ended")


def run(request: dict) -> None:
    """Runs a program as `python PROGRAM ...` or `python -m MODULE ...` does."""
    np.random.seed()  # Python's own generator is seeded anew at each fork
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if os.environ.get("TFPARA_TEST_GRAPPLER") == "0":
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    program, *arguments = request["program"]
    module = program == "-m"
    if module:
        program, *arguments = arguments
    sys.argv = [program, *arguments]
    # The first entry of the path is this file's directory, unless Python runs with -P.
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(program))
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


with socket.socket(fileno=int(sys.argv[1])) as tests:
    own = {*sys.stdlib_module_names, "__main__"}
    _imported[:] = [name for name in sys.modules if name.partition(".")[0] not in own]
    gc.collect()
    gc.freeze()  # so that collections do not write to, and so copy, what all forks share
    gc.set_threshold(20_000, 10, 5)  # tracing makes many objects, few of them garbage
    stack = tf_stack.extract_stack()  # as in conftest.py
    assert stack[0].lineno
    tf_stack.extract_stack = lambda stacklevel=1: stack
    wanted = program_to_run(tests)
if wanted:
    run(wanted)
