"""A worker of a run that goes on from its checkpoints, and may kill itself at a given place.

Options (JSON): rule (Python expression), local_devices, directory (of the checkpoints), out (npz
path, `{rank}` is replaced), epochs, every_syncs, step_seconds (that each step lasts at least),
overlap, fragments, compression, marks (a file that tells the test how far this start has come),
limit_bytes (no file may grow longer), lease_seconds (of a directory at a URL), and kill: null, or
[place, n] to send itself SIGKILL at the n-th time that it comes there. The places are those of
`PLACES`. kill_once: [rank, file]: only that worker kills itself, and only if the file does not
exist, which it then makes.
"""

import json
import os
import pathlib
import resource
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tfpara.checkpoint import lease
from tfpara.checkpoint import run as checkpoint
from tfpara.checkpoint import store as checkpoint_store
from tfpara.checkpoint.local_store import LocalStore
from tfpara.checkpoint.remote_store import RemoteStore
from tfpara.remote_files import RemoteFolder
from tfpara.sync.one_sync import global_state

TAU = 2
MINIBATCHES = 17  # of an epoch, over all replicas: not a multiple of their number
PLACES = {
    "start": "before the checkpoint is looked for",
    "restored": "when half of the checkpoint has been taken over",
    "step": "within a training step",
    "sync": "within a sync, when the global state is written and the replicas may not be",
    "begin": "when the directory of a checkpoint has been made",
    "part": "while a worker's part is being written: half of its bytes are there",
    "written": "when this worker's part is complete",
    "lease": "when the directory at a URL has been locked",
    "manifest": "when all parts and the manifest are there, before the rename; at a URL all parts",
    "renamed": "after the rename, or the manifest, before those that are too old go",
    "removing": "while an old checkpoint is being removed",
    "removed": "when the chief is done with a checkpoint, and the others do not know it yet",
}


