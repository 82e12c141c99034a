"""The minibatches that an epoch of `fit` left out for NaN or Inf, in its log and a printed line."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfpara.cluster.call_site import EVALUATE, Purpose
from tfpara.sync.data import reading
from tfpara.sync.keras.batches import PyDatasetSteps, ShuffledArrays
from tfpara.sync.keras.replacing import data_adapters
from tfpara.sync.one_sync.left_out import LeftOut
from tfpara.sync.start_line import say
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.sync.workers.json_exchange import everyones
from tfpara.typing import Logs

# In the log of an epoch, the value of this key is the number of minibatches that were left out.
ENTRY = "left_out"
_TOLD = 20  # the printed line names at most this number of minibatches
_TELL = Purpose("at the end of an epoch, counting minibatches that were left out")


def _of(extended: PeriodicSyncExtended, model: keras.Model) -> LeftOut | None:
    trained = extended.models.trained(model)
    return None if trained is None else trained.graph.left_out


def begin_epoch(extended: PeriodicSyncExtended, model: keras.Model) -> None:
    """Begins an epoch's counts at 0; if the epoch is resumed, a checkpoint sets them afterwards."""
    left_out = _of(extended, model)
    if left_out is not None:
        left_out.begin_epoch()


def tell(extended: PeriodicSyncExtended, model: keras.Model, epoch: int, logs: Logs | None) -> None:
    """Adds the number of minibatches that were left out to a log; the chief prints which.

    Every worker must call it at the end of each epoch. `epoch`: its number, from 0.
    """
    left_out = _of(extended, model)
    if left_out is None:
        return
    first = extended.worker.first_replica
    mine = []
    for replica, (count, numbers) in enumerate(left_out.told()):
        inside = _inside(extended, replica, numbers) if numbers else []
        both = zip(numbers, inside, strict=True)
        mine.append([count, [[number, first + replica, what] for number, what in both]])
    everyone = [of for worker in everyones(mine, extended.control, _TELL) for of in worker]
    total = sum(count for count, _ in everyone)
    if logs is not None:
        logs[ENTRY] = float(total)
    if total and extended.worker.rank == 0:
        named = sorted(each for _, of_replica in everyone for each in of_replica)[:_TOLD]
        places = [f"{n} of replica {replica}{inside}" for n, replica, inside in named]
        more = f" and {total - len(named)} more" if total > len(named) else ""
        say(
            f"epoch {epoch + 1} left out {total} minibatches whose loss or gradient had NaN or "
            f"Inf: minibatch {', '.join(places)}{more}"
        )


def _inside(extended: PeriodicSyncExtended, replica: int, numbers: Sequence[int]) -> Sequence[str]:
    """Returns a text for each of some minibatches: its rows, if the data are arrays, or its batch.

    It is "" where neither is known. The `numbers` rise; 1 is the replica's first in the epoch.
    """
    passes = extended.data.passes
    unknown = [""] * len(numbers)
    # With `steps_per_epoch` a pass may last several epochs. Then a minibatch's number in the epoch
    # does not tell which rows it had.
    if passes is None or passes.steps_per_epoch:
        return unknown
    adapter = passes.data_adapter
    if isinstance(adapter, PyDatasetSteps) and adapter.num_batches is not None:
        shares = extended.data.shares
        reads = reading.reads(adapter.order, *shares[min(replica, len(shares) - 1)])
        batches = [read.batch for read in reads for _ in read.parts]
        return [f" (of batch {batches[number - 1]})" for number in numbers]
    if not isinstance(adapter, data_adapters.ArrayDataAdapter):
        return unknown
    # `dataset` contains the indices of the rows in place of the rows. It is divided among the
    # replicas just as the rows were, so it shows which rows each minibatch had.
    rows = range(adapter._num_samples)
    order = adapter.order if isinstance(adapter, ShuffledArrays) else list(rows)
    dataset = tf.data.Dataset.from_tensor_slices(order).batch(adapter.batch_size)
    strategy = extended._container_strategy()
    found, wanted = [], iter([*numbers, 0])
    # In a resumed run, a dataset that `fit` reads lacks the minibatches that are already trained,
    # but a dataset that an evaluation reads is complete. The dataset here must be complete, so it
    # is read as in an evaluation.
    with extended.call_site.in_call(EVALUATE):
        awaited = next(wanted)
        options = adapter.get_tf_dataset().options()
        divided = strategy.experimental_distribute_dataset(dataset.with_options(options))
        for number, minibatch in enumerate(divided, 1):
            if number == awaited:
                own = strategy.experimental_local_results(minibatch)[replica].numpy().tolist()
                found.append(f" (rows {', '.join(map(str, own))})")
                awaited = next(wanted)
            if not awaited:
                break
    return found
