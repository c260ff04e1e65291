"""The calculations inside a solution: `3 + 4 = 7`, `<<48/2=24>>`, `2*3 = 6 = 12/2`. Each is checked exactly."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from hf_rlx.verifiers.exact import TooLarge, exact
from hf_rlx.verifiers.latex import read
from hf_rlx.verifiers.latex_tokens import normalise
from hf_rlx.verifiers.latex_tree import NotReadable
from hf_rlx.verifiers.text import Completion, completion_text
from hf_rlx.verifiers.verdict import Verdict

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_PART = re.compile(
    r"(?P<note><<[^<>\n]{0,200}>>)"
    rf"|(?P<number>{_NUMBER}|\\[dt]?frac\{{ *-?(?:{_NUMBER}) *\}}\{{ *-?(?:{_NUMBER}) *\}})"
    r"|(?P<equals>(?<![<>!=:])={1,2}(?![=>]))"
    r"|(?P<operator>\*\*|[-+*/^\N{MULTIPLICATION SIGN}÷·⋅\N{MINUS SIGN}]|\\times\b|\\cdot\b|\\div\b)"
    r"|(?P<mark>\\[()\[\]])|(?P<open>\()|(?P<close>\))|(?P<percent>\\?%)|(?P<money>\\?\$|[€£])"
    r"|(?P<space>[ \t]+)|(?P<word>[A-Za-z]+)|(?P<other>.)",
    re.DOTALL,
)
MAX_LENGTH = 200_000
"""Characters of a solution; calculations that end behind them are not read, for reading takes some 3 s a million."""
_MAX_SIDE = 200  # characters; a longer one is no step that anybody could follow
_PLACES = 10  # a rounded number with more decimals is a calculator's, good to fewer than it shows
_VALUES = ("number", "close", "percent")


@dataclass(frozen=True)
class StepCheck:
    """One calculation of a solution.

    Args:
        start, end: where it stands, in characters: `text[start:end]` is `3 + 4 = 7`.
        expression: the left side, as written.
        claimed: the right side, as written.
        verdict: right or wrong, never failed; the reason of a wrong one names the true value.
    """

    start: int
    end: int
    expression: str
    claimed: str
    verdict: Verdict


class _Part(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class _Side(NamedTuple):
    start: int
    end: int
    computes: bool  # it has an operator
    whole: bool  # nothing is missing at its ends


def check_steps(text: str, rounding: bool = False) -> list[StepCheck]:
    """Every calculation in a text, in order of its end. Linear in the length of the text.

    Chains give one check for each equals sign. Equations with variables are no calculations, and what is written in
    prose beside an annotation `<<...>>` that says the same is not checked twice.

    Args:
        text: a solution, of which `MAX_LENGTH` characters are read.
        rounding: accept a claimed decimal that is the true value rounded to the digits that are written, as in
            `10/3 = 3.33`.
    """
    text = text[:MAX_LENGTH]
    if "=" not in text:
        return []
    found: list[StepCheck] = []
    runs: list[list[_Part]] = [[]]
    noted: set[tuple[object, object]] = set()
    for part in _parts(text):
        if part.kind == "note":
            inside = _parts(text[part.start + 2 : part.end - 2], part.start + 2)
            checks = list(_checks(text, list(inside), rounding))
            noted.update(map(_said, checks))
            found += checks
        elif part.kind in ("word", "other"):
            runs.append([part])  # its first part says what stands before the run
        else:
            runs[-1].append(part)
    for index, run in enumerate(runs):
        follower = runs[index + 1][0] if index + 1 < len(runs) else None
        for check in _checks(text, run, rounding, follower):
            beside = "<<" in text[check.start : check.end]
            if not (beside and _said(check) in noted):
                found.append(check)
    return sorted(found, key=lambda check: (check.end, check.start))


def _parts(text: str, offset: int = 0) -> Iterator[_Part]:
    """The text in parts; `x` between two numbers and "of" behind a percent sign are multiplications."""
    before = _Part("other", "", 0, 0)
    for match in _PART.finditer(text):
        kind = "other" if match.lastgroup == "mark" else str(match.lastgroup)
        part = _Part(kind, match.group(), match.start() + offset, match.end() + offset)
        if kind == "word":
            rest = text[match.end() : match.end() + 4].lstrip(" ")
            ahead = bool(rest) and (rest[0].isdigit() or rest[0] in "($.")
            if ahead and (
                (part.text in "xX" and before.kind in _VALUES) or (part.text == "of" and before.kind == "percent")
            ):
                part = part._replace(kind="operator")
        if part.text == "**" and not (
            before.kind in _VALUES and re.match(r" *[\d(.]", text[match.end() : match.end() + 3])
        ):
            part = part._replace(kind="other")  # Markdown
        if kind != "space":
            before = part
        yield part


def _checks(text: str, run: list[_Part], rounding: bool, follower: _Part | None = None) -> Iterator[StepCheck]:
    sides = list(_sides(text, run, follower))
    if not any(side.computes for side in sides):
        return
    for left, right in itertools.pairwise(sides):
        if not (left.whole and right.whole):
            continue
        expression, claimed = (_shown(text[s.start : s.end]) for s in (left, right))
        verdict = _verdict(expression, claimed, rounding)
        if verdict is not None:
            yield StepCheck(left.start, right.end, expression, claimed, verdict)


def _said(check: StepCheck) -> tuple[object, object]:
    """What tells a calculation from another: its two values, or their texts where they are too large."""
    try:
        return _value(check.expression), _value(check.claimed)
    except TooLarge:
        return check.expression, check.claimed


def _shown(side: str) -> str:
    return re.sub(r"<<[^<>\n]*>>", "", side).strip()


def _sides(text: str, run: list[_Part], follower: _Part | None) -> Iterator[_Side]:
    """What stands between the equals signs of a run. Its first part may be the word before it."""
    leader = run[0] if run and run[0].kind in ("word", "other") else None
    body = [part for part in run if part is not leader]
    groups: list[list[_Part]] = [[]]
    for part in body:
        if part.kind == "equals":
            groups.append([])
        else:
            groups[-1].append(part)
    for index, group in enumerate(groups):
        first, last = index == 0, index == len(groups) - 1
        solid = [part for part in group if part.kind not in ("space", "note")]
        if not solid:
            yield _Side(0, 0, False, False)
            continue
        start = _restart(solid) if first else 0
        # An opening currency sign or bracket of mark-up at the very end belongs to what follows.
        while len(solid) > start and solid[-1].kind in ("money", "open"):
            solid.pop()
        if not last and any(_apart(a, b, c) for a, b, c in _triples(solid[start:])):
            yield _Side(0, 0, False, False)
            continue
        stop = _stop(solid) if last else len(solid)
        kept = solid[start:stop]
        if not kept:
            yield _Side(0, 0, False, False)
            continue
        whole = True
        if first and start == 0 and leader is not None:
            whole = _begins(text, leader, kept)
        elif first and start > 0:
            whole = not re.fullmatch(r"\d{3}", kept[0].text)  # the end of 350 000
        if last and stop == len(solid) and follower is not None:
            whole = whole and _finishes(text, kept[-1], follower)
        computes = any(part.kind == "operator" for part in kept[1:]) or "frac" in text[kept[0].start : kept[-1].end]
        yield _Side(kept[0].start, kept[-1].end, computes, whole and kept[-1].kind in _VALUES)


def _triples(parts: list[_Part]) -> Iterator[tuple[_Part, _Part, str]]:
    for index in range(len(parts) - 1):
        yield parts[index], parts[index + 1], parts[index + 2].text if index + 2 < len(parts) else ""


def _apart(left: _Part, right: _Part, then: str) -> bool:
    """Two values side by side belong to two calculations, except in a mixed number: `2 1/2`."""
    side_by_side = left.kind in _VALUES and right.kind in ("number", "money")
    return side_by_side and not (left.kind == right.kind == "number" and then == "/" and left.text.isdigit())


def _restart(parts: list[_Part]) -> int:
    """Where the last calculation of the parts begins."""
    cuts = [i + 1 for i, (a, b, c) in enumerate(_triples(parts)) if _apart(a, b, c)]
    return cuts[-1] if cuts else 0


def _stop(parts: list[_Part]) -> int:
    """Where the first calculation of the parts ends."""
    return next((i + 1 for i, (a, b, c) in enumerate(_triples(parts)) if _apart(a, b, c)), len(parts))


def _begins(text: str, leader: _Part, parts: list[_Part]) -> bool:
    """Whether the first side is complete: no variable or operator is cut off in front of it."""
    first = parts[0]
    if leader.kind == "word" and leader.end == first.start:
        return False  # x2 = 3
    if leader.text == "," and text[: leader.start][-1:].isdigit() and re.fullmatch(r"\d{3}", first.text):
        return False  # 350, 000
    if first.kind == "operator":
        negative = first.text in "-\N{MINUS SIGN}" and len(parts) > 1 and first.end == parts[1].start
        return negative and (leader.end < first.start or (leader.kind == "other" and leader.text not in "]}|!"))
    return leader.text not in ("<", ">", "\\", "_", "{", "[", "|", "≈", "≤", "≥")


def _finishes(text: str, last: _Part, follower: _Part) -> bool:
    """Whether the last side is complete: no variable is multiplied to its end."""
    if last.end != follower.start:
        return True
    if follower.kind == "word":
        return len(follower.text) > 1
    return follower.text not in ("_", "{", "!", "[", "|", "\\")


@functools.lru_cache(maxsize=1024)
def _value(side: str) -> Fraction | None:
    if len(side) > _MAX_SIDE:
        return None
    side = re.sub(r"(?<=[\d%)])\s*[xX]\s*(?=[\d($.])", "*", side)
    side = re.sub(r"%\s*of\b", "% *", side).replace("**", "^")
    side = re.sub(r"\\?\$|[€£]", "", side)
    try:
        return exact(read(normalise(side)))
    except NotReadable:
        return None


def _verdict(expression: str, claimed: str, rounding: bool) -> Verdict | None:
    try:
        true, said = _value(expression), _value(claimed)
    except TooLarge as reason:
        return Verdict("wrong", str(reason))
    if true is None or said is None:
        return None
    if true == said:
        return Verdict("right", "equal")
    if rounding:
        digits = re.fullmatch(r"[^\d.]*[\d,]*\.?(\d*)\s*%?[^\d]*", claimed)
        places = min(len(digits[1]), _PLACES) + 2 * ("%" in claimed) if digits else 0
        if digits and abs(true - said) <= Fraction(1, 2 * 10**places):
            return Verdict("right", "equal when rounded")
    return Verdict("wrong", f"it is {_plain(true)}")


def _plain(value: Fraction) -> str:
    """As a decimal where that is short and exact, else as a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    decimal = f"{float(value):.10g}"
    exactly = "e" not in decimal and Fraction(decimal) == value
    return decimal if exactly else f"{value.numerator}/{value.denominator}"


