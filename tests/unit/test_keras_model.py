"""What workers compare of a model before they train it."""

import keras
import numpy as np
import pytest

from tfpara import keras_model


def with_lookup(words):
    inner = keras.layers.StringLookup(output_mode="one_hot")
    if words:
        inner.adapt(np.array(words))
    word, number = keras.Input((1,), dtype="string"), keras.Input((1,))
    bins = keras.layers.Discretization([0.0, 1.0], output_mode="one_hot")
    joined = keras.layers.Concatenate()([keras.Sequential([inner])(word), bins(number)])
    return keras.Model([word, number], joined)


def test_tables_have_what_adapt_makes_also_within_models():
    one, same, other = map(with_lookup, map(list, ("aab", "aba", "abb")))
    assert keras_model.tables(one) == keras_model.tables(same) != keras_model.tables(other)
    said = [f"{name}: {text}" for name, text in keras_model.tables(other).items()]
    assert said[0].startswith(
        "table 1, of StringLookup, which adapt makes of its data: [UNK], b, a"
    )
    assert said[1].startswith(
        "table 2, of Discretization, which adapt makes of its data: 0.0, 1.0 ("
    )


def test_a_long_table_is_short_in_a_message_and_its_end_counts():
    words = [f"{k:05}" for k in range(10_000)]
    one, other = (keras_model.tables(with_lookup(w)) for w in (words, [*words[:-1], "end"]))
    assert one != other and all(len(str(text)) < 60 for text in one.values())


@pytest.mark.parametrize("layer", [keras.layers.StringLookup, keras.layers.TextVectorization])
def test_a_layer_that_was_not_adapted_has_no_words(layer):
    model = keras.Sequential([keras.Input((1,), dtype="string"), layer()])
    keras_model.tables(model)


def test_optimizers_in_lists_and_dicts_have_names():
    """A part's own optimizer is none of the model's: the part may be pretrained, and frozen."""
    part = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    part.compile("sgd", "mse")
    model = keras.Sequential([part])
    model.compile("sgd", "mse")
    model.pair = [keras.optimizers.SGD(), {"a": (keras.optimizers.Adam(),)}]
    inner = [model.pair[0], model.pair[1]["a"][0]]
    assert keras_model.optimizers(model) == [model.optimizer, *inner]
    keras_model.build_optimizer(model)
    names = {"pair[0]": inner[0], "pair[1]['a'][0]": inner[1]}
    assert keras_model.unbuilt_optimizers(model) == names
