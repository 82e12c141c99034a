"""The base of tfpara's callbacks."""

from __future__ import annotations

import keras

from tfpara.strategy import Strategy


class Callback(keras.callbacks.Callback):
    """A callback that knows its model's strategy, and acts in the thread that trains."""

    # If this were True, Keras might call the batch hooks later, in another thread.
    async_safe = False

    @property
    def _strategy(self) -> Strategy:
        """The strategy of the model; a plain `Strategy` if it is not tfpara's."""
        return Strategy.of(self.model)
