"""Small nets and strategies that many tests need."""

import keras
import tensorflow as tf

import tfpara


def strategy_of(devices=2, rule=None, **options):
    """Returns a strategy of replicas on logical devices of this process: BSP, period 2."""
    options = {"sync_period": 2, "devices": [f"CPU:{k}" for k in range(devices)], **options}
    return tfpara.PeriodicSyncStrategy(rule or tfpara.BSP(), **options)


def net(inputs, *units, activation=None):
    """Returns a net of dense layers; all but the last have the activation."""
    hidden = [keras.layers.Dense(count, activation) for count in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(units[-1])])


def compiled_net(strategy, inputs, *units, optimizer="sgd", loss="mse", activation=None, **options):
    """Returns a net that is made and compiled in the scope of a strategy, or of none (None).

    optimizer: a name, or a function that makes one in the scope.
    loss: as Keras has it, or "classes": the cross entropy of integer labels with logits.
    """
    if loss == "classes":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = net(inputs, *units, activation=activation)
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, **options)
    return model
