"""Elastic runs of real processes, and what must hold of every one of them, for tests."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import threading
import time

import tfpara
from tests.lib import warm
from tfpara.elastic.meeting import ADDRESS, Line
from tfpara.elastic.meeting_point import Meeting

PROGRAM = pathlib.Path(__file__).with_name("programs") / "train_elastic.py"
DEADLINE = 180.0  # seconds; reached only by a hang
SECRET = "a secret of the tests"
AGAIN = 75  # the exit code of a worker that was asked to end


class Run:
    """A run with a meeting point in this process; a context manager that leaves no process behind.

    Args:
        directory: of the workers' logs.
        founders: number of workers with which it begins.
        options: of all workers, for the program.
        faults: of founders by rank, as `train_elastic.py` has them.
        before: how many workers come, and are lost, before the run has begun.
        environment: variables of founders, by number.
        lost: whether there is one more, of rank 0, which is lost before it has connected itself.
        program: which the workers run, of `programs`.
    """

    def __init__(
        self,
        directory,
        founders,
        faults=None,
        before=0,
        environment=(),
        lost=False,
        program=PROGRAM.name,
        **options,
    ):
        self.directory, self.founders, self.options = directory, founders, options
        self.before, self.environment, self.lost = before, dict(environment), lost
        self.program = str(PROGRAM.with_name(program))
        self.faults = {str(rank): fault for rank, fault in (faults or {}).items()}
        self.processes = []

    def __enter__(self):
        founders = self.founders + self.lost
        self.meeting = Meeting("127.0.0.1", 0, founders, 120.0, SECRET.encode())
        for _ in range(self.before):
            self.line().close()
        if self.lost:
            line = self.line()
            threading.Thread(target=lambda: (line.formed(), line.close()), daemon=True).start()
        for _ in range(self.founders):
            self.start(faults=self.faults)
        return self

    def line(self):
        """A worker of this process, with the settings that `train_elastic.py` has by default."""
        elastic = tfpara.Elastic(min_workers=1, grace_seconds=5.0)
        settings = dataclasses.asdict(elastic)
        address = f"127.0.0.1:{self.meeting.port}"
        return Line(address, SECRET.encode(), 1, settings, 10.0)

    def close_meeting(self):
        """Ends the meeting point, as if its machine were gone."""
        self.meeting.close()

    def open_meeting(self):
        """Starts another at the same address, which knows nothing."""
        port = self.meeting.port
        self.meeting = Meeting("127.0.0.1", port, self.founders, 120.0, SECRET.encode())

    def __exit__(self, *_):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        self.meeting.close()

    def start(self, **options):
        """Starts a worker; the number under which this run knows it."""
        number = len(self.processes)
        while number >= self.founders and self.meeting.state.phase == "founding":
            time.sleep(0.02)
        options = {**self.options, **options, "log": str(self.log(number))}
        environment = {
            **os.environ,
            ADDRESS: f"127.0.0.1:{self.meeting.port}",
            "TFPARA_SECRET": SECRET,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **self.environment.get(number, {}),
        }
        self.processes.append(
            warm.Popen(
                [self.program, json.dumps(options)],
                environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return number

    def log(self, number):
        return self.directory / f"{number}.jsonl"

    def events(self, number):
        lines = self.log(number).read_text().splitlines() if self.log(number).exists() else []
        return [json.loads(line) for line in lines]

    def wait_until(self, number, *event, count=1):
        """Waits until a worker has logged so many events that begin so."""

        def logged():
            if sum(each[: len(event)] == list(event) for each in self.events(number)) >= count:
                return True
            process = self.processes[number]
            assert process.poll() is None, (number, process.communicate()[0])
            return False

        self.until(logged, lambda: (number, event, self.events(number)[-3:]))

    def until(self, condition, told=lambda: None):
        """Waits until a function returns something true; `told` returns the message otherwise."""
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until, told()
            time.sleep(0.02)

    def ends(self):
        """Waits for all workers; returns their exit codes and what they printed."""
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in self.processes]
        return [process.returncode for process in self.processes], outputs

    def stop(self):
        """Asks all workers to end, and waits until they have, each with a checkpoint.

        Returns how often each minibatch is in the global model.
        """
        for process in self.processes:
            process.terminate()
        codes, outputs = self.ends()
        assert codes == [AGAIN] * len(codes), outputs
        return self.synced()

    def of_rank(self, rank):
        """The number of the founder that has a rank at the start."""
        for number in range(self.founders):
            self.wait_until(number, "rank")
            if self.events(number)[0] == ["rank", str(rank)]:
                return number
        raise AssertionError(rank)

    def check(self, lost, epochs=2, minibatches=60):
        """Checks what holds of every run.

        Args:
            lost: exit codes of the workers that do not come to the end.

        Returns:
            The last events of the others.
        """
        codes, outputs = self.ends()
        assert sorted(code for code in codes if code) == sorted(lost), (codes, outputs)
        ended = [number for number, code in enumerate(codes) if code == 0]
        last = [self.events(number)[-1] for number in ended]
        assert {each[0] for each in last} == {"end"}
        assert len({each[1] for each in last}) == 1, "the weights differ"
        histories = [[e for e in self.events(n) if e[0] == "history"] for n in ended]
        assert all(each == histories[0] for each in histories), histories
        self.check_counts(set(range(len(codes))) - set(ended), epochs, minibatches)
        assert all(weight > 0.0 for weight in last[0][2])
        return last

    def check_counts(self, lost, epochs=2, minibatches=60):
        """Checks that each minibatch is in the model once, but for what lost workers cannot know.

        Who is lost in a sync does not see whether the others commit it.
        """
        counts, open_ = self.synced(), self.left_open(lost)
        for epoch in range(epochs):
            for number in range(minibatches):
                own = epoch * 1000 + number
                assert counts.get(own, 0) in ({0, 1} if own in open_ else {1}), own

    def synced(self):
        """How often each minibatch is in the global model, as the workers' logs say."""
        counts = {}
        for number in range(len(self.processes)):
            for own in self.divided(number)[0]:
                counts[own] = counts.get(own, 0) + 1
        return counts

    def left_open(self, numbers):
        """What workers have trained last, and not synced as far as they know."""
        return {own for number in numbers for own in self.divided(number)[1]}

    def divided(self, number):
        """Returns a worker's minibatches in the global model, and those it has trained last."""
        synced, pending = [], []
        flies = reopened = None  # how many of `pending` are in a sync beside the training
        for event, *rest in self.events(number):
            if event == "trained":
                pending.append(rest[0])
            elif event == "flies":
                flies, reopened = len(pending), None
            elif event == "reopens":
                flies, reopened = None, flies
            elif event in ("synced", "taken"):
                sent = flies if event == "synced" else reopened
                sent = len(pending) if sent is None else sent
                synced += pending[:sent]
                pending = pending[sent:] if event == "synced" else []
                flies = reopened = None
            elif event == "dropped":
                pending, flies, reopened = [], None, None
        return synced, pending
