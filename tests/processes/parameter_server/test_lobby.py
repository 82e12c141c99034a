"""The control channel between the processes of an asynchronous run, with real processes."""

import signal
import socket
import time

import pytest

from tests.lib.lobby_processes import DEADLINE, Processes, views
from tfpara import StartupError
from tfpara.cluster import messages
from tfpara.parameter_server.control import lobby, member

SILENCE = 8.0  # seconds; no process that runs is silent for so long on a busy machine


def kill(process):
    process.signal(signal.SIGKILL)
    process.end()


def test_all_end_with_0_when_the_chief_has_finished():
    with Processes(2, 2) as run:
        run.start()
        address = run["chief"].wait_for("gathered").split()[1]
        run["chief"].command("workers")
        run["chief"].wait_for("workers 0 1")
        run["chief"].command("finish")
        for name, (code, output) in run.ends().items():
            assert code == 0, output
            wanted = "" if name == "chief" else f"serving {address}\n"
            assert name == "chief" or output == wanted
    host, _, port = run.address("chief").rpartition(":")
    assert address.startswith(host + ":") and address not in {v.address for v in run.views.values()}


@pytest.mark.parametrize("order", [1, -1])
def test_they_may_start_in_any_order(order):
    with Processes(1, 1) as run:
        for name in list(run.views)[::order]:
            run.start(name)
        run["chief"].wait_for("gathered")
        run["chief"].command("finish")
        assert [code for code, _ in run.ends().values()] == [0] * 3


def test_a_worker_that_is_killed_may_come_back():
    with Processes(2, 1) as run:
        run.start_all()
        kill(run["worker 0"])
        run["chief"].wait_for("lost 0")
        run["chief"].command("workers")
        run["chief"].wait_for("workers 1")
        run.start("worker 0")
        run["chief"].wait_for(f"worker 0 ({run.address('worker 0')}) is back.")
        run["worker 0"].wait_for("serving")
        run["chief"].command("workers")
        run["chief"].wait_for("workers 0 1")
        run["chief"].command("finish")
        ends = run.ends()
    assert [code for code, _ in ends.values()] == [0] * 4
    name = f"worker 0 ({run.address('worker 0')})"
    assert (
        f"{name} is lost: its connection ended. Training goes on without it.\n"
        in (ends["chief"][1])
    )
    assert f"{name} is back.\n" in ends["chief"][1]


def test_all_name_the_parameter_server_that_is_killed():
    with Processes(2, 2) as run:
        run.start_all()
        kill(run["ps 1"])
        sentence = (
            f"ps 1 ({run.address('ps 1')}) is lost with its part of the model: its connection "
            "ended. Start all processes again, from the last checkpoint."
        )
        for name, (code, output) in run.ends("ps 1").items():
            assert code == 1
            prefix = "ParameterServerError" if name == "chief" else "tfpara"
            assert output.endswith(f"{prefix}: {sentence}\n")


def test_all_name_the_chief_that_is_killed():
    with Processes(2, 1) as run:
        run.start_all()
        kill(run["chief"])
        for code, output in run.ends("chief").values():
            assert code == 1
            assert output.endswith(
                f"tfpara: chief ({run.address('chief')}) is gone: its connection ended before the "
                "run did; its output may say why. Start all processes again.\n"
            )


@pytest.mark.nightly
def test_a_parameter_server_that_is_stopped_is_noticed():
    with Processes(1, 1, timeout_seconds=SILENCE) as run:
        run.start_all()
        run["ps 0"].signal(signal.SIGSTOP)
        for code, output in run.ends("ps 0").values():
            assert code == 1
            assert f"ps 0 ({run.address('ps 0')}) is lost with its part of the model" in output
            assert f"it was silent for longer than timeout_seconds={SILENCE:g}." in output
        run["ps 0"].signal(signal.SIGCONT)
        code, output = run["ps 0"].end()
        assert code == 1
        assert "the chief has given ps 0" in output and "silent for longer" in output


def test_a_worker_that_is_stopped_is_given_up_and_may_be_replaced():
    with Processes(2, 1, timeout_seconds=SILENCE) as run:
        run.start_all()
        stopped = run["worker 1"]
        stopped.signal(signal.SIGSTOP)
        run["chief"].wait_for("lost 1")
        stopped.signal(signal.SIGKILL)  # else it keeps the port
        run.start("worker 1")
        run["chief"].wait_for(f"worker 1 ({run.address('worker 1')}) is back.")
        run["chief"].command("finish")
        assert [code for code, _ in run.ends().values()] == [0] * 4


