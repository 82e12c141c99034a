"""The live page: what reports make of a run's status, who gets it, and in which forms."""

import base64
import contextlib
import hashlib
import http.client
import json
import math
import re
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tfpara.cluster import secret
from tfpara.launch import command
from tfpara.status import page, run
from tfpara.status.run import RunStatus
from tfpara.status.server import StatusError, StatusServer

HOSTILE = '</script><img src=x onerror=alert(1)>\\"\n# TYPE'


class Clock:
    """The time of the status, which a test moves."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run, "time", clock)
    return clock


def report(clock, samples=0, waits=0.0, trains=True, **others):
    counts = {"steps": samples // 8, "samples": samples, "syncs": samples // 160, **others}
    return {"at": clock.now, "rank": 0, "trains": trains, "joins": False, "waits": waits, **counts}


def rows(status):
    return {row["name"]: row for row in status.now()["workers"]}


def test_speed_and_waiting_are_those_between_reports_of_training(clock):
    status = RunStatus("these")
    status.started("chief", 12)
    assert rows(status)["chief"]["state"] == "runs"
    # A checkpoint has brought the 64,000 samples before the first epoch.
    for samples, waited, trains in [(0, 0, False), (64_000, 9, True), (64_300, 9.5, True)]:
        clock.now += 2.0
        told = report(clock, samples, trains=trains, wait_seconds=waited)
        status.told("chief", told)
        status.told("chief", told)  # the launcher reads it again
    row = rows(status)["chief"]
    assert (row["samples_per_second"], row["wait_share"]) == (150.0, 0.25)
    assert (row["samples"], row["state"], row["pid"], row["starts"]) == (64_300, "trains", 12, 1)
    assert status.now()["samples_per_second"] == 150.0
    clock.now += 3.0
    assert rows(status)["chief"]["last_sync_seconds"] == 3.0
    assert status.summary() == [
        "2.0 s of training: 150 samples/s; workers waited in 25% of their time; processes: "
        "1, starts: 1"
    ]


def test_who_is_awaited_is_who_does_not_wait_and_who_is_silent_is_no_judge(clock):
    status = RunStatus("these")
    for name in ("chief", "worker 1", "worker 2", "spare", "evaluator"):
        status.started(name, 1)
    status.told("evaluator", {"scores": {"loss": 1.0}})
    for seconds in range(8):
        clock.now += 1.0
        status.told("chief", report(clock, 800, waits=float(seconds)))
        status.told("spare", report(clock) | {"joins": True})
        if seconds < 1:  # then it is stopped
            status.told("worker 1", report(clock, 800))
            status.told("worker 2", report(clock, 800, waits=2.5))
    found = rows(status)
    assert {name: row["state"] for name, row in found.items()} == {
        "chief": "waits for 7 s",
        "worker 1": "silent for 7 s",
        "worker 2": "silent for 7 s",
        "spare": "waits until it is let in",
        "evaluator": "runs",
    }
    assert status.now()["waits_for"] == ["worker 1", "worker 2"]
    status.ended("worker 1", "killed by SIGKILL", is_fault=True)
    assert status.now()["waits_for"] == ["worker 2"]


def test_a_run_without_training_needs_no_summary(clock):
    status = RunStatus("these")
    status.started("chief", 7)
    status.told("chief", report(clock, 80))
    status.ended("chief", "exit code 1", is_fault=True)
    assert status.summary() == []


def test_scores_are_those_of_one_worker_and_of_the_evaluator(clock):
    status = RunStatus("these")
    for name, loss in (("chief", 0.25), ("worker 1", 0.5), ("evaluator", 0.75)):
        status.started(name, 7)
        told = {} if name == "evaluator" else report(clock, 80)
        status.told(name, told | {"scores": {"loss": loss}})
    assert status.now()["scores"] == {"chief": {"loss": 0.25}, "evaluator": {"loss": 0.75}}
    status.ended("chief", "killed by SIGKILL", is_fault=True)
    assert list(status.now()["scores"]) == ["worker 1", "evaluator"]


def test_a_process_that_is_started_again_begins_anew_and_its_fault_stays(clock):
    status = RunStatus("these")
    status.started("worker 1", 7)
    for samples in (0, 800):
        clock.now += 0.5
        status.told("worker 1", report(clock, samples))
    status.ended("worker 1", "killed by SIGKILL", is_fault=True)
    assert not rows(status)["worker 1"]["runs"]
    status.note("restart 1 of 3")
    status.started("worker 1", 8)
    row = rows(status)["worker 1"]
    assert (row["pid"], row["starts"], row["runs"], row.get("samples")) == (8, 2, True, None)
    assert status.now()["faults"] == 1
    assert status.summary() == [
        "0.5 s of training: 1,600 samples/s; workers waited in 0% of their time; processes: 1, "
        "starts: 2",
        "after 1.0 s: worker 1: killed by SIGKILL",
        "after 1.0 s: restart 1 of 3",
    ]
    for _ in range(20):
        status.note("again")
    assert status.summary()[1] == "the last 10 of 22 faults and changes:"
    assert len(status.summary()) == 12


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {"at": "now", "samples": [], "trains": 1},
        {"at": math.nan, "scores": {"loss": "low"}, "devices": "CPU:0", "place": 3},
        {"at": True, "rank": 1e400, "scores": [1], "devices": [[{}]] * 10_000, "place": "x" * 9999},
        {"at": 10**400, "scores": {f"{n}": 10**400 for n in range(1000)}},
    ],
)
def test_reports_of_anything_break_nothing(told, clock):
    status = RunStatus("these")
    for sent in (report(clock, 80), told, report(clock, 160)):
        clock.now += 1.0
        status.told("chief", sent)
        shown = json.loads(page.as_json(status.now()))
        list(text_string_to_metric_families(page.metrics(status.now())))
        assert len(json.dumps(shown)) < 15_000
    assert rows(status)["chief"]["samples"] == 160


def filled(clock):
    status = RunStatus("these")
    for name in ("chief", HOSTILE):
        status.started(name, 3)
        for samples in (160, 480):
            clock.now += 1.0
            told = report(clock, samples, distance=0.125, place=HOSTILE, devices=[HOSTILE])
            status.told(name, told | {"scores": {"loss": 0.5, HOSTILE: math.nan}})
    status.ended(HOSTILE, "exit code 3", is_fault=True)
    return status


def test_prometheus_reads_what_the_status_has(clock):
    text = page.metrics(filled(clock).now())
    families = {each.name: each for each in text_string_to_metric_families(text)}
    values = {
        (sample.name, sample.labels.get("worker"), sample.labels.get("score")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["tfpara_up", "chief", None] == 1 and values["tfpara_up", HOSTILE, None] == 0
    assert values["tfpara_samples_total", HOSTILE, None] == 480
    assert values["tfpara_samples_per_second", "chief", None] == 320
    assert values["tfpara_distance", "chief", None] == 0.125
    assert values["tfpara_score", "chief", "loss"] == 0.5
    assert math.isnan(values["tfpara_score", "chief", HOSTILE])
    assert values["tfpara_faults_total", None, None] == 1
    assert families["tfpara_samples"].type == "counter"
    assert families["tfpara_up"].documentation == "whether the process runs"


def test_json_has_texts_for_numbers_that_are_not_finite(clock):
    shown = json.loads(page.as_json(filled(clock).now()), parse_constant=pytest.fail)
    assert shown["scores"] == {"chief": {"loss": 0.5, HOSTILE: "nan"}}
    assert shown["workers"][1]["name"] == HOSTILE


def test_the_page_is_a_constant_that_runs_its_own_script_alone():
    scripts = re.findall(r"<script>(.*?)</script>", page.PAGE, re.S)
    (digest,) = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    assert f"script-src 'sha256-{digest}'" in page.POLICY
    assert "default-src 'none'" in page.POLICY
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval|https?:", page.PAGE)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "a secret of the tests")
    status = RunStatus("these")
    server = StatusServer(0, status.now, "--status_port=0")
    yield server
    server.close()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


PATHS = ["/", "/status.json", "/metrics"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", ["query", "header"])
def test_with_the_token_all_is_there(path, way, server):
    by_query = way == "query"
    headers = {} if by_query else {"Authorization": f"Bearer {server.token}"}
    code, text, sent = ask(server, f"{path}?token={server.token}" if by_query else path, **headers)
    assert code == 200 and text
    kinds = {"/": "text/html", "/status.json": "application/json", "/metrics": "text/plain"}
    assert sent["Content-Type"].startswith(kinds[path])
    assert sent["Cache-Control"] == "no-store" and sent["Referrer-Policy"] == "no-referrer"
    assert server.token not in text and "a secret of the tests" not in text
    assert ask(server, f"/other?token={server.token}")[0] == 404


@pytest.mark.parametrize("path", [*PATHS, "/other", "//", "/?token", "http:/"])
@pytest.mark.parametrize(
    "token", ["", "0" * 32, "a+secret+of+the+tests", "%C3%A9", "TOKEN.", "%20TOKEN"]
)
def test_without_the_token_nothing_is(path, token, server):
    token = token.replace("TOKEN", server.token)
    for given, headers in ((f"{path}?token={token}", {}), (path, {"Authorization": token})):
        code, text, sent = ask(server, given, **headers)
        assert (code, text) == (403, "The address needs the token that the run has printed.\n")
        assert server.token not in str(sent)


@pytest.mark.parametrize(
    ("host", "code"),
    [("evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("localhost:9000", 200), ("", 403)],
)
def test_a_name_that_leads_here_is_refused(host, code, server):
    """As where another site rebinds its name; a tunnel has another port."""
    assert ask(server, f"/?token={server.token}", Host=host)[0] == code


def test_nothing_can_be_sent(server):
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(server, f"/?token={server.token}", method)[0] == 501


def test_connections_that_say_nothing_are_dropped_and_the_page_goes_on(server):
    address = ("127.0.0.1", server.port)
    silent = [socket.create_connection(address) for _ in range(40)]
    for each in silent[16:]:  # no thread waits for them
        each.settimeout(30)
        assert each.recv(1) == b""
    silent[0].sendall(b"GET \xff\x00 nothing\r\n\r\n")
    for each in silent:
        each.close()
    code = None
    while code is None:  # until the threads have noticed
        with contextlib.suppress(OSError, http.client.HTTPException):
            code, _, _ = ask(server, f"/?token={server.token}")
    assert code == 200


def test_the_token_is_of_the_secret_and_does_not_show_it(server, monkeypatch):
    other = StatusServer(0, dict, "--status_port=0")
    assert other.token == server.token and server.url.endswith(f"/?token={server.token}")
    monkeypatch.setenv(secret.VARIABLE, "another secret of the tests")
    third = StatusServer(0, dict, "--status_port=0")
    assert third.token != server.token and len(third.token) == 32
    monkeypatch.delenv(secret.VARIABLE)
    tokens = []
    for _ in range(2):
        fourth = StatusServer(0, dict, "--status_port=0")
        tokens.append(fourth.token)
        fourth.close()
    assert len(set(tokens)) == 2  # there is no secret, so each has a token of its own
    other.close()
    third.close()


def test_a_port_that_is_in_use(server):
    port = server.port
    words = rf"--status_port={port}: port {port} of 127.0.0.1 is in use. Give another one, or 0"
    with pytest.raises(StatusError, match=words):
        StatusServer(port, dict, f"--status_port={port}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--status_port=70000"], "'70000' is not a whole number from 0 to 65535"),
        (["--status_port=-1"], "'-1' is not a whole number from 0 to 65535"),
        (["--status_port=http"], "'http' is not a whole number from 0 to 65535"),
        (["--status_port=0", "--ps=1"], "--status_port=0 with --ps=1: the live page shows syncs"),
    ],
)
def test_flags_that_cannot_be(flags, words, capsys):
    try:
        code = command.main([*flags, "--", "python", "-c", ""])
    except SystemExit as error:
        code = error.code
    assert code == 2 and words in capsys.readouterr().err


def test_the_launcher_says_that_the_port_is_in_use(server, capsys):
    flag = f"--status_port={server.port}"
    assert command.main([flag, "--", "python", "-c", ""]) == 2
    assert f"tfpara-launch: {flag}: port" in capsys.readouterr().err
