"""Several models that a custom loop trains, synchronised as one."""

from __future__ import annotations

from collections.abc import Sequence

import keras


class Group(keras.Model):
    """Built models that are trained together, with optimizers besides those that they compile."""

    def __init__(
        self, models: Sequence[keras.Model], optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> None:
        for given, kind in ((models, keras.Model), (optimizers, keras.optimizers.Optimizer)):
            strange = [one for one in given if not isinstance(one, kind)]
            if strange:
                raise TypeError(f"strategy.track: {strange[0]!r} is no keras {kind.__name__}.")
        if not models:
            raise ValueError("strategy.track([]): give the models that the loop trains.")
        super().__init__(name="_and_".join(model.name for model in models))
        self.members = list(models)
        self.optimizers = list(optimizers)
        self.built = True  # The group has no weights of its own for Keras to build.

    def is_of(
        self, models: Sequence[keras.Model], optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> bool:
        """Returns whether the group was made of these models and optimizers."""
        mine, given = [*self.members, *self.optimizers], [*models, *optimizers]
        return [id(one) for one in mine] == [id(one) for one in given]


def as_list(given: object) -> list:
    """Returns a list or tuple as a list, and any other object as a list of one."""
    return list(given) if isinstance(given, (list, tuple)) else [given]
