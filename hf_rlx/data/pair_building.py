"""Scored responses to pairs or ranked lists. Knows no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, Literal, get_args

from hf_rlx.data.pair_checks import check_answer

Strategy = Literal["best_worst", "all", "ranked"]

TOO_FEW = "fewer than two scored responses"
TIED = "all scores equal"
WITHIN = "difference within the margin"
IDENTICAL = "identical responses"


class Pairs(list[dict[str, Any]]):
    """Rows of preference data, and what was left out on the way to them.

    Attributes:
        rows_in: rows that went in.
        left_out: reason -> indices of the rows that gave nothing.
        notes: what else was counted, e.g. responses without a score.
        agreement: of several annotators, by what they judged; empty where there is one.
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = (), rows_in: int = 0) -> None:
        super().__init__(rows)
        self.rows_in = rows_in
        self.left_out: dict[str, list[int]] = {}
        self.notes: dict[str, int] = {}
        self.agreement: dict[str, Any] = {}

    def leave_out(self, reason: str, index: int) -> None:
        """Record that the row `index` gave nothing, and why."""
        self.left_out.setdefault(reason, []).append(index)

    def note(self, what: str, count: int = 1) -> None:
        """Add `count` to the note `what`; nothing where it is 0."""
        if count:
            self.notes[what] = self.notes.get(what, 0) + count


def build_pairs(
    rows: Iterable[dict[str, Any]],
    strategy: Strategy = "best_worst",
    margin: float = 0.0,
    *,
    max_pairs: int | None = None,
    response_columns: Sequence[str] = (),
) -> Pairs:
    """Pairs or ranked lists from responses with scores.

    A response without a score (None) and an empty one are left out; equal scores give no pair, nor do equal responses.

    Args:
        rows: {"prompt", "responses": K texts or message lists, "scores": K numbers or None}, higher is better. Without
            a `prompt` the responses hold it. Further columns are kept.
        strategy:
            "best_worst": one pair a row, of the highest and the lowest score; of several equal ones the first, but
            two that are not the same response.
            "all": every pair, in the order of the responses: 0 and 1, 0 and 2, 1 and 2, ...
            "ranked": one list a row, best first, of equal scores the earlier one first.
        margin: score units. A pair's scores must differ by more; of a list the highest and the lowest.
        max_pairs: at most so many a row, those of the largest difference; None: all. For "all".
        response_columns: columns of K entries, one a response: `model` becomes `model_chosen` and `model_rejected`, in
            lists it is ordered with them.

    Returns:
        Rows of prompt, chosen, rejected, score_chosen, score_rejected; "ranked": prompt, responses, scores. The same
        for the same input. `left_out` has the rows that gave nothing.

    Raises:
        ValueError: an unknown strategy, a margin below 0, or a row, by its index: without responses or scores, with
            another number of scores than of responses, a score that is NaN or no number, a response that is neither
            text nor messages.
    """
    check_options(strategy, margin, max_pairs)
    made = Pairs()
    for index, row in enumerate(rows):
        made.rows_in += 1
        try:
            responses, scores = _read(row)
            entries = {name: _entries(row, name, len(responses)) for name in response_columns}
        except ValueError as error:
            raise ValueError(f"row {index} {error}") from error
        scored = {i: score for i, score in enumerate(scores) if score is not None}
        known = {i: score for i, score in scored.items() if not is_empty(responses[i])}
        made.note("responses without a score", len(scores) - len(scored))
        made.note("empty responses", len(scored) - len(known))
        keys = {i: answer_key(responses[i]) for i in known}
        chosen = _chosen(known, keys, strategy, margin, max_pairs)
        if not chosen:
            made.leave_out(_reason(known, margin), index)
            continue
        given = {"prompt": row["prompt"]} if "prompt" in row else {}
        more = {n: v for n, v in row.items() if n not in ("prompt", "responses", "scores", *response_columns)}
        if strategy == "ranked":
            order = sorted(known, key=lambda i: -known[i])
            ordered = {"responses": [responses[i] for i in order], "scores": [known[i] for i in order]}
            made.append(given | ordered | {n: [e[i] for i in order] for n, e in entries.items()} | more)
            continue
        for best, worst in chosen:
            row_out = {"chosen": responses[best], "rejected": responses[worst]}
            row_out |= {"score_chosen": known[best], "score_rejected": known[worst]}
            for name, values in entries.items():
                row_out |= {f"{name}_chosen": values[best], f"{name}_rejected": values[worst]}
            made.append(given | row_out | {n: v for n, v in more.items() if n not in row_out})
    return made