@pytest.mark.nightly
def test_all_name_the_chief_that_is_stopped():
    with Processes(1, 1, timeout_seconds=SILENCE) as run:
        run.start_all()
        run["chief"].signal(signal.SIGSTOP)
        for code, output in run.ends("chief").values():
            assert code == 1
            sentence = f"chief ({run.address('chief')}) was silent for longer than timeout_seconds"
            assert sentence in output


def test_a_run_that_is_stopped_as_a_whole_goes_on():
    """As by Ctrl-Z, or in a machine that sleeps: each was stopped itself, and blames nobody."""
    with Processes(1, 1, timeout_seconds=SILENCE) as run:
        run.start_all()
        for name in ("chief", "worker 0", "ps 0"):
            run[name].signal(signal.SIGSTOP)
        time.sleep(SILENCE + 2.0)
        for name in ("chief", "worker 0", "ps 0"):
            run[name].signal(signal.SIGCONT)
        time.sleep(1.0)
        run["chief"].command("finish")
        ends = run.ends()
    assert [code for code, _ in ends.values()] == [0] * 3
    assert "lost" not in ends["chief"][1]


@pytest.mark.nightly
def test_a_run_without_workers_ends():
    with Processes(1, 1, timeout_seconds=SILENCE) as run:
        run.start_all()
        kill(run["worker 0"])
        for code, output in run.ends("worker 0").values():
            assert code == 1
            assert (
                f"all workers are gone, and none has come back for timeout_seconds={SILENCE:g};"
                in output
            )


def test_the_chief_may_end_all_with_a_code_and_a_sentence():
    with Processes(1, 1) as run:
        run.start_all()
        run["chief"].command("fail the chief was asked to end, and has written a checkpoint.")
        ends = run.ends()
    assert [code for code, _ in ends.values()] == [75] * 3
    for name in ("worker 0", "ps 0"):
        assert ends[name][1].endswith(
            "tfpara: the chief was asked to end, and has written a checkpoint.\n"
        )


@pytest.mark.nightly
def test_a_chief_whose_interpreter_takes_long_to_end_has_told_the_others_how():
    """In it Python's threads stop first, and so do its signs of life."""
    with Processes(1, 1, timeout_seconds=SILENCE) as run:
        run.start_all()
        run["chief"].command("leave")
        run["chief"].wait_for("leaving")
        run["chief"].signal(signal.SIGSTOP)
        for name in ("worker 0", "ps 0"):
            code, output = run[name].end()
            assert (code, output.count("tfpara:")) == (0, 0), output
        run["chief"].signal(signal.SIGCONT)
        assert run["chief"].end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_parameter_server_that_is_asked_to_end_waits_for_the_chief(number):
    with Processes(1, 1) as run:
        run.start_all()
        run["ps 0"].signal(number)
        run["chief"].wait_for(
            f"ps 0 ({run.address('ps 0')}) was asked to end ({signal.Signals(number).name})."
        )
        run["chief"].command("finish")
        assert [code for code, _ in run.ends().values()] == [0] * 3


@pytest.mark.parametrize("how", ["Ctrl-C", "chief gone"])
def test_a_parameter_server_that_is_asked_to_end_does_not_wait_for_ever(how):
    with Processes(1, 1) as run:
        run.start_all()
        run["ps 0"].signal(signal.SIGTERM)
        run["chief"].wait_for("ps 0")
        run["ps 0"].signal(signal.SIGTERM)  # as some schedulers repeat it; nothing changes
        if how == "Ctrl-C":
            run["ps 0"].signal(signal.SIGINT)
        else:
            kill(run["chief"])
        wanted = signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM
        assert run["ps 0"].end()[0] == 128 + wanted


def test_a_worker_that_is_asked_to_end_does_so():
    """While SIGTERM leads to a checkpoint, with the code of a process to be started again."""
    with Processes(2, 1) as run:
        run.start_all()
        for name, code, before in (("0", 143, ""), ("1", 75, "restart code 75")):
            if before:
                run["chief"].command(before)
                run["chief"].wait_for("restart code")
            run[f"worker {name}"].signal(signal.SIGTERM)
            assert run[f"worker {name}"].end()[0] == code
            told = "is lost: it was asked to end (SIGTERM). Training goes on without it."
            run["chief"].wait_for(f"worker {name} ({run.address(f'worker {name}')}) {told}")
            run["chief"].wait_for(f"lost {name}")


