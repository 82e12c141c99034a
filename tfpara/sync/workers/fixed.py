"""Fixed: the company of a run whose workers stay the same, one worker alone included."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfpara.cluster import ALONE, Cluster
from tfpara.cluster.place import END, FIT_END, Place, Purpose, call
from tfpara.strategy import StateHolder
from tfpara.sync.workers.company import Fit
from tfpara.sync.workers.meetings import Control, MismatchError
from tfpara.typing import Json, Scalar


class Models(Protocol):
    """The trained models, as `Fixed` uses them."""

    def in_turn(self) -> Sequence[Any]: ...
    def finish_blocks(self, purpose: Purpose) -> None: ...


class Host(Protocol):
    """The extended strategy, as `Fixed` uses it."""

    control: Control
    place: Place

    @property
    def models(self) -> Models: ...
    def take_place(self, num_workers: int, rank: int) -> None: ...


class Steps:
    """The position in an epoch of which all replicas take the same steps. See `Epoch`."""

    def units(self, steps: int | None) -> int:
        return steps or 0

    def trained_units(self, steps: int) -> int:
        return steps

    def reached(self, steps: int) -> int:
        return steps

    def position(self) -> dict[str, Json]:
        return {}

    def resume(self, epoch: int, position: Mapping[str, Any]) -> None:
        if owed := position.get("owed"):
            raise ValueError(
                f"the checkpoint is of an elastic run, and owes {len(owed)} steps of workers that "
                "were lost. Resume it with elastic=."
            )


class Fixed:
    """The workers of a run that none leaves and none joins, or the one that trains alone.

    See `Company` for what its methods do.

    Args:
        found: the workers.
        by_horovod: whether Horovod connects them, so that TensorFlow knows this one alone.
    """

    changes = joining = False
    generation = completed_in = 0
    members, leader = None, ""
    _host: Host

    def __init__(self, found: Cluster, by_horovod: bool = False) -> None:
        self._found, self._by_horovod = found, by_horovod
        self.epoch = Steps()

    @property
    def is_chief(self) -> bool:
        return self._found.rank == 0

    def replicas_now(self, devices: int) -> tuple[Scalar, Scalar]:
        return self._found.num_workers * devices, self._found.rank * devices

    def founding_replicas(self, devices: int) -> int:
        return self._found.num_workers * devices

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        found = ALONE if self._by_horovod else self._found
        if found.num_workers == 1:
            return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        # The cluster is validated, so TF_CONFIG is not read again.
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(json.loads(found.tf_config())["cluster"]),
            task_type=found.task_type,
            task_id=found.task_index,
            rpc_layer="grpc",
        )

    def attach(self, extended: Host) -> None:
        self._host = extended
        if self._by_horovod:
            extended.take_place(self._found.num_workers, self._found.rank)

    def part(self) -> None:
        # If this exchange succeeds, all others have finished their work. If it fails, the error is
        # ignored, since nothing follows.
        with contextlib.suppress(tf.errors.OpError, MismatchError):
            self._host.control.together(END)

    def program_ends(self) -> None:
        """Nothing: the others' programs end as they do."""

    # -- exchanges ---------------------------------------------------------------------------

    def together(self, exchange: Callable[[], Json]) -> Any:
        return exchange()

    def by_the_chief(self, write: Callable[[], object], name: str) -> None:
        if self.is_chief:
            write()
        self._host.control.together(call(name))

    def finish_block(self, synchronizer: Any, purpose: Purpose) -> None:
        with self._host.place.meeting(purpose):
            synchronizer.finish_block()

    def finish_blocks(self, purpose: Purpose) -> None:
        synchronizers = self._host.models.in_turn()
        if synchronizers:
            with self._host.place.meeting(purpose):
                for synchronizer in synchronizers:
                    synchronizer.finish_block()

    def sums(self, parts: Sequence[tf.Tensor], evaluates: bool) -> list[tf.Tensor]:
        del evaluates  # of the parts of an evaluation's data, as of those of training
        return [self._sum(part) for part in parts]

    def _sum(self, part: tf.Tensor) -> tf.Tensor:
        if self._found.num_workers == 1:
            return part
        flat, name = tf.reshape(part, [-1]), f"metric/{part.dtype.name}"
        total = self._host.control.collectives.all_reduce([flat], name)[0]
        return tf.reshape(total, part.shape)

    # -- fit ---------------------------------------------------------------------------------

    def fit(self, model: keras.Model, given: dict[str, Any], fit: Fit) -> keras.callbacks.History:
        history = fit(given)
        if self._found.num_workers > 1:
            self._host.models.finish_blocks(FIT_END)
        return history

    def fit_begins(self) -> None:
        """Nothing: nobody has to be let in."""

    def epoch_begins(self, epoch: int) -> None:
        """Nothing: the data stay as they were divided."""

    def check_step(self) -> None:
        """Nothing: the data stay as they were divided."""

    # -- callbacks ---------------------------------------------------------------------------

    def leave(self) -> bool:
        return True

    def share_state(self, name: str, holder: StateHolder) -> None:
        """Nothing: nobody joins."""

    def keep_record(self, checkpoints: StateHolder, directory: Path) -> None:
        """Nothing: nothing changes."""

    def write_record(self, syncs: int) -> None:
        """Nothing: nothing has changed."""
