"""What makes preference data worse than it looks: repeated and contradictory rows, near ties, length. No torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from typing import Any, Literal, get_args

from hf_rlx.data.pair_building import WITHIN, Pairs, answer_key, score_of

Keep = Literal["drop", "keep"]
Same = Literal["exact", "whitespace"]

DUPLICATE = "duplicate of an earlier row"
CONTRADICTION = "contradicts another row"
UNBALANCED = "dropped to balance lengths"


def deduplicate(
    rows: Iterable[dict[str, Any]],
    same: Same = "exact",
    *,
    duplicates: Keep = "drop",
    contradictions: Keep = "drop",
) -> Pairs:
    """Without repeated rows, and without those that say the opposite of one another.

    Args:
        rows: pairs or ranked lists.
        same: which texts count as the same: "exact" ones, or "whitespace": that differ in white space at most.
        duplicates: of rows with the same prompt, answers and preferences "drop" all but the first, or "keep" them.
        contradictions: of rows where two answers to one prompt stand the other way round "drop" all, or "keep" them.

    Returns:
        the rows that remain, in their order. `left_out` has the others, `notes` count what was kept.

    Raises:
        ValueError: an unknown option, or a row that is neither pair nor list.
    """
    for name, value, choices in (
        ("same", same, get_args(Same)),
        ("duplicates", duplicates, get_args(Keep)),
        ("contradictions", contradictions, get_args(Keep)),
    ):
        if value not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}, got {value!r}")
    found = list(rows)
    keyed = []
    for index, row in enumerate(found):
        answers = [answer_key(answer, same == "whitespace") for answer in answers_of(row, index)]
        better = frozenset((answers[i], answers[j]) for i, j in preferences_of(row, index))
        keyed.append((answer_key(row.get("prompt"), same == "whitespace"), frozenset(answers), better))
    stated = {(prompt, pair) for prompt, _, better in keyed for pair in better}
    made = Pairs(rows_in=len(found))
    seen = set()
    for index, (row, key) in enumerate(zip(found, keyed, strict=True)):
        prompt, _, better = key
        opposed = any((prompt, pair[::-1]) in stated for pair in better)
        repeated = key in seen
        seen.add(key)
        if opposed and contradictions == "drop":
            made.leave_out(CONTRADICTION, index)
        elif repeated and duplicates == "drop":
            made.leave_out(DUPLICATE, index)
        else:
            made.append(row)
            made.note("contradictory rows kept", opposed)
            made.note("duplicates kept", repeated)
    return made


def filter_margin(rows: Iterable[dict[str, Any]], margin: float) -> Pairs:
    """Only rows whose scores differ by more than `margin`.

    Args:
        rows: pairs with score_chosen and score_rejected, or with a `margin`; lists with scores or ranks, of which the
            highest and the lowest count.
        margin: score units, at least 0.

    Raises:
        ValueError: a margin below 0; a row, by its index, that has none of these.
    """
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin must be a number of at least 0, got {margin!r}")
    made = Pairs()
    for index, row in enumerate(rows):
        made.rows_in += 1
        if not difference_of(row, index) > margin:
            made.leave_out(WITHIN, index)
        else:
            made.append(row)
    return made


def difference_of(row: dict[str, Any], index: int) -> float:
    """How far the scores of a row are apart, score units: of a pair chosen minus rejected, or its `margin`; of a list
    highest minus lowest.

    Raises:
        ValueError: it has none; names the row.
    """
    try:
        if "responses" in row:
            scores = _scores(row)
            return max(scores) - min(scores)
        chosen = score_of(row.get("score_chosen"), "`score_chosen`")
        rejected = score_of(row.get("score_rejected"), "`score_rejected`")
        given = score_of(row.get("margin"), "`margin`")
    except ValueError as error:
        raise ValueError(f"row {index} {error}") from error
    if chosen is not None and rejected is not None:
        return chosen - rejected
    if given is None:
        raise ValueError(f"row {index} has no scores to hold against the margin; give score_chosen and score_rejected")
    return given


@dataclass(frozen=True)
class LengthBalance:
    """How far preference goes with length. A ranked list counts as all its pairs.

    Args:
        pairs: their number. longer, shorter: pairs whose chosen answer has more, fewer characters.
        mean_difference: characters of chosen minus rejected. mean_difference_tokens: the same in tokens; None: not
            counted.
        pearson, spearman: correlation of an answer's score and its characters, over all answers; NaN where one of them
            is constant.
        scored: whether the answers have scores; if not, chosen counts as 1 and rejected as 0.
    """

    pairs: int
    longer: int
    shorter: int
    mean_difference: float
    mean_difference_tokens: float | None
    pearson: float
    spearman: float
    scored: bool

    @property
    def share_longer(self) -> float:
        """Of the pairs, whose chosen answer is the longer one; NaN without pairs."""
        return self.longer / self.pairs if self.pairs else math.nan

    @property
    def to_balance(self) -> int:
        """Pairs to drop so that chosen is as often longer as shorter."""
        return abs(self.longer - self.shorter)


def length_balance(rows: Iterable[dict[str, Any]], count_tokens: Callable[[str], int] | None = None) -> LengthBalance:
    """Whether the longer answer is chosen more often.

    Args:
        rows: pairs or ranked lists. count_tokens: of a text; None: tokens are not counted.

    Raises:
        ValueError: a row that is neither pair nor list.
    """
    differences: list[int] = []
    tokens: list[int] = []
    scores: list[float] = []
    lengths: list[float] = []
    scored = True
    for index, row in enumerate(rows):
        answers = [text_of(answer) for answer in answers_of(row, index)]
        if row.get("prompt") is None:  # what all begin with is their prompt
            shared = common_start(answers)
            answers = [text[shared:] for text in answers]
        sizes = [len(text) for text in answers]
        counted = [count_tokens(text) for text in answers] if count_tokens else sizes
        for better, worse in preferences_of(row, index):
            differences.append(sizes[better] - sizes[worse])
            tokens.append(counted[better] - counted[worse])
        given = _scores(row)
        scored = scored and ("responses" in row or row.get("score_chosen") is not None)
        scores += given
        lengths += sizes
    n = len(differences)
    return LengthBalance(
        pairs=n,
        longer=sum(difference > 0 for difference in differences),
        shorter=sum(difference < 0 for difference in differences),
        mean_difference=sum(differences) / n if n else math.nan,
        mean_difference_tokens=(sum(tokens) / n if n else math.nan) if count_tokens else None,
        pearson=pearson(scores, lengths),
        spearman=pearson(_mean_places(scores), _mean_places(lengths)),
        scored=scored and bool(scores),
    )


def balance_lengths(rows: Iterable[dict[str, Any]], seed: int = 0) -> Pairs:
    """As many pairs whose chosen answer is longer as pairs where it is shorter; equally long ones stay.

    Args:
        rows: pairs. seed: of the choice of those that are dropped; the others keep their order.

    Raises:
        ValueError: ranked lists, which hold several pairs each.
    """
    found = list(rows)
    sides: dict[bool, list[int]] = {True: [], False: []}
    for index, row in enumerate(found):
        if "responses" in row:
            raise ValueError(f"row {index} is a ranked list; balance pairs, e.g. of strategy best_worst or all")
        chosen, rejected = (len(text_of(answer)) for answer in answers_of(row, index))
        if chosen != rejected:
            sides[chosen > rejected].append(index)
    many, few = sorted(sides.values(), key=len, reverse=True)
    dropped = set(random.Random(seed).sample(many, len(many) - len(few)))
    made = Pairs((row for index, row in enumerate(found) if index not in dropped), len(found))
    for index in sorted(dropped):
        made.leave_out(UNBALANCED, index)
    return made


def answers_of(row: dict[str, Any], index: int) -> list[Any]:
    """The answers of a pair, chosen first, or of a list.

    Raises:
        ValueError: it is neither; names the row.
    """
    if "responses" in row:
        return list(row["responses"])
    if "chosen" not in row or "rejected" not in row:
        has = sorted(map(str, row))
        raise ValueError(f"row {index} has neither `chosen` and `rejected` nor `responses`; it has {has}")
    return [row["chosen"], row["rejected"]]


def preferences_of(row: dict[str, Any], index: int) -> list[tuple[int, int]]:
    """(better, worse) indices into `answers_of`."""
    if "responses" not in row:
        return [(0, 1)]
    try:
        scores = _scores(row)
    except ValueError as error:
        raise ValueError(f"row {index} {error}") from error
    pairs = combinations(range(len(scores)), 2)
    return [(i, j) if scores[i] > scores[j] else (j, i) for i, j in pairs if scores[i] != scores[j]]


def common_start(rows: Sequence[Sequence[Any]]) -> int:
    """How many entries, of texts characters, all rows begin with."""
    alike = takewhile(lambda entries: all(e == entries[0] for e in entries), zip(*rows, strict=False))
    return sum(1 for _ in alike)


def text_of(answer: Any) -> str:
    """All that an answer says; messages one behind the other."""
    if isinstance(answer, str):
        return answer
    contents = [message.get("content") or "" for message in answer or []]
    return "".join(c if isinstance(c, str) else "".join(part.get("text") or "" for part in c) for c in contents)


def pearson(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation; NaN below two values, or where one side is constant."""
    n = len(first)
    if n < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    left, right = math.fsum(first) / n, math.fsum(second) / n
    cross = math.fsum((a - left) * (b - right) for a, b in zip(first, second, strict=True))
    squares = math.fsum((a - left) ** 2 for a in first) * math.fsum((b - right) ** 2 for b in second)
    return cross / math.sqrt(squares)


def _mean_places(values: Sequence[float]) -> list[float]:
    """Of each value its place, from 1, among the sorted ones; equal ones share the mean of theirs."""
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order, start=1)))}
    last = dict(zip(order, range(1, len(order) + 1), strict=True))
    return [(first[value] + last[value]) / 2 for value in values]


def _scores(row: dict[str, Any]) -> list[float]:
    """One an answer, higher is better; of a pair without scores 1 and 0."""
    if "responses" in row:
        ranked = row.get("scores") is None
        column = "ranks" if ranked else "scores"
        given = [score_of(value, f"`{column}`") for value in row.get(column) or []]
        known = [value for value in given if value is not None]
        if len(known) != len(row["responses"]) or not known:
            raise ValueError(f"has {len(known)} `{column}` for {len(row['responses'])} `responses`; give one each")
        return [-value for value in known] if ranked else known
    chosen, rejected = row.get("score_chosen"), row.get("score_rejected")
    return [1.0, 0.0] if chosen is None or rejected is None else [float(chosen), float(rejected)]
