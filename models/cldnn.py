"""The CLDNN: a convolution, LSTM layers and Dense layers, one after the other."""

from __future__ import annotations

import keras

from models.arguments import Seeds, check_sizes, kernel, logits
from models.recurrent import dense_layers, inputs, lstm_layer


def cldnn(
    input_dim: int,
    num_classes: int,
    *,
    bands: int = 40,
    maps: int = 128,
    band_filter: int = 8,
    band_pool: int = 3,
    reduction: int = 192,
    layers: int = 2,
    cells: int = 1024,
    projection: int = 256,
    output_projection: int = 256,
    cell_clip: float | None = 50.0,
    dense: int = 2,
    width: int = 1024,
    activation: str = "relu",
    streams: int | None = None,
    seed: int | None = None,
) -> keras.Model:
    """Builds a convolution over frequency, LSTM layers with projection, Dense layers and logits.

    At each frame, a filter of the convolution spans `band_filter` neighbouring bands, with all
    spliced frames and derivatives. Max-pooling over `band_pool` bands and a linear layer of
    `reduction` units follow, and then the LSTM layers.

    Args:
        input_dim: width of a spliced frame, a multiple of `bands`, such as 880 for 11 frames of 40
            bands and their first derivatives.
        num_classes: number of tied states.
        bands: number of mel bands.
        maps: number of feature maps of the convolution.
        band_filter: number of bands that a filter spans.
        band_pool: number of bands that are pooled, without overlap.
        reduction: units of the linear layer after the convolution; 0 for none.
        layers: LSTM layers, at least 1.
        cells: number of memory cells of each LSTM layer.
        projection: width of the LSTM layers' recurrent projection; 0 for none.
        output_projection: width of their non-recurrent projection, which is appended to the output.
        cell_clip: bound of the cells' values; None for none. Only with projection.
        dense: number of Dense layers after the LSTM layers.
        width: units of each Dense layer.
        activation: activation of the convolution and the Dense layers.
        streams: for truncated BPTT, the number of rows of each batch. A row's state is carried over
            to the next batch (see `models.streaming`). None takes whole utterances.
        seed: seed of the initial weights; None draws one.

    Returns:
        A model from float32 [batch, frames, input_dim] to float32 logits [batch, frames,
        num_classes]. With streams its input is {"frames": [streams, frames, input_dim], "reset":
        [streams]}; "reset" is 1 for rows in which an utterance starts, and 0 for others.

    Raises:
        ValueError: an argument is out of range, or `input_dim` is no multiple of `bands`.

    Source: Li et al. (2017), section 3.1: 128 feature maps, two LSTM layers of 1024 memory blocks
    and 512 projections, two layers of 1024, ReLU, "about 13.8 million parameters"; the order of
    layers is that of Sainath et al., "Convolutional, long short-term memory, fully connected deep
    neural networks" (2015), which Li et al. cite, with the linear layer after the convolution. Li
    et al. leave open the filter, the pooling and what the 512 projections are. If all 512 recurred,
    the LSTM, Dense and output layers alone would have 14.8 million parameters. So here half of the
    projections recur and half do not, which Sak et al. (2014) provide for; with a reduction to 192
    the count is 13.8 million. `projection=512, output_projection=0` is the other reading.
    """
    check_sizes(input_dim=input_dim, bands=bands, maps=maps, band_pool=band_pool)
    check_sizes(layers=layers, cells=cells, width=width, band_filter=band_filter)
    check_sizes(2, num_classes=num_classes)
    check_sizes(0, reduction=reduction, projection=projection, dense=dense)
    _check_bands(input_dim, bands, band_filter, band_pool)
    seeds = Seeds(seed)
    taken, frames, reset = inputs(input_dim, streams)
    # The convolution runs along the bands. So the next two layers make the shape
    # [batch, frames, bands, spliced frames and derivatives].
    hidden = keras.layers.Reshape((-1, input_dim // bands, bands), name="blocks")(frames)
    hidden = keras.layers.Permute((1, 3, 2), name="bands")(hidden)
    hidden = keras.layers.Conv2D(
        maps,
        (1, band_filter),
        activation=activation,
        kernel_initializer=kernel(activation, seeds()),
        name="convolution",
    )(hidden)
    hidden = keras.layers.MaxPooling2D((1, band_pool), name="pooling")(hidden)
    hidden = keras.layers.Reshape((-1, hidden.shape[2] * maps), name="maps")(hidden)
    if reduction:
        hidden = keras.layers.Dense(
            reduction,
            kernel_initializer=keras.initializers.GlorotUniform(seeds()),
            name="reduction",
        )(hidden)
    for number in range(layers):
        layer = lstm_layer(
            f"lstm{number + 1}",
            streams,
            seeds,
            cells=cells,
            projection=projection,
            output_projection=output_projection,
            cell_clip=cell_clip,
        )
        hidden = layer(hidden, reset=reset)
    hidden = dense_layers(hidden, dense, width, activation, seeds)
    return keras.Model(taken, logits(num_classes, seeds())(hidden), name="cldnn")


def _check_bands(input_dim: int, bands: int, band_filter: int, band_pool: int) -> None:
    if input_dim % bands:
        raise ValueError(
            f"input_dim must be a multiple of bands, the mel bands that the convolution runs over. "
            f"Received: input_dim={input_dim}, bands={bands}"
        )
    if band_filter - 1 + band_pool > bands:
        raise ValueError(
            f"band_filter and band_pool leave nothing of the bands: band_filter - 1 + band_pool "
            f"must be at most bands. Received: band_filter={band_filter}, band_pool={band_pool}, "
            f"bands={bands}"
        )
