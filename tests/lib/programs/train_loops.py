"""Training without Keras' own step or loop: steps of a user's, TensorFlow's loop, and GANs.

Each training is a function of a strategy, and does not depend on the number of workers and devices:
with TensorFlow's default strategy it is plain Keras on whole batches. As a program this file runs
all of them on a worker of one device or two.

Options (JSON): out (npz path), folder (of checkpoints).
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tfpara.sync.simulation import make_devices

BATCH, STEPS, RATE = 16, 6, 0.1
X = np.random.default_rng(0).normal(size=(BATCH * STEPS, 6)).astype("float32")
Y = (X @ np.random.default_rng(1).normal(size=(6, 2))).astype("float32")


def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def network(seed=0, regularizer=None, outputs=2, inputs=6):
    def kernel(k):
        return keras.initializers.GlorotUniform(seed + k)

    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(
                5, "tanh", kernel_initializer=kernel(1), kernel_regularizer=regularizer
            ),
            keras.layers.Dense(outputs, kernel_initializer=kernel(2)),
        ]
    )


def weights_of(model):
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


# -- fit with steps of a user's --------------------------------------------------------------------


class OfAUser(keras.Model):
    """A user's model, whose steps return a metric and other values."""

    def __init__(self, **options):
        super().__init__()
        self.net, self.tracker = network(**options), keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.net(x)

    @property
    def metrics(self):
        return [self.tracker]

    def step(self, minibatch, train):
        x, y = minibatch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=train), training=train)
            scaled = self.optimizer.scale_loss(loss)
        if train:
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(scaled, weights), weights)
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self.tracker.result(), "raw": loss, "more": {"first": tf.reduce_mean(x)}}

    def train_step(self, minibatch):
        return self.step(minibatch, True)

    def test_step(self, minibatch):
        return self.step(minibatch, False)


def own_step(strategy, model=None, optimizer=None, **options):
    with strategy.scope():
        model = model or OfAUser()
        model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=0.9), "mse", **options)
    stopping = keras.callbacks.EarlyStopping("raw", patience=5, mode="min")
    history = model.fit(data(), epochs=2, verbose=0, callbacks=[stopping]).history
    evaluated = model.evaluate(data(), verbose=0, return_dict=True)
    log = {f"log/{k}": v for k, v in history.items()}
    return {"weights": weights_of(model)} | log | {f"evaluate/{k}": v for k, v in evaluated.items()}


class WithLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(x**2))
        return x


def losses(strategy):
    """Trains with losses of a regularizer and of a layer, and with loss scaling."""
    with strategy.scope():
        model = OfAUser(regularizer=keras.regularizers.L2(0.05))
        model.net = keras.Sequential([*model.net.layers, WithLoss()])
        model.net.build((None, 6))
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE))
    return own_step(strategy, model, optimizer)


def accumulated(strategy):
    """Trains with gradients accumulated over two minibatches, in executions of three."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=2)
    return own_step(strategy, None, optimizer, steps_per_execution=3)


def mixed(strategy):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        return own_step(strategy)
    finally:
        keras.mixed_precision.set_global_policy("float32")


# -- loops -----------------------------------------------------------------------------------------


def tutorial(strategy):
    """Trains with the loop of TensorFlow's tutorial, plus `track` and `synchronize`.

    It also differs in where it reduces the loss.
    """
    loss_object = keras.losses.MeanSquaredError(reduction=None)
    with strategy.scope():
        model = network(regularizer=keras.regularizers.L2(0.05))
        optimizer = keras.optimizers.SGD(RATE, momentum=0.9)
    if hasattr(strategy, "track"):
        strategy.track(model)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(loss_object(y, model(x, training=True)))
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(batch):
        return strategy.run(train_step, args=batch)

    losses, means = [], []
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(data()):
            per_replica = distributed_train_step(batch)
            losses.append(float(strategy.reduce("SUM", per_replica, axis=None)))
            means.append(strategy.reduce("MEAN", batch[0], axis=0).numpy())
        if hasattr(strategy, "synchronize"):
            strategy.synchronize()
    return {"weights": weights_of(model), "losses": losses, "means": means}


def gan_loop(strategy):
    """Trains a GAN: a step of one model, then of the other, each in its own call of `run`."""
    with strategy.scope():
        models = generator, discriminator = network(0, inputs=3), network(10, None, 1, 2)
        optimizers = [keras.optimizers.SGD(RATE, momentum=0.5) for _ in models]
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.build(model.trainable_variables)  # Inside the tf.function it could not.
    if hasattr(strategy, "track"):
        strategy.track(models)

    def scores(x, y):
        made = discriminator(generator(x[:, :3]))
        return tf.reduce_mean(made**2), tf.reduce_mean((discriminator(y) - 1.0) ** 2) - made

    @tf.function
    def step(batch, which):
        def of_replica(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(scores(x, y)[which])
            weights = models[which].trainable_variables
            optimizers[which].apply(tape.gradient(loss, weights), weights)

        strategy.run(of_replica, args=batch)

    for batch in strategy.experimental_distribute_dataset(data()):
        for which in (1, 0):
            step(batch, which)
    if hasattr(strategy, "synchronize"):
        strategy.synchronize()
    return {"generator": weights_of(generator), "discriminator": weights_of(discriminator)}


class InputMean(keras.layers.Layer):
    """Keeps a moving mean of its inputs, which it returns."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign((self.mean + tf.reduce_mean(x, 0)) / 2)
        return x


