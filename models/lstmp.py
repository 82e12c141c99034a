"""An LSTM cell with projection layers, for `keras.layers.RNN`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from models.arguments import check_sizes

_INITIALIZERS = {
    "kernel_initializer": "glorot_uniform",
    "recurrent_initializer": "glorot_uniform",
    "projection_initializer": "glorot_uniform",
    "peephole_initializer": "zeros",
    "bias_initializer": "zeros",
}


@keras.saving.register_keras_serializable(package="models")
class LSTMPCell(keras.layers.Layer):
    """One step of an LSTM whose output is projected before it recurs.

    With x_t [batch, input_dim], the recurrent projection r_t [batch, projection], the cells c_t
    [batch, units], the product of elements ⊙, σ = `recurrent_activation` and g = h = `activation`:

        i_t = σ(x_t W_i + r_{t−1} R_i + p_i ⊙ c_{t−1} + b_i)
        f_t = σ(x_t W_f + r_{t−1} R_f + p_f ⊙ c_{t−1} + b_f)
        c_t = f_t ⊙ c_{t−1} + i_t ⊙ g(x_t W_c + r_{t−1} R_c + b_c)
        o_t = σ(x_t W_o + r_{t−1} R_o + p_o ⊙ c_t + b_o)
        m_t = o_t ⊙ h(c_t)
        r_t = m_t P[:, :projection],  s_t = m_t P[:, projection:]

    The output is r_t, followed by the non-recurrent projection s_t if there is one. The weights
    are `kernel` W [input_dim, 4 units], `recurrent_kernel` R [projection, 4 units], `bias`
    [4 units], with the parts in the order i, f, c, o; `peepholes` [3, units] in the order i, f, o;
    `projection_kernel` P [units, projection + output_projection].

    Args:
        units: number of memory cells.
        projection: width of r_t.
        output_projection: width of s_t; 0 for none.
        peepholes: whether the gates see the cells.
        cell_clip: bound of the cells' absolute values; None for no bound.
        activation: activation of the cells' input and output.
        recurrent_activation: activation of the gates.
        unit_forget_bias: whether the forget gate's bias starts from 1, for any `bias_initializer`.
        kernel_initializer: initialiser of W. Those of the other weights are
            `recurrent_initializer`, `projection_initializer`, `peephole_initializer` and
            `bias_initializer`. All are keyword arguments.

    Raises:
        ValueError: an argument is out of range.

    Example: ``keras.layers.RNN(LSTMPCell(1024, 512), return_sequences=True)``.

    Source: Sak, Senior & Beaufays, "Long short-term memory recurrent neural network architectures
    for large scale acoustic modeling" (2014), eqs. 7-14, which give the outputs W_rm m_t and
    W_pm m_t; the bias of 1 is that of Jozefowicz et al. (2015).
    """

    def __init__(
        self,
        units: int,
        projection: int,
        *,
        output_projection: int = 0,
        peepholes: bool = True,
        cell_clip: float | None = None,
        activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid",
        unit_forget_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        check_sizes(units=units, projection=projection)
        check_sizes(0, output_projection=output_projection)
        if cell_clip is not None and not cell_clip > 0:
            raise ValueError(
                f"cell_clip must be positive, or None. Received: cell_clip={cell_clip!r}"
            )
        initializers = {name: kwargs.pop(name, start) for name, start in _INITIALIZERS.items()}
        super().__init__(**kwargs)
        self.units = units
        self.projection = projection
        self.output_projection = output_projection
        self.use_peepholes = peepholes
        self.cell_clip = cell_clip
        self.activation = keras.activations.get(activation)
        self.recurrent_activation = keras.activations.get(recurrent_activation)
        self.unit_forget_bias = unit_forget_bias
        self._initializers = {n: keras.initializers.get(i) for n, i in initializers.items()}
        # keras.layers.RNN reads these attributes of a cell.
        self.state_size = [projection, units]
        self.output_size = projection + output_projection

    def build(self, input_shape: Any) -> None:
        """Makes the weights for inputs [batch, input_dim]."""
        start = self._initializers
        gates = 4 * self.units

        def bias(shape: Any, dtype: Any = None) -> Any:
            values = start["bias_initializer"](shape, dtype=dtype)
            if not self.unit_forget_bias:
                return values
            ones = ops.ones([self.units], dtype=dtype)
            return ops.concatenate([values[: self.units], ones, values[2 * self.units :]])

        self.kernel = self.add_weight(
            (input_shape[-1], gates), start["kernel_initializer"], name="kernel"
        )
        self.recurrent_kernel = self.add_weight(
            (self.projection, gates), start["recurrent_initializer"], name="recurrent_kernel"
        )
        self.bias = self.add_weight((gates,), bias, name="bias")
        if self.use_peepholes:
            self.peepholes = self.add_weight(
                (3, self.units), start["peephole_initializer"], name="peepholes"
            )
        self.projection_kernel = self.add_weight(
            (self.units, self.output_size), start["projection_initializer"], name="projection"
        )

    def call(self, inputs: Any, states: Any, training: bool = False) -> tuple[Any, list[Any]]:
        """Computes one step from inputs [batch, input_dim]; `training` is not used.

        The states are r_{t−1} [batch, projection] and c_{t−1} [batch, units]. Returns the output,
        [batch, projection + output_projection], and [r_t, c_t].
        """
        recurrent, cells = states
        gates = ops.matmul(inputs, self.kernel) + ops.matmul(recurrent, self.recurrent_kernel)
        into, forget, new, out = ops.split(gates + self.bias, 4, axis=1)
        if self.use_peepholes:
            into = into + self.peepholes[0] * cells
            forget = forget + self.peepholes[1] * cells
        gated = self.recurrent_activation(into) * self.activation(new)
        cells = self.recurrent_activation(forget) * cells + gated
        if self.cell_clip is not None:
            cells = ops.clip(cells, -self.cell_clip, self.cell_clip)
        if self.use_peepholes:
            out = out + self.peepholes[2] * cells
        memory = self.recurrent_activation(out) * self.activation(cells)
        output = ops.matmul(memory, self.projection_kernel)
        return output, [output[:, : self.projection], cells]

    def get_config(self) -> dict[str, Any]:
        initializers = {
            name: keras.initializers.serialize(start) for name, start in self._initializers.items()
        }
        return {
            **super().get_config(),
            "units": self.units,
            "projection": self.projection,
            "output_projection": self.output_projection,
            "peepholes": self.use_peepholes,
            "cell_clip": self.cell_clip,
            "activation": keras.activations.serialize(self.activation),
            "recurrent_activation": keras.activations.serialize(self.recurrent_activation),
            "unit_forget_bias": self.unit_forget_bias,
            **initializers,
        }
