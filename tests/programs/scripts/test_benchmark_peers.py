"""The suite `peers` at its smallest, its prediction by hand, and the page made of it."""

import importlib.util
import json
import os

import pytest

from scripts.benchmarks import beside_peers
from scripts.benchmarks.headlines import headlines
from scripts.benchmarks.page import BEGIN, END, section
from scripts.benchmarks.prediction import costs_of, predictions
from scripts.benchmarks.systems import systems_of
from tfpara.planner import Link

# The peers of PyTorch need an environment of their own: see docs/benchmarks.md.
TORCH = os.environ.get("TFPARA_TORCH_PYTHON")
SIZES = ("--batch=8", "--inputs=16", "--layers=1", "--width=32", "--classes=10")


def suite(run_well, out, only, *flags):
    quick = ("--rounds=1", "--steps=8", "--sync_periods=1,4,8", f"--only={only}")
    run_well("benchmarks", "--suite=peers", f"--out={out}", *quick, *SIZES, *flags)
    content = json.loads(out.read_text())
    return content, {row["system"]: row for row in content["rows"] if row["link"] == "loopback"}


@pytest.fixture(scope="module")
def results(run_well, tmp_path_factory):
    """The JSON file of the suite on loopback."""
    out = tmp_path_factory.mktemp("peers") / "peers.json"
    only = "plain Keras;tfpara, one worker;tfpara, period 1;bare all-reduce;PyTorch DDP"
    suite(run_well, out, only, "--link_mbit=")
    return out


@pytest.mark.nightly
def test_every_system_has_figures_or_a_reason(results):
    rows = {row["system"]: row for row in json.loads(results.read_text())["rows"]}
    assert "--torch_python" in rows.pop("PyTorch DDP")["missing"]
    for row in rows.values():
        assert row.get("samples_per_second", row.get("sync_ms", 0)) > 0, row
    ours, alone = rows["tfpara, period 1"], rows["tfpara, one worker"]
    speed = ours["samples_per_second"]
    assert ours["scaling"] == pytest.approx(speed / alone["samples_per_second"])
    independent = rows["plain Keras, independent"]
    assert ours["ratio_to_independent"] == pytest.approx(speed / independent["samples_per_second"])


@pytest.mark.nightly
def test_per_step_peers_of_tensorflow_average(run_well, tmp_path):
    # The suite itself compares the workers' weights, and lists as failed what does not average.
    _, rows = suite(run_well, tmp_path / "x.json", "MultiWorkerMirrored;Horovod", "--link_mbit=")
    weights = 17 * 32 + 33 * 10
    for name in ("MultiWorkerMirrored", "Horovod"):
        if name == "Horovod" and importlib.util.find_spec("horovod") is None:
            assert "cannot import horovod" in rows[name]["missing"]
            continue
        assert rows[name]["scaling"] > 0
        # Two workers send the model once each, for two minibatches of 8; other programs may use
        # loopback at the same time.
        assert rows[name]["bytes_per_sample"] > 4 * weights / 8


@pytest.mark.nightly
def test_the_cost_model_is_beside_what_was_measured(results):
    content = json.loads(results.read_text())
    (one,) = content["predictions"]
    assert one["system"] == "tfpara, period 1"
    ratio = one["samples_per_second"] / one["predicted_samples_per_second"]
    assert one["measured_over_predicted"] == pytest.approx(ratio)


