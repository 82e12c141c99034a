"""Workers of which one does something else than the others, again and again.

Options (JSON): cases (names of methods of `Worker`, some of which all workers do alike), odd (the
worker that differs), local_devices, and those of PeriodicSyncStrategy. Each case prints one line:
"NAME: " and the message of the error, or the result.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tfpara.cluster import failures
from tfpara.sync.simulation import make_devices


class Here(keras.callbacks.Callback):
    """Calls `do()` after a batch of the first epoch, or after that epoch."""

    def __init__(self, do, batch=None):
        super().__init__()
        self.do, self.batch, self.epoch = do, batch, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 0 and batch == self.batch:
            self.do()

    def on_epoch_end(self, epoch, logs=None):
        if self.epoch == 0 and self.batch is None:
            self.do()


class Worker:
    """A worker with the cases as methods; `odd` is whether this is the worker that differs."""

    def __init__(self, strategy, odd):
        self.strategy, self.odd, self.more = strategy, odd, 0
        self.new_model()

    def new_model(self):
        with self.strategy.scope():
            self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            self.model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])

    def data(self):
        count = 8 * (6 + self.more)
        rng = np.random.default_rng(self.strategy.worker_index)
        x = rng.normal(size=(count, 6)).astype("float32")

        def mine(_):
            return tf.data.Dataset.from_tensor_slices((x, x[:, :4])).batch(4)

        return self.strategy.distribute_datasets_from_function(mine)

    def evaluate(self):
        return self.model.evaluate(self.data(), verbose=0)

    def fit(self, do=None, batch=None, epochs=3, **kwargs):
        callbacks = [Here(do, batch)] if do and self.odd else []
        return self.model.fit(
            self.data(), epochs=epochs, verbose=0, callbacks=callbacks, **kwargs
        ).history

    def stop(self):
        self.model.stop_training = True

    # -- what does not match ----------------------------------------------------------------

    def first_evaluate(self):
        self.new_model()
        return self.evaluate() if self.odd else self.fit()

    def first_fit(self):
        self.new_model()
        return self.fit() if self.odd else self.evaluate()

    def evaluate_after_epoch(self):
        return self.fit(self.evaluate)

    def evaluate_in_epoch(self):
        return self.fit(self.evaluate, batch=4)

    def validation(self):
        return self.fit(validation_data=self.data() if self.odd else None)

    def stop_after_epoch(self):
        return self.fit(self.stop)

    def stop_in_epoch(self):
        return self.fit(self.stop, batch=3)

    def metric(self):
        return self.fit(lambda: self.model.metrics[0].result())

    def weights(self):
        def look():
            with self.strategy.weights(self.model, "global"):
                pass

        return self.fit(look, batch=2)

    def epochs(self):
        return self.fit(epochs=3 if self.odd else 2)

    def order(self):
        calls = [self.evaluate, self.fit]
        for call in calls if self.odd else reversed(calls):
            call()

    def barrier(self):
        return self.fit(self.strategy.barrier)

    def variable(self):
        return self.new_model() if self.odd else self.evaluate()

    def gather(self):
        return self.strategy.gather(tf.ones([1]), 0) if self.odd else self.evaluate()

    def other_weights(self):
        with self.strategy.weights(self.model, "local" if self.odd else "global"):
            pass

    def forget(self):
        return self.strategy.forget(self.model) if self.odd else self.evaluate()

    def former_model(self):
        """Trains a former model on the odd worker, while the others evaluate the present one."""
        former = self.model
        self.new_model()
        self.fit()
        if self.odd:
            former.fit(self.data(), verbose=0)
        return self.evaluate()

    # -- what does --------------------------------------------------------------------------

    def alike(self):
        """Does all that workers may do, with unequal data, also with a second model."""
        self.more = self.strategy.worker_index
        self.new_model()
        found = [self.evaluate()]
        for _ in range(2):
            history = self.model.fit(
                self.data(),
                epochs=2,
                verbose=0,
                validation_data=self.data(),
                callbacks=[Here(self.evaluate), tfpara.callbacks.StopTogether()],
            ).history
            found.append([values[-1] for values in history.values()])
            with self.strategy.weights(self.model, "global"):
                found.append(self.evaluate())
        self.strategy.barrier()
        self.more = 0
        self.fit()
        return [round(float(value), 5) for each in found for value in each]

    def still_alike(self):
        """Trains the model once more, after all the mismatches."""
        return [round(float(value), 5) for value in (*self.fit()["loss"], *self.evaluate())]


def main():
    options = json.loads(sys.argv[1])
    cases, odd = options.pop("cases"), options.pop("odd")
    local = options.pop("local_devices", 1)
    make_devices(local)
    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BSP(),
        devices=[f"CPU:{device}" for device in range(local)],
        **{"sync_period": 3, "timeout_seconds": 40, **options},
    )
    worker = Worker(strategy, strategy.worker_index == odd)
    for case in cases:
        try:
            found = getattr(worker, case)()
        except (tf.errors.OpError, RuntimeError) as error:
            found = failures.explain(error)
            found = found.sentence if found else str(error)
        print(f"{case}: {found}", flush=True)


if __name__ == "__main__":
    main()