def check_options(strategy: str, margin: float, max_pairs: int | None = None) -> None:
    """Raise a ValueError where one of them cannot be used."""
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy is one of {', '.join(get_args(Strategy))}, got {strategy!r}")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise ValueError(f"margin must be a number of at least 0, got {margin!r}")
    if max_pairs is not None and (not isinstance(max_pairs, int) or max_pairs < 1):
        raise ValueError(f"max_pairs must be at least 1, or None for all, got {max_pairs}")


def answer_key(answer: Any, whitespace: bool = False) -> str:
    """What two equal prompts or answers have in common.

    Args:
        answer: text, messages or None. whitespace: whether every run of white space counts as one blank, and none
            counts at the ends.
    """
    if isinstance(answer, str):
        return " ".join(answer.split()) if whitespace else answer
    if whitespace and isinstance(answer, list):
        answer = [{k: answer_key(v, True) if isinstance(v, str) else v for k, v in m.items()} for m in answer]
    # A text never begins with this character, so that the text "null" is not None.
    return "\0" + json.dumps(answer, ensure_ascii=False, sort_keys=True, default=str)


def score_of(value: Any, what: str) -> float | None:
    """A score as a float; None stays.

    Raises:
        ValueError: NaN or no number; reads on from "row 3 ...".
    """
    if value is None:
        return None
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise ValueError(f"has {repr(value)[:40]} as {what}; give a number, or None to leave it out")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"has NaN as {what}; give a number, or None to leave it out")
    return number


def listed(row: dict[str, Any], column: str) -> list[Any]:
    """The list in `column`; arrays become lists.

    Raises:
        ValueError: there is none; reads on from "row 3 ...".
    """
    if column not in row:
        raise ValueError(f"has no `{column}`; it has {sorted(map(str, row))}")
    values = row[column]
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise ValueError(f"has {repr(values)[:40]} as `{column}`; give a list with one entry a response")
    return list(values)


def _read(row: Any) -> tuple[list[Any], list[float | None]]:
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}; rows are dictionaries with `responses` and `scores`")
    responses, scores = listed(row, "responses"), _entries(row, "scores", None)
    if len(scores) != len(responses):
        raise ValueError(
            f"has {len(scores)} `scores` for {len(responses)} `responses`; give one each, None where there is none"
        )
    for place, answer in enumerate(responses):
        if not is_empty(answer):
            check_answer(answer, f"`responses[{place}]`")
    return responses, [score_of(score, f"`scores[{place}]`") for place, score in enumerate(scores)]


def _entries(row: dict[str, Any], column: str, count: int | None) -> list[Any]:
    values = listed(row, column)
    if count is not None and len(values) != count:
        raise ValueError(f"has {len(values)} entries in `{column}` for {count} `responses`; give one each")
    return values


def is_empty(answer: Any) -> bool:
    """None, "", [] and messages that all say nothing: what a policy gives that ends at once."""
    if isinstance(answer, list):
        return all(
            isinstance(message, dict) and message.get("content") in ("", None, []) and not message.get("tool_calls")
            for message in answer
        )
    return answer is None or answer == ""


def _reason(scores: dict[int, float], margin: float) -> str:
    """Why these give no pair."""
    if len(scores) < 2:
        return TOO_FEW
    best, worst = max(scores.values()), min(scores.values())
    if best == worst:
        return TIED
    return IDENTICAL if best - worst > margin else WITHIN


def _chosen(
    scores: dict[int, float], keys: dict[int, str], strategy: str, margin: float, max_pairs: int | None
) -> list[tuple[int, int]]:
    """(better, worse) response indices; of "ranked" those of "all"."""
    found = []
    for i, j in combinations(scores, 2):
        better, worse = (i, j) if scores[i] > scores[j] else (j, i)
        if scores[i] != scores[j] and scores[better] - scores[worse] > margin and keys[i] != keys[j]:
            found.append((better, worse))
    if strategy == "best_worst":
        ends = (max(scores.values(), default=0.0), min(scores.values(), default=0.0))
        return sorted(pair for pair in found if (scores[pair[0]], scores[pair[1]]) == ends)[:1]
    if max_pairs is not None and len(found) > max_pairs:
        widest = sorted(found, key=lambda pair: scores[pair[1]] - scores[pair[0]])[:max_pairs]
        found = [pair for pair in found if pair in widest]
    return found
