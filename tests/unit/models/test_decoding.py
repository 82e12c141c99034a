"""The phone HMM, Viterbi's path and the error count: against hand values and plain enumeration."""

import doctest
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.decoding import (
    UNSEEN,
    Counts,
    Hmm,
    PhoneErrors,
    PhoneStates,
    count_errors,
    decode,
    errors,
    estimate,
    log_prior,
)
from tests.lib.random_examples import random_examples

AB = PhoneStates.of(["a.0", "a.1", "b.0", "b.1"])
sequences = st.lists(st.integers(0, 3), max_size=7)


# -- errors --------------------------------------------------------------------------------------


def fewest_errors(reference, recognised):
    """(errors, those that are no substitutions), the least, by trying everything."""

    @functools.cache
    def best(i, j):
        options = [(0, 0)] if i == j == 0 else []
        if i and j:
            errors, gaps = best(i - 1, j - 1)
            options.append((errors + (reference[i - 1] != recognised[j - 1]), gaps))
        before = [(i - 1, j)] * bool(i) + [(i, j - 1)] * bool(j)
        options += [(best(*place)[0] + 1, best(*place)[1] + 1) for place in before]
        return min(options)

    return best(len(reference), len(recognised))


@pytest.mark.parametrize(
    ("said", "recognised", "expected"),
    [
        ("", "", (0, 0, 0, 0)),
        ("abc", "abc", (0, 0, 0, 3)),
        ("", "ab", (2, 0, 0, 0)),
        ("ab", "", (0, 2, 0, 2)),
        ("kitten", "sitting", (1, 0, 2, 6)),
        ("abcd", "bcde", (1, 1, 0, 4)),  # as four substitutions it would be more
        ("ab", "ba", (0, 0, 2, 2)),  # not one insertion and one deletion
        ("aaaa", "aa", (0, 2, 0, 4)),
    ],
)
def test_errors_by_hand(said, recognised, expected):
    got = count_errors([ord(c) for c in said], [ord(c) for c in recognised])
    assert got == PhoneErrors(*expected)


@given(sequences, sequences)
def test_errors_are_the_fewest(reference, recognised):
    got = count_errors(reference, recognised)
    total, gaps = fewest_errors(tuple(reference), tuple(recognised))
    assert (got.errors, got.insertions + got.deletions) == (total, gaps)
    assert min(got.insertions, got.deletions, got.substitutions) >= 0
    assert got.insertions - got.deletions == len(recognised) - len(reference)
    assert got.reference == len(reference)


@given(sequences, sequences, sequences)
def test_errors_are_a_distance(a, b, c):
    ab, ba = count_errors(a, b), count_errors(b, a)
    assert (ab.insertions, ab.deletions) == (ba.deletions, ba.insertions)
    assert (ab.errors == 0) == (a == b)
    assert count_errors(a, c).errors <= ab.errors + count_errors(b, c).errors


def test_errors_add_up_to_a_rate():
    total = PhoneErrors(1, 0, 2, 4) + PhoneErrors(0, 3, 0, 6)
    assert total == PhoneErrors(1, 3, 2, 10)
    assert total.rate == 60.0
    with pytest.raises(ValueError, match="the reference is empty"):
        _ = PhoneErrors(2, 0, 0, 0).rate


def test_examples_in_docstrings():
    assert doctest.testmod(errors) == (0, 1)


# -- states and counts ---------------------------------------------------------------------------


def test_states_of_names_in_any_order_and_of_different_numbers():
    states = PhoneStates.of(["a.1", "x.y.0", "a.0", "x.y.2", "x.y.1"])
    assert states.phones == ("a", "x.y")
    np.testing.assert_array_equal(states.classes, [[2, 0, -1], [1, 4, 3]])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pdf-0", "pdf-1"], "class 0 is named 'pdf-0', but decoding needs phone states"),
        (["a.0", "b.x"], "class 1 is named 'b.x'"),
        ([".0"], "class 0 is named '.0'"),
        (["a.0", "a.0"], "two classes are named 'a.0'"),
        (["a.0", "a.2"], r"phone 'a' has the states \[0, 2\]"),
    ],
)
def test_other_classes_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        PhoneStates.of(names)


