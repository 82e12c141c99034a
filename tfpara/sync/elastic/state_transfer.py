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
from tfpara.sync.one_sync.reports import Request
from tfpara.sync.one_sync.state_vars import TRAVELLING, Slot, slots_of
from tfpara.sync.tensorflow.extended import PeriodicSyncExtended
from tfpara.typing import Json


class StateTransfer:
    """The state of a run, for transfer to workers that are behind, or new.

    Args:
        extended: the strategy's extended object.

    Attributes:
        model: the model that is trained; None before the first call of `fit`.
        holders: objects of callbacks whose states a joiner receives, by name.
    """

    def __init__(self, extended: PeriodicSyncExtended) -> None:
        self._extended = extended
        self.model: keras.Model | None = None
        self.holders: dict[str, StateHolder] = {}

    @property
    def trained_model(self) -> keras.Model:
        assert self.model is not None
        return self.model

    def keep(self, name: str, holder: StateHolder) -> None:
        """Registers an object whose state a joiner receives.

        Args:
            name: name of the state; a number is added if another object has the same name.
            holder: the object. If its state says `HAS_WEIGHTS`, the arrays in its attribute
                `weights`, of the same shapes on all workers, are sent as well.
        """
        if holder not in self.holders.values():
            same = sum(known.startswith(name) for known in self.holders)
            self.holders[f"{name} {same}"] = holder

    def states(self) -> dict[str, Json]:
        return {name: holder.get_state() for name, holder in self._all_holders().items()}

    def take_states(self, states: Mapping[str, Json]) -> None:
        """Sets the states of all objects that the sender has, too."""
        for name, holder in self._all_holders().items():
            if name in states:
                holder.set_state(states[name])

    def _all_holders(self) -> dict[str, StateHolder]:
        return self._extended.states | self.holders

    def slots(self) -> list[Slot]:
        counters = ("counter/syncs", "counter/period")
        (synchronizer,) = self._extended.models.synchronizers
        slots = [
            *slots_of(self.trained_model),
            *synchronizer.graph.global_state.rule.slots(),
        ]
        return [slot for slot in slots if slot.kind in TRAVELLING or slot.name in counters]

    def hand_over(self, source: int, receives: bool, joins: bool, ahead: Mapping[str, Any]) -> None:
        """Sends the state of one worker to those that receive it; all workers call it.

        Args:
            source: rank of the sender.
            receives: whether this worker receives the state.
            joins: whether this worker is new, and so also receives the log of earlier epochs.
            ahead: the sender's report.
        """
        (synchronizer,) = self._extended.models.synchronizers
        hosts = self._extended.control.collectives
        assert isinstance(hosts, TensorFlowCollectives)  # Horovod's groups cannot change
        values = hand_over(self.slots(), hosts, source, receives)
        kept: list[tuple[Any, list[np.ndarray]]] = []
        for name, state in sorted(ahead["states"].items()):
            if isinstance(state, dict) and state.get(HAS_WEIGHTS):
                holder: Any = self._all_holders().get(name)
                own = getattr(holder, "weights", None) or self.trained_model.get_weights()
                kept.append((holder, hand_over_arrays(own, hosts, source)))
        history = json.loads(hand_over_text(told(self.trained_model.history), hosts, source))
        if not receives:
            return
        # Everything has arrived; otherwise nothing would be written.
        for variable, value in values:
            variable.assign(value)
        for holder, weights in kept:
            if holder is not None:
                holder.weights = weights
        if joins:
            vars(self.trained_model.history).update(history)
        synchronizer.start_from(synchronizer.broadcast_point())
        synchronizer.graph.block.give_up()
        synchronizer.graph._agreed.assign(ahead["agreed"])
        synchronizer.graph.answered(Request.MEET)


def told(history: keras.callbacks.History) -> str:
    """Returns a `History` as JSON text."""
    state = {"epoch": history.epoch, "history": history.history}
    return json.dumps(state, default=lambda value: getattr(value, "tolist", value.__repr__)())


def hand_over(
    slots: Sequence[Slot], hosts: TensorFlowCollectives, source: int, receives: bool
) -> list[tuple[tf.Variable, tf.Tensor]]:
    """Sends the values of slots; all workers call it, with the same slots in the same order.

    This function writes nothing, so if the source is lost, no worker has only a part of its state.

    Args:
        slots: the slots, sent in packs of up to `BUCKET_BYTES`.
        hosts: collectives between the workers' hosts; Horovod's groups cannot change.
        source: rank of the sender.
        receives: whether this worker receives the values.

    Returns:
        The slots' variables with their new values; empty if this worker does not receive.
    """
    received: list[tuple[tf.Variable, tf.Tensor]] = []
    for number, pack in enumerate(_packed(slots)):
        values = [slot.variable.read_value() for slot in pack]
        name = f"hand over/{number}"
        if len(pack) > 1:
            got = _broadcast_together(values, hosts, name, source)
        else:
            got = [hosts.broadcast(tf.reshape(values[0], [-1]), name, source)]
        for slot, value in zip(pack, got if receives else (), strict=receives):
            received.append((slot.variable, tf.reshape(value, slot.variable.shape)))
    return received


def _broadcast_together(
    values: Sequence[tf.Tensor], hosts: TensorFlowCollectives, name: str, source: int
) -> list[tf.Tensor]:
    """Returns the source's values, of any dtypes, whose bytes are sent at once.

    Each broadcast makes all workers wait for each other once more.
    """
    arrays = [np.asarray(value) for value in values]
    sent = b"".join(array.tobytes() for array in arrays)
    words = np.frombuffer(sent + bytes(-len(sent) % 4), np.int32)
    got, start, found = hosts.broadcast(tf.constant(words), name, source).numpy().tobytes(), 0, []
    for array in arrays:
        found.append(tf.constant(np.frombuffer(got, array.dtype, array.size, start)))
        start += array.nbytes
    return found


def hand_over_arrays(
    arrays: Sequence[np.ndarray], collectives: TensorFlowCollectives, source: int
) -> list[np.ndarray]:
    """Returns the arrays of the worker with rank `source`; all call it, with the same shapes."""
    return [
        collectives.broadcast(tf.convert_to_tensor(array), f"hand over/array {n}", source).numpy()
        for n, array in enumerate(arrays)
    ]


def hand_over_text(text: str, collectives: TensorFlowCollectives, source: int) -> str:
    """Returns the text of the worker with rank `source`; all call it."""
    numbers = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    (size,) = hand_over_arrays([np.array([len(numbers)])], collectives, source)
    # Padded to a power of 2, since TensorFlow keeps some memory for every shape that was sent.
    padded = np.zeros(1 << int(size[0]).bit_length(), np.int32)
    padded[: len(numbers)] = numbers[: len(padded)]
    (got,) = hand_over_arrays([padded], collectives, source)
    return bytes(got[: size[0]].astype(np.uint8)).decode()


def _packed(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Returns packs of slots that fit into a bucket; larger slots are single."""
    packs: list[list[Slot]] = []
    size = BUCKET_BYTES
    for slot in slots:
        number = slot.variable.shape.num_elements() * slot.variable.dtype.size
        if size + number > BUCKET_BYTES:
            packs.append([])
            size = 0
        packs[-1].append(slot)
        size += number
    return packs
