"""Whole benchmarks at their smallest: every system runs, and the file has the promised form."""

import json

import pytest

SMALL = ("--layers=1", "--width=64", "--classes=50")


def test_scaling_writes_rows_and_prints_them(run_well, tmp_path):
    out = tmp_path / "scaling.json"
    ended = run_well(
        "benchmarks",
        "--suite=scaling",
        f"--out={out}",
        "--rounds=1",
        "--sync_periods=16",
        "--only=plain Keras;bare all-reduce;tfpara, period",
        "--steps=2",
        "--batch=8",
        *SMALL,
    )
    content = json.loads(out.read_text())
    assert content["suite"] == "scaling"
    assert {"machine", "versions", "rows"} <= set(content)
    rows = {row["system"]: row for row in content["rows"]}
    assert rows["plain Keras, independent"]["ratio_to_independent"] == 1.0
    assert rows["bare all-reduce"]["sync_ms"] > 0
    row = rows["tfpara, period 16"]
    assert (row["workers"], row["sync_period"]) == (2, 16)
    assert row["samples_per_second"] > 0
    assert 0 < row["sync_fraction"] < 1
    low, high = row["sync_ms_range"]
    assert 0 < low <= row["sync_ms"] <= high
    assert "tfpara, period 16" in ended.out
    assert "tfpara, one worker" not in rows


def test_memory_falls_with_the_number_of_replicas(run_well, tmp_path):
    out = tmp_path / "memory.json"
    run_well("benchmarks", "--suite=memory", f"--out={out}", "--replicas=1,4")
    held = {row["system"]: row["state_bytes"] for row in json.loads(out.read_text())["rows"]}
    whole = 4 * 4 * 12_466_779  # the model, its momentum and two averages, in float32
    assert held["replicated, 4 replicas"] == held["replicated, 1 replica"]
    assert abs(held["replicated, 1 replica"] / whole - 1) < 1e-4
    assert abs(held["sharded, 4 replicas"] * 4 / whole - 1) < 1e-4


def test_averages_are_compared_with_none(run_well, tmp_path):
    out = tmp_path / "averages.json"
    small = ("--rounds=1", "--steps=4", "--only=sharded", *SMALL)
    run_well("benchmarks", "--suite=averages", f"--out={out}", *small)
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["sharded, no averages"]["ratio_to_none"] == 1.0
    assert rows["sharded, three averages"]["sync_ms"] > 0


def test_input_is_compared_with_training(run_well, run, tmp_path, corpus_directory):
    out = tmp_path / "input.json"
    arguments = ("benchmarks", "--suite=input", f"--out={out}", "--rounds=1", "--steps=4")
    assert "--corpus=DIR" in run(*arguments).err
    run_well(*arguments, f"--corpus={corpus_directory}", "--batch=16")
    pipeline, training = json.loads(out.read_text())["rows"]
    assert training["ratio_to_training"] == 1.0
    assert pipeline["frames_per_second"] > 0


def test_goodput_of_a_run_with_faults_and_of_one_without(run_well, tmp_path):
    """A quiet run's is 1; where a worker is killed the others go on, and all epochs are trained."""
    out = tmp_path / "faults.json"
    arguments = ("--only=no faults;elastic, one spare", "--workers=3", "--epochs=4")
    arguments += ("--epoch_steps=60", "--step_seconds=0.02", "--kill_every=2")
    run_well("benchmarks", "--suite=faults", f"--out={out}", *arguments)
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["no faults"]["goodput"] == 1.0
    assert rows["no faults"]["kills"] == 0
    assert rows["elastic, one spare"]["kills"] >= 1
    assert rows["elastic, one spare"]["goodput"] > 0.0
    assert 0.0 < rows["elastic, one spare"]["loss"] < 3.0


ELEMENTS = 1320 * 64 + 64 + 64 * 50 + 50  # weights and biases of the network of `SMALL`


def cluster_rows(run_well, tmp_path, *arguments):
    out = tmp_path / "cluster.json"
    arguments += ("--link_mbit=100", "--link_delay_ms=0", "--sync_periods=20")
    arguments += ("--step_seconds=0.05", "--rounds=1", *SMALL)
    run_well("benchmarks", "--suite=cluster", f"--out={out}", *arguments)
    return json.loads(out.read_text())["rows"]


@pytest.mark.usefixtures("may_make_links")
def test_a_cluster_of_pausing_workers(run_well, tmp_path):
    """A sync takes no less than its bytes on the link, and three workers are faster than one."""
    rows = cluster_rows(run_well, tmp_path, "--only=sharded;int8", "--replicas=3")
    rows = {row["system"]: row for row in rows}
    for name, bits in (("sharded", 32), ("int8", 8)):
        floor = 1e3 * 4 / 3 * ELEMENTS * bits * 1.045 / 100e6
        assert rows[name]["floor_ms"] == pytest.approx(floor)
        assert rows[name]["sync_ms"] > 0.7 * floor  # what the link's bucket lets through at once
        assert 1.0 < rows[name]["speedup"] < 3.0
        assert rows[name]["speedup"] < rows[name]["predicted_speedup"] * 1.05


@pytest.mark.usefixtures("may_make_links")
def test_a_cluster_syncs_on_two_levels(run_well, tmp_path):
    """Four replicas on two workers use two links. Three replicas cannot share workers of two."""
    (row,) = cluster_rows(run_well, tmp_path, "--only=two levels", "--replicas=3,4")
    assert row["workers"] == 4
    assert row["floor_ms"] == pytest.approx(1e3 * ELEMENTS * 32 * 1.045 / 100e6)
    assert 2.0 < row["speedup"] < 4.0


@pytest.mark.usefixtures("may_make_links")
def test_a_cluster_says_which_way_failed(run_well, tmp_path):
    """/bin/false stands for a Python without PyTorch. The other ways keep their figures."""
    arguments = ("--only=sharded;PyTorch", "--replicas=2", "--torch_python=/bin/false")
    rows = {row["system"]: row for row in cluster_rows(run_well, tmp_path, *arguments)}
    assert "ended with 1" in rows["PyTorch PeriodicModelAverager"]["failed"]
    assert rows["sharded"]["speedup"] > 1.0


def test_blocks_by_speed_use_the_speed_of_all(run_well, tmp_path):
    """One of two workers has half the speed: equal blocks use 2/3 of both speeds."""
    out = tmp_path / "balance.json"
    arguments = ("--only=2, one at half, balance", "--rounds=1", "--steps=100")
    run_well("benchmarks", "--suite=balance", f"--out={out}", *arguments)
    off, on = json.loads(out.read_text())["rows"]
    assert off["of_all_speeds"] < 0.8 < on["of_all_speeds"]
    assert on["ratio_to_off"] > 1.15
    assert on["loss"] == pytest.approx(off["loss"], rel=0.05)