def test_who_waits_for_the_chief_may_be_asked_to_end():
    for name in ("worker 0", "ps 0"):
        ended = member.attend(views(1, 1)[name], print, 2.0, [signal.SIGTERM])
        assert ended == (128 + signal.SIGTERM, "")


@pytest.mark.nightly
def test_all_name_who_never_started():
    with Processes(2, 2, startup_seconds=20.0) as run:
        run.start("chief", "worker 1", "ps 0")
        for code, output in run.ends().values():
            assert code == 1
            assert (
                "after 20 s these processes have not started: "
                f"ps 1 ({run.address('ps 1')}), worker 0 ({run.address('worker 0')}). Start one"
            ) in output


def test_members_name_the_chief_that_never_started():
    with Processes(1, 1, startup_seconds=1.0) as run:
        run.start("worker 0", "ps 0")
        for name, (code, output) in run.ends().items():
            assert code == 1
            assert f"after 1 s this process, {name} ({run.address(name)}), has not" in output
            assert f"started: chief ({run.address('chief')}) is not there" in output
            assert "refused" in output


def test_all_report_a_tf_config_that_differs():
    with Processes(2, 1) as run:
        other = run.views["worker 1"]
        other = other._replace(jobs={**other.jobs, "ps": ("127.0.0.1:9",)})
        run.start("chief", "ps 0")
        run["ps 0"].wait_for("serving")
        run.start("worker 1", view=other)
        for code, output in run.ends().values():
            assert code == 1
            assert f"TF_CONFIG differs between processes: chief ({run.address('chief')})" in output
            assert "worker 1 has {'chief'" in output and "127.0.0.1:9" in output


def test_twins_are_named_before_and_during_the_run():
    with Processes(2, 1) as run:
        run.start("chief", "worker 0")
        first = run["worker 0"]
        first.wait_for("serving")
        run.start("worker 0")
        sentence = f"the same task in TF_CONFIG: both are worker 0 ({run.address('worker 0')})."
        for code, output in [*run.ends().values(), first.end()]:
            assert code == 1
            assert sentence in output
    with Processes(1, 1) as run:
        run.start_all()
        first = run["worker 0"]
        run.start("worker 0")
        code, output = run["worker 0"].end()
        assert code == 1 and f"both are worker 0 ({run.address('worker 0')})." in output
        run["chief"].command("finish")
        assert run["chief"].end()[0] == first.end()[0] == run["ps 0"].end()[0] == 0


def test_all_name_a_port_in_use():
    with Processes(1, 1) as run:
        port = int(run.address("ps 0").rpartition(":")[2])
        with socket.create_server(("", port)):
            run.start("chief", "worker 0")
            run["worker 0"].wait_for("serving")
            run.start("ps 0")
            for code, output in run.ends().values():
                assert code == 1
                assert f"port {port} of this process, ps 0 ({run.address('ps 0')}), is" in output
    with Processes(1, 1) as run:
        port = int(run.address("chief").rpartition(":")[2])
        with socket.create_server(("", port)):
            run.start("chief")
            code, output = run["chief"].end()
            assert code == 1 and f"port {port} of this process, chief" in output


def test_an_address_that_leads_nowhere_is_named(monkeypatch):
    """As behind a firewall: the worker reaches the chief, the chief not the worker."""
    monkeypatch.setattr(lobby.ports, "accepting", lambda addresses, _: addresses[:1])
    with Processes(1, 1) as run:
        hall = lobby.Lobby(run.views["chief"], 60.0, 60.0)
        run.start("worker 0", "ps 0")
        with pytest.raises(StartupError) as caught:
            hall.gather()
        sentence = str(caught.value)
        assert sentence.startswith(f"worker 0 ({run.address('worker 0')}) came to the chief, but")
        for code, output in run.ends().values():
            assert code == 1 and output.endswith(f"tfpara: {sentence}\n")


def test_another_version_is_named():
    with Processes(1, 1) as run:
        run.start("chief")
        view = run.views["worker 0"]
        answer = None
        while answer is None:
            try:
                guest = messages.connect(run.address("chief"), b"", member.PURPOSE, DEADLINE)
            except ConnectionRefusedError:
                assert run["chief"].popen.poll() is None
                continue
            guest.send(hello=view.spec(), job="worker", index=0, version="0.0.1")
            answer = guest.wait(time.monotonic() + DEADLINE)
            guest.close()
        code, output = run["chief"].end()
    assert code == 1 and answer["end"]["sentence"] in output
    assert f"{view.name} has 0.0.1. Install the same version everywhere." in output