def two_functions(strategy):
    """Trains in two functions: one accumulates gradients over two minibatches, one takes a step.

    Before the first step, the first function has changed the statistics of a layer.
    """
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), InputMean(), network()])
        optimizer = keras.optimizers.SGD(RATE)
        sums = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in model.trainable_weights]
    if hasattr(strategy, "track"):
        strategy.track(model)

    def add(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_weights)
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)

    def step():
        optimizer.apply([total.read_value() for total in sums], model.trainable_weights)
        for total in sums:
            total.assign(tf.zeros(total.shape))

    adding = tf.function(lambda batch: strategy.run(add, args=batch))
    stepping = tf.function(lambda: strategy.run(step))
    for number, batch in enumerate(strategy.experimental_distribute_dataset(data())):
        adding(batch)
        if number % 2:
            stepping()
    return {"weights": weights_of(model)}


_CASES = (own_step, losses, accumulated, mixed, tutorial, two_functions, gan_loop)
CASES = {f.__name__: f for f in _CASES}
# The others run on two devices of each worker; own_step does so on two devices of one process.
ON_ONE_DEVICE = ("own_step", "losses", "accumulated", "mixed")


# -- what a strategy of ours alone can do ----------------------------------------------------------


class GAN(keras.Model):
    """A GAN as in Keras' guide, whose optimizers get their slots with their first step."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = network(0, inputs=3), network(10, None, 1, 2)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def compile(self, d_optimizer, g_optimizer):
        super().compile(optimizer=None)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, minibatch):
        x, y = minibatch
        parts = (self.discriminator, self.d_optimizer), (self.generator, self.g_optimizer)
        for part, optimizer in parts:
            with tf.GradientTape() as tape:
                made = self.discriminator(self.generator(x[:, :3]))
                loss = tf.reduce_mean(made - self.discriminator(y))
                loss = loss if part is self.discriminator else -tf.reduce_mean(made)
            weights = part.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def gan_resumed(strategy, folder):
    """Returns what a GAN's run ends with, both uninterrupted and resumed."""

    def trained(run, epochs):
        with strategy.scope():
            model = GAN()
            model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
        checkpoint = tfpara.callbacks.Checkpoint(f"{folder}/{run}")
        model.fit(data(), epochs=epochs, verbose=0, callbacks=[checkpoint])
        state = (*model.weights, *model.d_optimizer.variables, *model.g_optimizer.variables)
        values = [strategy.experimental_local_results(v.value) for v in state]
        return np.concatenate([np.ravel(part) for parts in values for part in parts])

    whole = trained("whole", 2)
    trained("broken", 1)
    return {"whole": whole, "resumed": trained("broken", 2)}


class WithoutMetrics(OfAUser):
    @property
    def metrics(self):
        return []

    def train_step(self, minibatch):
        super().train_step(minibatch)
        return {"first": tf.reduce_mean(minibatch[0])}


def unequal(strategy):
    """Returns a log of training; each worker has two minibatches more than the one before it."""
    count = 4 + 2 * strategy.worker_index
    with strategy.scope():
        model = WithoutMetrics()
        model.compile(keras.optimizers.SGD(RATE), "mse")
    given = strategy.distribute_datasets_from_function(lambda context: data().take(count))
    return {"first": model.fit(given, epochs=2, verbose=0).history["first"]}


@keras.saving.register_keras_serializable()
class MeanLabel(keras.metrics.Metric):
    """The mean of the first labels, from variables with an aggregation."""

    def __init__(self, aggregation):
        super().__init__(name=aggregation)
        options = {"shape": (), "initializer": "zeros", "aggregation": aggregation}
        self.total = self.add_variable(name="total", **options)
        self.count = self.add_variable(name="count", **options)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_true[:, 0]))
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.total / self.count


AGGREGATIONS = ("sum", "mean", "only_first_replica")


def aggregated(strategy):
    """Returns what metrics of each aggregation log, and what their variables read."""
    with strategy.scope():
        model = network()
        metrics = [MeanLabel(aggregation) for aggregation in AGGREGATIONS]
        model.compile(keras.optimizers.SGD(RATE), "mse", metrics=metrics)
    log = model.fit(data(), epochs=1, verbose=0).history
    evaluated = model.evaluate(data(), verbose=0, return_dict=True)
    found = {f"fit/{name}": log[name] for name in AGGREGATIONS}
    found |= {f"evaluate/{name}": evaluated[name] for name in AGGREGATIONS}
    return found | {"total": float(metrics[2].total.value.value())}


def refused(strategy):
    """Returns the messages for what several workers cannot do inside a tf.function."""

    @tf.function
    def inside(method, *args, **kwargs):
        values = strategy.run(lambda: tf.ones([1]))
        return getattr(strategy, method)(*args, values, **kwargs)

    found = {}
    for method, *args in (("reduce", "SUM"), ("gather",)):
        try:
            inside(method, *args, axis=None if args else 0)
        except ValueError as error:
            found[method] = str(error)
    return found


def main():
    options = json.loads(sys.argv[1])
    make_devices(2)
    strategy, one = (
        tfpara.PeriodicSyncStrategy(
            tfpara.BSP(), sync_period=1, devices=devices, timeout_seconds=60
        )
        for devices in (["CPU:0", "CPU:1"], ["CPU:0"])
    )
    found = {f"aggregated/{key}": value for key, value in aggregated(strategy).items()}
    if options["whole"]:
        for name, case in CASES.items():
            results = case(one if name in ON_ONE_DEVICE else strategy)
            found |= {f"{name}/{key}": value for key, value in results.items()}
        found |= gan_resumed(one, options["folder"]) | unequal(strategy) | refused(strategy)
    np.savez(options["out"], **found)


if __name__ == "__main__":
    main()
