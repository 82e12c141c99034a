"""A hidden Markov model of phone states with a phone bigram, estimated on labelled frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

# The moves of a phone are smoothed by the common distribution of all phones that have the same
# number of states. The common distribution has the weight of this many counted moves.
_POOLED_WEIGHT = 10.0
_MOVE_FLOOR = 0.5  # is added to each count before the common distribution is computed
# A class without training frames has about this log-likelihood. It is low enough to lie outside a
# decoder's beam even at an acoustic scale of 0.01. It is near enough to 0 that a sum in float32 is
# still exact to about a hundredth.
UNSEEN = -1e5


@dataclasses.dataclass(frozen=True)
class PhoneStates:
    """The states of each phone, in the order in which they are passed.

    Attributes:
        phones: names, in the order of their first class.
        classes: int [P, S], the class of each state; -1 after the last state of a phone with fewer
            than S states.
    """

    phones: tuple[str, ...]
    classes: np.ndarray

    @classmethod
    def of(cls, class_names: Sequence[str]) -> PhoneStates:
        """Reads the names of the classes, PHONE.STATE with states counted from 0.

        Raises:
            ValueError: the names have another form, such as those of tied states ("pdf-17").
        """
        states: dict[str, dict[int, int]] = {}
        for number, name in enumerate(class_names):
            phone, dot, state = name.rpartition(".")
            if not (dot and phone and state.isascii() and state.isdigit()):
                raise ValueError(
                    f"class {number} is named {name!r}, but decoding needs phone states, "
                    "PHONE.STATE. For tied states, write log-likelihoods for Kaldi's decoders "
                    "instead: --write_loglikes."
                )
            if int(state) in states.setdefault(phone, {}):
                raise ValueError(f"two classes are named {name!r}.")
            states[phone][int(state)] = number
        for phone, found in states.items():
            if sorted(found) != list(range(len(found))):
                raise ValueError(
                    f"phone {phone!r} has the states {sorted(found)}; they must be counted from 0 "
                    "without gaps."
                )
        classes = np.full([len(states), max(map(len, states.values()))], -1)
        for row, found in zip(classes, states.values(), strict=True):
            row[: len(found)] = [found[state] for state in range(len(found))]
        return cls(tuple(states), classes)

    @property
    def num_classes(self) -> int:
        return int(self.classes.max()) + 1

    def segments(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds where phones begin in a sequence of frame labels.

        A phone begins at the first frame, when the phone changes, and when the state goes back,
        since then the phone was said twice. (If the second phone does not begin with an earlier
        state than that in which the first ends, the two count as one.)

        Args:
            labels: int [num_frames], classes.

        Returns:
            Phone and state of each frame, int [num_frames] each, and the frames where phones begin.
        """
        phone_of, state_of = np.empty([2, self.num_classes], np.int64)
        phones, states = np.nonzero(self.classes >= 0)
        phone_of[self.classes[phones, states]] = phones
        state_of[self.classes[phones, states]] = states
        phone, state = phone_of[labels], state_of[labels]
        begins = (np.diff(phone) != 0) | (np.diff(state) < 0)
        return phone, state, np.flatnonzero(np.concatenate([[True], begins]))


