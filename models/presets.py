"""The papers' models by name, and the kind of frames that each takes.

    model = presets.build("dnn-003", num_classes=144, scale=0.25)

Names end in the number that the project gives the paper:

| number | paper |
|---|---|
| 000 | Exponential moving average model in parallel speech recognition training |
| 001 | Experiments on parallel training of deep neural network using model averaging |
| 002 | Improving training time of DNN with asynchronous averaged stochastic gradient descent |
| 003 | Empirical evaluation of parallel training algorithms on acoustic modeling |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import keras

from models.cldnn import cldnn
from models.dnn import dnn
from models.lstm import lstm

BUILDERS: Mapping[str, Callable[..., keras.Model]] = MappingProxyType(
    {"dnn": dnn, "lstm": lstm, "cldnn": cldnn}
)
# Names of the builders' arguments that the `scale` of `Preset.resolve` multiplies.
WIDTHS = ("width", "cells", "projection", "output_projection", "maps", "reduction")


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model with the shape that a paper gives.

    Attributes:
        kind: name of its builder in `BUILDERS`.
        frame_dim: width of a frame before splicing or stacking.
        num_classes: number of tied states.
        arguments: further arguments of the builder.
        context: number of frames spliced on each side.
        stack: number of frames that are joined to one, without overlap.
        about: source of the shape, and the project's choices for what the paper leaves open.
    """

    kind: str
    frame_dim: int
    num_classes: int
    arguments: Mapping[str, Any]
    context: int = 0
    stack: int = 1
    about: str = ""

    @property
    def recurrent(self) -> bool:
        """True if the model takes sequences of frames, for truncated BPTT, not single frames."""
        return self.kind != "dnn"

    def input_dim(self, frame_dim: int | None = None) -> int:
        """Returns the width of the model's input for frames of width `frame_dim`.

        If `frame_dim` is None, frames have the paper's width.
        """
        frames = 2 * self.context + self.stack
        return frames * (self.frame_dim if frame_dim is None else frame_dim)

    def resolve(
        self,
        scale: float = 1.0,
        input_dim: int | None = None,
        num_classes: int | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        """Returns all arguments of the builder, as values that JSON can hold.

        Args:
            scale: factor of the paper's widths, which are rounded and at least 1; 0.25 gives a
                model for a laptop. The number of layers, the input and the classes do not change.
            input_dim: width of the input; None for the paper's.
            num_classes: number of classes; None for the paper's.
            changes: arguments of the builder that replace the paper's; they are not scaled.

        Raises:
            ValueError: scale is not positive.
        """
        if not scale > 0:
            raise ValueError(f"scale must be positive. Received: scale={scale!r}")
        scaled = {
            name: max(1, round(value * scale)) if name in WIDTHS and value else value
            for name, value in self.arguments.items()
        }
        return {
            "input_dim": self.input_dim() if input_dim is None else input_dim,
            "num_classes": self.num_classes if num_classes is None else num_classes,
            **scaled,
            **changes,
        }

    def build(
        self,
        scale: float = 1.0,
        input_dim: int | None = None,
        num_classes: int | None = None,
        **changes: Any,
    ) -> keras.Model:
        """Builds the model. The arguments are those of `resolve`; `changes` may have seed= or,
        for a recurrent model, streams=.
        """
        return BUILDERS[self.kind](**self.resolve(scale, input_dim, num_classes, **changes))


def _dnn(layers: int, width: int, activation: str) -> dict[str, Any]:
    return {"layers": layers, "width": width, "activation": activation}


_CLDNN = {
    "maps": 128,
    "reduction": 192,
    "layers": 2,
    "cells": 1024,
    "projection": 256,
    "output_projection": 256,
    "dense": 2,
    "width": 1024,
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dnn-000": Preset(
            "dnn",
            84,
            11088,
            _dnn(8, 2048, "relu"),
            context=5,
            about="Section 3.3: 8 layers. Input (11 frames), width (2048) and activation (ReLU, "
            "which trains without pretraining) are not given.",
        ),
        "dnn-001": Preset(
            "dnn",
            40,
            8806,
            _dnn(6, 2048, "sigmoid"),
            context=5,
            about="Section 4: 11 frames of 40-dim fMLLR, 6 hidden layers of 2048 sigmoids.",
        ),
        "dnn-002": Preset(
            "dnn",
            39,
            10217,
            _dnn(7, 2048, "sigmoid"),
            context=5,
            about="Section 3: 11 frames of 13-dim PLP and two derivatives, 7 hidden layers of "
            "2048. The activation is not given; sigmoid goes with its RBM pretraining.",
        ),
        "dnn-003": Preset(
            "dnn",
            120,
            5723,
            _dnn(6, 1024, "relu"),
            context=5,
            about="Section 3.1: 11 frames of 40-dim filterbanks and two derivatives, 6 hidden "
            "layers of 1024 ReLU: 12.5 million parameters, where the paper says 13.5.",
        ),
        "dnn-003-7": Preset(
            "dnn",
            120,
            5723,
            _dnn(7, 1024, "relu"),
            context=5,
            about="As dnn-003 with the 13.5 million parameters of section 3.1, which seven hidden "
            "layers of 1024 have (six matrices of 1024 x 1024).",
        ),
        "lstm-000": Preset(
            "lstm",
            84,
            11088,
            {"layers": 2, "cells": 1024, "dense": 1, "width": 1024},
            stack=3,
            about="Section 3.2: 3 stacked frames of 28-dim filterbanks and two derivatives, two "
            "LSTM layers, a full-connection layer. The widths (1024) are not given.",
        ),
        "cldnn-003": Preset(
            "cldnn",
            80,
            5723,
            _CLDNN,
            context=5,
            about="Section 3.1: 11 frames of 40-dim filterbanks and one derivative, a convolution "
            "of 128 maps, two LSTM layers of 1024 with 512 projections, two layers of 1024: 13.8 "
            "million parameters. What is chosen to meet that is said in models.cldnn.",
        ),
    }
)


def get(name: str) -> Preset:
    """Returns the preset of this name.

    Raises:
        ValueError: there is none of this name; the message lists all names.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}. There are: {', '.join(PRESETS)}.")
    return PRESETS[name]


def build(
    name: str,
    scale: float = 1.0,
    input_dim: int | None = None,
    num_classes: int | None = None,
    **changes: Any,
) -> keras.Model:
    """Builds the model of this name; the arguments are those of `Preset.resolve`."""
    return get(name).build(scale, input_dim, num_classes, **changes)
