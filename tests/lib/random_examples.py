"""The number of random examples that a test takes."""

import hypothesis

_AT_EACH_CHANGE = 40  # of a test that asks for no number


def random_examples(number: int) -> hypothesis.settings:
    """Gives a test `number` random examples at each change, fewer in `--fast`, more in `--all`."""
    asked = hypothesis.settings.default.max_examples
    return hypothesis.settings(max_examples=max(number * asked // _AT_EACH_CHANGE, 1))
