"""Truncated BPTT: a recurrent layer that continues from its state at the end of the last batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from models.arguments import check_sizes


@keras.saving.register_keras_serializable(package="models")
class Streaming(keras.layers.Layer):
    """A layer that runs a recurrent layer over utterances that come in pieces.

    Row i of every batch is the next piece of stream i. The layer's state after a batch, s_i, is
    kept for the next one, in which row i starts from

        s_i           where reset[i] is false,
        zero          where it is true: the piece is the first of an utterance.

    Gradients do not cross the beginning of the batch: this is truncated backpropagation through
    time, with as many steps as the batch has frames. Keras' own `stateful=True` has one
    `reset_state()` for all rows; with this layer, an utterance may start in any row at any batch.

    The kept state belongs to the data that are being read. As with `stateful=True` it is no weight:
    it is not in `weights`, nor in files of weights, so a model with streams and the same model
    without (`streams=None`) can read each other's weight files.

    Args:
        layer: a keras.layers.RNN, LSTM, GRU or SimpleRNN, with return_sequences=True and
            return_state=True.
        streams: number of rows of every batch. None keeps no state: each row is a whole utterance.

    Raises:
        TypeError: `layer` is no recurrent layer.
        ValueError: `layer` does not return its sequence and state, goes backwards or is stateful;
            or streams < 1.
    """

    def __init__(self, layer: keras.layers.RNN, streams: int | None = None, **kwargs: Any) -> None:
        if not isinstance(layer, keras.layers.RNN):
            raise TypeError(
                f"layer must be a keras.layers.RNN, LSTM, GRU or SimpleRNN. Received: {layer!r}"
            )
        if not (layer.return_sequences and layer.return_state):
            raise ValueError(
                f"layer {layer.name!r} must be made with return_sequences=True, return_state=True."
            )
        if layer.stateful or layer.go_backwards:
            raise ValueError(
                f"layer {layer.name!r} must not be stateful, which Streaming itself is, nor go "
                "backwards, since the future of a stream is not known."
            )
        if streams is not None:
            check_sizes(streams=streams)
        super().__init__(**kwargs)
        self.layer = layer
        self.streams = streams
        self.supports_masking = True
        self._carried: _Carried | None = None

    @property
    def states(self) -> list[keras.Variable]:
        """The kept state, variables of float [streams, width].

        There are none without streams, or before `build`.
        """
        return [] if self._carried is None else self._carried.of_streams

    def reset_state(self) -> None:
        for variable in self.states:
            variable.assign(ops.zeros_like(variable.value))

    def build(self, sequences_shape: Any, reset_shape: Any = None) -> None:
        """Makes the layer's weights, and the state of each stream."""
        if not self.layer.built:
            self.layer.build(sequences_shape)
            self.layer.built = True
        if self.streams is None or self._carried is not None:
            return
        zeros = keras.tree.flatten(self.layer.get_initial_state(self.streams))
        self._carried = _Carried(
            [
                keras.Variable(
                    ops.cast(zero, self.variable_dtype), trainable=False, name="rnn_state"
                )
                for zero in zeros
            ]
        )

    def call(
        self, sequences: Any, reset: Any = None, mask: Any = None, training: bool = False
    ) -> Any:
        """Returns the layer's outputs for the next piece of every stream.

        Args:
            sequences: [streams, frames, dim].
            reset: bool or number [streams]: an utterance starts in rows where it is true (not 0).
                With None no utterance starts; without streams it must be None.
            mask: bool [streams, frames]: false skips a frame, as in Keras' recurrent layers.
            training: whether this is training; Keras sets it.

        Returns:
            [streams, frames, width of the output].

        Raises:
            ValueError: the batch has another number of rows than streams (if the number is known
                only when the graph runs, tf.errors.InvalidArgumentError); or `reset` is given
                without streams.
        """
        if self.streams is None and reset is not None:
            raise ValueError(
                f"layer {self.name!r} got reset=, but was made without streams, so each batch "
                "starts from zero. Give it streams=, or leave out reset."
            )
        start = None if self.streams is None else self._start(sequences, reset)
        outputs, *states = self.layer(sequences, initial_state=start, mask=mask, training=training)
        # Without streams `self.states` is empty, so the loop keeps no state. `zip` must then not be
        # strict, because the layer still returns states.
        for variable, state in zip(self.states, keras.tree.flatten(states), strict=False):
            variable.assign(ops.cast(state, variable.dtype))
        return outputs

    def _start(self, sequences: Any, reset: Any) -> Any:
        """Returns the state from which each stream starts this batch."""
        message = (
            f"layer {self.name!r} keeps the state of {self.streams} streams, so every batch must "
            f"have {self.streams} rows. Build the model with streams= as many rows as the data have"
        )
        if sequences.shape[0] not in (None, self.streams):
            raise ValueError(f"{message}. Received: shape {tuple(sequences.shape)}")
        # The state comes from variables, and gradients stop at variables. So backpropagation ends
        # at the beginning of the batch.
        carried = [ops.cast(variable, self.compute_dtype) for variable in self.states]
        if sequences.shape[0] is None and tf.is_tensor(sequences):
            check = tf.debugging.assert_equal(tf.shape(sequences)[0], self.streams, message)
            with tf.control_dependencies([check]):
                carried = [tf.identity(state) for state in carried]
        if reset is not None:
            fresh = ops.reshape(ops.cast(reset, "bool"), [self.streams, 1])
            carried = [ops.where(fresh, ops.zeros_like(state), state) for state in carried]
        return keras.tree.pack_sequence_as(self.layer.get_initial_state(self.streams), carried)

    def compute_mask(self, sequences: Any, previous_mask: Any) -> Any:
        return keras.tree.flatten(previous_mask)[0]

    def compute_output_shape(self, sequences_shape: Any, reset_shape: Any = None) -> Any:
        """Returns the shape of the output, [streams, frames, width of the output]."""
        return self.layer.compute_output_shape(sequences_shape)[0]

    def get_config(self) -> dict[str, Any]:
        layer = keras.saving.serialize_keras_object(self.layer)
        return {**super().get_config(), "layer": layer, "streams": self.streams}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Streaming:
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return cls(**{**config, "layer": layer})


class _Carried(tf.Module):
    """A holder of variables, which SavedModel finds and Keras does not count as weights."""

    def __init__(self, variables: list[keras.Variable]) -> None:
        super().__init__()
        self.of_streams = variables
