"""The codes with which programs end, and what asks them to end."""

import inspect
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.lib.launched import default_signals
from tfpara import program
from tfpara.cluster import exit_codes, failures

pytestmark = pytest.mark.latest


def test_defaults_settings_and_arguments():
    assert (exit_codes.restart(environ={}), exit_codes.lost_worker(environ={})) == (75, 1)
    environ = {"TFPARA_RESTART_EXIT_CODE": "143", "TFPARA_LOST_WORKER_EXIT_CODE": "138"}
    assert exit_codes.restart(environ=environ) == 143
    assert exit_codes.lost_worker(environ=environ) == 138
    assert exit_codes.restart(130, environ) == 130


@pytest.mark.parametrize("bad", ["0", "256", "-1", "x", "1.0", "9" * 9])
def test_what_is_no_exit_code(bad):
    with pytest.raises(ValueError, match=f"TFPARA_RESTART_EXIT_CODE='{bad}'.*from 1 to 255.*75"):
        exit_codes.restart(environ={"TFPARA_RESTART_EXIT_CODE": bad})
    with pytest.raises(ValueError, match="lost_worker_exit_code='0'"):
        exit_codes.lost_worker(0)


class Lost(RuntimeError):
    """Stands for TensorFlow's error of a sync."""


def lose():
    raise Lost


@pytest.mark.parametrize(("given", "code"), [(None, 138), (139, 139)])
def test_run_ends_with_the_code_of_a_lost_worker(given, code, monkeypatch):
    monkeypatch.setenv("TFPARA_LOST_WORKER_EXIT_CODE", "138")
    monkeypatch.setattr(failures, "is_of_tensorflow", lambda error: isinstance(error, Lost))
    found = failures.Explanation("a sync failed because worker 1 is gone.", True, ["worker 1"])
    monkeypatch.setattr(failures, "explain", lambda *_: found)
    with pytest.raises(SystemExit) as leaving:
        program.run(lose, lost_worker_exit_code=given)
    assert leaving.value.code == code
    with pytest.raises(SystemExit) as leaving:
        program.run(lambda: 1 / 0, lost_worker_exit_code=given)
    assert leaving.value.code == 1


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: None, []),
        (lambda: sys.exit(0), []),
        (lambda: sys.exit(3), [(3, "")]),
        (lambda: sys.exit("no data"), [(1, "the chief has failed: no data")]),
        (lambda: 1 / 0, [(1, "the chief has failed: ZeroDivisionError: division by zero")]),
    ],
)
def test_run_tells_parameter_servers_and_workers_the_code_of_the_chief(end, told, monkeypatch):
    calls = []
    monkeypatch.setattr("tfpara.cluster.asynchronous.is_meant", lambda: True)
    monkeypatch.setattr(program, "_strategy", None)
    monkeypatch.setattr(program, "_tells", [lambda *call: calls.append(call)])
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        program.run(end)
    signal.signal(signal.SIGTERM, former)
    assert calls == told


def test_a_repeated_sigterm_changes_no_exit_code():
    """It comes while the interpreter ends."""
    script = """
import atexit, os, signal, sys
from tfpara import program
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
program.run(lambda: sys.exit(int(sys.argv[1])))
"""
    for code, ends in ((75, 75), (0, -signal.SIGTERM)):
        command = [sys.executable, "-c", script, str(code)]
        assert subprocess.run(command, preexec_fn=default_signals).returncode == ends


def test_a_script_without_run_ends_with_it_too():
    script = """
import sys
from tfpara import program
from tfpara.cluster import failures
failures.is_of_tensorflow = lambda error: True
found = failures.Explanation("a sync failed because worker 1 is gone.", True, ["worker 1"])
failures.explain = lambda *_: found
sys.excepthook = program._hook(sys.excepthook)
raise RuntimeError
"""
    for value, code in (("143", 143), ("", 1)):
        env = os.environ | {"TFPARA_LOST_WORKER_EXIT_CODE": value}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True)
        assert done.returncode == code and b"worker 1 is gone." in done.stderr


