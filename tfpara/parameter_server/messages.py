"""The messages between workers and parameter servers, as tuples of tensors, and their transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfpara.typing import Nest

# The ids of the rows that a block of minibatches uses (int64 [rows], ascending, each id once), for
# each embedding table that is pulled and pushed by rows. The keys are the indices of the tables
# among the trainable weights.
Rows: TypeAlias = Mapping[int, tf.Tensor]
NO_ROWS: Rows = {}  # all weights are pulled and pushed whole
_SMALL_BYTES = 1 << 18


class Pulled(NamedTuple):
    """The result of a pull: tensors on the worker; only `held` stays on the servers."""

    # the trainable weights, in the model's order; tables pulled by rows have only the pulled rows
    weights: list[tf.Tensor]
    state: list[tf.Tensor]  # the averaged state (moving statistics), in the model's order
    versions: list[tf.Tensor]  # number of pushes so far on each server
    halted: tf.Tensor  # whether workers have to stop after this block
    # number of minibatches that the model was trained on; None if the servers have the optimizers
    minibatches: tf.Tensor | None = None
    # learning rate of the workers' optimizers; None if workers have no optimizers, or if their rate
    # is a schedule
    rate: tf.Tensor | None = None
    # copies of the pulled weights that stay on the servers, for delay compensation; else empty
    held: Sequence[tf.Tensor] = ()

    def with_rate(self, rate: tf.Tensor) -> Pulled:
        """Returns this with the learning rate `rate`; unchanged without a rate or if `rate` < 0."""
        if self.rate is None:
            return self
        return self._replace(rate=tf.where(rate >= 0.0, tf.cast(rate, self.rate.dtype), self.rate))


class Place(NamedTuple):
    """The position of a minibatch in the data: int64 scalars, each counted from 0."""

    epoch: tf.Tensor
    chunk: tf.Tensor  # index of the chunk in the epoch
    start: tf.Tensor  # index of the minibatch in the chunk


class Push(NamedTuple):
    """The content of a push: what a worker sends after a block of minibatches.

    Attributes:
        values: for each weight its gradient (ASGD), its change since the pull (Downpour), or the
            local weight (EASGD). Of a table in `rows`, only the values of those rows.
        state: s − D S_pulled, for each tensor of the averaged state S (moving statistics); s is the
            worker's state after the block. The server sets S ← D S + (s − D S_pulled). So S becomes
            the state of one worker with all minibatches, however many pushes came since the pull.
        kept: D, for each tensor of S: how much of each element of S_pulled is still in s. It is a
            product over the minibatches, such as ρ^τ for a moving average with decay ρ.
    """

    values: Sequence[tf.Tensor]
    state: Sequence[tf.Tensor]
    kept: Sequence[tf.Tensor]
    metrics: Sequence[tf.Tensor]  # increments of the metrics' variables, which are sums
    worker: tf.Tensor  # index of the worker
    place: Place  # where the block's first minibatch is in the data
    minibatches: tf.Tensor  # number of the block's minibatches
    samples: tf.Tensor  # number of the block's samples
    rate: tf.Tensor  # learning rate of this push; if negative, the servers' rate is used
    rows: Rows = NO_ROWS  # ids of the rows in `values`, for tables that are pushed by rows
    squares: Sequence[tf.Tensor] = ()  # sums of the gradients' squares; empty if not needed
    # number of minibatches that were left out; empty if minibatches are never left out
    left_out: Sequence[tf.Tensor] = ()
    # None in a whole push. In the part that goes to one server: that server's version at the pull
    version: tf.Tensor | None = None


class Answer(NamedTuple):
    """The answer to a push.

    Attributes:
        settled: False if the push must be offered again later, because it would now make other
            workers' pushes too stale.
        included: whether the minibatches are in the model on all servers, by this or an earlier
            push.
    """

    versions: list[tf.Tensor]  # number of pushes on each server, including this one
    moves: list[tf.Tensor]  # what is subtracted from each local weight; empty without local models
    settled: tf.Tensor
    included: tf.Tensor


class Moment(NamedTuple):
    """The models on the servers at one moment, between two pushes."""

    # Keys: "global" and the names of the averages. Each list has the order of the model's weights.
    weights: dict[str, list[tf.Tensor]]
    state: list[tf.Tensor]  # the moving statistics, in the order of `Server.state`
    pushes: int  # number of pushes on the first server before that moment


def sent(values: Nest, source: str | None, target: str | None) -> Nest:
    """Returns a nest with its tensors on the device `target`.

    TensorFlow fetches each tensor from another process by a separate call. So tensors of up to
    256 KB travel as one vector for each type: floating-point numbers as they are, whole numbers and
    booleans as int64. They arrive unchanged. `source` is the device of the tensors. A device None
    is the one that runs the graph; a tensor may also be None.
    """
    flat = tf.nest.flatten(values)
    together: dict[tf.DType, list[int]] = {}
    for place, value in enumerate(flat):
        if value is None:
            continue
        if (kind := _kind(value)) is not None:
            together.setdefault(kind, []).append(place)
            continue
        with tf.device(target):
            flat[place] = tf.identity(value)
    for kind, places in together.items():
        with tf.device(source):
            parts = [tf.reshape(tf.cast(flat[k], kind), [-1]) for k in places]
            vector = tf.concat(parts, 0)
        with tf.device(target):
            parts = tf.split(vector, [part.shape[0] for part in parts])
            for place, part in zip(places, parts, strict=True):
                like = flat[place]
                flat[place] = tf.cast(tf.reshape(part, like.shape), like.dtype)
    return tf.nest.pack_sequence_as(values, flat)


def _kind(value: tf.Tensor) -> tf.DType | None:
    """Returns the type of the vector in which a tensor travels; None: the tensor travels alone."""
    size, dtype = value.shape.num_elements(), value.dtype
    if size is None or size * dtype.size > _SMALL_BYTES:
        return None
    if dtype.is_floating:
        return dtype
    return tf.int64 if dtype.is_integer or dtype.is_bool else None
