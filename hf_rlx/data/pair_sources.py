"""Rankings, ratings and verifier outcomes to pairs or ranked lists. Knows no torch. Judges: see `pair_judges.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from hf_rlx.data.pair_agreement import agreement
from hf_rlx.data.pair_building import (
    Pairs,
    Strategy,
    answer_key,
    build_pairs,
    check_options,
    is_empty,
    listed,
    score_of,
)
from hf_rlx.data.pair_checks import check_answer

COMPLETIONS = ("completion", "response", "prediction", "answer", "output")
LABELS = ("label", "reward", "score", "is_correct", "correct", "right")
_TRUE = ("true", "right", "correct", "yes", "pass", "passed")
_FALSE = ("false", "wrong", "incorrect", "no", "fail", "failed")


def from_rankings(
    rows: Iterable[dict[str, Any]], strategy: Strategy = "best_worst", margin: float = 0.0, **options: Any
) -> Pairs:
    """Pairs or ranked lists from rankings.

    Args:
        rows: prompt, responses (K) and one of
            ranks: K numbers, lower is better, equal is a tie, None: not ranked; or such a list from each of several
            annotators, of which a response's mean rank counts.
            ranking: indices of the responses, best first; those that are not named are not ranked.
        strategy, margin, options: see `build_pairs`; margin in ranks.

    Returns:
        As `build_pairs`, a score being minus the rank; "ranked" lists have `ranks` instead. `agreement` has
        "preferences" where rows have several annotators.

    Raises:
        ValueError: names the row: no ranking, another number of ranks than of responses, an index that is none.
    """
    check_options(strategy, margin, options.get("max_pairs"))
    scored: list[dict[str, Any]] = []
    tables: list[list[list[float | None]]] = []  # (row, annotator, response)
    for index, row in enumerate(rows):
        try:
            _is_row(row, "`responses` and `ranks` (or `ranking`)")
            ranks = _ranks(row, len(listed(row, "responses")))
        except ValueError as error:
            raise ValueError(f"row {index} {error}") from error
        tables.append(ranks)
        means = [_mean([annotator[place] for annotator in ranks]) for place in range(len(row["responses"]))]
        scores = [None if mean is None else -mean for mean in means]
        scored.append({**{n: v for n, v in row.items() if n not in ("ranks", "ranking")}, "scores": scores})
    made = build_pairs(scored, strategy, margin, **options)
    if strategy == "ranked":
        for row in made:
            row["ranks"] = [-score for score in row.pop("scores")]
    if max((len(ranks) for ranks in tables), default=0) > 1:
        made.agreement["preferences"] = agreement(_preferences(tables))
    return made


def _ranks(row: dict[str, Any], count: int) -> list[list[float | None]]:
    """(annotators, K)."""
    if row.get("ranks") is None and row.get("ranking") is not None:
        order = listed(row, "ranking")
        wrong = [i for i in order if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count]
        if wrong or len(set(order)) != len(order):
            raise ValueError(
                f"has the ranking {order}; give each index of a response, 0 to {count - 1}, once, best first"
            )
        return [[float(order.index(place)) if place in order else None for place in range(count)]]
    given = listed(row, "ranks")
    several = bool(given) and all(isinstance(ranks, list | tuple) for ranks in given)
    annotators = given if several else [given]
    for ranks in annotators:
        if len(ranks) != count:
            raise ValueError(f"has {len(ranks)} `ranks` for {count} `responses`; give one each, None for not ranked")
    return [[score_of(rank, f"`ranks[{place}]`") for place, rank in enumerate(ranks)] for ranks in annotators]


def from_ratings(
    rows: Iterable[dict[str, Any]],
    strategy: Strategy = "best_worst",
    margin: float = 0.0,
    *,
    standardise: bool = False,
    **options: Any,
) -> Pairs:
    """Pairs or ranked lists from the ratings of several annotators; a response's mean rating is its score.

    Args:
        rows: prompt, responses (K) and `ratings`: K lists with one number (or None) an annotator, or K dictionaries
            annotator -> number. In lists an annotator is a position, or has the name in the row's `annotators`.
            Or one rating a row: prompt, response (or completion), rating, annotator; grouped by prompt.
        strategy, margin, options: see `build_pairs`; margin in rating units, after `standardise`.
        standardise: take each annotator's mean off their ratings and divide by their population standard deviation,
            over all rows, before the means: strict and lenient ones then count alike. One who gives everything the
            same rating counts as 0.

    Returns:
        As `build_pairs`. `agreement` has, with several annotators, "ratings" (interval) and "preferences" (which of
        two responses each rates higher, nominal).

    Raises:
        ValueError: names the row: no ratings, another number of them than of responses, one that is no number.
    """
    check_options(strategy, margin, options.get("max_pairs"))
    found = list(rows)
    if found and isinstance(found[0], dict) and "rating" in found[0] and "ratings" not in found[0]:
        found = _group_ratings(found)
    tables: list[list[dict[str, float]]] = []  # (row, response, annotator)
    for index, row in enumerate(found):
        try:
            _is_row(row, "`responses` and `ratings`")
            tables.append(_ratings(row))
        except ValueError as error:
            raise ValueError(f"row {index} {error}") from error
    names = sorted({name for table in tables for given in table for name in given})
    rated = tables
    if standardise:
        by_name = {name: [r[name] for table in tables for r in table if name in r] for name in names}
        centre = {name: math.fsum(values) / len(values) for name, values in by_name.items()}
        spread = {n: math.sqrt(math.fsum((v - centre[n]) ** 2 for v in vs) / len(vs)) for n, vs in by_name.items()}
        rated = [
            [{n: (v - centre[n]) / spread[n] if spread[n] else 0.0 for n, v in given.items()} for given in table]
            for table in tables
        ]
    scored = []
    for row, table in zip(found, rated, strict=True):
        kept = {name: value for name, value in row.items() if name not in ("ratings", "annotators")}
        scored.append({**kept, "scores": [_mean(list(given.values())) for given in table]})
    made = build_pairs(scored, strategy, margin, **options)
    if len(names) > 1:
        units = [[given.get(name) for name in names] for table in tables for given in table]
        made.agreement["ratings"] = agreement(units, "interval")
        made.agreement["preferences"] = agreement(
            _preferences([[[given.get(name) for given in table] for name in names] for table in tables])
        )
    return made


def _ratings(row: dict[str, Any]) -> list[dict[str, float]]:
    """K dictionaries annotator -> rating."""
    responses, given = listed(row, "responses"), listed(row, "ratings")
    if len(given) != len(responses):
        raise ValueError(f"has {len(given)} `ratings` for {len(responses)} `responses`; give a list of ratings each")
    names = row.get("annotators")
    read = []
    for place, ratings in enumerate(given):
        if isinstance(ratings, list | tuple):
            if names is not None and len(names) != len(ratings):
                raise ValueError(f"has {len(ratings)} ratings of response {place} for {len(names)} `annotators`")
            ratings = dict(zip(map(str, range(len(ratings)) if names is None else names), ratings, strict=True))
        elif not isinstance(ratings, dict):
            ratings = {"0": ratings}
        numbers = {str(n): score_of(v, f"the rating of response {place} by {n}") for n, v in ratings.items()}
        read.append({name: number for name, number in numbers.items() if number is not None})
    return read


def _group_ratings(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a prompt out of one a rating."""
    groups: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        answer = next((column for column in COMPLETIONS if column in row), None) if isinstance(row, dict) else None
        if answer is None or "prompt" not in row or "rating" not in row:
            raise ValueError(f"row {index} is no dictionary with prompt, response and rating; got {str(row)[:80]}")
        new = {"prompt": row["prompt"], "responses": {}, "ratings": {}}
        group = groups.setdefault(answer_key(row["prompt"]), new)
        _check_answer(row[answer], index, answer)
        key = answer_key(row[answer])
        group["responses"].setdefault(key, row[answer])
        ratings, name = group["ratings"].setdefault(key, {}), str(row.get("annotator", "0"))
        if name in ratings:
            raise ValueError(
                f"row {index} is a second rating of one response by the annotator {name}; drop it, or name the "
                "annotators in a column `annotator`"
            )
        ratings[name] = row["rating"]
    return [{n: v if n == "prompt" else list(v.values()) for n, v in group.items()} for group in groups.values()]


