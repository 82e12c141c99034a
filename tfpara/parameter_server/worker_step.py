"""The computation of a worker between a pull and a push, as pure functions of tensors.

The Keras model is called with tensors in place of its variables (`keras.StatelessScope`). So all
workers can run the same traced function, which does not change the chief's model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfpara.algorithms.asgd import ASGD, AsyncRule
from tfpara.algorithms.keras_step import KerasSteps, check_local, clipped
from tfpara.algorithms.local_momentum import in_a_block
from tfpara.keras_model import (
    carried_states,
    constrained,
    is_seed,
    memory_can_change,
    memory_of,
    momentum_of,
    parts_not_trained,
    told_of_fit,
)
from tfpara.parameter_server.errors import check_read, check_sums
from tfpara.parameter_server.messages import NO_ROWS, Place, Pulled, Push, Rows
from tfpara.parameter_server.server import metric_variables
from tfpara.parameter_server.tables import Tables
from tfpara.steps import batch_size
from tfpara.typing import Nest

# This is 2^64 divided by the golden ratio, as a signed number. If neighbouring integers are
# multiplied by it, the products differ in their upper bits. The seeds of random streams are made
# from these bits.
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_SEEDS = 1 << 31

# A function that chooses the learning rate of a chunk. Its argument makes a new dataset of the
# chunk's minibatches. The function needs a new dataset each time that it reads the minibatches,
# because a dataset that shuffles has another order when it is read again.
ChooseRate: TypeAlias = Callable[[Callable[[], tf.data.Dataset]], tf.Tensor]


def stream_of(order: Sequence[int], epoch: int, chunk: int) -> int:
    """Returns the first random stream of a chunk; each minibatch uses the next one."""
    return int(np.random.default_rng([*order, epoch, chunk]).integers(1 << 62))


class Block(NamedTuple):
    """A worker's state between a pull and a push: lists of tensors."""

    # ids of the rows in `weights`, for each embedding table that is pulled by rows
    rows: Rows
    # the weights on which the next minibatch is computed: the pulled weights (ASGD), or the weights
    # after the steps that the worker's own optimizer has taken so far
    weights: list[tf.Tensor]
    # sums of the gradients of the block's minibatches so far; empty before the first minibatch, and
    # empty if the worker takes optimizer steps of its own
    gradients: list[tf.Tensor]
    squares: list[tf.Tensor]  # sums of the gradients' squares; empty if not needed
    optimizer: list[tf.Tensor]  # state of the local optimizer; empty for ASGD
    # number of minibatches that the pulled model was trained on; a schedule of the learning rate
    # needs it
    before: tf.Tensor
    state: list[tf.Tensor]  # moving statistics that workers share
    # The share of the pulled state, from 0 to 1, that is still in `state`:
    # `state` = `kept` · pulled state + what the block has added
    kept: list[tf.Tensor]
    own: list[tf.Tensor]  # the worker's own state: random seeds and carried recurrent states
    metrics: list[tf.Tensor]  # what the block adds to the metrics' variables, which are sums
    minibatches: tf.Tensor  # number of minibatches so far, int64
    samples: tf.Tensor  # number of samples so far, int64
    # whether each minibatch was left out, bool [τ]; empty if minibatches are never left out
    left_out: tf.Tensor