class CalculationSteps:
    """Step reward function: a step ends with each calculation in a completion and is worth whether it is right.

    For `step_reward_funcs` of `GRPOTrainer`.

    Args:
        right, wrong: rewards of a step.
        rounding: see `check_steps`.
        name: name under which the rewards are logged.

    >>> CalculationSteps()(["?"], ["2 + 2 = 4"])
    [[(9, 1.0)]]
    """

    def __init__(
        self, right: float = 1.0, wrong: float = 0.0, *, rounding: bool = False, name: str = "calculations"
    ) -> None:
        self.right = right
        self.wrong = wrong
        self.rounding = rounding
        self.__name__ = name

    def __call__(
        self,
        prompts: list[Completion],
        completions: list[Completion],
        log_extra: Callable[[str, list], None] | None = None,
        **columns: Any,
    ) -> list[list[tuple[int, float]]]:
        """For each completion its steps: (end in characters of its text, reward); none where nothing is calculated.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: plain strings, or message lists whose last assistant message is judged.
            log_extra: gets the column `<name>/first_wrong`, the first wrong calculation of each completion.
            columns: not read.
        """
        texts = [completion_text(completion) for completion in completions]
        checks = [check_steps(text, self.rounding) for text in texts]
        if log_extra is not None:
            wrong = [[c for c in row if c.verdict.outcome == "wrong"] for row in checks]
            log_extra(
                f"{self.__name__}/first_wrong",
                [text[row[0].start : row[0].end] if row else "" for text, row in zip(texts, wrong, strict=True)],
            )
        return [self._steps(row) for row in checks]

    def _steps(self, checks: list[StepCheck]) -> list[tuple[int, float]]:
        """One step for each end; a wrong calculation that ends there makes it wrong."""
        steps: dict[int, float] = {}
        for check in checks:
            reward = self.right if check.verdict.outcome == "right" else self.wrong
            steps[check.end] = min(reward, steps.get(check.end, reward)) if self.wrong <= self.right else reward
        return list(steps.items())
