"""What holds of every reader, whatever its input is: it ends soon, and does nothing but read."""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import tracemalloc

# Never where a reader reads: programs, other machines, code in a pickle, changes of files.
_NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn")
_NEVER += ("pickle.find_class", "socket.connect", "ctypes.dlopen")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod")
_CHANGES += ("os.truncate", "shutil.rmtree", "shutil.move")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SECONDS = 10.0  # reached only by a hang
_watching = []  # what was done, the folder in which writing is allowed, and the reader's thread


def _hook(event, arguments):
    if not _watching or threading.get_ident() != _watching[-1][2]:
        return  # threads that tests before have left do other things
    done, folder, _ = _watching[-1]
    if event in _NEVER:
        done.append((event, str(arguments)[:200]))
    elif event in _CHANGES or (event == "open" and (arguments[2] or 0) & _WRITES):
        path = arguments[0]
        if isinstance(path, int) or _is_allowed(os.path.abspath(os.fsdecode(path)), folder):
            return
        done.append((event, str(path)[:200]))


def _is_allowed(path, folder):
    """Whether a file may be written: in the folder, and by tf.function and `tempfile`."""
    within = folder is not None and path.startswith(f"{folder}/")
    return within or path == tempfile.gettempdir() or "__autograph_generated_file" in path


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched(size, folder=None, factor=500, least=4e6):
    """Fails where what is done inside is more than to read an input of `size` bytes.

    Args:
        size: bytes of the input.
        folder: in which files may be written.
        factor, least: bytes of memory that are allowed: `least` + `factor` * `size`.
    """
    done, began = [], not tracemalloc.is_tracing()
    if began:
        tracemalloc.start()

    def hang(*_):
        raise AssertionError(f"a reader has not ended after {_SECONDS:g} s")

    former = signal.signal(signal.SIGALRM, hang)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    _watching.append((done, folder, threading.get_ident()))
    try:
        yield
    finally:
        _watching.pop()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
        peak = tracemalloc.get_traced_memory()[1] - before
        if began:
            tracemalloc.stop()
    assert not done, f"a reader has done {done}"
    assert peak < least + factor * size, f"{peak:.3g} bytes of memory for {size} of input"