def test_phones_begin_where_the_phone_changes_or_the_state_goes_back():
    #                 a.0 a.0 a.1 a.0 a.1 b.1 b.1 a.1
    labels = np.array([0, 0, 1, 0, 1, 3, 3, 1])
    phone, state, first = AB.segments(labels)
    np.testing.assert_array_equal(first, [0, 3, 5, 7])
    np.testing.assert_array_equal(phone[first], [0, 0, 1, 0])
    np.testing.assert_array_equal(state, [0, 0, 1, 0, 1, 1, 1, 1])


def test_counts_by_hand():
    counts = Counts.zero(AB)
    counts.add(np.array([0, 0, 1, 0, 1, 3, 3, 1]))
    np.testing.assert_array_equal(counts.frames, [3, 3, 0, 2])
    # Rows: from state 0, from state 1, beginning. Columns: to 0, to 1, end.
    np.testing.assert_array_equal(counts.moves[0], [[1, 2, 0], [0, 0, 3], [2, 1, 0]])
    np.testing.assert_array_equal(counts.moves[1], [[0, 0, 0], [0, 1, 1], [0, 1, 0]])
    # a a b a, from the beginning (row 2) to the end (column 2).
    np.testing.assert_array_equal(counts.bigram, [[1, 1, 1], [1, 0, 0], [1, 0, 0]])
    again = Counts.from_json(AB, counts.to_json())
    np.testing.assert_array_equal(again.moves, counts.moves)
    with pytest.raises(ValueError, match=r"bigram must be \[3, 3\] counts"):
        Counts.from_json(AB, {**counts.to_json(), "bigram": [[1]]})


def test_estimates_by_hand():
    counts = Counts.zero(AB)
    counts.add(np.array([0, 0, 1, 0, 1, 3, 3, 1]))
    hmm = estimate(counts)
    np.testing.assert_allclose(np.exp(hmm.prior[[0, 1, 3]]), np.array([4, 4, 3]) / 12)
    assert hmm.prior[2] == -UNSEEN  # b.0 was never seen
    # All phones together, from state 0: 1½ stay, 2½ go on, ½ end: of 4½; a's own: 1, 2, 0.
    together = np.array([1.5, 2.5, 0.5]) / 4.5
    np.testing.assert_allclose(np.exp(hmm.moves[0, 0]), (np.array([1, 2]) + 10 * together[:2]) / 13)
    np.testing.assert_allclose(np.exp(hmm.exit[0, 0]), 10 * together[2] / 13)
    np.testing.assert_allclose(np.exp(hmm.moves[1, 0]), together[:2])  # b.0 was never seen
    assert hmm.moves[0, 1, 0] == -np.inf
    # Unigram of a, b, end: (3 + 1, 1 + 1, 1 + 1) / 8. After a: 1, 1, 1 and 3 kinds.
    np.testing.assert_allclose(np.exp(hmm.bigram[0]), (1 + 3 * np.array([0.5, 0.25])) / 6)
    np.testing.assert_allclose(np.exp(hmm.end[0]), (1 + 3 * 0.25) / 6)
    # At the beginning only a: 1 and 1 kind, and no end.
    np.testing.assert_allclose(np.exp(hmm.start), np.array([1.5, 0.25]) / 1.75)


labellings = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), max_size=4)
MIXED = PhoneStates.of(["a.0", "a.1", "a.2", "b.0", "b.1", "b.2", "c.0"])


@given(labellings)
def test_estimates_are_distributions(utterances):
    counts = Counts.zero(MIXED)
    for labels in utterances:
        counts.add(np.array(labels))
    hmm = estimate(counts)
    real = MIXED.classes >= 0
    seen, total = counts.frames > 0, counts.frames.sum() + MIXED.num_classes
    np.testing.assert_allclose(np.exp(hmm.prior[seen]).sum(), 1 - (~seen).sum() / total)
    np.testing.assert_allclose((np.exp(hmm.moves).sum(2) + np.exp(hmm.exit))[real], 1)
    np.testing.assert_allclose(np.exp(hmm.entry).sum(1), 1)
    np.testing.assert_allclose(np.exp(hmm.bigram).sum(1) + np.exp(hmm.end), 1)
    np.testing.assert_allclose(np.exp(hmm.start).sum(), 1)
    assert np.isfinite(hmm.exit[real]).all() and np.isfinite(hmm.bigram).all()
    assert counts.bigram[-1].sum() == counts.bigram[:, -1].sum() == len(utterances)