@pytest.mark.nightly
def test_the_page_has_what_stands_around_its_marks(results, run, run_well, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    arguments = ("benchmarks.page", f"--results={results}")
    run_well(*arguments, f"--page={page}")
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold\n" not in text
    assert "| tfpara, period 1 | 2 |" in text
    assert "* PyTorch DDP (loopback): not installed" in text
    assert (tmp_path / "peers.svg").read_text().count("<svg")
    page.write_text("no marks")
    ended = run(*arguments, f"--page={page}")
    assert ended.returncode == 1 and "lacks the lines" in ended.err
    assert page.read_text() == "no marks"


@pytest.mark.nightly
def test_the_page_has_limited_links_beside_loopback(results):
    content = json.loads(results.read_text())
    rows = {r["system"]: {**r, "link": "100 Mbit/s"} for r in content["rows"]}
    for name, key, value in (
        ("tfpara, period 1", "samples_per_second", 7.0),
        ("bare all-reduce", "sync_ms", 4321.0),
    ):
        content["rows"].append({**rows[name], key: value, f"{key}_range": [value, value]})
    text = section(content)
    assert text.count("| system | loopback | 100 Mbit/s |") == 2
    by_link = text.split("| system | loopback | 100 Mbit/s |", 1)[1].split(
        "predicted by the cost model"
    )[0]
    (trained,) = [line for line in by_link.splitlines() if line.startswith("| tfpara, period 1 |")]
    (exchanged,) = [line for line in by_link.splitlines() if line.startswith("| bare all-reduce |")]
    assert trained.endswith("| 7 |") and exchanged.endswith("| 4321 |")
    assert "plain Keras" not in by_link


@pytest.mark.skipif(not TORCH, reason="TFPARA_TORCH_PYTHON names no python that has torch")
def test_peers_of_pytorch_run(run_well, tmp_path):
    out = tmp_path / "peers.json"
    flags = ("--link_mbit=", f"--torch_python={TORCH}")
    content, rows = suite(run_well, out, "PyTorch;torchft", *flags)
    assert "torch" in content["versions"]
    assert len(rows) == 6
    for name, row in rows.items():
        if "missing" not in row:
            assert row["samples_per_second"] > 0, row
            assert row["workers"] == 1 or row["scaling"] > 0, name


@pytest.mark.nightly
def test_unknown_systems_and_links_are_refused(run, tmp_path):
    arguments = ("benchmarks", "--suite=peers", f"--out={tmp_path / 'x.json'}")
    ended = run(*arguments, "--only=Spark", "--link_mbit=")
    assert ended.returncode == 1 and "names no system. There are: plain Keras;" in ended.err
    ended = run(*arguments, "--link_mbit=0")
    assert ended.returncode == 1 and "--link_mbit=0 must lie between" in ended.err


def row(system, link="loopback", family="tfpara", workers=2, **figures):
    return {"system": system, "link": link, "family": family, "workers": workers, **figures}


def test_prediction_by_hand():
    rows = [
        row("plain Keras", family="reference", workers=1, samples_per_second=90.0),
        row("plain Keras, independent", family="reference", samples_per_second=144.0),
        row("tfpara, one worker", workers=1, samples_per_second=100.0),
        row("bare all-reduce", family="reference", sync_ms=400.0),
        row("tfpara, period 1", sync_period=1, samples_per_second=50.0, sync_ms=500.0),
        row(
            "tfpara, period 10, int8",
            link="80 Mbit/s",
            sync_period=10,
            samples_per_second=60.0,
            strategy={"compression": "int8"},
        ),
    ]
    costs = costs_of(rows, batch=10, model_bytes=40e6, loopback="loopback")
    assert costs.step_seconds == pytest.approx(0.1)
    assert costs.slowdown == pytest.approx(1.25)
    assert costs.local_seconds == pytest.approx(0.1)
    assert costs.link.bytes_per_second == pytest.approx(100e6)
    first, second = predictions(rows, costs, 10, {"80 Mbit/s": Link(10e6)})
    # 20 samples in 0.125 + 0.5 s; 200 samples in 1.25 + 0.1 + 1 s.
    assert first["predicted_samples_per_second"] == pytest.approx(20 / 0.625)
    assert second["predicted_samples_per_second"] == pytest.approx(200 / 2.35)
    assert second["measured_over_predicted"] == pytest.approx(60 * 2.35 / 200)
    assert costs_of(rows[:3], 10, 40e6, "loopback") is None


def test_headlines_compare_what_was_measured():
    def step(system, speed, link="loopback", **more):
        return row(system, link, samples_per_second=speed, **{"per_step": False, **more})

    ratios = {"ratio_to_independent": 0.99, "scaling": 1.9}
    rows = [
        step("tfpara, period 20", 90.0, sync_period=20),
        step("tfpara, period 80", 100.0, sync_period=80, **ratios),
        step("tfpara, period 80, overlap", 98.0, sync_period=80, strategy={"overlap": True}),
        step("DDP", 70.0, family="peer", per_step=True, scaling=1.4),
        step("averager", 90.0, family="peer", sync_period=80, scaling=1.8),
        row("sync, BMUF and EMA, Horovod", sync_ms=60.0),
        row("bare Horovod all-reduce", family="reference", sync_ms=50.0),
        step("tfpara, period 80", 80.0, "1000 Mbit/s", sync_period=80),
        step("DDP", 8.0, "1000 Mbit/s", family="peer", per_step=True),
        step("averager", 75.0, "1000 Mbit/s", family="peer", sync_period=80),
        row("sync, BMUF and EMA", "1000 Mbit/s", sync_ms=440.0, per_step=False),
        row("bare all-reduce", "1000 Mbit/s", sync_ms=400.0, family="reference", per_step=False),
    ]
    scaling, peers, sync, limited_sync, limited = headlines(rows)
    assert "of *tfpara, period 80* are 0.99 times as fast as two independent" in scaling
    assert "*averager* has the largest speed-up: two workers are 1.80 times" in peers
    assert "takes 60 ms. That is 1.20 times as long as the *bare Horovod all-reduce*" in sync
    assert "takes 440 ms at 1000 Mbit/s. That is 1.10 times as long" in limited_sync
    assert "of *tfpara, period 80* train on 80 samples/s: 0.80 times as fast as on lo" in limited
    assert "on loopback, and 10.0 times as fast as DDP (8 samples/s)" in limited
    assert headlines([]) == []


def test_every_system_has_a_name_of_its_own_and_a_base():
    sizes = {"batch": 8, "inputs": 16, "layers": 1, "width": 32, "classes": 10}
    systems = systems_of(sizes, [1, 5, 20, 80], 160)
    names = [system.name for system in systems]
    assert len(set(names)) == len(names)
    assert {system.alone for system in systems if system.alone} <= set(names)
    # What is timed ends with a sync, also where it is shortened for a slow link.
    for system in [*systems, *(beside_peers._shortened(s, 10.0) for s in systems)]:
        period = system.options.get("sync_period")
        if period and system.workers == 2 and system.options["system"] == "tfpara":
            assert system.options["steps"] % period == 0