@dataclasses.dataclass
class Counts:
    """Counts of frames, moves and phone pairs in labelled utterances.

    Attributes:
        states: the phones' states.
        frames: [K], number of frames of each class.
        moves: [P, S + 1, S + 1], number of moves within each phone, from a state or (last row) its
            beginning to a state or (last column) its end.
        bigram: [P + 1, P + 1], number of pairs of phones, from a phone or (last row) the
            utterance's beginning to a phone or (last column) its end.
    """

    states: PhoneStates
    frames: np.ndarray
    moves: np.ndarray
    bigram: np.ndarray

    @classmethod
    def zero(cls, states: PhoneStates) -> Counts:
        phones, width = states.classes.shape
        return cls(
            states,
            np.zeros(states.num_classes, np.int64),
            np.zeros([phones, width + 1, width + 1], np.int64),
            np.zeros([phones + 1, phones + 1], np.int64),
        )

    def add(self, labels: np.ndarray) -> None:
        """Adds the counts of an utterance: labels int [num_frames], at least one."""
        phone, state, first = self.states.segments(labels)
        end = self.moves.shape[1] - 1
        last = np.concatenate([first[1:], [len(labels)]]) - 1
        inside = np.setdiff1d(np.arange(len(labels)), first)
        np.add.at(self.frames, labels, 1)
        np.add.at(self.moves, (phone[inside], state[inside - 1], state[inside]), 1)
        np.add.at(self.moves, (phone[first], end, state[first]), 1)
        np.add.at(self.moves, (phone[last], state[last], end), 1)
        boundary = [len(self.states.phones)]
        sequence = np.concatenate([boundary, phone[first], boundary])
        np.add.at(self.bigram, (sequence[:-1], sequence[1:]), 1)

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as values that JSON can hold."""
        return {name: getattr(self, name).tolist() for name in ("frames", "moves", "bigram")}

    @classmethod
    def from_json(cls, states: PhoneStates, content: dict[str, Any]) -> Counts:
        """Returns the counts from a result of `to_json`.

        Raises:
            ValueError: a count is missing, or has another shape.
        """
        counts = cls.zero(states)
        for name in ("frames", "moves", "bigram"):
            value = np.array(content.get(name), np.int64)
            if value.shape != getattr(counts, name).shape or (value < 0).any():
                raise ValueError(
                    f"{name} must be {list(getattr(counts, name).shape)} counts. Received: "
                    f"{list(value.shape)}"
                )
            setattr(counts, name, value)
        return counts


@dataclasses.dataclass(frozen=True)
class Hmm:
    """The model's probabilities, as natural logarithms; -inf for what is impossible.

    Attributes:
        states: the phones' states.
        prior: [K], probability of each class, from `log_prior`; log posteriors minus these are
            pseudo-log-likelihoods, log p(x | k) plus a number that depends only on x.
        moves: [P, S, S], probability of a move from state (row) to state within a phone.
        entry: [P, S], probability of the state with which a phone begins.
        exit: [P, S], probability of leaving the phone after a frame in each state.
        bigram: [P, P], probability of the next phone (column) after a phone (row).
        start: [P], probability of the first phone.
        end: [P], probability of the utterance's end after each phone.
    """

    states: PhoneStates
    prior: np.ndarray
    moves: np.ndarray
    entry: np.ndarray
    exit: np.ndarray
    bigram: np.ndarray
    start: np.ndarray
    end: np.ndarray


def estimate(counts: Counts) -> Hmm:
    """Estimates the model from counts; smoothed, so that nothing possible has probability 0.

    * Priors: see `log_prior`.
    * Moves within a phone: (n + 10 p̄) / (N + 10), for a move that is n of the N moves from a state,
      with p̄ the common distribution of all phones with equally many states, to each of whose counts
      1/2 is added. States are passed in order; they may be skipped, as in a phone of one or two
      frames.
    * Bigram: Witten & Bell's, p(q | p) = (n_pq + t_p p(q)) / (n_p + t_p), with t_p the number of
      different phones seen after p, and at least 1; p(q) = (n_q + 1) / (n + P + 1), the utterance's
      end among the q. No utterance is empty.

    Source: Witten & Bell, "The zero-frequency problem" (1991), method C, interpolated.
    """
    with np.errstate(divide="ignore"):
        moves = np.log(_moves(counts))
        bigram = np.log(_bigram(counts.bigram))
    return Hmm(
        counts.states,
        log_prior(counts.frames),
        moves=moves[:, :-1, :-1],
        entry=moves[:, -1, :-1],
        exit=moves[:, :-1, -1],
        bigram=bigram[:-1, :-1],
        start=bigram[-1, :-1],
        end=bigram[:-1, -1],
    )


def log_prior(frames: np.ndarray) -> np.ndarray:
    """Returns log p(k) = log((n_k + 1) / (n + K)), [K], from the frames n_k of each class.

    If n_k is 0, the value is -`UNSEEN`, so that log posteriors minus it are about `UNSEEN`. By the
    formula, the prior of such a class would be so small that even a small posterior would make it
    the likeliest class of all.
    """
    known = np.log((frames + 1) / (frames.sum() + len(frames)))
    return np.where(frames > 0, known, -UNSEEN)


def _moves(counts: Counts) -> np.ndarray:
    """Returns probabilities with the layout of `Counts.moves`; rows of missing states are 0."""
    width = counts.states.classes.shape[1]
    sizes = (counts.states.classes >= 0).sum(1)
    result = np.zeros(counts.moves.shape)
    for size in np.unique(sizes):
        group = sizes == size
        # A move is allowed from a state to itself, to a later state, or to the end of the phone. It
        # is also allowed from the beginning to any state.
        allowed = np.zeros([width + 1, width + 1])
        allowed[:size, :size] = np.triu(np.ones([size, size]))
        allowed[:size, -1] = 1
        allowed[-1, :size] = 1
        pooled = _normalised(allowed * (counts.moves[group].sum(0) + _MOVE_FLOOR))
        own = allowed * counts.moves[group]
        result[group] = _normalised(own + _POOLED_WEIGHT * pooled)
    return result


def _bigram(counts: np.ndarray) -> np.ndarray:
    totals = counts.sum(0)
    unigram = (totals + 1) / (totals.sum() + len(totals))
    kinds = np.maximum((counts > 0).sum(1, keepdims=True), 1)
    smoothed = counts + kinds * unigram
    # No move leads from the beginning straight to the end, since every utterance has a phone.
    smoothed[-1, -1] = 0
    return _normalised(smoothed)


def _normalised(rows: np.ndarray) -> np.ndarray:
    totals = rows.sum(-1, keepdims=True)
    return np.divide(rows, totals, out=np.zeros(rows.shape), where=totals > 0)
