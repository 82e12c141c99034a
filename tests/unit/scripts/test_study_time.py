"""How much sooner an error is reached: by hand, from made curves and the cost model."""

import math
import re
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from scripts import study_time
from scripts.study_grid import Cell
from scripts.study_time import Best
from tfpara.planner import Costs, Link

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()

STUDY = Path(__file__).resolve().parents[3] / "docs" / "study.md"
# Four workers send 1.5 MB at 1 MB/s, and 0.375 MB in int8: syncs of 1.6 and 0.1 + 1.2 · 0.375 s.
COSTS = Costs(step_seconds=0.1, model_bytes=1e6, link=Link(1e6), local_seconds=0.1)
LENGTHS = [0.5, 1.0, 1.5, 2.0]


def test_runs_become_longer_or_shorter_until_the_error_is_between_two_lengths():
    curve = {}
    errors = {1.0: 5.0, 1.5: 4.5, 2.0: 3.5}
    while (length := study_time.next_length(LENGTHS, curve, 4.0)) is not None:
        curve[length] = (100 * length, errors[length])
    assert curve == {1.0: (100, 5.0), 1.5: (150, 4.5), 2.0: (200, 3.5)}
    # Half of the way from 3.5 to 4.5: the geometric mean of 150 and 200.
    assert study_time.samples_needed(curve, 4.0) == pytest.approx(math.sqrt(150 * 200))
    assert study_time.next_length(LENGTHS, {1.0: (100, 3.9)}, 4.0) == 0.5
    shorter = {1.0: (100, 3.9), 0.5: (50, 4.1)}
    assert study_time.next_length(LENGTHS, shorter, 4.0) is None
    assert study_time.samples_needed(shorter, 4.0) == pytest.approx(math.sqrt(100 * 50))
    # No shorter run: an upper limit.
    assert study_time.samples_needed({0.5: (50, 3.0), 1.0: (100, 2.0)}, 4.0) == 50


def test_an_error_that_no_run_reaches_and_a_run_that_diverges():
    curve = {length: (100 * length, 5.0) for length in LENGTHS[1:]}
    assert study_time.next_length(LENGTHS, curve, 4.0) is None
    assert study_time.samples_needed(curve, 4.0) is None
    assert study_time.soonest({5: None, 20: None}, 100, COSTS, 4) is None
    assert study_time.planned({5: 100, 20: 100, 80: None}, 100, COSTS, 4) is None
    assert study_time.of_all_reduce(None, 100, COSTS, 4) is None
    assert study_time.samples_needed({1.0: (100, math.inf), 1.5: (150, 3.0)}, 4.0) == 150


def test_times_by_hand():
    """A block of 20 steps takes 2 + 1.6 s, or 2.55 s in int8, for the work of 8 s."""
    only = study_time.soonest({5: None, 20: 1200, 80: 2000}, 1000, COSTS, 4)
    assert only == Best(pytest.approx(8 / 2.55 / 1.2), 20, "int8")
    # 32 / 8.55 / 1.42 = 2.636 with a period of 80 is not 2 % more than 2.614.
    alike = {5: None, 20: 1200, 80: 1420}
    assert study_time.soonest(alike, 1000, COSTS, 4)[1:] == (20, "int8")
    # The planner wants 105 minibatches, and takes the longest period whose error is known.
    plan = study_time.planned(alike, 1000, COSTS, 4)
    assert plan == Best(pytest.approx(32 / 8.55 / 1.42), 80, "int8")
    # Each step of all-reduce takes the 1.5 s of travel, for the work of 0.4 s.
    assert study_time.of_all_reduce(800, 1000, COSTS, 4) == pytest.approx(0.4 / 1.5 / 0.8)


def test_the_table_has_each_link_and_says_what_is_not_reached():
    one = Cell("digits", "", 1, 0, 0, 0.05)
    ours, never, reduced = (
        one._replace(rule=rule, replicas=4, period=period)
        for rule, period in (("bmuf", 20), ("bmuf", 80), ("all-reduce", 1))
    )
    curves = {
        one: {1.0: (1000, 4.0)},
        ours: {1.0: (1000, 4.4), 1.5: (1500, 3.96)},
        never: {1.0: (1000, 9.0)},
        reduced: {1.0: (1000, 5.0)},
    }
    fast = Costs(0.1, 1e6, Link(1e12))
    found = study_time.rows({"digits": 4.0}, curves, {1000.0: COSTS, 10000.0: fast})
    assert [row.link_mbit for row in found] == [1000.0, 10000.0]
    needed = 1500 * (1000 / 1500) ** (0.04 / 0.44)
    assert found[0].samples == {20: pytest.approx(needed), 80: None}
    assert found[1].best == Best(pytest.approx(4 * 1000 / needed), 20, "none")
    assert found[1].content()["best"]["period"] == 20 and found[1].content()["all_reduce"] is None
    text = study_time.page({"digits": 4.0}, found)
    sooner = f"{8 / 2.55 * 1000 / needed:.1f} (τ = 20, int8)"
    assert f"| digits | 4 | `BMUF()` | {sooner} | {4000 / needed:.1f} (τ = 20) | 2.7 to" in text
    assert "| digits | 4 | all-reduce | not reached | not reached | |" in text
    assert f"| digits | 4 | not reached | {needed / 1000:.1f} | not reached |" in text


def test_the_table_of_the_study_follows_from_its_errors_and_the_cost_model():
    text = STUDY.read_text()
    curves, targets = {}, {"speech": 1.01 * 34.15, "digits": 1.01 * 1.48}
    for task, target in targets.items():
        part = text.split(f"### {task.capitalize()}\n")[1].split("\n###")[0]
        one = Cell(task, "", 1, 0, 0, 0.02)
        curves[one] = {1.0: (1.0, target / 1.01)}
        row = r"^\|(?: (\d+))? \| (`BMUF\(\)`|all-reduce)(?:, rate [^|]*)? \|(.*)\|$"
        for period, rule, cells in re.findall(row, part, re.M):
            name = rule if rule == "all-reduce" else "bmuf"
            for count, cell in zip((4, 8, 16), cells.split("|"), strict=False):
                way = one._replace(rule=name, replicas=count, period=int(period or 1))
                error = float(cell.split()[0]) if cell.strip() else math.inf
                curves.setdefault(way, {1.0: (1.0, error)})  # the first table has the longest runs
    _, costs = study_time.settings()
    made = study_time.page(targets, study_time.rows(targets, curves, costs))
    for line in made.split("Samples needed")[0].splitlines():
        if re.match(r"\| (speech|digits) ", line) and not line.startswith("| digits | 16 | all"):
            assert line in text, f"docs/study.md must have: {line}"


@pytest.mark.parametrize(
    "given,said",
    [
        ({"lengths": ["2"]}, "--lengths=2 must contain 1: "),
        ({"lengths": ["1", "-2"]}, "--lengths=1,-2 must be positive numbers"),
        ({"link_speeds": ["fast"]}, "--link_speeds=fast must be positive numbers"),
        ({"link_speeds": ["nan"]}, "--link_speeds=nan must be positive numbers"),
        ({"step_ms": 0.0}, "--step_ms=0.0 must be positive"),
        ({"model_mb": 0.0}, "--model_mb=0.0 must be positive"),
    ],
)
def test_wrong_flags_are_refused(given, said):
    with flagsaver.flagsaver(**given), pytest.raises(ValueError, match=re.escape(said)):
        study_time.settings()
