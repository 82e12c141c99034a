"""The steps that `strategy.run` takes, as TensorFlow and Keras report them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpara.contexts import attributes, context_variable
from tfpara.keras_model import build_optimizer, check_optimizers_known
from tfpara.steps import after, batch_size, skip_empty, weight_of
from tfpara.sync.data.dealt import rows_of, slice_of
from tfpara.sync.one_sync.synchronizer import Synchronizer
from tfpara.sync.tensorflow.nonfinite import Guard
from tfpara.sync.tensorflow.trained_models import TrainedModels
from tfpara.tensorflow_private import context as _context
from tfpara.tensorflow_private import values as _values
from tfpara.typing import Nest, Scalar, Variable

# Whether `run` predicts rows. Each thread has a value of its own, because a thread that reads data
# may predict with a model while another thread trains.
PREDICTS = contextvars.ContextVar("tfpara_predicts", default=False)


def predicting() -> contextlib.AbstractContextManager[None]:
    """A context in which `run` predicts rows and takes no steps, and each worker gets all data."""
    return context_variable(PREDICTS, True)


@dataclasses.dataclass(eq=False)
class StepTrace:
    """The actions of replicas in one call of `run`, noted while the call is traced or runs eagerly.

    `optimizers` are those that take a step; `applying` says whether such a step is under way.
    """

    optimizers: list[keras.optimizers.Optimizer] = dataclasses.field(default_factory=list)
    written: list[Variable] = dataclasses.field(default_factory=list)
    applying: bool = False

    def step_of(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which an optimizer takes a step."""
        self.optimizers.append(optimizer)
        return attributes(self, applying=True)


