"""The transfer of a worker's state to workers that are behind, or new, by collectives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpara.collectives import TensorFlowCollectives
from tfpara.strategy import HAS_WEIGHTS, StateHolder
from tfpara.sync.one_sync.replicas import BUCKET_BYTES
from tfpara.sync.one_sync.state_vars import TRAVELLING, Slot, slots_of
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.typing import Json


class StateTransfer:
    """The state of a run, for transfer to workers that are behind, or new.

    Attributes:
        model: the model that is trained; None before the first call of `fit`.
        holders: objects of callbacks whose states a joiner receives, by name.
    """

    def __init__(self, extended: PeriodicSyncExtended) -> None:
        self._extended = extended
        self.model: keras.Model | None = None
        self.holders: dict[str, StateHolder] = {}
        self._history = b"{}"

    @property
    def trained_model(self) -> keras.Model:
        assert self.model is not None
        return self.model

    def keep(self, name: str, holder: StateHolder) -> None:
        """Registers an object whose state a joiner receives; see `CompanyBase.share_state`."""
        if holder not in self.holders.values():
            same = sum(known.startswith(name) for known in self.holders)
            self.holders[f"{name} {same}"] = holder

    def states(self) -> dict[str, Json]:
        return {name: holder.get_state() for name, holder in self._all_holders().items()}

    def take_states(self, states: Mapping[str, Json]) -> None:
        """Sets the states of those objects that the sender has as well."""
        for name, holder in self._all_holders().items():
            if name in states:
                holder.set_state(states[name])

    def _all_holders(self) -> dict[str, StateHolder]:
        return self._extended.states | self.holders

    def note_history(self) -> int:
        """Keeps the present log of earlier epochs for joiners; returns its length in bytes."""
        history = getattr(self.model, "history", None)
        self._history = (told(history) if history else "{}").encode()
        return len(self._history)

    def slots(self) -> list[Slot]:
        counters = ("counter/syncs", "counter/period")
        (synchronizer,) = self._extended.models.synchronizers
        slots = [*slots_of(self.trained_model), *synchronizer.graph.global_state.rule.slots()]
        return [slot for slot in slots if slot.kind in TRAVELLING or slot.name in counters]

    def hand_over(self, source: int, receives: bool, joins: bool, ahead: Mapping[str, Any]) -> None:
        """Sends the state of one worker to those that receive it; all workers call it.

        `source` is the sender's rank, and `ahead` its report. A worker that `joins`, and so
        `receives`, also gets the log of earlier epochs.
        """
        (synchronizer,) = self._extended.models.synchronizers
        hosts = self._extended.control.collectives
        assert isinstance(hosts, TensorFlowCollectives)  # Horovod is not used in elastic runs
        # All workers must give equally many bytes, although only those of the source are sent.
        # TensorFlow keeps memory for every shape that it has sent. To have few shapes, the number
        # of bytes is rounded up to a power of 2. Each worker pads its history to that number. If a
        # receiver's history is longer, it is cut.
        size = 1 << (ahead["history"] - 1).bit_length()
        note = self._history.ljust(size)[:size]
        values, history = hand_over(self.slots(), hosts, source, receives, note)
        kept: list[tuple[Any, list[np.ndarray]]] = []
        for name, state in sorted(ahead["states"].items()):
            if isinstance(state, dict) and state.get(HAS_WEIGHTS):
                holder: Any = self._all_holders().get(name)
                own = getattr(holder, "weights", None) or self.trained_model.get_weights()
                kept.append((holder, hand_over_arrays(own, hosts, source)))
        if not receives:
            return
        # Values are written only after all of them have arrived. So no worker has a mixture of two
        # states if the transfer fails.
        for variable, value in values:
            variable.assign(value)
        for holder, weights in kept:
            if holder is not None:
                holder.weights = weights
        if joins:
            vars(self.trained_model.history).update(json.loads(history))
        synchronizer.start_from(synchronizer.broadcast_point())
        synchronizer.give_up_block()
        synchronizer.graph._agreed.assign(ahead["agreed"])


def told(history: keras.callbacks.History) -> str:
    """Returns a `History` as JSON text."""
    # `epoch` is missing until `History.on_train_begin` sets it, after the `on_train_begin` of all
    # other callbacks.
    state = {"epoch": getattr(history, "epoch", []), "history": history.history}
    return json.dumps(state, default=lambda value: getattr(value, "tolist", value.__repr__)())


def hand_over(
    slots: Sequence[Slot],
    hosts: TensorFlowCollectives,
    source: int,
    receives: bool,
    note: bytes = b"",
) -> tuple[list[tuple[tf.Variable, np.ndarray | tf.Tensor]], bytes]:
    """Sends the values of slots; all workers call it, with the same slots in the same order.

    This function writes nothing, so if the source is lost, no worker has only a part of its state.
    The source alone reads its variables. Small values travel together, in packs of up to
    `BUCKET_BYTES`, since each broadcast makes all workers wait for each other once more. `note` are
    the source's bytes, which travel with the first pack; equally many on all workers.

    Returns the variables with new values, none unless this worker `receives`, and the note.
    """
    received: list[tuple[tf.Variable, np.ndarray | tf.Tensor]] = []
    sends = hosts.rank == source
    for number, pack in enumerate(_packed(slots)):
        variables = [slot.variable for slot in pack]
        name = f"hand over/{number}"
        if number and len(pack) == 1:
            (large,) = variables
            shape = [large.shape.num_elements()]
            flat = tf.reshape(large.read_value(), shape) if sends else tf.zeros(shape, large.dtype)
            got = hosts.broadcast(flat, name, source)
            values: list[np.ndarray | tf.Tensor] = [tf.reshape(got, large.shape)]
        else:
            sent = b"" if number else note
            values, sent = _hand_over_together(variables, hosts, name, source, sent)
            note = note if number else sent
        if receives:
            received += zip(variables, values, strict=True)
    return received, note


def _hand_over_together(
    variables: Sequence[tf.Variable],
    hosts: TensorFlowCollectives,
    name: str,
    source: int,
    note: bytes,
) -> tuple[list[np.ndarray | tf.Tensor], bytes]:
    """Returns the source's values, of any dtypes, and its note, sent as bytes in one broadcast."""
    sizes = [each.shape.num_elements() * each.dtype.size for each in variables]
    own = bytes(sum(sizes))
    if hosts.rank == source:
        own = b"".join(each.read_value().numpy().tobytes() for each in variables)
    own += note
    words = np.frombuffer(own + bytes(-len(own) % 4), np.int32)
    got = hosts.broadcast(tf.constant(words), name, source).numpy().tobytes()
    *starts, end = np.cumsum([0, *sizes])
    values: list[np.ndarray | tf.Tensor] = []
    for each, start in zip(variables, starts, strict=True):
        dtype, count = each.dtype.as_numpy_dtype, each.shape.num_elements()
        values.append(np.frombuffer(got, dtype, count, start).reshape(each.shape))
    return values, got[end : end + len(note)]


def hand_over_arrays(
    arrays: Sequence[np.ndarray], collectives: TensorFlowCollectives, source: int
) -> list[np.ndarray]:
    """Returns the arrays of the worker with rank `source`; all call it, with the same shapes."""
    return [
        collectives.broadcast(tf.convert_to_tensor(array), f"hand over/array {n}", source).numpy()
        for n, array in enumerate(arrays)
    ]


def _packed(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Returns packs of slots that fit into a bucket; larger slots are single, and not the first."""
    packs: list[list[Slot]] = [[]]
    size = 0
    for slot in slots:
        number = slot.variable.shape.num_elements() * slot.variable.dtype.size
        if size + number > BUCKET_BYTES:
            packs.append([])
            size = 0
        packs[-1].append(slot)
        size += number
    return packs
