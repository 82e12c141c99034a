"""Runs docs/engines/spark/train.py under Spark, three times in the same session.

In the first training one worker is killed. The second and the third find the Python workers of the
one before. In the third one worker is asked to end. Arguments: the file, and a folder, which gets
one folder for each training and `ends.json`, with what they have returned.
"""

import functools
import importlib.util
import json
import os
import pathlib
import signal
import sys
import time

from pyspark import cloudpickle
from pyspark.sql import SparkSession

specification = importlib.util.spec_from_file_location("train_with_spark", sys.argv[1])
script = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = script
specification.loader.exec_module(script)
cloudpickle.register_pickle_by_value(script)
FOLDER = pathlib.Path(sys.argv[2])


def train(folder, fault, at):
    """Calls `script.train`; worker 1 does `fault` after step `at`, if no step was taken before."""
    import keras

    import tfpara

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    marks = folder / f"steps-{rank}"
    fault = None if marks.exists() or rank != 1 else fault
    made = []

    class Kept(tfpara.callbacks.Checkpoint):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    class Steps(keras.callbacks.Callback):
        taken = 0

        def on_train_batch_end(self, batch, logs=None):
            self.taken += 1
            with marks.open("a") as file:
                file.write(f"{os.getpid()} ")
            if fault == "kill" and self.taken == at:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "leave" and self.taken == at:
                os.kill(os.getpid(), signal.SIGTERM)
                while not made[0]._termination.asked:
                    time.sleep(0.05)

    tfpara.callbacks.Checkpoint = Kept
    return script.train(folder, callbacks=[Steps()])


def main():
    ends = []
    for name, fault, at in [("killed", "kill", 30), ("again", None, 0), ("left", "leave", 13)]:
        folder = FOLDER / name
        folder.mkdir()
        ends.append(script.run(functools.partial(train, folder, fault, at), 2))
    (FOLDER / "ends.json").write_text(json.dumps(ends))


session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
try:
    main()
finally:
    session.stop()