def test_priors_of_counts():
    np.testing.assert_allclose(np.exp(log_prior(np.array([3, 1]))), [2 / 3, 1 / 3])
    found = log_prior(np.array([3, 0]))
    np.testing.assert_allclose(found, [np.log(0.8), -UNSEEN])


def test_a_class_without_a_training_frame_is_not_decoded():
    """Its small prior would make it the likeliest of all where its posterior is a hundredth."""
    counts = Counts.zero(AB)
    counts.add(np.repeat([0, 1], 500))
    hmm = estimate(counts)
    log_posteriors = np.log(np.tile([0.49, 0.49, 0.01, 0.01], (6, 1)))
    assert np.isin(decode(log_posteriors - hmm.prior, hmm).classes, [0, 1]).all()


# -- decoding ------------------------------------------------------------------------------------


def random_hmm(rng, states):
    """Probabilities without structure, but for the order of states."""
    phones, width = states.classes.shape
    real = states.classes >= 0

    def logs(*shape):
        return np.log(rng.dirichlet(np.ones(shape[-1]), shape[:-1]))

    allowed = np.triu(np.ones([width, width], bool)) & real[:, None, :] & real[:, :, None]
    return Hmm(
        states,
        prior=logs(states.num_classes),
        moves=np.where(allowed, logs(phones, width, width), -np.inf),
        entry=np.where(real, logs(phones, width), -np.inf),
        exit=np.where(real, -rng.exponential(size=(phones, width)), -np.inf),
        bigram=logs(phones, phones),
        start=logs(phones),
        end=-rng.exponential(size=phones),
    )


def by_enumeration(likelihoods, hmm, scale, penalty):
    """Every path (phone, state, whether newly entered) of every frame; the best score and path."""
    places = [(p, s) for p, s in np.argwhere(hmm.states.classes >= 0)]
    best = (-np.inf, None)
    for path in itertools.product(places, repeat=len(likelihoods)):
        for entered in itertools.product([False, True], repeat=len(likelihoods) - 1):
            (p, s), score, sequence = path[0], 0.0, [path[0][0]]
            score = hmm.start[p] + hmm.entry[p, s] - penalty
            for (p0, s0), (p, s), new in zip(path, path[1:], entered, strict=False):
                if new:
                    score += hmm.exit[p0, s0] + hmm.bigram[p0, p] + hmm.entry[p, s] - penalty
                    sequence.append(p)
                else:
                    score += hmm.moves[p, s0, s] if p == p0 else -np.inf
            (p, s) = path[-1]
            score += hmm.exit[p, s] + hmm.end[p]
            classes = [hmm.states.classes[place] for place in path]
            score += scale * sum(likelihoods[t, k] for t, k in enumerate(classes))
            if score > best[0]:
                best = (score, (sequence, classes))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_path_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    names = [["a.0", "a.1", "b.0", "b.1"], ["a.0", "b.0", "b.1", "b.2"], ["a.0", "b.0", "c.0"]]
    states = PhoneStates.of(names[seed % 3])
    hmm = random_hmm(rng, states)
    likelihoods = rng.normal(size=(1 + seed % 4, states.num_classes))
    scale, penalty = rng.uniform(0.2, 2.0), rng.normal()
    score, (sequence, classes) = by_enumeration(likelihoods, hmm, scale, penalty)
    got = decode(likelihoods, hmm, scale, penalty)
    assert got.score == pytest.approx(score, abs=1e-9)
    np.testing.assert_array_equal(got.phones, sequence)
    np.testing.assert_array_equal(got.classes, classes)


def equal_chances():
    """Two phones of two states in order, where everything that can be is as likely."""
    half = np.log(0.5)
    return Hmm(
        AB,
        prior=np.log(np.full(4, 0.25)),
        moves=np.array([[[half, half], [-np.inf, half]]] * 2),
        entry=np.array([[0.0, -np.inf]] * 2),
        exit=np.array([[-np.inf, half]] * 2),
        bigram=np.full([2, 2], half),
        start=np.full(2, half),
        end=np.zeros(2),
    )


