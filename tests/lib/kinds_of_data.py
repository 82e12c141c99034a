"""Data of every kind that Keras users pass to `fit`, whose rows can be counted.

Row r has the input (r, 2r, …), the label 3r + 1 and the sample weight r + 2. Some kinds have no
sample weights.
"""

import os

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH, EPOCHS = 42, 8, 2  # five batches and a ragged one


def aligned(array):
    """Returns a copy that begins at a multiple of 64 bytes, which TensorFlow does not copy."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def arrays(rows=ROWS):
    r = np.arange(rows, dtype=np.float32)
    x = np.stack([r, 2 * r], 1)
    return aligned(x), aligned((3 * r + 1)[:, None]), aligned(r + 2)


class Batches(keras.utils.PyDataset):
    """A PyDataset whose batches are views of arrays, as in Keras' own documentation."""

    def __init__(self, data, batch=BATCH, **kwargs):
        super().__init__(**kwargs)
        self.data, self.batch = data, batch

    def __len__(self):
        return -(-len(self.data[0]) // self.batch)

    def __getitem__(self, index):
        return tuple(a[index * self.batch : (index + 1) * self.batch] for a in self.data)


class SelfShuffled(Batches):
    """A PyDataset that shuffles its rows by itself, in the common form."""

    def __init__(self, data, **kwargs):
        super().__init__(data, **kwargs)
        self.on_epoch_end()

    def on_epoch_end(self):
        self.rows = np.arange(len(self.data[0]))
        np.random.shuffle(self.rows)

    def __getitem__(self, index):
        rows = self.rows[index * self.batch : (index + 1) * self.batch]
        np.random.normal(size=len(rows))  # draws numbers, as for augmentation
        return tuple(a[rows] for a in self.data)


class Endless(Batches):
    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return super().__getitem__(index % len(self))


def generator(data, repeat=False):
    batches = Batches(data)
    while True:
        for index in range(len(batches)):
            yield batches[index]
        if not repeat:
            return


def rows(data):
    return tf.data.Dataset.from_tensor_slices(data)


def from_generator(data, batch=None):
    spec = tuple(tf.TensorSpec([batch, *a.shape[1:]], a.dtype) for a in data)
    return tf.data.Dataset.from_generator(lambda: generator(data), output_signature=spec)


def write_files(folder):
    """Writes three files of different lengths with numbers of rows; ROWS_IN names the folder."""
    for name, numbers in {"a": range(20), "b": range(20, 25), "c": range(25, ROWS)}.items():
        (folder / name).write_text("".join(f"{number}\n" for number in numbers))
    os.environ["ROWS_IN"] = str(folder)


def files(batch):
    def row(line):
        r = tf.strings.to_number(line)
        return tf.stack([r, 2 * r]), tf.stack([3 * r + 1])

    paths = [os.path.join(os.environ["ROWS_IN"], name) for name in "abc"]
    return tf.data.TextLineDataset(paths).map(row).batch(batch)


def off(dataset):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _mine(strategy, data):
    worker, workers = strategy.worker_index, strategy.num_workers
    return tuple(a[worker::workers] for a in data)


def _own(strategy, dataset):
    return strategy.distribute_datasets_from_function(lambda context: dataset)


XY = slice(0, 2)  # takes x and y of the arrays, without sample weights

# By the name of a kind, a function (data, strategy) → arguments of `fit`. Without a strategy (None)
# they are for plain Keras.
KINDS = {
    "arrays": lambda d, s: {"x": d[0], "y": d[1], "sample_weight": d[2], "batch_size": BATCH},
    "arrays in order": lambda d, s: {"x": d[0], "y": d[1], "batch_size": BATCH, "shuffle": False},
    "tensors": lambda d, s: {"x": tf.constant(d[0]), "y": tf.constant(d[1]), "batch_size": BATCH},
    "class weights": lambda d, s: {
        "x": d[0],
        "y": d[1].astype(int) % 2,
        "class_weight": {0: 1.0, 1: 5.0},
        "batch_size": BATCH,
    },
    "batched": lambda d, s: {"x": rows(d).batch(BATCH)},
    "shuffled": lambda d, s: {"x": rows(d).shuffle(ROWS).batch(BATCH)},
    "unknown cardinality": lambda d, s: {"x": rows(d).filter(lambda *_: True).batch(BATCH)},
    "repeated": lambda d, s: {"x": rows(d).take(40).batch(BATCH).repeat(), "steps_per_epoch": 5},
    "files": lambda d, s: {"x": files(BATCH)},
    "from_generator": lambda d, s: {"x": from_generator(d[XY])},
    "from_generator, fixed": lambda d, s: {
        "x": from_generator([a[:40] for a in d[XY]], BATCH),
        "epochs": 2,
    },
    "own, OFF": lambda d, s: {
        "x": rows(d).batch(BATCH) if s is None else off(rows(_mine(s, d)).batch(BATCH))
    },
    "own, function": lambda d, s: {
        "x": rows(d).batch(BATCH) if s is None else _own(s, from_generator(_mine(s, d)))
    },
    "PyDataset": lambda d, s: {"x": Batches(d, workers=0)},
    "PyDataset, in order": lambda d, s: {"x": Batches(d[XY]), "shuffle": False},
    "PyDataset, threads": lambda d, s: {"x": Batches(d, workers=2)},
    "PyDataset, threads in order": lambda d, s: {
        "x": Batches(d, workers=2, max_queue_size=1),
        "shuffle": False,
    },
    "PyDataset, one batch": lambda d, s: {"x": Batches(d, batch=64)},
    "PyDataset, self-shuffled": lambda d, s: {"x": SelfShuffled(d, workers=2)},
    "PyDataset, class weights": lambda d, s: {
        "x": Batches((d[0], d[1].astype(int) % 2)),
        "class_weight": {0: 1.0, 1: 5.0},
    },
    "PyDataset, steps": lambda d, s: {
        "x": Batches([a[:32] for a in d], workers=2),
        "steps_per_epoch": 4,
    },
    "PyDataset, endless": lambda d, s: {
        "x": Endless([a[:32] for a in d], workers=2),
        "steps_per_epoch": 4,
    },
    "generator": lambda d, s: {"x": generator(d), "epochs": 1},
    "generator, endless": lambda d, s: {
        "x": generator([a[:40] for a in d], repeat=True),
        "steps_per_epoch": 5,
    },
}


class Recorder(keras.Model):
    """A model that notes every row of its steps' minibatches."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.note(data)
        return super().train_step(data)

    def test_step(self, data):
        self.note(data)
        return super().test_step(data)

    def note(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y = tf.cast(tf.reshape(y, [-1]), tf.float32)
        weight = tf.zeros_like(y) - 1 if weight is None else tf.cast(weight, tf.float32)
        table = tf.concat([x, y[:, None], tf.reshape(weight, [-1, 1])], 1)

        def append(table):
            self.seen.append(np.array(table))

        tf.numpy_function(append, [table], [])

    def rows(self):
        """Returns the rows of all steps since the last call, sorted: a list of lists of numbers."""
        tables, self.seen = self.seen, []
        return sorted(np.concatenate(tables).tolist()) if tables else []


class Epochs(keras.callbacks.Callback):
    """Keeps the rows of each epoch."""

    def __init__(self):
        super().__init__()
        self.rows, self.validated = [], []

    def on_train_begin(self, logs=None):
        self.model.rows()  # removes those of an earlier fit

    def on_test_begin(self, logs=None):
        self.rows.append(self.model.rows())

    def on_test_end(self, logs=None):
        self.validated.append(self.model.rows())

    def on_epoch_end(self, epoch, logs=None):
        if self.model.seen:
            self.rows.append(self.model.rows())


def make(strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = Recorder()
        model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def trained(model, kind, strategy=None, rows=ROWS):
    """Returns the rows of each epoch of a `fit`, and whether the data are unchanged."""
    data = arrays(rows)
    former = [a.copy() for a in data]
    epochs = Epochs()
    given = {"epochs": EPOCHS, **KINDS[kind](data, strategy)}
    model.fit(**given, verbose=0, callbacks=[epochs])
    same = all(np.array_equal(a, b) for a, b in zip(data, former, strict=True))
    return {"epochs": epochs.rows, "untouched": same, "steps": model.optimizer.iterations.numpy()}