def shown(make, capsys, monkeypatch):
    """Returns the output of a script that ends with the error of a call."""
    monkeypatch.setattr(program, "_explains", False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(Exception) as caught:
        make()
    sys.excepthook(caught.type, caught.value, caught.tb)
    return capsys.readouterr().err


MISTAKES = ["{", "[]", '{"cluster": {"worker": ["a"], "ps": ["b:1"]}, "task": {}}']


@pytest.mark.parametrize("text", MISTAKES)
@pytest.mark.parametrize("name", ["PeriodicSyncStrategy", "AsyncStrategy"])
def test_a_wrong_cluster_is_one_line_for_both_strategies(name, text, capsys, monkeypatch):
    import tfpara

    monkeypatch.setenv("TF_CONFIG", text)
    rule = {"PeriodicSyncStrategy": tfpara.BMUF(), "AsyncStrategy": tfpara.ASGD()}[name]
    arguments = {"sync_period": 2} if name == "PeriodicSyncStrategy" else {}
    said = shown(lambda: getattr(tfpara, name)(rule, **arguments), capsys, monkeypatch)
    assert said.startswith("ClusterError: ") and said.count("\n") == 1
    monkeypatch.setenv("TFPARA_TRACEBACK", "1")
    said = shown(lambda: getattr(tfpara, name)(rule, **arguments), capsys, monkeypatch)
    assert said.count("Traceback") == 1 and "ClusterError: " in said.splitlines()[-1]


def test_a_wrong_argument_is_a_sentence_with_the_line_of_the_script(capsys, monkeypatch):
    import tensorflow as tf

    import tfpara
    from tfpara.whole_number import checked_seconds

    line = inspect.currentframe().f_lineno + 1
    wrong = [lambda: tfpara.simulate(0, tfpara.BSP(), sync_period=2)]
    wrong += [lambda: tfpara.simulate_async(0, tfpara.ASGD())]
    wrong += [lambda: tfpara.simulate(1, None, sync_period=0)]
    for number, call in enumerate(wrong):
        said = shown(call, capsys, monkeypatch)
        where = f"[test_exit_codes.py, line {line + number}; TFPARA_TRACEBACK=1 shows the "
        assert where in said and said.count("\n") == 1, said
    # AutoGraph raises the error of a function anew.
    traced = tf.function(lambda: checked_seconds("x", -1))
    said = shown(lambda: (program.explain_errors(), traced()), capsys, monkeypatch)
    assert said.startswith("ValueError: x=-1 must be a positive number of seconds. [")


def test_what_is_no_message_of_ours_has_its_traceback(capsys, monkeypatch):
    from tfpara.cluster import ports

    def of_the_script():
        raise ValueError("the user's")

    # The second is raised by Python in our code: our mistake.
    for call in (of_the_script, lambda: ports.own_host(3)):
        said = shown(lambda call=call: (program.explain_errors(), call()), capsys, monkeypatch)
        assert said.startswith("Traceback"), said


def test_an_error_while_the_script_handles_another_shows_both(capsys, monkeypatch):
    from tfpara.whole_number import checked_seconds

    def call(suppress):
        try:
            raise KeyError("the script's own")
        except KeyError as first:
            if not suppress:
                checked_seconds("x", -1)
            try:
                checked_seconds("x", -1)
            except ValueError as second:
                raise second from (None if suppress == "hidden" else first)

    for suppress in (False, "hidden"):
        said = shown(lambda s=suppress: (program.explain_errors(), call(s)), capsys, monkeypatch)
        assert said.splitlines()[-1].startswith("ValueError: x=-1 must be a positive number of ")
        assert ('KeyError: "the script\'s own"' in said) == (not suppress), said


def in_a_thread(function):
    """What a call in a thread returns, or the error that it raises."""
    ends = []

    def call():
        try:
            ends.append(function())
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=call, name="of an engine")
    thread.start()
    thread.join(60.0)
    return ends[0]


def test_run_is_refused_in_a_thread_which_cannot_end_the_process():
    called = []
    error = in_a_thread(lambda: program.run(lambda: called.append(1)))
    assert isinstance(error, RuntimeError) and not called
    assert "'of an engine'" in str(error) and "main() itself" in str(error)


@pytest.mark.parametrize("watcher", [None, lambda: False])
def test_in_a_thread_without_a_watcher_it_is_said_that_sigterm_is_not_heard(watcher, caplog):
    from tfpara.callbacks import termination

    listening = termination.Termination(75, watcher)
    in_a_thread(lambda: listening.start(60.0))
    listening.stop()
    assert ("SIGTERM is not heard" in caplog.text) == (watcher is None)
    caplog.clear()
    listening.start(60.0)
    listening.stop()
    assert not caplog.text


def test_a_watcher_asks_for_the_end_from_any_thread():
    from tfpara.callbacks import termination

    answers = [OSError("no metadata"), False, True]
    asked = []

    def watcher():
        asked.append(threading.current_thread())
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    listening = termination.Termination(143, watcher)

    def fit():
        listening.start(60.0)
        while not listening.asked:
            threading.Event().wait(0.05)
        listening.stop()

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join(60.0)
    assert listening.asked and not answers and thread not in asked


@pytest.mark.quick  # a skip in the thread would not reach the test
@pytest.mark.parametrize("call", [lambda fit: fit(), in_a_thread], ids=["main", "thread"])
def test_fit_leaves_where_the_watcher_says_that_the_machine_goes(call, tmp_path, capsys):
    import keras
    import numpy as np

    import tfpara

    strategy = tfpara.PeriodicSyncStrategy(tfpara.BSP(), sync_period=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(1))
    checkpoint = tfpara.callbacks.Checkpoint(
        tmp_path, restart_exit_code=143, termination_watcher=lambda: len(steps) > 3
    )

    def fit():
        with pytest.raises(tfpara.callbacks.Preempted) as leaving:
            model.fit(
                np.ones((8, 2)),
                np.ones((8, 1)),
                batch_size=4,
                epochs=10**9,
                verbose=0,
                callbacks=[count, checkpoint],
            )
        return leaving.value.code

    assert call(fit) == 143 and list(tmp_path.glob("checkpoint-*"))
    how = "fit raises Preempted" if call is in_a_thread else "exit code 143"
    assert f"checkpoint written, {how}. Start" in capsys.readouterr().out
