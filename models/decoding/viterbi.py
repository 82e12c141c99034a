"""The best path through the phone states, frame by frame."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from models.decoding.hmm import Hmm


class Decoded(NamedTuple):
    """The best path: its phones, the class of every frame, and its log score."""

    phones: np.ndarray  # int [num_phones]: indices in `PhoneStates.phones`
    classes: np.ndarray  # int [num_frames]: the class of each frame
    score: float


def decode(
    log_likelihoods: np.ndarray,
    hmm: Hmm,
    acoustic_scale: float = 1.0,
    insertion_penalty: float = 0.0,
) -> Decoded:
    """Returns Viterbi's best path over all phone sequences.

    The best path maximises, over the paths of states,

        Σ_t a·ℓ_t(state_t) + Σ log p(moves within phones) + Σ (log p(phone | phone before) − b)

    where the sums include the utterance's beginning and end, as the bigram does. Between frames a
    path moves within its phone, or leaves it and enters another (or the same again). If both are
    equally good, it stays in its phone; of equally good states or phones it takes the one with the
    lower number. All phones are computed at once: P² + P·S² additions for each frame.

    Args:
        log_likelihoods: ℓ, [num_frames, K], log posteriors minus `hmm.prior` or true ones.
        hmm: the model, of K classes.
        acoustic_scale: a > 0. Neighbouring frames are not independent, so values below 1 are
            usually better.
        insertion_penalty: b, a natural logarithm; positive gives fewer phones, negative more.

    Raises:
        ValueError: the array has another shape, no frames or a number that is not finite, or an
            option is out of range.
    """
    likelihoods = np.asarray(log_likelihoods, np.float64)
    _check(likelihoods, hmm, acoustic_scale, insertion_penalty)
    classes = hmm.states.classes
    # Scores have the shape [frames, phones, states of a phone]. If a phone has fewer states than
    # other phones, the scores of the states that it lacks are -inf.
    scores = np.where(classes >= 0, acoustic_scale * likelihoods[:, classes], -np.inf)
    entry = hmm.entry - insertion_penalty
    frames, phones, width = scores.shape
    # These arrays tell where the best path to each state comes from. If `entered` is False, the
    # path comes from the state `stayed_from` of the same phone. If `entered` is True, the path
    # comes from the phone `phone_before`, and has left that phone from its state `left_from`.
    stayed_from = np.zeros([frames, phones, width], np.int16)
    entered = np.ones([frames, phones, width], bool)
    phone_before = np.zeros([frames, phones], np.int32)
    left_from = np.zeros([frames + 1, phones], np.int16)
    every = np.arange(phones)

    best = hmm.start[:, None] + entry + scores[0]
    for t in range(1, frames):
        stay = best[:, :, None] + hmm.moves
        stayed_from[t] = stay.argmax(1)
        stay = stay.max(1)
        leave = best + hmm.exit
        left_from[t] = leave.argmax(1)
        follow = leave.max(1)[:, None] + hmm.bigram
        phone_before[t] = follow.argmax(0)
        enter = follow[phone_before[t], every][:, None] + entry
        entered[t] = enter > stay
        best = np.maximum(stay, enter) + scores[t]
    leave = best + hmm.exit
    left_from[frames] = leave.argmax(1)
    final = leave.max(1) + hmm.end
    last = int(final.argmax())

    phone, state = last, int(left_from[frames, last])
    path, sequence = np.empty(frames, np.int64), []
    for t in range(frames - 1, -1, -1):
        path[t] = classes[phone, state]
        if entered[t, phone, state]:
            sequence.append(phone)
            phone = int(phone_before[t, phone])
            state = int(left_from[t, phone])
        else:
            state = int(stayed_from[t, phone, state])
    return Decoded(np.array(sequence[::-1], np.int64), path, float(final[last]))


def _check(likelihoods: np.ndarray, hmm: Hmm, scale: float, penalty: float) -> None:
    if likelihoods.ndim != 2 or likelihoods.shape[1:] != hmm.prior.shape or not len(likelihoods):
        raise ValueError(
            f"log_likelihoods must be [num_frames, {len(hmm.prior)}], one frame or more. Received: "
            f"{list(likelihoods.shape)}"
        )
    if not np.isfinite(likelihoods).all():
        frame, column = np.argwhere(~np.isfinite(likelihoods))[0]
        raise ValueError(
            f"log_likelihoods has {likelihoods[frame, column]} in frame {frame}, class {column}; "
            "decoding needs finite numbers."
        )
    if not 0.0 < scale < np.inf:
        raise ValueError(f"acoustic_scale={scale!r} must be a positive number.")
    if not np.isfinite(penalty):
        raise ValueError(f"insertion_penalty={penalty!r} must be a finite number.")
