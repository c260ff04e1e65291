"""Selection among samples and its evaluation, in plain Python: strings and floats in, indices and estimates out."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer", bound=Hashable)


class WeightedVote(NamedTuple, Generic[Answer]):
    """Result of `weighted_best_of_n`."""

    answer: Answer | None  # None when nothing can be ranked
    totals: dict[Answer, float]  # in order of first appearance
    best: int  # best-scoring member of the winning group, -1 for none


class MajorityVote(NamedTuple, Generic[Answer]):
    """Result of `majority_vote`."""

    answer: Answer | None  # None when nobody voted
    votes: dict[Answer, int]  # in order of first appearance
    agreement: float  # votes of the winner / samples (no-answers included), NaN for no sample
    best: int  # first sample with the winning answer, -1 for none


class PositionSwap(NamedTuple):
    """Result of `position_swap`; NaN inputs stay NaN, are not consistent and leave the averages."""

    preference: list[float]  # P(A better)
    consistent: list[bool]  # both orders name the same winner
    consistency: float  # share of consistent pairs, NaN for none
    position_bias: float  # mean P(first) - 1/2, NaN for none


class UctScores(NamedTuple):
    """Result of `uct`."""

    scores: list[float]
    best: int  # first maximum, -1 for no child


def _check_lengths(name: str, x: Sequence, other_name: str, y: Sequence) -> None:
    if len(x) != len(y):
        raise ValueError(f"`{name}` has length {len(x)} but `{other_name}` has length {len(y)}.")


def best_of_n(scores: Sequence[float]) -> int:
    """Index of the first maximum; NaN never wins, -1 when nothing can be ranked.

    Args:
        scores: one per sample, higher is better.
    """
    best = -1
    for i, score in enumerate(scores):
        if not math.isnan(score) and (best < 0 or score > scores[best]):
            best = i
    return best


def weighted_best_of_n(answers: Sequence[Answer | None], scores: Sequence[float]) -> WeightedVote[Answer]:
    """Best-of-n over groups of equal answers: argmax_a ∑_{i : answerᵢ = a} scoreᵢ, first seen on ties.

    Args:
        answers: canonical answers; None = no answer, left out.
        scores: ≥ 0 (probabilities, not logits: with negative scores more votes would lower a total); NaN left
            out.

    Raises:
        ValueError: lengths differ, or a negative score.

    Source: Snell et al. (2408.03314) section 5.1.
    """
    _check_lengths("answers", answers, "scores", scores)
    totals: dict[Answer, float] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is None or math.isnan(score):
            continue
        if score < 0:
            raise ValueError(f"`scores` holds {score}; weighted votes need scores >= 0 (use a probability).")
        totals[answer] = totals.get(answer, 0.0) + score
    if not totals:
        return WeightedVote(None, totals, -1)
    winner = max(totals, key=totals.__getitem__)
    members = [math.nan if a != winner else s for a, s in zip(answers, scores, strict=True)]
    return WeightedVote(winner, totals, best_of_n(members))


def majority_vote(answers: Sequence[Answer | None]) -> MajorityVote[Answer]:
    """Most frequent answer, first seen on ties; a missing answer (None) casts no vote.

    Args:
        answers: canonical answers.

    Source: self-consistency, Wang et al. (2203.11171).
    """
    votes: dict[Answer, int] = {}
    for answer in answers:
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
    if not votes:
        return MajorityVote(None, votes, 0.0 if answers else math.nan, -1)
    winner = max(votes, key=votes.__getitem__)
    return MajorityVote(winner, votes, votes[winner] / len(answers), list(answers).index(winner))


def maj_at_k(answers: Sequence[Hashable | None], correct: Hashable, k: int) -> float:
    """Exact probability that a majority vote over k of the n samples is right; ties share 1/m among m answers.

    Counts subsets by generating functions instead of listing C(n, k) of them. No-answers cast no vote but
    count in k.

    Args:
        answers: canonical answers of n samples; None = no answer.
        correct: the right answer.
        k: samples per vote, at least 1.

    Returns:
        Probability; NaN for k > n.

    Raises:
        ValueError: k below 1.
    """
    if k < 1:
        raise ValueError(f"`k` is {k} but must be at least 1.")
    if k > len(answers):
        return math.nan
    counts = Counter(a for a in answers if a is not None)
    right = counts.pop(correct, 0)
    silent = len(answers) - right - sum(counts.values())
    favourable = 0.0
    for votes in range(1, min(right, k) + 1):
        # ways[(used, ties)]: draws from the other answers, none above `votes`, `ties` of them equal to it.
        ways = {(0, 0): 1}
        for size in counts.values():
            grown: dict[tuple[int, int], int] = {}
            for (used, ties), number in ways.items():
                for drawn in range(min(size, votes, k - votes - used) + 1):
                    key = (used + drawn, ties + (drawn == votes))
                    grown[key] = grown.get(key, 0) + number * math.comb(size, drawn)
            ways = grown
        for (used, ties), number in ways.items():
            rest = k - votes - used
            subsets = math.comb(right, votes) * number * math.comb(silent, rest)
            # Divided as integers: the binomials of large n do not fit a float.
            favourable += subsets / (math.comb(len(answers), k) * (ties + 1))
    return favourable


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased probability that k of n samples hold a right one: 1 - C(n-c, k) / C(n, k).

    Computed as 1 - ∏_{i=n-c+1}^{n} (1 - k/i). Estimate each problem, then average.

    Args:
        n: samples.
        c: right ones, 0 ≤ c ≤ n.
        k: budget, at least 1.

    Returns:
        Probability; NaN for k > n (the Codex snippet returns 1 there).

    Raises:
        ValueError: c outside [0, n], or k below 1.

    Source: Chen et al. (2107.03374) eq. 1.
    """
    if not 0 <= c <= n:
        raise ValueError(f"`c` is {c} but must lie in [0, n = {n}].")
    if k < 1:
        raise ValueError(f"`k` is {k} but must be at least 1.")
    if k > n:
        return math.nan
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def expected_best_of_n(scores: Sequence[float], correct: Sequence[float], n: int) -> float:
    """Unbiased accuracy of best-of-n from a pool of N: ∑ᵢ correct₍ᵢ₎ C(i-1, n-1) / C(N, n), scores ascending.

    Equal scores are ranked with the earlier sample higher, as `best_of_n` picks it; NaN scores rank lowest.

    Args:
        scores: of N samples.
        correct: 1 or 0 (or any payoff) of each.
        n: samples per draw, at least 1.

    Returns:
        Expected payoff; NaN for n > N.

    Raises:
        ValueError: lengths differ, or n below 1.
    """
    _check_lengths("scores", scores, "correct", correct)
    if n < 1:
        raise ValueError(f"`n` is {n} but must be at least 1.")
    size = len(scores)
    if n > size:
        return math.nan
    order = sorted(range(size), key=lambda i: (-math.inf if math.isnan(scores[i]) else scores[i], -i))
    total = math.comb(size, n)
    return sum(correct[i] * (math.comb(rank, n - 1) / total) for rank, i in enumerate(order))