class Killer:
    """Kills this process at the place that the options name."""

    def __init__(self, kill, once, rank):
        self.place, self.times = kill or (None, 0)
        self.mark = None
        if once:
            self.mark = pathlib.Path(once[1])
            if rank != once[0] or self.mark.exists():
                self.place = None

    def here(self, place):
        if place == self.place:
            self.times -= 1
            if self.times == 0:
                print("killed:", place, flush=True)
                if self.mark:
                    self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def op(self, place, after):
        """Returns `here` as an operation of a graph that runs after the tensors `after`."""
        if place != self.place:
            return tf.no_op()
        with tf.control_dependencies(after):
            return tf.numpy_function(lambda: self.here(place), [], [])

    def before(self, owner, name, place):
        self._around(owner, name, lambda: self.here(place), None)

    def after(self, owner, name, place):
        self._around(owner, name, None, lambda: self.here(place))

    def _around(self, owner, name, before, after):
        former = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if before:
                before()
            result = former(*args, **kwargs)
            if after:
                after()
            return result

        setattr(owner, name, wrapped)

    def install(self):
        """Replaces functions of the library in this process, so that they call `here`."""
        store = checkpoint_store.Store
        for kind in (LocalStore, RemoteStore):
            self.after(kind, "begin", "begin")
        self.before(checkpoint.SyncCheckpoints, "restore", "start")
        self.before(checkpoint.Parts, "piece", "restored")
        self.after(store, "write_part", "written")
        self.after(store, "commit", "removed")
        self._around_renames()
        self._around_objects()
        self._inside_a_part()
        self._inside_a_sync()

    def _around_objects(self):
        """The same places where the directory is at a URL."""
        upload, create, remove = RemoteFolder.upload, RemoteFolder.create, RemoteFolder.remove

        def uploading(folder, path, name):
            if name.endswith(".index"):  # the last file of a part
                self.here("part")
            upload(folder, path, name)

        def creating(folder, name, content):
            if name.endswith("manifest.json"):
                self.here("manifest")
            created = create(folder, name, content)
            self.here("renamed" if name.endswith("manifest.json") else "lease")
            return created

        def removing(folder, names):
            names = list(names)
            remove(folder, names)
            if names and names[0].endswith("manifest.json"):
                self.here("removing")

        RemoteFolder.upload = uploading
        RemoteFolder.create, RemoteFolder.remove = creating, removing

    def _inside_a_part(self):
        mark = checkpoint_store._mark

        def half(path):
            if "part-" in path.name and ".partial-" in str(path) and ".data" in path.name:
                if self.place == "part" and self.times == 1:
                    os.truncate(path, path.stat().st_size // 2)
                self.here("part")
            return mark(path)

        checkpoint_store._mark = half

    def _around_renames(self):
        rename = pathlib.Path.rename

        def wrapped(path, target):
            visible = pathlib.Path(target).name.startswith("checkpoint-")
            if visible:
                self.here("manifest")
            renamed = rename(path, target)
            self.here("renamed" if visible else "removing")
            return renamed

        pathlib.Path.rename = wrapped

    def _inside_a_sync(self):
        commit = global_state.GlobalState.commit

        def wrapped(state, update):
            commit(state, update)
            self.op("sync", [cell.variable.read_value() for cell in state.cells()])

        global_state.GlobalState.commit = wrapped


class Place(keras.layers.Layer):
    """The identity, which in training is one of the killer's places."""

    def __init__(self, killer):
        super().__init__()
        self.killer = killer

    def call(self, x, training=False):
        with tf.control_dependencies([self.killer.op("step", [x])] if training else []):
            return tf.identity(x)


def network(killer):
    """A model with dropout and batch normalisation."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dropout(0.3),
            Place(killer),
            layers.Dense(4),
        ]
    )


def minibatch(epoch, number):
    rng = np.random.default_rng([epoch, number])
    return rng.normal(size=(5, 6)).astype("float32"), rng.integers(0, 4, 5).astype("int32")


def data_of(strategy):
    """Returns this worker's data; minibatch k of an epoch belongs to replica k mod N."""

    def of_this_worker(epoch, first):
        mine = [
            k
            for k in range(first, MINIBATCHES)
            if (k - first) % strategy.num_replicas in strategy.local_replica_ids
        ]
        pairs = [minibatch(epoch, k) for k in mine]
        x = np.reshape([x for x, _ in pairs], (-1, 5, 6)).astype("float32")
        y = np.reshape([y for _, y in pairs], (-1, 5)).astype("int32")
        return tf.data.Dataset.from_tensor_slices((x, y))

    return strategy.datasets_by_epoch(of_this_worker)


class Progress(keras.callbacks.Callback):
    """Tells the test when steps are taken, makes them slow, and keeps all epochs' losses."""

    def __init__(self, marks, seconds):
        super().__init__()
        self.marks, self.seconds, self.losses = marks, seconds, {}

    def set_model(self, model):
        super().set_model(model)
        model.distribute_strategy.keep_state("losses", self)

    def get_state(self):
        return self.losses

    def set_state(self, state):
        self.losses = state

    def on_train_batch_end(self, batch, logs=None):
        if self.marks:
            pathlib.Path(self.marks).write_text(str(batch))
        time.sleep(self.seconds)

    def on_epoch_end(self, epoch, logs=None):
        self.losses[str(epoch)] = {k: float(v) for k, v in sorted(logs.items())}


class Stopping(keras.callbacks.EarlyStopping):
    """Remembers the best weights, and leaves those of the last epoch in the model."""

    def on_train_end(self, logs=None):
        pass

    def memory(self):
        found = {"stopping": np.array([self.best, self.wait, self.best_epoch])}
        return found | {f"best/{k}": weight for k, weight in enumerate(self.best_weights)}


def everything(strategy, model):
    """Returns all that a run ends with on this worker's replicas, by name."""
    found = {}
    for which in ("local", "global", *strategy.averages):
        with strategy.weights(model, which):
            for k, variable in enumerate(model.variables):
                locals_ = strategy.experimental_local_results(variable.value)
                found |= {f"{which}/{k}/{r}": c.numpy() for r, c in enumerate(locals_)}
    for k, variable in enumerate(model.optimizer.variables):
        locals_ = strategy.experimental_local_results(variable.value)
        found |= {f"optimizer/{k}/{r}": c.numpy() for r, c in enumerate(locals_)}
    synchronizer = strategy.synchronizer_of(model)
    for slot in synchronizer.slots():
        if slot.name != "counter/seconds" and not slot.empty:
            found[slot.key(strategy.local_replica_ids)] = slot.variable.read_value().numpy()
    return found


def main():
    options = json.loads(sys.argv[1])
    if options.get("limit_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["limit_bytes"],) * 2)
    lease.SECONDS = options.get("lease_seconds", lease.SECONDS)
    local = options["local_devices"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(local)]
    )
    tf.config.experimental.enable_op_determinism()
    strategy = tfpara.PeriodicSyncStrategy(
        eval(options["rule"]),
        sync_period=TAU,
        averages={"ema": tfpara.EMA(0.8)},
        aggregation="sharded",
        overlap=options.get("overlap", False),
        fragments=options.get("fragments", 1),
        compression=options.get("compression", "none"),
        devices=[f"CPU:{i}" for i in range(local)],
        timeout_seconds=60,
        startup_timeout_seconds=120,
    )
    killer = Killer(options.get("kill"), options.get("kill_once"), strategy.worker_index)
    killer.install()
    # Another seed shows any state that is not in the checkpoint.
    keras.utils.set_random_seed(options.get("seed", 1))
    with strategy.scope():
        model = network(killer)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    progress = Progress(options.get("marks"), options.get("step_seconds", 0.0))
    stopping = Stopping(patience=9, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau(factor=0.7, patience=1, min_delta=0.05, cooldown=1)
    validation = tf.data.Dataset.from_tensor_slices(minibatch(0, 99)).take(4).batch(4)
    model.fit(
        data_of(strategy),
        epochs=options["epochs"],
        verbose=0,
        validation_data=validation,
        callbacks=[
            plateau,
            stopping,
            progress,
            tfpara.callbacks.Checkpoint(
                options["directory"], every_syncs=options.get("every_syncs", 1), keep=2
            ),
        ],
    )
    results = everything(strategy, model) | stopping.memory()
    results["losses"] = np.array(json.dumps(progress.losses, sort_keys=True))
    np.savez(options["out"].replace("{rank}", str(strategy.worker_index)), **results)
    print("trained", flush=True)


if __name__ == "__main__":
    main()
