"""Votes of judges on two responses to pairs, with swapped positions. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_rlx.data.pair_agreement import agreement
from hf_rlx.data.pair_building import TIED, WITHIN, Pairs, Strategy, answer_key, build_pairs, check_options, is_empty
from hf_rlx.data.pair_checks import check_answer

SIDES = (
    ("response_a", "response_b"),
    ("completion_a", "completion_b"),
    ("answer_a", "answer_b"),
    ("conversation_a", "conversation_b"),
    ("response_0", "response_1"),
)
VERDICTS = ("verdict", "votes", "winner", "preference", "better_response_id")
_A = ("a", "model_a", "response_a", "answer_a", "completion_a", "first")
_B = ("b", "model_b", "response_b", "answer_b", "completion_b", "second")
_TIE = ("tie", "c", "draw", "equal", "both", "neither", "tie (inconsistent)", "tie (bothbad)", "both_bad")
_SWAPPED = "verdict_swapped"


@dataclass
class _Compared:
    """Two responses to a prompt and the votes on them; 1: the first, -1: the second, 0: a tie.

    Args:
        row: index of the first row about them. prompt, answers, more: of that row. keys: of the answers.
        forward, backward: judge -> votes with the first response shown first, and with it shown second.
    """

    row: int
    given: dict[str, Any]
    answers: tuple[Any, Any]
    keys: tuple[str, str]
    more: dict[str, Any]
    forward: dict[str, list[int]] = field(default_factory=dict)
    backward: dict[str, list[int]] = field(default_factory=dict)

    def votes(self) -> dict[str, list[tuple[int, bool | None]]]:
        """Judge -> (vote, whether both orders agree; None: seen in one order only).

        The k-th vote of each order belong together. Where they differ the judge went by the position: a tie.
        """
        found: dict[str, list[tuple[int, bool | None]]] = {}
        for judge in {**self.forward, **self.backward}:
            one, other = self.forward.get(judge, []), self.backward.get(judge, [])
            both = min(len(one), len(other))
            votes = [(a if a == b else 0, a == b) for a, b in zip(one[:both], other[:both], strict=True)]
            found[judge] = votes + [(vote, None) for vote in one[both:] + other[both:]]
        return found


def from_judgements(
    rows: Iterable[dict[str, Any]], strategy: Strategy = "all", margin: float = 0.0, **options: Any
) -> Pairs:
    """Pairs or ranked lists from votes: which of two responses is better.

    Args:
        rows: (prompt,) response_a, response_b, `verdict` and, of several judges, `judge`. A verdict is A, B or tie
            (also model_a, [[A]], 0 for A and 1 for B, and the like), None: none given; a list holds several votes.
            Votes with swapped positions are rows with the responses the other way round, or `verdict_swapped`: what
            the judge said when response_b was shown first, so "A" is response_b there. A judge's two orders count as
            one vote, a tie where they do not agree.
        strategy: "all": a pair for each two responses that were compared. "best_worst" and "ranked": of all responses
            to a prompt, scored by the mean share of votes that each won.
        margin: difference of the shares of votes, in [0, 1]; a pair's must be above it.
        options: see `build_pairs`; `response_columns` are not read.

    Returns:
        As `build_pairs`; a score is the share of votes, ties half. `left_out` has the index of the first row about two
        responses (or a prompt). `notes` count votes in both orders and those that disagreed. `agreement` has
        "verdicts" of several judges.

    Raises:
        ValueError: names the row: a column is missing, a verdict that is none of those.
    """
    check_options(strategy, margin, options.get("max_pairs"))
    made = Pairs()
    compared: dict[tuple[str, frozenset[str]], _Compared] = {}
    for index, row in enumerate(rows):
        made.rows_in += 1
        try:
            _add(compared, row, index, made)
        except ValueError as error:
            raise ValueError(f"row {index} {error}") from error
    judged = [(pair, pair.votes()) for pair in compared.values()]
    every = [vote for _, votes in judged for given in votes.values() for vote in given]
    made.note("comparisons", len(judged))
    made.note("votes seen in both orders", sum(same is not None for _, same in every))
    made.note("of these inconsistent, counted as ties", sum(same is False for _, same in every))
    judges = sorted({judge for _, votes in judged for judge in votes})
    if len(judges) > 1:
        units = [[_side(votes.get(judge, [])) for judge in judges] for _, votes in judged]
        made.agreement["verdicts"] = agreement(units)
    shares = [(pair, _share([vote for given in votes.values() for vote, _ in given])) for pair, votes in judged]
    if strategy != "all":
        return _by_prompt(shares, strategy, margin, made, options)
    for pair, share in shares:
        if share is None:
            made.leave_out("no verdict", pair.row)
        elif share == 0.5:
            made.leave_out(TIED, pair.row)
        elif not abs(2 * share - 1) > margin:
            made.leave_out(WITHIN, pair.row)
        else:
            first, second = pair.answers if share > 0.5 else pair.answers[::-1]
            high = max(share, 1 - share)
            scores = {"score_chosen": high, "score_rejected": 1 - high}
            made.append({**pair.given, "chosen": first, "rejected": second, **scores, **pair.more})
    return made


def _add(compared: dict[tuple[str, frozenset[str]], _Compared], row: Any, index: int, made: Pairs) -> None:
    """Read one row into what was compared."""
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}; rows are dictionaries with two responses and a verdict")
    sides = next((pair for pair in SIDES if pair[0] in row and pair[1] in row), None)
    column = next((name for name in VERDICTS if name in row), None)
    if sides is None or column is None:
        what = "two responses, called response_a and response_b" if sides is None else "`verdict`"
        raise ValueError(f"has no {what}; it has {sorted(map(str, row))}")
    answers = (row[sides[0]], row[sides[1]])
    if any(is_empty(answer) for answer in answers):
        made.leave_out("empty responses", index)
        return
    for name, answer in zip(sides, answers, strict=True):
        check_answer(answer, f"`{name}`")
    votes = _votes(row[column], column)
    swapped = [-vote for vote in _votes(row.get(_SWAPPED), _SWAPPED)]
    keys = (answer_key(answers[0]), answer_key(answers[1]))
    if keys[0] == keys[1]:
        made.leave_out("identical responses", index)
        return
    given = {"prompt": row["prompt"]} if "prompt" in row else {}
    place = (answer_key(row.get("prompt")), frozenset(keys))
    if place not in compared:
        used = ("prompt", "judge", "chosen", "rejected", column, _SWAPPED, *sides)
        more = {name: value for name, value in row.items() if name not in used}
        compared[place] = _Compared(index, given, answers, keys, more)
    pair, judge = compared[place], str(row.get("judge", ""))
    if pair.keys != keys:  # the other way round: A is the second of the pair
        votes, swapped = [-vote for vote in votes], [-vote for vote in swapped]
    straight, turned = (pair.forward, pair.backward) if pair.keys == keys else (pair.backward, pair.forward)
    straight.setdefault(judge, []).extend(votes)
    if swapped:
        turned.setdefault(judge, []).extend(swapped)


def _votes(value: Any, column: str) -> list[int]:
    """1: A, -1: B, 0: a tie; none of None."""
    if isinstance(value, list | tuple):
        return [vote for entry in value for vote in _votes(entry, column)]
    if value is None:
        return []
    if isinstance(value, str):
        word = value.strip().removeprefix("[[").removesuffix("]]").strip().lower()
        for words, vote in ((_A, 1), (_B, -1), (_TIE, 0)):
            if word in words:
                return [vote]
    elif not isinstance(value, bool) and value in (0, 1):
        return [1 if value == 0 else -1]
    raise ValueError(f"has {value!r} as `{column}`; give A, B or tie, 0 (A) or 1 (B), or None for no verdict")


def _share(votes: Sequence[int]) -> float | None:
    """Of the votes that the first won, ties half; None without votes."""
    return (sum(votes) / len(votes) + 1) / 2 if votes else None


def _side(votes: Sequence[tuple[int, bool | None]]) -> int | None:
    """What most of a judge's votes say; None without votes."""
    total = sum(vote for vote, _ in votes)
    return (total > 0) - (total < 0) if votes else None


