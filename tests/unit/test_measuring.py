"""What a plan needs, from what workers have measured; and scripts that cannot be measured."""

import json
import re
import sys

import pytest

from tfpara import measuring, plan

# 4 MB of weights; an all-reduce of them takes two workers 12 ms, of which 2 ms are delay.
TOGETHER = {
    "batch": 32.0,
    "step_ms": 3.0,
    "sync_ms": 20.0,
    "bytes": 4e6,
    "reduce_bytes": 4e6,
    "reduce_ms": 12.0,
    "empty_ms": 2.0,
}
ALONE = {**TOGETHER, "batch": 64.0, "step_ms": 4.0}


def test_the_values_by_hand():
    """A sample takes one worker 1/16 ms, and each of two 3/32 ms: 1.5 times as long."""
    assert measuring.found(ALONE, [TOGETHER, TOGETHER], apart=False) == pytest.approx(
        {
            "step_ms": 2.0,
            "slowdown": 1.5,
            "model_mb": 4.0,
            "link_mbit": 3344.0,  # 4 MB in 10 ms, and 4.5 % for headers
            "link_delay_ms": 1.0,  # two messages, one after the other
            "sync_ms": 8.0,
            "batch": 32.0,
        }
    )


def test_workers_with_machines_of_their_own_do_not_slow_each_other_down():
    found = measuring.found(ALONE, [TOGETHER, TOGETHER], apart=True)
    assert (found["step_ms"], found["slowdown"]) == (2.0, 1.0)


def test_a_noisy_measurement_gives_possible_numbers():
    """The worker alone was slower, and an empty all-reduce took longer than one of 4 MB."""
    noisy = {**TOGETHER, "step_ms": 1.0, "sync_ms": 1.0, "empty_ms": 15.0}
    found = measuring.found(ALONE, [noisy, noisy], apart=False)
    assert found["slowdown"] == 1.0 and found["step_ms"] == 1.0 and found["sync_ms"] == 0.0
    assert found["link_mbit"] > 0 and found["link_delay_ms"] > 0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('of the script'); raise SystemExit(3)", "ended before it was measured.*script"),
        ("import time; print('x', flush=True); time.sleep(60)", "measured nothing in 2 s"),
        ('print(\'tfpara measured: {"error": "why."}\')', "^why.$"),
        ("print('tfpara measured: {\"block\": tfpara measured: 3')", 'before it .*: {"block": t'),
    ],
)
def test_scripts_that_cannot_be_measured(tmp_path, monkeypatch, script, message):
    path = tmp_path / "script.py"
    path.write_text(script)
    monkeypatch.setattr(measuring, "_QUIET_SECONDS", 2.0 if "sleep" in script else 60.0)
    with pytest.raises(measuring.MeasuringError, match=f"(?s){message}"):
        measuring.measure([str(path)])


@pytest.mark.quick
def test_hosts_are_reached_by_ssh_with_the_secret_on_their_input(tmp_path, monkeypatch, capsys):
    """A program in place of ssh runs what a host is to run, here; the script prints its place."""
    (tmp_path / "ssh").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/words\nshift 2; echo "host=$1"\nexec sh -c "$2"\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        f"said = {TOGETHER!r}\n"
        "rank, size = os.environ['TFPARA_RANK'], os.environ['TFPARA_SIZE']\n"
        f"place = pathlib.Path({str(tmp_path)!r}, f'{{size}}-{{rank}}')\n"
        "place.write_text(' '.join([os.environ['TFPARA_SECRET'], os.environ['TFPARA_MEASURE'],\n"
        "    os.environ['TFPARA_COORDINATOR'].split(':')[0], os.getcwd(), *sys.argv[1:]]))\n"
        "print('tfpara measured: ' + json.dumps(said))\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{sys.exec_prefix}/bin:/usr/bin:/bin")
    monkeypatch.delenv("TFPARA_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    assert plan.main(["--hosts=a,b", "--workers=2", "--measure", str(script), "one two"]) == 0
    said = {name: (tmp_path / name).read_text().split(" ") for name in ("1-0", "2-0", "2-1")}
    for secret, measure, coordinator, folder, *arguments in said.values():
        assert measure == "1" and coordinator == "a" and folder == str(tmp_path)
        assert arguments == ["one", "two"] and len(secret) == 64
        assert secret not in (tmp_path / "words").read_text()
    assert said["2-0"][0] == said["2-1"][0]
    out = capsys.readouterr()
    assert "measuring: 2 workers on a, b: starting" in out.err
    assert "A minibatch takes 3 ms on one worker, and 1.00 times that" in out.out


@pytest.mark.quick
def test_a_host_that_cannot_be_reached_ends_the_others(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(
        f"""#!/bin/sh
case $* in
*TFPARA_SIZE=1*) echo 'tfpara measured: {json.dumps(ALONE)}' ;;
*"u@a "*) echo "$*" > {tmp_path}/words; exec sleep 600 ;;
*) echo no route to b; exit 255 ;;
esac
"""
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(measuring.MeasuringError, match="(?s)2 workers on u@a, b: .*no route to b"):
        measuring.measure([__file__], ["u@a", "b"])
    assert re.search(r"TFPARA_COORDINATOR=a:\d+ ", (tmp_path / "words").read_text())
