"""Random cases, and the library's run of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfpara
from tests.search.reference import (
    SIZES,
    Case,
    Fit,
    Result,
    flat,
    minibatch,
    new_weights,
    unflat,
)

FORMATS = {
    "bf16": lambda x: np.asarray(x, tf.bfloat16.as_numpy_dtype).astype("float64"),
    "fp16": lambda x: np.asarray(x, np.float16).astype("float64"),
}


def draw(seed: int, number: int, workers: int, devices: int) -> Case:
    """Returns a random case, always the same for these arguments."""
    rng = np.random.default_rng([seed, number])

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    def pick(*values):
        return values[rng.integers(len(values))]

    if workers == 1:
        devices = int(rng.integers(1, devices + 1))
    replicas = workers * devices
    rule, options = _rule(pick, rng, replicas)
    optimizer, settings = _optimizer(pick, chance)
    plain_period = 1 + int(rng.integers(7))
    fragments = pick(1, 1, 1, 2, 4)
    overlap = pick(0, 0, 0, 1, plain_period)
    device_period = None
    if chance(0.15):
        device_period = pick(1, 2)
        plain_period *= device_period
    accumulates = "gradient_accumulation_steps" in settings
    local_state = pick("auto", "auto", "auto", "keep", "reset", "average")
    if overlap or fragments > 1 or accumulates or device_period:
        local_state = pick("auto", "auto", "keep")
    if optimizer in ("rmsprop",) and local_state == "reset":
        local_state = "keep"
    compression = pick("none", "none", "bf16", "fp16") if workers > 1 else "none"
    whole = rule == "outer_adam"  # NumPy has it for whole blocks alone
    if whole:
        fragments = 1
    per_execution = pick(1, 1, 1, 2, 3)
    fits = _fits(rng, pick, chance, workers, devices, plain_period, per_execution, whole)
    if whole or compression != "none" or overlap:
        fits = fits[:1]
    if device_period:
        fits = tuple(f for f in fits if f.sync_period == plain_period)
    resumed = len(fits) == 1 and fits[0].epochs > 1 and chance(0.3)
    resumed_on = 0
    keeps = rule in ("bsp", "easgd", "outer_sgd", "diloco", "slowmo") or "block_momentum" in options
    if workers == 1 and chance(0.3) and keeps and options.get("block_momentum") != "sqrt":
        # Slots would be those of one of the replicas, η another one; so local SGD without momentum.
        resumed_on, resumed, device_period = pick(1, 2, 3, 4), False, None
        optimizer, settings = "sgd", {"learning_rate": 0.1, "momentum": 0.0}
        if rule == "easgd":
            options = {"elasticity": 0.2}
        again = _fits(rng, pick, chance, 1, resumed_on, plain_period, per_execution, False)[0]
        first = dataclasses.replace(fits[0], sync_period=plain_period)
        fits = (first, dataclasses.replace(again, sync_period=plain_period))
    frozen = chance(0.1) and fragments == 1
    constraint = pick("", "", "", "nonneg", "clip", "unit")
    if any(fit.new_weights for fit in fits):
        constraint = ""  # such weights need not be within it
    averages = {}
    if chance(0.5):
        averages["ema"] = {"decay": float(pick(0.3, 0.9)), "num_updates": chance(0.5)}
        if not averages["ema"]["num_updates"]:
            averages["ema"]["zero_debias"] = chance(0.5)
        averages["ma"] = {}
    return Case(
        number=number,
        workers=workers,
        devices=devices,
        rule=rule,
        rule_options=options,
        optimizer=optimizer,
        optimizer_options=settings,
        fits=fits,
        local_state=local_state,
        overlap=min(overlap, plain_period),
        fragments=fragments,
        compression=compression,
        device_sync_period=device_period,
        aggregation=pick("sharded", "replicated"),
        averages=averages,
        weighted=pick("no", "no", "rows", "sum"),
        decay=pick(0.0, 0.0, 0.05),
        frozen=frozen,
        constraint=constraint,
        jit_compile=chance(0.15),
        steps_per_execution=per_execution,
        resumed=resumed,
        resumed_on=resumed_on,
    )


def _rule(pick, rng, replicas):
    eta, zeta = float(rng.uniform(0.2, 0.9)), float(pick(1.0, 0.7, 1.2))
    rules = [
        ("bsp", {}),
        ("bmuf", {}),
        ("bmuf", {}),
        ("bmuf", {"warmup": False}),
        ("bmuf", {"warmup": 3.0}),
        ("bmuf", {"block_momentum": "sqrt"}),
        ("bmuf", {"block_momentum": eta, "block_learning_rate": zeta}),
        ("bmuf", {"block_momentum": eta, "warmup": True}),
        ("bmuf", {"block_momentum": eta, "block_learning_rate": zeta, "nesterov": False}),
        ("easgd", {}),
        ("easgd", {"elasticity": float(rng.uniform(0.02, 1.8 / (replicas + 1)))}),
        ("outer_sgd", {"learning_rate": zeta, "momentum": eta, "nesterov": bool(pick(0, 1))}),
        ("outer_sgd", {"learning_rate": zeta, "momentum": 0.0, "nesterov": False}),
        ("diloco", {}),
        ("slowmo", {}),
        # If no replica has changed a weight, rounding may leave a difference of 2⁻²⁴ between it and
        # the mean. With Adam's own ε of 1e-7, it would become a step of 4e-4.
        ("outer_adam", {"learning_rate": 0.02, "epsilon": 1e-4}),
    ]
    return rules[rng.integers(len(rules))]


def _optimizer(pick, chance):
    kind = pick("sgd", "sgd", "sgd", "adam", "adamw", "rmsprop", "adagrad")
    options = {"learning_rate": 0.1 if kind in ("sgd", "adagrad") else 0.01}
    if kind == "sgd":
        options["momentum"] = pick(0.0, 0.6, 0.9)
        if options["momentum"]:
            options["nesterov"] = chance(0.4)
    if kind == "adamw":
        options["weight_decay"] = 0.1
    if kind == "sgd" and chance(0.2):
        options["weight_decay"] = 0.05
    if chance(0.25):
        options[pick("clipnorm", "global_clipnorm")] = 0.3
    if chance(0.2):
        options["gradient_accumulation_steps"] = pick(2, 3)
    return kind, options


def _fits(rng, pick, chance, workers, devices, period, per_execution, whole):
    fits = []
    for number in range(pick(1, 1, 2)):
        tau = period if number == 0 or chance(0.5) else 1 + int(rng.integers(7))
        longest = tau * (1 + int(rng.integers(3))) + (0 if whole else int(rng.integers(tau)))
        steps = -(-longest // per_execution) * per_execution
        if whole:
            steps = longest = tau * per_execution
        if chance(0.25) and not whole:
            fits.append(_of_arrays(rng, pick, chance, workers * devices, steps, tau, number))
            continue
        sizes = []
        full = int(rng.integers(workers * devices))  # a replica that has rows in each step
        for replica in range(workers * devices):
            own = [int(n) for n in rng.integers(1, 5, steps)]
            if replica != full and chance(0.5) and not whole:
                own[1 + int(rng.integers(steps)) :] = []
                own += [0] * (steps - len(own))
            sizes.append(tuple(own))
        for worker in range(workers):  # one may have fewer steps than the others
            mine = slice(worker * devices, (worker + 1) * devices)
            if worker != full // devices and chance(0.4) and not whole:
                left = per_execution * int(rng.integers(1, steps // per_execution + 1))
                sizes[mine] = [(max(own[0], 1), *own[1:left]) for own in sizes[mine]]
        fits.append(
            Fit(
                sizes=tuple(sizes),
                epochs=pick(1, 2, 3),
                sync_period=tau,
                known=chance(0.7),
                new_weights=number > 0 and chance(0.3),
            )
        )
    return tuple(fits)


def _of_arrays(rng, pick, chance, replicas, steps, tau, number):
    rows, last = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    return Fit(
        sizes=((rows,) * (steps - 1) + (min(rows, last),),) * replicas,
        epochs=pick(1, 2, 3),
        sync_period=tau,
        known=True,
        new_weights=number > 0 and chance(0.3),
        arrays=True,
    )


def trained(case: Case, folder: Path) -> tuple[np.ndarray, Result, list[int]]:
    """Runs the case with the library.

    Returns:
        The initial weights, the result of this worker, and which replicas these are.
    """
    if case.resumed:
        strategy, model, initial = _made(case)
        _fit(case, strategy, model, 0, folder, epochs=1)
    strategy, model, initial = _made(case)
    for number, fit in enumerate(case.fits):
        if number and case.resumed_on:
            case = dataclasses.replace(case, devices=case.resumed_on)
            strategy, model, _ = _made(case)
        elif number:
            strategy.set_sync_period(fit.sync_period)
        if fit.new_weights:
            model.set_weights(unflat(new_weights(case).astype("float32")))
        done = case.fits[0].epochs if number and case.resumed_on else 0
        history = _fit(case, strategy, model, number, folder, epochs=done + fit.epochs)
    values = [strategy.experimental_local_results(v.value) for v in model.weights[: len(SIZES)]]
    local = np.array([flat([v[d].numpy() for v in values]) for d in range(case.devices)])
    shown = {}
    for name in ["global", *case.averages]:
        with strategy.weights(model, name):
            shown[name] = flat(model.get_weights())
    loss = history.history["loss"][-1]
    return initial, Result(local, shown, loss), list(strategy.local_replica_ids)


class _Clip(keras.constraints.Constraint):
    def __call__(self, w):
        return keras.ops.clip(w, -0.3, 0.3)


def _made(case: Case):
    rules = {
        "bsp": tfpara.BSP,
        "bmuf": tfpara.BMUF,
        "easgd": tfpara.EASGD,
        "diloco": tfpara.DiLoCo,
        "slowmo": tfpara.SlowMo,
        "outer_sgd": lambda **kw: tfpara.Outer(lambda: keras.optimizers.SGD(**kw)),
        "outer_adam": lambda **kw: tfpara.Outer(lambda: keras.optimizers.Adam(**kw)),
    }
    averages = {
        name: tfpara.EMA(**options) if options else tfpara.MA()
        for name, options in case.averages.items()
    }
    strategy = tfpara.PeriodicSyncStrategy(
        rules[case.rule](**case.rule_options),
        sync_period=case.fits[0].sync_period,
        averages=averages,
        local_state=case.local_state,
        aggregation=case.aggregation,
        overlap=case.overlap or False,
        fragments=case.fragments,
        compression=case.compression,
        device_sync_period=case.device_sync_period,
        devices=[f"CPU:{k}" for k in range(case.devices)],
    )
    keras.utils.set_random_seed(case.number)
    optimizers = {
        "sgd": keras.optimizers.SGD,
        "adam": keras.optimizers.Adam,
        "adamw": keras.optimizers.AdamW,
        "rmsprop": keras.optimizers.RMSprop,
        "adagrad": keras.optimizers.Adagrad,
    }
    reduction = "mean_with_sample_weight" if case.weighted == "sum" else "sum_over_batch_size"
    constraint = {
        "": None,
        "nonneg": keras.constraints.NonNeg(),
        "clip": _Clip(),
        "unit": keras.constraints.UnitNorm(axis=0),
    }[case.constraint]
    regularizer = keras.regularizers.L2(case.decay) if case.decay else None
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(
                    7,
                    activation="tanh",
                    kernel_regularizer=regularizer,
                    kernel_constraint=constraint,
                ),
                keras.layers.Dense(5, trainable=not case.frozen),
            ]
        )
        model.compile(
            optimizers[case.optimizer](**case.optimizer_options),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
            steps_per_execution=case.steps_per_execution,
            jit_compile=case.jit_compile,
        )
    return strategy, model, flat(model.get_weights())


def _fit(case: Case, strategy, model, number: int, folder: Path, epochs: int):
    fit = case.fits[number]
    mine = list(strategy.local_replica_ids)
    steps = max(len(fit.sizes[r]) for r in mine)

    def examples():
        for step in range(steps):
            for replica in mine:
                batch = minibatch(case, number, replica, step)
                yield batch if case.weighted != "no" else batch[:2]

    spec = (
        tf.TensorSpec([None, 6], tf.float32),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.float32),
    )
    spec = spec if case.weighted != "no" else spec[:2]

    def of_this_worker(_):
        data = tf.data.Dataset.from_generator(examples, output_signature=spec)
        if fit.known:
            data = data.apply(tf.data.experimental.assert_cardinality(steps * len(mine)))
        return data

    callbacks = []
    if case.resumed or case.resumed_on:
        callbacks = [tfpara.callbacks.Checkpoint(folder / f"case {case.number}")]
    if fit.arrays:
        # TensorFlow gives the equal parts of a batch to the workers in turn.
        by_part = [
            worker * case.devices + device
            for device in range(case.devices)
            for worker in range(case.workers)
        ]
        every = [
            minibatch(case, number, replica, step)
            for step in range(fit.steps)
            for replica in by_part
        ]
        x, y, weights = (np.concatenate(parts) for parts in zip(*every, strict=True))
        return model.fit(
            x,
            y,
            sample_weight=weights if case.weighted != "no" else None,
            batch_size=case.replicas * fit.sizes[0][0],
            shuffle=False,
            epochs=epochs,
            callbacks=callbacks,
            verbose=0,
        )
    return model.fit(
        strategy.distribute_datasets_from_function(of_this_worker),
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    )