class WorkerStep:
    """The functions by which a worker trains on minibatches, for one model and rule.

    `spec` is the element spec of the minibatches; the other arguments are those of `Models`.

    Attributes:
        state: the model's variables whose values are in `Block.state`.
        local, local_models: whether workers have local optimizers, and local models.
        frozen, frozen_values: weights that are not trained, and their values in the graphs.
        integers: integer variables of layers, such as the kernels of quantized layers.
        tables: the tables that are pulled and pushed by rows.
        slots_by_rows: the index of the table for each slot of these tables; the keys are positions
            in the local optimizer's state.
        fit: how the local momentum was fitted to the block, in words; empty if it was not fitted.
    """

    def __init__(
        self,
        model: keras.Model,
        rule: AsyncRule,
        spec: Nest,
        sync_period: int,
        skips: bool = False,
        by_rows: bool = True,
    ) -> None:
        _check(model)
        _build_metrics(model, spec)
        self.model = model
        self.optimizer = model.optimizer
        # The rate is a variable, a schedule or a function. A script may replace it later, and
        # `has_these_weights` notices that.
        self._rate = model.optimizer._learning_rate
        self.weights = model.trainable_variables
        self._skips, self._period = skips, sync_period if skips else 0
        # The type is Any, because rules have different methods. A rule's flags, such as
        # `local_steps`, tell which methods it has.
        self._rule: Any = rule
        # `states` are the recurrent states that are carried over from minibatch to minibatch. They
        # are looked up by a function of their own, because Keras' lists of the model's variables
        # lack them.
        states = carried_states(model)
        self.frozen, self.state, self.integers, seeds = parts_not_trained(model)
        # Workers begin with these values, even if the chief's variables change later. For example,
        # `evaluate` changes a seed in the chief's process. If workers began with the changed seed,
        # a resumed run, in which the chief has not evaluated, would begin with another seed.
        self._fixed = {id(v): v.numpy() for v in seeds}
        self._fixed |= {id(v): np.zeros_like(v.numpy()) for v in states}
        self._own = [*self.integers, *seeds, *states]
        self.read_frozen()
        self._metrics = metric_variables(model)
        check_sums(self._metrics)
        self.local, self.local_models = rule.local_steps, rule.local_models
        # If a push has a single minibatch, the server itself squares the gradient, so the worker
        # does not send the square.
        self._squares = isinstance(rule, ASGD) and rule.delay_compensation > 0.0 and sync_period > 1
        self._steps: KerasSteps | None = None
        self.fit = ""
        if self.local:
            check_local(model.optimizer)
            self._steps = KerasSteps(model.optimizer, self.weights, told_rate=True)
            if getattr(rule, "has_momentum", False) and memory_can_change(model.optimizer):
                memory = memory_of(model.optimizer)
                shorter, factor = in_a_block(memory, float(sync_period), delayed=True)
                of_rate = float(factor) if momentum_of(model.optimizer) else 1.0
                self._steps.limit_memory(float(shorter), of_rate)
                self.fit = told_of_fit(model.optimizer, sync_period, float(shorter), of_rate)
        self.tables = Tables(model, rule)
        if by_rows:
            groups = (self.weights, self.state, self._own, self._metrics)
            specs = [[tf.TensorSpec(v.shape, v.dtype) for v in group] for group in groups]
            self.tables.find(self._trace, spec, specs)
        owners = self._steps.owners if self._steps else []
        self.slots_by_rows = {
            k: owner for k, owner in enumerate(owners) if owner in self.tables.indices
        }

    def _trace(self, data: Nest, values: Sequence[Sequence[tf.Tensor]]) -> None:
        """Computes a minibatch, its loss and metrics; `values`: the arguments of `_scope`."""
        with self._scope(*values):
            _measured(self.model, data, training=True)

    @property
    def has_these_weights(self) -> bool:
        """Whether the model still trains the same weights by the same optimizer."""
        optimizer = self.model.optimizer
        same = optimizer is self.optimizer and optimizer._learning_rate is self._rate
        return same and _are_same(self.weights, self.model.trainable_variables)

    @property
    def has_these_metrics(self) -> bool:
        """Whether the model still has the same metrics: compiling makes new ones."""
        return _are_same(self._metrics, metric_variables(self.model))

    def read_frozen(self) -> None:
        """Reads the present frozen weights and integer variables, for graphs made later."""
        # These are tensors, because each graph would hold copies of arrays. A tensor shares the
        # memory of the chief's variable, and is sent to a worker with each chunk.
        self.frozen_values = [tf.convert_to_tensor(v.value) for v in self.frozen]
        self._own_values = [
            self._fixed.get(id(v), tf.convert_to_tensor(v.value)) for v in self._own
        ]

    @property
    def optimizer_start(self) -> list[np.ndarray]:
        """The initial state of the local optimizers; empty if the rule has none."""
        return [] if self._steps is None else list(self._steps.initial)

    def own_start(self, stream: tf.Tensor) -> list[tf.Tensor]:
        """Returns `Block.own` for the beginning of a chunk, with the random numbers of `stream`."""
        shift = tf.math.floormod(tf.bitwise.right_shift(stream * _MIX, 33), _SEEDS)
        return [
            # A seed generator of Keras has a state of two numbers: the seed and a counter.
            tf.stack([(value[0] + tf.cast(shift, value.dtype)) % _SEEDS, value[1]])
            if is_seed(v.path)
            else tf.convert_to_tensor(value)
            for v, value in zip(self._own, self._own_values, strict=True)
        ]

    def begin(
        self,
        pulled: Pulled,
        own: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor] = (),
        optimizer: Sequence[tf.Tensor] = (),
        rows: Rows = NO_ROWS,
    ) -> Block:
        """Returns a block without minibatches.

        `own` is that of the previous block in the same chunk, or `own_start`; `weights` and
        `optimizer` are the local model and optimizer, if the rule has them.
        """
        optimizer = list(optimizer)
        if pulled.rate is not None:
            self._set_rate(optimizer, pulled.rate)
        zero = tf.zeros([], tf.int64)
        return Block(
            rows=dict(rows),
            weights=list(weights if self.local_models else pulled.weights),
            gradients=[],
            squares=[tf.zeros_like(w) for w in pulled.weights] if self._squares else [],
            optimizer=optimizer,
            before=zero if pulled.minibatches is None else pulled.minibatches,
            state=list(pulled.state),
            kept=[tf.ones_like(s) for s in pulled.state],
            own=list(own),
            metrics=[tf.zeros_like(v.value) for v in self._metrics],
            minibatches=zero,
            samples=zero,
            left_out=tf.zeros([self._period], tf.bool),
        )

    def _set_rate(self, optimizer: list[tf.Tensor], rate: tf.Tensor) -> None:
        steps: Any = self._steps
        optimizer[steps.rate_index] = tf.cast(rate, optimizer[steps.rate_index].dtype)

    def add(self, block: Block, data: Nest) -> Block:
        """Returns the block with one more minibatch, (x, y) or (x, y, sample_weight)."""
        if not self.model.jit_compile:
            return self._add(block, data)
        compiled = tf.function(self._add, jit_compile=True, autograph=False)
        return compiled(block, data)

    def _add(self, block: Block, data: Nest) -> Block:
        model = self.model
        samples = tf.convert_to_tensor(batch_size(data))
        of_state = tf.GradientTape(watch_accessed_variables=False)
        with tf.GradientTape() as tape, of_state:
            scope = self._scope(block.weights, block.state, block.own, block.metrics, tape)
            tape.watch(block.weights)
            of_state.watch(block.state)
            with scope, self.tables.looked_up(block.rows):
                loss, measure = _forward(model, data, training=True)
        self._check_assigned(scope.assigned)
        check_read(self.weights, tape.watched_variables())
        stood = [
            [weight, *scope.assigned.get(id(v), ())]
            for weight, v in zip(block.weights, self.weights, strict=True)
        ]
        zero = tf.UnconnectedGradients.ZERO
        gradients = [
            tf.add_n([tf.convert_to_tensor(g) for g in of_one])
            for of_one in tape.gradient(loss, stood, unconnected_gradients=zero)
        ]
        # A `tf.while_loop` over minibatches needs the same static shapes in each turn. So each
        # gradient of looked-up rows is given the shape of the rows.
        for index in block.rows:
            gradients[index].set_shape(block.weights[index].shape)
        with scope, self.tables.looked_up(block.rows):
            for metric in model.metrics:
                if metric.name == "loss":
                    metric.update_state(loss, sample_weight=samples)
            measure()

        def now(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
            found = [(scope.get_current_value(v), v) for v in variables]
            return [tf.convert_to_tensor(v.value if u is None else u) for u, v in found]

        state = now(self.state)
        moved = self._moved(block._replace(weights=[each[-1] for each in stood]), gradients)
        added = moved._replace(
            state=state,
            kept=_left(of_state, block, state),
            own=now(self._own),
            metrics=now(self._metrics),
            minibatches=block.minibatches + 1,
            samples=block.samples + tf.cast(samples, tf.int64),
        )
        return self._unless_bad(block, added, [loss, *gradients]) if self._skips else added

    def _unless_bad(self, before: Block, after: Block, values: Sequence[tf.Tensor]) -> Block:
        """Returns `after`, or, if `values` have NaN or Inf, `before` with a minibatch left out."""
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
        if not before.gradients:  # empty before the first minibatch, and with local steps
            before = before._replace(gradients=[tf.zeros_like(g) for g in after.gradients])
        kept = tf.nest.map_structure(lambda new, old: tf.where(finite, new, old), after, before)
        this = tf.range(self._period, dtype=tf.int64) == before.minibatches
        left_out = before.left_out | (this & ~finite)
        return kept._replace(minibatches=after.minibatches, left_out=left_out)

    def _moved(self, block: Block, gradients: list[tf.Tensor]) -> Block:
        """Returns the block after a local step, or, without local steps, with gradients added."""
        steps = self._steps
        if steps is not None:
            optimizer = list(block.optimizer)
            if steps.schedule is not None:
                self._set_rate(optimizer, steps.schedule(block.before + _trained(block)))
            weights, optimizer = steps(block.weights, optimizer, gradients)
            return block._replace(weights=weights, optimizer=optimizer)
        gradients, squares = clipped(self.optimizer, gradients), block.squares
        if self._squares:
            squares = [s + g * g for s, g in zip(squares, gradients, strict=True)]
        if block.gradients:  # empty before the block's first minibatch
            gradients = [a + g for a, g in zip(block.gradients, gradients, strict=True)]
        return block._replace(gradients=gradients, squares=squares)

    def _check_assigned(self, assigned: Mapping[int, object]) -> None:
        """Raises ValueError if a value that a layer assigns to weights would be lost."""
        for variable in self.frozen:
            if id(variable) in assigned:
                raise ValueError(
                    f"a layer assigns to the frozen weight {variable.path!r} when it is called, "
                    "and workers have frozen weights as constants. Unfreeze its layer, or train "
                    "with tfpara.PeriodicSyncStrategy."
                )
        for variable in self.weights:
            if id(variable) in assigned and not self.local:
                raise ValueError(
                    f"a layer assigns to the trained weight {variable.path!r} when it is called "
                    f"(as SpectralNormalization does), and {type(self._rule).__name__} sends "
                    "gradients alone. Take a rule with steps on the workers: tfpara.Downpour(), "
                    "tfpara.AsyncBMUF() or tfpara.AsyncEASGD()."
                )

    def loss(
        self,
        weights: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        own: Sequence[tf.Tensor],
        data: Nest,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the loss of a minibatch, as in evaluation, and its number of samples (float)."""
        zeros = [tf.zeros_like(v.value) for v in self._metrics]
        with self._scope(weights, state, own, zeros):
            loss, _ = _forward(self.model, data, training=False)
        return tf.cast(loss, tf.float32), tf.cast(batch_size(data), tf.float32)

    def _scope(
        self,
        weights: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        own: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
        tape: tf.GradientTape | None = None,
    ) -> _Scope:
        """Returns the scope in which these tensors take the place of the model's variables."""
        weighed = [*self.weights, *self.frozen]
        variables = [*weighed, *self.state, *self._own, *self._metrics]
        values = [*weights, *self.frozen_values, *state, *own, *metrics]
        tables = {id(self.weights[k]): (k, weights[k]) for k in self.tables.known}
        pairs = zip(variables, values, strict=True)
        mapping = [(v, value) for v, value in pairs if id(v) not in tables]
        return _Scope(mapping, weighed, tape, tables, self.tables.is_read)

    def push(
        self, block: Block, pulled: Pulled, worker: tf.Tensor, place: Place, rate: tf.Tensor
    ) -> Push:
        """Returns the push of a finished block; the other arguments are those of `Push`."""
        values, squares = block.weights, block.squares
        if self.local and not self.local_models:
            between = zip(block.weights, pulled.weights, strict=True)
            values = [self._rule.difference(w, pulled=p) for w, p in between]
        elif not self.local:
            values = block.gradients
            if self._rule.reduction == "mean":
                count = tf.cast(tf.maximum(_trained(block), 1), tf.float32)
                values = [v / tf.cast(count, v.dtype) for v in values]
                squares = [s / tf.cast(count, s.dtype) for s in squares]
        if self._skips:
            _tell(block, worker, place)
        return Push(
            values=values,
            state=[
                after - kept * before
                for after, kept, before in zip(block.state, block.kept, pulled.state, strict=True)
            ],
            kept=block.kept,
            metrics=block.metrics,
            worker=worker,
            place=place,
            minibatches=block.minibatches,
            samples=block.samples,
            rate=rate,
            rows=block.rows,
            squares=squares,
            left_out=[block.minibatches - _trained(block)] if self._skips else [],
        )

    def kept(
        self, block: Block, moves: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the local weights and optimizer for the next block; `moves`: of the `Answer`."""
        if not self.local_models:
            return [], block.optimizer
        moved = [w - m for w, m in zip(block.weights, moves, strict=True)]
        return constrained(moved, [v.constraint for v in self.weights]), block.optimizer


def _trained(block: Block) -> tf.Tensor:
    """Returns the number of a block's minibatches that were not left out."""
    return block.minibatches - tf.math.count_nonzero(block.left_out)


def _tell(block: Block, worker: tf.Tensor, place: Place) -> None:
    """Prints, in the worker's process, which minibatches of a block were left out, if any."""

    def told() -> tf.Tensor:
        numbers = place.start + tf.where(block.left_out)[:, 0]
        tf.print(
            *("tfpara: worker", worker, "left out minibatch", numbers, "of chunk", place.chunk),
            *("in epoch", place.epoch + 1, "(NaN or Inf in the loss or a gradient)"),
            output_stream=sys.stderr,
            summarize=-1,
        )
        return tf.constant(True)

    tf.cond(tf.reduce_any(block.left_out), told, lambda: tf.constant(False))


class _Scope(keras.StatelessScope):
    """A scope that keeps what layers such as SpectralNormalization assign to `weights`.

    `tables` has, by the variable's id, the index and the value of each large table. The value may
    be some rows of the table, which Keras' own `mapping` does not allow. `is_read` is called with
    the index when a table is read or assigned to.

    As in Keras, the gradient of a weight counts its uses before and after such an assignment, but
    does not flow through it: it is the sum of the gradients of all tensors that stood for the
    weight, which the tape watches.

    Attributes:
        assigned: by the variable's id, the values assigned to a weight, in order.
    """

    def __init__(
        self,
        mapping: list[tuple[keras.Variable, tf.Tensor]],
        weights: Sequence[keras.Variable],
        tape: tf.GradientTape | None,
        tables: dict[int, tuple[int, tf.Tensor]],
        is_read: Callable[[int, bool], None],
    ) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self._weights, self._tape = {id(v) for v in weights}, tape
        self.assigned: dict[int, list[tf.Tensor]] = {}
        self._tables, self._is_read = tables, is_read

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        if id(variable) not in self._tables:
            return super().get_current_value(variable)
        index, value = self._tables[id(variable)]
        self._is_read(index, False)
        return value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if id(variable) in self._weights:
            value = tf.stop_gradient(value)
            if self._tape is not None:
                self._tape.watch(value)
            self.assigned.setdefault(id(variable), []).append(value)
        if id(variable) in self._tables:
            index, _ = self._tables[id(variable)]
            self._is_read(index, True)
            self._tables[id(variable)] = index, value
            return
        super().add_update((variable, value))


def _forward(
    model: keras.Model, data: Nest, training: bool
) -> tuple[tf.Tensor, Callable[[], object]]:
    """Returns the loss of a minibatch, and a function that updates the model's metrics."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    outputs = model(x, training=training)
    # An overridden `compute_loss` may lack the argument `training`, because Keras allows that, too.
    known = "training" in inspect.signature(model.compute_loss).parameters
    told = {"training": training} if known else {}
    loss = model.compute_loss(x, y, outputs, sample_weight, **told)
    return loss, lambda: model.compute_metrics(x, y, outputs, sample_weight=sample_weight)


def _measured(model: keras.Model, data: Nest, training: bool) -> None:
    _, measure = _forward(model, data, training)
    measure()


def _build_metrics(model: keras.Model, spec: Nest) -> None:
    """Creates the variables of the metrics, which Keras would create at the first minibatch."""
    # The graph is never run, because dimensions of its minibatch may be unknown. Keras creates the
    # metrics' variables when the scope ends, and drops what the graph assigned to other variables.
    # The scope has the weights' values, because regularizers read them.
    graph = tf.function(lambda data: _measured(model, data, training=False), autograph=False)
    weights = [(v, v.value) for v in model.trainable_variables]
    with keras.StatelessScope(weights, collect_losses=True):
        graph.get_concrete_function(spec)


def _are_same(some: Sequence[keras.Variable], others: Sequence[keras.Variable]) -> bool:
    return [id(v) for v in some] == [id(v) for v in others]


def _left(tape: tf.GradientTape, block: Block, state: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns `Block.kept` after one more minibatch.

    Each element is multiplied by the derivative, in [0, 1], of the new state with respect to the
    previous one: ρ for S ← ρ S + (1 − ρ) x, and 1 if S is unchanged or only added to.
    """
    zero = tf.UnconnectedGradients.ZERO
    slopes = tape.gradient(state, block.state, unconnected_gradients=zero) if state else []
    return [
        kept * tf.clip_by_value(tf.cast(slope, kept.dtype), 0.0, 1.0)
        for kept, slope in zip(block.kept, slopes, strict=True)
    ]


def _check(model: keras.Model) -> None:
    if not getattr(model, "compiled", False):
        raise ValueError("the model is not compiled. Call model.compile(...) in strategy.scope().")
    if not model.built:
        raise ValueError(
            "the model is not built, so it has no weights to send to the parameter servers. Give "
            "it a keras.Input, or call model.build(input_shape)."
        )
    if getattr(model.train_step, "__func__", None) is not keras.Model.train_step:
        raise ValueError(
            f"{type(model).__name__} has a train_step of its own, which the workers of the "
            "asynchronous strategy cannot run. Override compute_loss and compute_metrics instead."
        )
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):  # older versions of Keras lack it
            raise ValueError(
                f"{variable.path!r} is a number by which float8 values are scaled. Its gradient is "
                "its next value, which the optimizers of the asynchronous strategy would take for "
                "a gradient. Train the model before model.quantize('float8'), or with "
                "tfpara.PeriodicSyncStrategy."
            )
