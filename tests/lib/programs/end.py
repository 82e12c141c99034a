"""A script of a user's that trains, and then ends in one of several ways.

JSON options: `how` it ends ("return", "raise", "exit", "leave", "wait", or "reading": in a `fit`
that fails while a generator is at work), and on which `rank`; `run`: whether `tfpara.run` calls it;
`thread`: whether it runs in a thread; `verbose`: of `fit`.
"""

import atexit
import json
import os
import sys
import threading
import time

import keras
import numpy as np

import tfpara

options = json.loads(sys.argv[1])


def slow(batch):
    while True:
        yield batch
        time.sleep(0.2)


def fail(batch, logs):
    raise KeyError("the user's")


def main():
    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2, timeout_seconds=60)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((32, 4), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=options.get("verbose", "auto"))
    atexit.register(print, "end", flush=True)
    print("trained", flush=True)
    if options.get("rank", strategy.worker_index) == strategy.worker_index:
        if options["how"] == "raise":
            raise KeyError("the user's")
        if options["how"] == "exit":
            sys.exit(7)
        if options["how"] == "leave":
            os._exit(3)
        if options["how"] == "reading":
            failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
            model.fit(slow((x, x[:, :1])), steps_per_epoch=4, verbose=0, callbacks=[failing])
        if options["how"] == "wait":
            print("waiting", flush=True)
            time.sleep(600)
    if options["how"] != "return":
        model.fit(x, x[:, :1], batch_size=4, verbose=0)


if options["run"]:
    tfpara.run(main)
elif options.get("thread"):
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
else:
    main()