def _by_prompt(
    shares: Sequence[tuple[_Compared, float | None]],
    strategy: Strategy,
    margin: float,
    made: Pairs,
    options: dict[str, Any],
) -> Pairs:
    """Pairs or lists of all responses to a prompt, scored by the mean share that each won."""
    prompts: dict[str, dict[str, Any]] = {}
    firsts: list[int] = []
    for pair, share in shares:
        key = answer_key(pair.given.get("prompt")) if pair.given else f"{pair.row}"
        if key not in prompts:
            firsts.append(pair.row)
            prompts[key] = {**pair.given, **pair.more, "responses": {}, "scores": {}}
        shared = (share, None if share is None else 1 - share)
        for name, answer, won in zip(pair.keys, pair.answers, shared, strict=True):
            prompts[key]["responses"].setdefault(name, answer)
            prompts[key]["scores"].setdefault(name, []).append(won)
    rows = []
    for row in prompts.values():
        shares_won = [[share for share in given if share is not None] for given in row["scores"].values()]
        scores = [sum(given) / len(given) if given else None for given in shares_won]
        rows.append({**row, "responses": list(row["responses"].values()), "scores": scores})
    built = build_pairs(rows, strategy, margin, **options)
    made.extend(built)
    for reason, found in built.left_out.items():
        for index in found:
            made.leave_out(reason, firsts[index])
    for note, count in built.notes.items():
        made.note(note, count)
    return made