def test_path_by_hand():
    # a.0 a.1 a.0 a.1 b.0 b.0 b.1: clear, so that a is said twice.
    classes = [0, 1, 0, 1, 2, 2, 3]
    likelihoods = np.where(np.eye(4)[classes] > 0, 0.0, -50.0)
    got = decode(likelihoods, equal_chances())
    np.testing.assert_array_equal(got.classes, classes)
    np.testing.assert_array_equal(got.phones, [0, 0, 1])
    # The first phone, 4 moves within phones, 3 exits and 2 phones more: 10 halves.
    assert got.score == pytest.approx(10 * np.log(0.5))


def test_one_unclear_frame_does_not_break_a_phone():
    classes = [0, 0, 1, 1]
    likelihoods = np.where(np.eye(4)[classes] > 0, 0.0, -3.0)
    likelihoods[1] = [-0.2, -3.0, 0.0, -3.0]  # b.0 is a little better here
    np.testing.assert_array_equal(decode(likelihoods, equal_chances()).classes, classes)
    np.testing.assert_array_equal(likelihoods.argmax(1), [0, 2, 1, 1])


def test_insertion_penalty_and_acoustic_scale():
    rng = np.random.default_rng(0)
    hmm, likelihoods = random_hmm(rng, AB), rng.normal(size=(60, 4))
    lengths = [len(decode(likelihoods, hmm, 1.0, b).phones) for b in (-3.0, 0.0, 3.0, 1000.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[2] > lengths[3] == 1
    # Only the ratio of acoustic scores to the rest counts.
    a, b = decode(likelihoods, hmm, 0.5), decode(0.5 * likelihoods, hmm, 1.0)
    np.testing.assert_array_equal(a.classes, b.classes)


@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(-5, 5))
@random_examples(40)
def test_a_number_for_a_whole_frame_changes_the_score_alone(frames, seed, shift):
    """So the unknown p(x) of pseudo-likelihoods does no harm."""
    rng = np.random.default_rng(seed)
    hmm, likelihoods = random_hmm(rng, MIXED), rng.normal(size=(frames, 7))
    plain = decode(likelihoods, hmm)
    moved = decode(likelihoods + shift, hmm)
    np.testing.assert_array_equal(plain.phones, moved.phones)
    assert moved.score == pytest.approx(plain.score + frames * shift, abs=1e-6)


@given(labellings.filter(bool), st.integers(0, 6))
@random_examples(40)
def test_clear_posteriors_give_back_the_phones_that_were_said(utterances, number):
    counts = Counts.zero(MIXED)
    for labels in utterances:
        counts.add(np.array(labels))
    labels = np.array(utterances[number % len(utterances)])
    hmm = estimate(counts)
    got = decode(np.where(np.eye(7)[labels] > 0, 0.0, -100.0), hmm)
    phone, _, first = MIXED.segments(labels)
    np.testing.assert_array_equal(got.classes, labels)
    # A phone of one state said twice in a row may be found as two: as the labels show it is one.
    merged = [p for n, p in enumerate(got.phones) if n == 0 or p != got.phones[n - 1]]
    said = [p for n, p in enumerate(phone[first]) if n == 0 or p != phone[first][n - 1]]
    assert merged == said


@pytest.mark.parametrize(
    ("likelihoods", "options", "message"),
    [
        (np.zeros([0, 4]), {}, r"must be \[num_frames, 4\]"),
        (np.zeros([3, 5]), {}, r"Received: \[3, 5\]"),
        (np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]]), {}, "nan in frame 1, class 1"),
        (np.array([[0, 0, 0, -np.inf]]), {}, "-inf in frame 0, class 3"),
        (np.zeros([1, 4]), {"acoustic_scale": 0.0}, "acoustic_scale=0.0 must be positive"),
        (np.zeros([1, 4]), {"insertion_penalty": np.inf}, "insertion_penalty=inf"),
    ],
)
def test_bad_values_are_refused(likelihoods, options, message):
    message = message.replace("must be positive", "must be a positive number")
    with pytest.raises(ValueError, match=message):
        decode(likelihoods, equal_chances(), **options)
