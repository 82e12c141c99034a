"""The division of Python data among the workers, and reading ahead in threads or processes.

This module does not import TensorFlow, since the processes that read data import this module.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfpara.typing import Data, Json

if TYPE_CHECKING:
    import keras


class Read(NamedTuple):
    """The number of a batch that a worker reads, and the parts on which it takes a step each."""

    batch: int
    parts: range


def reads(order: Iterable[int], worker: int, workers: int) -> list[Read]:
    """Returns the batches that a worker reads in one pass, with the parts that it trains.

    The workers take turns at the batches, whose numbers are in `order`. Each batch is cut into
    `workers` parts, and its reader takes a step on each part. Batches that are left over are read
    by all, and each takes a step on its part. So each takes as many steps as there are batches.
    """
    order = list(order)
    whole = len(order) // workers * workers
    own = [Read(batch, range(workers)) for batch in order[worker:whole:workers]]
    return own + [Read(batch, range(worker, worker + 1)) for batch in order[whole:]]


def endless_reads(worker: int, workers: int) -> Iterator[Read]:
    """Yields the batches that a worker reads if the data have no end; see `reads`."""
    for batch in itertools.count(worker, workers):
        yield Read(batch, range(workers))


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Returns 0 … count − 1 in the order of an epoch, the same for the same seed."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def shuffled_rows(
    rows: int, seed: int, epoch: int, batch_size: int | None = None
) -> NDArray[np.int64]:
    """Does what `shuffled` does, but fast; with a batch size, rows are shuffled within batches.

    Seeds are 0 … 2⁴⁸ − 1.
    """
    # A `RandomState` draws the same numbers in all versions of NumPy, so a run can resume with
    # another version.
    drawn = np.random.RandomState([seed % 2**32, seed >> 32, epoch])
    if batch_size is None:
        return drawn.permutation(rows)
    order = np.arange(rows)
    for start in range(0, rows, batch_size):
        drawn.shuffle(order[start : start + batch_size])
    return order


class Order:
    """The seed and the division of data, which checkpoints keep; None: not known or not needed.

    Attributes:
        seed: of shuffled Python data; each `fit` that does not resume draws one.
        parts: of each batch that is dealt out: one for each replica at the run's first start.
        devices: the number of devices of each worker at that start.
        workers: the number of workers each of which read a part of the data, if batches were not
            divided; in place of a worker stands a device if workers have unlike numbers of them.
    """

    seed: int | None = None
    parts: int | None = None
    devices: int | None = None
    workers: int | None = None

    def known(self) -> tuple[int, int, int]:
        """Returns the seed, the parts and the devices, once workers have agreed on them."""
        assert self.seed is not None and self.parts is not None and self.devices is not None
        return self.seed, self.parts, self.devices

    def get_state(self) -> Json:
        return {name: getattr(self, name) for name in ("seed", "parts", "devices", "workers")}

    def set_state(self, state: Json) -> None:
        for name, value in state.items():
            if value is not None:
                setattr(self, name, value)


def random_states() -> dict[str, list[Json]]:
    """Returns the states of Python's and NumPy's global random generators, for JSON."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": list(random.getstate()), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def set_random_states(states: Mapping[str, list[Json]]) -> None:
    """Sets Python's and NumPy's generators to the states that `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


@contextlib.contextmanager
def common_randomness(seed: str) -> Iterator[None]:
    """A context in which Python's and NumPy's global generators draw by `seed`."""
    states = random_states()
    random.seed(seed)
    np.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        set_random_states(states)


def bounds(rows: int, part: int, of: int) -> slice:
    """Returns the rows of one part of a batch; the sizes of parts differ by one at most."""
    return slice(rows * part // of, rows * (part + 1) // of)


def ahead(
    dataset: keras.utils.PyDataset,
    numbers: Iterable[int],
    processes: bool = False,
    steady: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Generator[Data, None, None]:
    """Yields `dataset[number]` for each number in turn, read ahead as the dataset's settings say.

    `dataset.workers` threads read up to `max_queue_size` batches ahead; fewer than 2 threads read
    none ahead. With `processes` there are processes instead, started by Python's chosen method,
    which read copies of the dataset. Each read of a thread runs in a context that `steady` returns.
    """
    workers, size = dataset.workers, dataset.max_queue_size
    if workers < 2 and not processes:
        yield from (dataset[number] for number in numbers)
        return

    def read_steadily(number: int) -> Data:
        with steady():
            return dataset[number]

    executor: concurrent.futures.Executor
    read: Callable[[int], Data]
    if processes:
        executor = concurrent.futures.ProcessPoolExecutor(
            max(1, workers), initializer=_keep, initargs=(dataset,)
        )
        read = _kept
    else:
        executor = concurrent.futures.ThreadPoolExecutor(workers)
        read = read_steadily
    waiting: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for number in numbers:
            waiting.append(executor.submit(read, number))
            if len(waiting) > max(1, size):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except concurrent.futures.BrokenExecutor as error:
        raise RuntimeError(
            "a process that reads a PyDataset ended. Start methods spawn and forkserver let it "
            "import the script: put all that this does below "
            'if __name__ == "__main__":.'
        ) from error
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


_dataset: Any = None  # the copy of the dataset in a process that reads; None in other processes


def _keep(dataset: keras.utils.PyDataset) -> None:
    global _dataset
    _dataset = dataset


def _kept(number: int) -> Data:
    return _dataset[number]
