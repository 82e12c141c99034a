"""What `strategy.predict` refuses before it asks the other workers."""

import numpy as np
import pytest

from tfpara.sync.keras import predicting


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0, 2.0], r"got a float in x, which has no rows\. Give arrays"),
        (None, "got a NoneType in x"),
        (np.float32(1.0), "in x, which has no rows"),
        ({"a": np.zeros([3, 2]), "b": np.zeros([2, 2])}, r"the arrays have \[2, 3\] rows"),
        (np.zeros([0, 2]), "data without a single row"),
        (iter([np.zeros([3, 2])]), "divides data by number"),
    ],
)
def test_data_that_cannot_be_divided(x, message):
    with pytest.raises(ValueError, match=message):
        predicting._whole(x)


def test_an_input_may_be_none():
    whole = predicting._whole({"a": None, "b": np.arange(3)})
    part = whole.part(1, 3)
    assert whole.length == 3 and part["a"] is None and part["b"].tolist() == [1, 2]
