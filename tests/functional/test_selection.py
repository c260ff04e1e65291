"""Selection among samples and unbiased estimates of it, against brute force."""

import math
from itertools import combinations

import pytest

import hf_rlx.functional as F

NAN = math.nan


def test_best_of_n():
    """The first maximum; NaN never wins, wherever it stands; nothing to rank is -1."""
    assert F.best_of_n([NAN, 0.5, 0.5]) == 1
    assert F.best_of_n([-math.inf, NAN]) == 0
    assert F.best_of_n([NAN]) == F.best_of_n([]) == -1


def test_weighted_best_of_n():
    """408 collects 0.3 + 0.4 = 0.7 and beats the single best 0.5; its best member is index 2."""
    out = F.weighted_best_of_n(["408", "400", "408", None, "7"], [0.3, 0.5, 0.4, 0.9, NAN])
    assert (out.answer, out.best) == ("408", 2)
    assert out.totals == {"408": pytest.approx(0.7), "400": 0.5}
    with pytest.raises(ValueError, match="need scores >= 0"):
        F.weighted_best_of_n(["a"], [-0.1])
    with pytest.raises(ValueError, match="`answers` has length 1 but `scores` has length 2"):
        F.weighted_best_of_n(["a"], [0.1, 0.2])


def test_majority_vote():
    """Two votes each: b was seen first; the missing answer casts none but counts in the agreement 2/5."""
    out = F.majority_vote([None, "b", "a", "a", "b"])
    assert (out.answer, out.votes, out.best) == ("b", {"b": 2, "a": 2}, 1)
    assert out.agreement == pytest.approx(0.4)
    assert F.majority_vote([None]).answer is None


def brute_maj_at_k(answers, correct, k):
    total = 0.0
    subsets = list(combinations(answers, k))
    for subset in subsets:
        votes = {a: subset.count(a) for a in subset if a is not None}
        winners = [a for a, v in votes.items() if v == max(votes.values())]
        total += (correct in winners) / max(len(winners), 1)
    return total / len(subsets)


@pytest.mark.parametrize("answers", ["aabbc", "aab", "abcd", ["a", None, "b", "a", None, "b", "c"]])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_maj_at_k_equals_all_subsets(answers, k):
    answers = list(answers)
    assert F.maj_at_k(answers, "a", k) == pytest.approx(brute_maj_at_k(answers, "a", k))


def test_maj_at_k_scales():
    """60 right of 100, k = 50: ∑_{v > 25} C(60, v) C(40, 50 - v) / C(100, 50), the tie at 25 by half."""
    ways = [math.comb(60, v) * math.comb(40, 50 - v) for v in range(25, 51)]
    expected = (ways[0] / 2 + sum(ways[1:])) / math.comb(100, 50)
    assert F.maj_at_k(["x"] * 60 + ["y"] * 40, "x", 50) == pytest.approx(expected)
    assert math.isnan(F.maj_at_k(["x"], "x", 2))


def test_pass_at_k():
    """3 of 10 right: 1 - C(7, 5)/C(10, 5) = 1 - 21/252; k > n is undefined even with no right answer."""
    assert F.pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert F.pass_at_k(5, 0, 3) == 0.0
    assert F.pass_at_k(5, 3, 3) == 1.0
    assert math.isnan(F.pass_at_k(2, 0, 3))
    with pytest.raises(ValueError, match="`c` is 4"):
        F.pass_at_k(3, 4, 1)


def test_expected_best_of_n_equals_all_subsets():
    scores, correct = [0.2, 0.9, 0.5, 0.1, 0.7], [1, 0, 1, 0, 1]
    for n in (1, 2, 3, 5):
        subsets = list(combinations(range(5), n))
        brute = sum(correct[max(s, key=scores.__getitem__)] for s in subsets) / len(subsets)
        assert F.expected_best_of_n(scores, correct, n) == pytest.approx(brute)


def test_position_swap():
    """0.9 and 0.2: (0.9 + 0.8)/2 = 0.85, consistent. 0.9 twice: always the first, 1/2, inconsistent, bias 0.4."""
    out = F.position_swap([0.9, 0.9, NAN], [0.2, 0.9, 0.5])
    assert out.preference[:2] == pytest.approx([0.85, 0.5])
    assert out.consistent == [True, False, False]
    assert out.consistency == 0.5
    assert out.position_bias == pytest.approx((0.55 + 0.9) / 2 - 0.5)
    assert F.position_swap([0.5, 0.5], [0.5, 0.1]).consistent == [True, False]


def test_uct():
    """N = 6: 3/4 + √2 √(ln 6 / 4); an unvisited child comes first; PUCT at the root is 0 everywhere."""
    out = F.uct([3.0, 1.0], [4, 2])
    assert out.scores[0] == pytest.approx(0.75 + math.sqrt(2) * math.sqrt(math.log(6) / 4))
    assert F.uct([3.0, 0.0], [4, 0]).best == 1
    assert F.uct([0.0, 0.0], [0, 0], priors=[0.4, 0.6]) == ([0.0, 0.0], 0)
    assert F.uct([], []).best == -1
