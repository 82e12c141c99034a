"""Runs docs/engines/ray/train.py under Ray: one worker is killed, and one asks all to leave.

Arguments: the file, and a folder, which gets one folder for each run and `ends.json`, with what the
runs have returned.
"""

import importlib.util
import json
import os
import pathlib
import shutil
import signal
import sys
import time

import ray
import ray.train

specification = importlib.util.spec_from_file_location("train_with_ray", sys.argv[1])
script = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = script
specification.loader.exec_module(script)
ray.cloudpickle.register_pickle_by_value(script)
FOLDER = pathlib.Path(sys.argv[2])


def train(folder, faults=()):
    """Calls `script.train`; `faults` has what worker 1 does in each start, and after which step."""
    import keras

    import tfpara

    rank = ray.train.get_context().get_world_rank()
    marks = folder / f"steps-{rank}"
    starts = len(set(marks.read_text().split())) if marks.exists() else 0
    what, at = faults[starts] if rank == 1 else (None, None)
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
                print(os.getpid(), file=file)
            if what == "kill" and self.taken == at:
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "leave" and self.taken == at:
                (folder / "leave").touch()
                while not made[0]._termination.asked:
                    time.sleep(0.05)

    tfpara.callbacks.Checkpoint = Kept
    return script.train(folder, callbacks=[Steps()])


def main():
    two, one = FOLDER / "two", FOLDER / "one"
    two.mkdir()
    ends = [script.run(lambda: train(two, [("kill", 30), ("leave", 13)]), two, 2)]
    shutil.copytree(two / "checkpoints", one / "checkpoints")
    ends.append(script.run(lambda: train(one), one, 1))
    (FOLDER / "ends.json").write_text(json.dumps(ends))


ray.init(num_cpus=2, include_dashboard=False)
try:
    main()
finally:
    ray.shutdown()