def from_outcomes(
    rows: Iterable[dict[str, Any]],
    strategy: Strategy = "best_worst",
    margin: float = 0.0,
    *,
    by: str | None = None,
    completion: str | None = None,
    label: str | None = None,
    **options: Any,
) -> Pairs:
    """Pairs or ranked lists from verified completions, one a row.

    Args:
        rows: a prompt, a completion and an outcome: true or false, right or wrong, or a reward; None: not judged, left
            out. Further columns that differ among the completions of a prompt become `NAME_chosen` and
            `NAME_rejected`.
        strategy, margin, options: see `build_pairs`. Right and wrong count as 1 and 0, so that "all" gives every
            right completion with every wrong one.
        by: column whose value the completions of one prompt share, such as an id; None: the prompt itself.
        completion, label: their columns; None: the first of `COMPLETIONS` and of `LABELS` that row 0 has.

    Returns:
        As `build_pairs`, prompts in the order of their first row. `rows_in` counts completions, `left_out` has the
        index of a prompt's first row.

    Raises:
        ValueError: names the row: a column is missing, an outcome that is none of those.
    """
    check_options(strategy, margin, options.get("max_pairs"))
    groups: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    count = 0
    for index, row in enumerate(rows):
        count += 1
        _is_row(row, "a completion and a label", index)
        completion = completion or _first(COMPLETIONS, row, index, "completion")
        label = label or _first(LABELS, row, index, "label")
        for column in (by or "prompt", completion, label):
            if column not in row:
                raise ValueError(f"row {index} has no `{column}`; it has {sorted(map(str, row))}")
        _check_answer(row[completion], index, completion)
        members = groups.setdefault(answer_key(row[by or "prompt"]), [])
        members.append((index, row))
        if answer_key(row.get("prompt")) != answer_key(members[0][1].get("prompt")):
            raise ValueError(
                f"row {index} has another prompt than row {members[0][0]} but the same `{by}`; group by another column"
            )
    used = ("prompt", completion, label)
    differing = sorted({name for members in groups.values() for name in _differing(members) if name not in used})
    built = []
    for members in groups.values():
        kept = {n: v for n, v in members[0][1].items() if n not in (completion, label, *differing)}
        kept |= {name: [row.get(name) for _, row in members] for name in differing}
        scores = [_outcome(row[str(label)], index, str(label)) for index, row in members]
        built.append({**kept, "responses": [row[str(completion)] for _, row in members], "scores": scores})
    columns = [*options.pop("response_columns", ()), *differing]
    made = build_pairs(built, strategy, margin, response_columns=columns, **options)
    firsts = [members[0][0] for members in groups.values()]
    made.left_out = {reason: [firsts[i] for i in found] for reason, found in made.left_out.items()}
    made.rows_in = count
    made.note("prompts", len(groups))
    return made


