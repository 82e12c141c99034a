"""Random runs beside NumPy written from the pages, see tests/search/__main__.py."""

import dataclasses
import os

import pytest

from tests.search import __main__ as search
from tests.search import cases

SEED = int(os.environ.get("TFPARA_TEST_SEED", "0"))


@pytest.mark.nightly_cases("0", "2", "3", "4")
@pytest.mark.parametrize("number", range(5))
def test_a_random_run_is_what_the_pages_say(number, tmp_path):
    case = cases.draw(SEED, number, workers=1, devices=4)
    found = search.differences(case, tmp_path)
    assert max(found.values()) <= search.tolerance(case), case


@pytest.mark.nightly
def test_a_wrong_rule_is_found(tmp_path):
    case = cases.draw(0, 3, workers=1, devices=4)
    assert case.rule == "bmuf"
    wrong = dataclasses.replace(case, rule_options={**case.rule_options, "warmup": 2.0})
    found = search.differences(case, tmp_path, expected_of=wrong)
    assert found["global"] > 10 * search.tolerance(case)
