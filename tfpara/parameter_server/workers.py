"""The workers of a run, as the chief uses them, and the training that a `fit` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tfpara.parameter_server.chunks import Chunks
from tfpara.parameter_server.server import Server
from tfpara.parameter_server.worker_step import ChooseRate, WorkerStep


class Training(NamedTuple):
    """Everything that the workers need to train in one `fit`."""

    server: Server  # the global model
    work: WorkerStep  # the computation of a minibatch
    chunks: Chunks  # the data
    sync_period: int  # τ, number of minibatches of a push
    choose_rate: ChooseRate | None  # chooses a chunk's rate; None: the servers' rate
    # The numbers in `order`, the epoch's number and the chunk's number determine what random layers
    # draw. A resume may change `order`, so it is read anew for each chunk.
    order: Sequence[int]
    seed: int  # only for the random times of simulated workers


class Executor:
    """Trains the chunks of a `fit` on the workers."""

    def submit(self, epoch: int, chunks: Sequence[int]) -> None:
        """Schedules chunks of an epoch on the workers; each worker gets one chunk at a time."""
        raise NotImplementedError

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds`; returns whether the runs of all chunks have ended.

        A `tf.errors.OpError` that it raises may have an attribute `chunk`: (epoch, chunk) of the
        failed chunk, or None if it is not known.
        """
        raise NotImplementedError

    def halt(self) -> None:
        """Takes the chunks back from workers that do not stop when `Counters.halted` is set."""


class Workers:
    """The workers of a run. The methods of this class suit workers that cannot be lost.

    Attributes:
        state: an object whose `asked_to_end` and `restart_code` are those of `Membership`.
    """

    state: Any
    is_simulated: bool = True  # whether all workers are simulated in this process
    num_workers: int
    chief_device: str  # device of the chief's model
    server_devices: Sequence[str]

    def executor(self, training: Training) -> Executor:
        """Returns the object that trains chunks on the workers."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ParameterServerError if the run cannot continue."""

    def lost(self) -> list[int]:
        """Returns the indices of workers that were lost since the last call."""
        return []

    def end_with(self, exit_code: int, sentence: str) -> None:
        """Sets the exit code and the last sentence of the processes that end after this one.

        An empty sentence keeps an earlier one.
        """