def position_swap(first_wins_ab: Sequence[float], first_wins_ba: Sequence[float]) -> PositionSwap:
    """Preference of a judge asked in both orders: p = (p_ab + 1 - p_ba) / 2.

    A pair is consistent when both orders name the same winner (or both a tie).

    Args:
        first_wins_ab: P(first better) with A first; NaN = unusable.
        first_wins_ba: P(first better) with B first.

    Raises:
        ValueError: lengths differ.

    Source: RLAIF (2309.00267) section 2.1.
    """
    _check_lengths("first_wins_ab", first_wins_ab, "first_wins_ba", first_wins_ba)
    pairs = list(zip(first_wins_ab, first_wins_ba, strict=True))
    preference = [(ab + 1.0 - ba) / 2.0 for ab, ba in pairs]
    consistent = [(ab > 0.5) == (ba < 0.5) and (ab < 0.5) == (ba > 0.5) and ab == ab for ab, ba in pairs]
    usable = [(ab, ba) for ab, ba in pairs if not (math.isnan(ab) or math.isnan(ba))]
    consistent = [ok and not math.isnan(p) for ok, p in zip(consistent, preference, strict=True)]
    if not usable:
        return PositionSwap(preference, consistent, math.nan, math.nan)
    bias = sum(ab + ba for ab, ba in usable) / (2 * len(usable)) - 0.5
    return PositionSwap(preference, consistent, sum(consistent) / len(usable), bias)


def uct(
    value_sum: Sequence[float],
    visits: Sequence[int],
    priors: Sequence[float] | None = None,
    c: float = math.sqrt(2.0),
) -> UctScores:
    """Tree policy over the children of a node: w/n + c √(ln N / n), unvisited +inf; with priors PUCT.

    N = ∑ visits. PUCT: w/n (0 unvisited) + c · prior · √N / (1 + n).

    Args:
        value_sum: summed values w of each child, values in [0, 1].
        visits: n of each child.
        priors: policy probability of each child; None = UCT.
        c: exploration constant.

    Raises:
        ValueError: lengths differ.

    Source: Kocsis and Szepesvári (2006); AlphaZero (1712.01815) for PUCT.
    """
    _check_lengths("value_sum", value_sum, "visits", visits)
    if priors is not None:
        _check_lengths("priors", priors, "visits", visits)
    total = sum(visits)
    scores = []
    for i, (w, n) in enumerate(zip(value_sum, visits, strict=True)):
        if priors is not None:
            scores.append((w / n if n else 0.0) + c * priors[i] * math.sqrt(total) / (1 + n))
        else:
            scores.append(w / n + c * math.sqrt(math.log(total) / n) if n else math.inf)
    return UctScores(scores, best_of_n(scores))