def _check_answer(answer: Any, index: int, column: str) -> None:
    """That it is text or messages, or empty."""
    try:
        if not is_empty(answer):
            check_answer(answer, f"`{column}`")
    except ValueError as error:
        raise ValueError(f"row {index} {error}") from error


def _differing(members: Sequence[tuple[int, dict[str, Any]]]) -> set[str]:
    """Columns in which the rows of one prompt are not all alike."""
    first = members[0][1]
    columns = {name for _, row in members for name in row}
    return {n for n in columns if any(answer_key(row.get(n)) != answer_key(first.get(n)) for _, row in members)}


def _outcome(value: Any, index: int, column: str) -> float | None:
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return float(word in _TRUE)
        raise ValueError(
            f"row {index} has {value!r} as `{column}`; give true or false, a number, or one of "
            f"{', '.join(_TRUE + _FALSE)}"
        )
    try:
        return score_of(value, f"`{column}`")
    except ValueError as error:
        raise ValueError(f"row {index} {error}") from error


def _first(names: Sequence[str], row: dict[str, Any], index: int, what: str) -> str:
    for name in names:
        if name in row:
            return name
    raise ValueError(f"row {index} has no {what}, called {', '.join(names)}; it has {sorted(map(str, row))}")


def _is_row(row: Any, columns: str, index: int | None = None) -> None:
    if not isinstance(row, dict):
        where = "" if index is None else f"row {index} "
        raise ValueError(f"{where}is a {type(row).__name__}; rows are dictionaries with {columns}")


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _preferences(tables: Sequence[Sequence[Sequence[float | None]]]) -> list[list[int | None]]:
    """(pairs of responses of a row, annotators): 1, 0, -1, which of the two has the higher number; None: not judged.

    Args:
        tables: (row, annotator, response); rows with fewer annotators lack the last ones.
    """
    annotators = max(len(table) for table in tables)
    units = []
    for table in tables:
        for i, j in combinations(range(len(table[0]) if table else 0), 2):
            judged = [_sign(numbers[i], numbers[j]) for numbers in table]
            units.append([*judged, *[None] * (annotators - len(judged))])
    return units


def _sign(first: float | None, second: float | None) -> int | None:
    if first is None or second is None:
        return None
    return (first > second) - (first < second)