class RunSteps:
    """The calls of `run`.

    Attributes:
        guard: takes back steps with NaN or Inf; None: they stay.
        minibatch_weight: a user's function that gives the weight of a minibatch; None: the weight
            follows from the compiled loss.
        trace: the trace of the present call of `run`, else of the last one.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, models: TrainedModels, guard: Guard | None
    ) -> None:
        self._strategy, self._local_results = strategy, strategy.experimental_local_results
        self._models, self.guard = models, guard
        self.minibatch_weight: Callable[..., Scalar] | None = None
        self.trace = StepTrace()
        self._left: list[tuple[tf.Tensor, Callable[[], None]]] | None = None
        # All optimizers that have taken steps in run(), by id.
        self._stepping: weakref.WeakValueDictionary[int, keras.optimizers.Optimizer]
        self._stepping = weakref.WeakValueDictionary()
        # The synchronizers whose syncs are in the graphs of custom loops.
        self._in_loops: weakref.WeakSet[Synchronizer] = weakref.WeakSet()

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

        `run` is TensorFlow's method, with its arguments. `check(model, strategy)` is called if the
        model had no synchronizer before its step.
        """
        if PREDICTS.get():
            return self._predicted(run, fn, args, kwargs, options)
        models, eager = self._models, tf.executing_eagerly()
        if eager and models.for_step(fn) is None:
            model = models.model_of(fn)
            if _is_train_step(fn) or (model is models.tracked and _has_weights(model)):
                # The synchronizer is made before the step runs, so that the global model starts
                # from the weights before the step.
                models.make(model)
        # If `fn` was traced in an earlier call, `trace` stays empty. Then only the step counts of
        # optimizers show that `fn` takes steps.
        counts = self.step_counts() if eager else []
        trace = self.trace = StepTrace()
        outputs = run(skip_empty(self._guarded(fn)), args, kwargs, options)
        locals_ = self._local_results((args, kwargs or {}))
        samples = [batch_size(values) for values in locals_]
        if _is_step_of_keras(fn):
            outputs = self.of_those_that_stepped(outputs, samples)
        self._stepping.update((id(each), each) for each in trace.optimizers)
        nonfinite = [] if self.guard is None else self.guard.taken()
        stepped = trace.written or (eager and (self.step_counts() != counts or any(nonfinite)))
        if not stepped and not _is_train_step(fn):
            if not eager and models.for_step(fn) is None and _has_state(models.tracked):
                # A function without a step may change statistics before the first step. So the
                # synchronizer, which compares the workers' first statistics, is made already now.
                with _outside_of_traces():
                    models.make(models.tracked)
            return outputs
        self.check_optimizers(models.model_of(fn), trace.optimizers)
        # The synchronizer is looked up after the step, because the step may have made slots of an
        # optimizer. If syncs write slots, the model then needs a new synchronizer.
        synchronizer = models.for_step(fn)
        if synchronizer is None:
            self._check_loop(models.model_of(fn))
            with _outside_of_traces():
                synchronizer = models.make(models.model_of(fn))
            check(models.model_of(fn), self._strategy)
        if not eager and not _is_step_of_keras(fn):
            self._in_loops.add(synchronizer)
        self.check_written(synchronizer, trace.written)
        self._models.company.check_in_fit()
        with after(locals_):
            due = synchronizer.count(
                [1 if n is None else n for n in samples],
                [self.weight_of(fn, *values) for values in locals_],
                nonfinite,
            )
            if self._left is None:
                synchronizer.act_if(due)
            else:
                self._left.append((due, synchronizer.act))
        return outputs

    def _predicted(
        self, run: Callable[..., Nest], fn: Callable[..., Nest], args: Nest, *others: Any
    ) -> Nest:
        """Returns the predictions of all rows, each row once."""
        leaves = tf.nest.flatten((args, others))
        if not any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            # `predict_on_batch` gives all rows to every replica, so only the predictions of the
            # first replica are returned.
            outputs = run(fn, args, *others)
            return tf.nest.map_structure(lambda leaf: self._local_results(leaf)[0], outputs)
        return run(_of_a_row_if_empty(fn), args, *others)

    def _guarded(self, fn: Callable[..., Nest]) -> Callable[..., Nest]:
        """Returns `fn`, guarded against NaN and Inf if there is a guard and `fn` trains a model."""
        model = self._models.model_of(fn)
        trains = _is_train_step(fn) or not isinstance(getattr(fn, "__self__", None), keras.Model)
        if self.guard is None or model is None or not trains:
            return fn
        build_optimizer(model)
        return self.guard.around(fn, model)

    @contextlib.contextmanager
    def leaving_syncs(self) -> Iterator[list[tuple[tf.Tensor, Callable[[], None]]]]:
        """A context in which steps run no syncs, and the caller runs those that are due.

        Yields a list to which each step appends a pair: whether something is due, and the function
        that the caller must then call before the next step.
        """
        left: list[tuple[tf.Tensor, Callable[[], None]]] = []
        with attributes(self, _left=left):
            yield left

    def weight_of(self, fn: Callable[..., Nest], args: Nest, kwargs: Nest) -> Scalar:
        """Returns the weight of a replica's minibatch in the mean of the replicas."""
        samples = batch_size((args, kwargs))
        if self.minibatch_weight is not None:
            weight = self.minibatch_weight(*args, **kwargs)
            if samples is None:
                return weight
            # A replica without samples takes no step, so its weight is 0, whatever the user's
            # function returns.
            weight = tf.cast(weight, tf.float64)
            return tf.where(samples > 0, weight, tf.zeros_like(weight))
        model = getattr(fn, "__self__", None)
        if samples is None or not isinstance(model, keras.Model):
            return 1 if samples is None else samples
        return weight_of(args[0], samples, model.loss)

    def of_those_that_stepped(self, outputs: Nest, samples: Sequence[Scalar]) -> Nest:
        """Replaces the outputs of replicas that had no samples by the mean of the other outputs.

        Such replicas took no step and returned zeros, which Keras would include in its mean.
        Integers and booleans become floats, of which Keras can take the mean. Of outputs that are
        no numbers, such as texts, the first replica's is returned.
        """
        if len(samples) == 1:
            return outputs
        all_stepped = not any(tf.is_tensor(number) or number == 0 for number in samples)
        stepped = tf.stack([tf.convert_to_tensor(1 if n is None else n) for n in samples]) > 0

        def filled(leaf: tf.Tensor) -> tf.Tensor:
            parts = self._local_results(leaf)
            if len(parts) == 1 or not all(tf.is_tensor(part) for part in parts):
                return leaf
            dtype = parts[0].dtype
            if dtype.is_integer or dtype.is_bool:
                real = tf.float64 if dtype.size == 8 else tf.float32
                parts = [tf.cast(part, real) for part in parts]
            elif not dtype.is_floating and not dtype.is_complex:
                return parts[0]
            if all_stepped:
                return _values.PerReplica(parts)
            weights = tf.cast(stepped, parts[0].dtype)
            total = tf.tensordot(weights, tf.stack(parts), 1)
            mean = tf.math.divide_no_nan(total, tf.reduce_sum(weights))
            # Keras recognizes the values of replicas by this type.
            return _values.PerReplica(
                [tf.where(stepped[k], part, mean) for k, part in enumerate(parts)]
            )

        return tf.nest.map_structure(filled, outputs)

    def step_counts(self) -> list[tuple[keras.optimizers.Optimizer, int]]:
        """Returns the optimizers that have stepped in `run`, and their steps on this worker."""

        def count(optimizer: keras.optimizers.Optimizer) -> int:
            # `_iterations` is read, since the public `iterations` stands still while gradients
            # accumulate.
            return sum(int(part) for part in self._local_results(optimizer._iterations.value))

        return [(optimizer, count(optimizer)) for optimizer in list(self._stepping.values())]

    def optimizers_of(self, model: keras.Model) -> list[keras.optimizers.Optimizer]:
        """Returns the optimizers that have taken steps on weights of a model."""
        own = {id(variable) for variable in model.trainable_variables}
        return [
            optimizer
            for optimizer in self._stepping.values()
            if any(id(variable) in own for variable in optimizer._trainable_variables)
        ]

    def check_optimizers(
        self, model: keras.Model | None, used: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        """Raises ValueError if syncs or the guard write slots, and an optimizer is not known."""
        settings = self._models.settings
        if model is None:
            return
        if self.guard is not None:
            check_optimizers_known(model, used, 'nonfinite="skip"')
        if settings.slots_at_sync == "keep" and not hasattr(settings.rule, "check_optimizer"):
            return
        local_state = settings.local_state
        setting = "" if local_state == "keep" else f", local_state={local_state!r}"
        # The message has the class name of the rule, not its repr. The repr of the rule `Outer`
        # reads a Keras optimizer, which is not possible in a graph.
        check_optimizers_known(model, used, f"{type(settings.rule).__name__}{setting}")

    def _check_loop(self, model: keras.Model | None) -> None:
        """Raises ValueError if a graph of a loop would go on with syncs that lack new slots."""
        if model is None or self._models.trained(model) not in self._in_loops:
            return
        name = self._models.optimizer_built_since(model)
        if name:
            raise ValueError(
                f"the optimizer {name!r} makes its slots now, after a tf.function of the loop was "
                "traced, whose syncs would leave them out. Make the slots of all optimizers before "
                "the loop, in the scope: optimizer.build(model.trainable_variables)."
            )

    def check_written(self, synchronizer: Synchronizer, written: Sequence[Variable]) -> None:
        """Raises ValueError if a step writes weights that no sync would average."""
        for variable in written:
            if getattr(variable, "trainable", False) and not synchronizer.has_any_of(
                [self._local_results(variable)[0]]
            ):
                raise ValueError(
                    f"run() trains {variable.name!r}, which is not a weight of the model that is "
                    "synchronised: the replicas would drift apart. Call strategy.track([...]) with "
                    "all models that are trained."
                )


@contextlib.contextmanager
def _outside_of_traces() -> Iterator[None]:
    """A context in eager mode, whose reads of variables are not noted in a graph being traced.

    In `tf.init_scope` alone they are noted, and TensorFlow refuses to run a graph if one of its
    noted variables is gone. A model's former synchronizer is read in the trace, and goes after it.
    """
    with tf.init_scope(), tf.Graph().as_default(), _context.eager_mode():
        yield


def _is_step_of_keras(
    fn: Callable[..., Nest], names: Sequence[str] = ("train_step", "test_step")
) -> bool:
    """Returns whether `fn` is the step that `fit` or `evaluate` runs on a minibatch."""
    owner = getattr(fn, "__self__", None)
    return isinstance(owner, keras.Model) and getattr(fn, "__name__", "") in names


def _has_weights(model: keras.Model | None) -> bool:
    return model is not None and bool(model.trainable_variables)


def _has_state(model: keras.Model | None) -> bool:
    return model is not None and bool(model.trainable_variables and model.non_trainable_weights)


def _is_train_step(fn: Any) -> bool:
    """Returns whether `fn` is the `train_step` of a model that has trainable weights."""
    return _is_step_of_keras(fn, ["train_step"]) and _has_weights(fn.__self__)


def _of_a_row_if_empty(fn: Callable[..., Nest]) -> Callable[..., Nest]:
    """Wraps `fn`, which predicts the rows of a replica's batch, for batches without rows.

    `fn` then predicts a row of zeros, of which nothing is returned. So all axes but the first are
    as long as those of the other replicas' predictions, and no layer has to work without rows.
    """

    def predicting(*args: Nest, **kwargs: Nest) -> Nest:
        given = (args, kwargs)
        count = batch_size(given)
        dense = all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(given))
        if count is None or (isinstance(count, int) and count):
            return fn(*args, **kwargs)
        if not dense:
            return skip_empty(fn)(*args, **kwargs)
        missing = tf.cast(tf.equal(count, 0), tf.int32)

        def filled(leaf: tf.Tensor) -> tf.Tensor:
            if leaf.shape.rank == 0:
                return leaf
            zeros = tf.zeros(tf.concat([[missing], tf.shape(leaf)[1:]], 0), leaf.dtype)
            shape = tf.TensorShape([None]).concatenate(leaf.shape[1:])
            return tf.ensure_shape(tf.concat([leaf, zeros], 0), shape)

        def own(leaf: Any) -> Any:
            if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
                return leaf
            kept = rows_of(leaf) * tf.cast(1 - missing, tf.int64)
            return slice_of(leaf, 0, kept)

        args, kwargs = tf.nest.map_structure(filled, given)
        return tf.nest.map_structure(own, fn(*args, **kwargs))

    return predicting
