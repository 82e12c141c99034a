"""Prints facts about its process (JSON), and ends as the option `end` says; see test_warm.py."""

import atexit
import json
import os
import random
import signal
import stat
import sys

facts = {
    "ours": sorted(name for name in sys.modules if name.split(".")[0] in ("tfpara", "scripts")),
    "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
    "arguments": sys.argv,
    "path": sys.path,
    "directory": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "streams": [
        (str(s.encoding), s.line_buffering, s.fileno(), stat.S_IFMT(os.fstat(s.fileno()).st_mode))
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "group": [os.getpgid(0), os.getsid(0)],
}

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.python.client import device_lib  # noqa: E402

tasks = "/proc/self/task"
facts["files"] = len(os.listdir("/proc/self/fd"))
facts["threads"] = [len(os.listdir(tasks))]
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
draws = [random.random(), np.random.uniform(), float(tf.random.uniform(()))]
layer = keras.layers.Dense(1)
layer.build((1,))
draws.append(float(layer.kernel[0, 0]))
devices = [d.incarnation for d in device_lib.list_local_devices()]
facts["threads"].append(len(os.listdir(tasks)))
facts["devices"] = len(tf.config.list_logical_devices("CPU"))
facts["own"] = {
    "draws": draws,
    "hash": [hash("a name")],
    "incarnations": devices,
    "process": [os.getpid()],
}
print(json.dumps(facts))
atexit.register(print, "at exit")
end = json.loads(sys.argv[1])["end"]
if end == "kill":
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if end == "error":
    raise ValueError("a fault")
sys.exit(end)
