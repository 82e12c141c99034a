"""The steps that `strategy.run` takes, as TensorFlow and Keras report them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.keras_model import check_optimizers_known
from tfpara.steps import after, batch_size, skip_empty, weight_of
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.settings import Settings
from tfpara.sync.tensorflow.private import values as _values
from tfpara.sync.tensorflow.trained_models import TrainedModels
from tfpara.typing import Nest, Scalar, Variable


class RunSteps:
    """The optimizers that step, and the variables that are written, in a call of `run`.

    Args:
        strategy: whose replicas take the steps.
        settings: of the strategy.
        models: the trained models.

    Attributes:
        minibatch_weight: a user's weight of a minibatch; None: from the compiled loss.
        optimizer_stepped: whether an optimizer has stepped in this `run`.
        applying: whether a step of an optimizer is being traced, or run.
        written: variables that optimizers wrote while this `run` was traced.
        used: optimizers that stepped in this `run`.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, settings: Settings, models: TrainedModels
    ) -> None:
        self._strategy = strategy
        self._local_results = strategy.experimental_local_results
        self._settings = settings
        self._models = models
        self.minibatch_weight: Callable[..., Scalar] | None = None
        self.optimizer_stepped = False
        self.applying = False
        self.written: list[Variable] = []
        self.used: list[keras.optimizers.Optimizer] = []
        # All optimizers that have taken steps in run(), by id.
        self._stepping: weakref.WeakValueDictionary[int, keras.optimizers.Optimizer]
        self._stepping = weakref.WeakValueDictionary()

    def run(
        self,
        run: Callable[..., Nest],
        fn: Callable[..., Nest],
        args: Nest,
        kwargs: Nest,
        options: object,
        check: Callable[[keras.Model, tf.distribute.Strategy], object],
    ) -> Nest:
        """Runs `fn` on every local replica; counts a step if `fn` takes an optimizer step.

        Args:
            run: TensorFlow's method `run`.
            fn: the step.
            args: its arguments, with a component for each local replica.
            kwargs: its named arguments; None: there are none.
            options: for TensorFlow.
            check: called with a model that was not known before its step, and the strategy.
        """
        models = self._models
        if tf.executing_eagerly() and models.for_step(fn) is None:
            model = models.model_of(fn)
            if _is_train_step(fn) or (model is models.tracked and _has_weights(model)):
                # Made before the step, so that it starts from the weights before the step.
                models.make(model)
        # A function that was traced in an earlier call does not show that it steps. Its
        # optimizers' step counts do.
        counts = self.step_counts() if tf.executing_eagerly() else []
        self.optimizer_stepped = False
        self.written, self.used = [], []
        outputs = run(skip_empty(fn), args, kwargs, options)
        locals_ = self._local_results((args, kwargs or {}))
        samples = [batch_size(values) for values in locals_]
        if _is_step_of_keras(fn):
            outputs = self.of_those_that_stepped(outputs, samples)
        if tf.executing_eagerly() and self.have_stepped(counts):
            self.optimizer_stepped = True
        if not self.optimizer_stepped and not _is_train_step(fn):
            return outputs
        self.check_optimizers(models.model_of(fn))
        # Looked up again, since the step may have made slots of optimizers.
        synchronizer = models.for_step(fn)
        if synchronizer is None:
            with tf.init_scope():
                synchronizer = models.make(models.model_of(fn))
            check(models.model_of(fn), self._strategy)
        self.check_written(synchronizer)
        with after(locals_):
            synchronizer.after_step(
                [1 if n is None else n for n in samples],
                [self.weight_of(fn, *values) for values in locals_],
            )
        return outputs

    def note(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Notes that an optimizer takes a step in a replica."""
        self.used.append(optimizer)
        self._stepping[id(optimizer)] = optimizer

    def weight_of(self, fn: Callable[..., Nest], args: Nest, kwargs: Nest) -> Scalar:
        """Returns the weight of a replica's minibatch in the mean of the replicas."""
        samples = batch_size((args, kwargs))
        if self.minibatch_weight is not None:
            weight = self.minibatch_weight(*args, **kwargs)
            if samples is None:
                return weight
            # A replica without samples takes no step, whatever the user's function returns.
            weight = tf.cast(weight, tf.float64)
            return tf.where(samples > 0, weight, tf.zeros_like(weight))
        model = getattr(fn, "__self__", None)
        if samples is None or not isinstance(model, keras.Model):
            return 1 if samples is None else samples
        return weight_of(args[0], samples, model.loss)

    def of_those_that_stepped(self, outputs: Nest, samples: Sequence[Scalar]) -> Nest:
        """Replaces the outputs of replicas that had no samples by the mean of the others'.

        Such replicas took no step and returned zeros, and Keras averages over all replicas.

        Args:
            outputs: what a step of Keras returned through `run`.
            samples: for each local replica its samples, as from `batch_size`.
        """
        if len(samples) == 1 or not any(tf.is_tensor(number) or number == 0 for number in samples):
            return outputs
        stepped = tf.stack([tf.convert_to_tensor(1 if n is None else n) for n in samples]) > 0

        def filled(leaf: tf.Tensor) -> tf.Tensor:
            parts = self._local_results(leaf)
            if len(parts) == 1 or not all(tf.is_tensor(p) and p.dtype.is_floating for p in parts):
                return leaf
            weights = tf.cast(stepped, parts[0].dtype)
            total = tf.tensordot(weights, tf.stack(parts), 1)
            mean = tf.math.divide_no_nan(total, tf.reduce_sum(weights))
            # Keras recognizes the values of replicas by this type.
            return _values.PerReplica(
                [tf.where(stepped[k], part, mean) for k, part in enumerate(parts)]
            )

        return tf.nest.map_structure(filled, outputs)

    def step_counts(self) -> list[tuple[keras.optimizers.Optimizer, int]]:
        """Returns all optimizers that have taken steps in `run`, and their steps.

        These are summed over the local replicas.
        """

        def count(optimizer: keras.optimizers.Optimizer) -> int:
            # `_iterations`, since the public `iterations` stands still while gradients accumulate.
            return sum(int(part) for part in self._local_results(optimizer._iterations.value))

        return [(optimizer, count(optimizer)) for optimizer in list(self._stepping.values())]

    def have_stepped(self, counts: Sequence[tuple[keras.optimizers.Optimizer, int]]) -> bool:
        """Returns whether an optimizer has taken a step since `step_counts` returned `counts`."""
        before = {id(optimizer): steps for optimizer, steps in counts}
        return any(before.get(id(each)) != steps for each, steps in self.step_counts())

    def check_optimizers(self, model: keras.Model | None) -> None:
        """Raises ValueError if a sync writes slots, and `run` steps with an unknown optimizer."""
        used, self.used = self.used, []
        settings = self._settings
        if model is None:
            return
        if settings.slots_at_sync == "keep" and not hasattr(settings.rule, "check_optimizer"):
            return
        setting = (
            "" if settings.local_state == "keep" else f", local_state={settings.local_state!r}"
        )
        # The class name alone: an outer rule's repr reads its optimizer, which no graph can do.
        check_optimizers_known(model, used, f"{type(settings.rule).__name__}{setting}")

    def check_written(self, synchronizer: Synchronizer) -> None:
        """Raises ValueError if `run` is to train weights that no sync would average."""
        written, self.written = self.written, []
        for variable in written:
            if getattr(variable, "trainable", False) and not synchronizer.has_any_of(
                [self._local_results(variable)[0]]
            ):
                raise ValueError(
                    f"run() trains {variable.name!r}, which is not a weight of the model that is "
                    "synchronised: the replicas would drift apart. Call strategy.track([...]) with "
                    "all models that are trained."
                )


def _is_step_of_keras(
    fn: Callable[..., Nest], names: Sequence[str] = ("train_step", "test_step")
) -> bool:
    """Returns whether `fn` is the step that `fit` or `evaluate` runs on a minibatch."""
    owner = getattr(fn, "__self__", None)
    return isinstance(owner, keras.Model) and getattr(fn, "__name__", "") in names


def _has_weights(model: keras.Model | None) -> bool:
    return model is not None and bool(model.trainable_variables)


def _is_train_step(fn: Any) -> bool:
    """Returns whether `fn` is the `train_step` of a model that has trainable weights."""
    return _is_step_of_keras(fn, ["train_step"]) and _has_weights(fn.__self__)
