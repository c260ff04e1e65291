"""Run a verifier over answers whose right verdict is known: `hf-rlx verify FILE`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hf_rlx.verifiers.verdict import Outcome, Verdict

COMPLETIONS = ("completion", "prediction", "response")
GOLDS = ("gold", "answer", "solution", "final")
EXPECTED = ("expected", "right", "label", "is_correct")
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "failed")
_SHOWN = 160  # characters of a completion's end in the list of disagreements

Judge = Callable[[str, Any], Verdict]


def _math(**options: Any) -> Judge:
    from hf_rlx.verifiers.math import MathVerifier

    return MathVerifier(**options).judge


def _number(extract: str = "last") -> Judge:
    from hf_rlx.verifiers.numbers import NumberVerifier

    verifier = NumberVerifier(extract)  # type: ignore[arg-type]

    def judge(completion: str, gold: Any) -> Verdict:
        reward = verifier([""], [completion], **{verifier.column: [gold]})[0]
        return Verdict("failed" if reward is None else "right" if reward else "wrong")

    return judge


VERIFIERS: dict[str, Callable[..., Judge]] = {"math": _math, "number": _number}


@dataclass(frozen=True)
class Item:
    """One line of the file, judged.

    Args:
        line: its number, from 1.
        completion, gold: what was judged.
        expected: the verdict that the file gives; None where it leaves it open (no field, null, or any text).
        verdict: ours.
        seconds: that the verdict took.
    """

    line: int
    completion: str
    gold: Any
    expected: bool | None
    verdict: Verdict
    seconds: float

    @property
    def disagrees(self) -> bool:
        """No verdict is a disagreement too."""
        return self.expected is not None and self.verdict.reward != float(self.expected)


@dataclass
class SelfCheck:
    """The items of a file, and what to say about them."""

    items: list[Item] = field(default_factory=list)

    @property
    def disagreements(self) -> list[Item]:
        """Items whose verdict is another than expected."""
        return [item for item in self.items if item.disagrees]

    def table(self) -> str:
        """The confusion table: our verdicts in rows, expected ones in columns."""
        counts = Counter((item.verdict.outcome, item.expected) for item in self.items)
        columns: list[tuple[str, bool | None]] = [("right", True), ("wrong", False), ("open", None)]
        lines = ["expected   " + "".join(f"{name:>10}" for name, _ in columns)]
        lines += [f"is {row:<8}" + "".join(f"{counts[row, key]:>10}" for _, key in columns) for row in OUTCOMES]
        known = sum(item.expected is not None for item in self.items)
        if known:
            agreed = known - len(self.disagreements)
            lines.append(f"agreement  {agreed} of {known} ({100 * agreed / known:.2f} %)")
        return "\n".join(lines)

    def print(self, to: TextIO, show: int = 20, slowest: int = 5) -> None:
        """Table, the first `show` disagreements and the `slowest` items."""
        print(self.table(), file=to)
        for item in self.disagreements[:show]:
            end = item.completion[-_SHOWN:]
            expected = "right" if item.expected else "wrong"
            print(f"\nline {item.line}: expected {expected}, {item.verdict.outcome} ({item.verdict.reason})", file=to)
            print(f"  gold {str(item.gold)[-_SHOWN:]!r}\n  completion ends {end!r}", file=to)
        hidden = len(self.disagreements) - show
        if hidden > 0:
            print(f"\n{hidden} more disagreements; --show {len(self.disagreements)} lists all", file=to)
        print("\nslowest:", file=to)
        for item in sorted(self.items, key=lambda item: -item.seconds)[:slowest]:
            print(f"  {1000 * item.seconds:8.1f} ms  line {item.line}: {item.verdict.reason}", file=to)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no JSON object; the message names it.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} is no JSON object")
        rows.append(row)
    return rows


def with_gold(rows: Sequence[dict[str, Any]], path: Path, on: str) -> list[dict[str, Any]]:
    """The rows with the gold answers of another file.

    Args:
        rows: to be filled.
        path: JSONL file with the gold answers.
        on: "here=there": the fields whose values must be equal; one name where both are called the same.

    Raises:
        ValueError: a row has no partner, or the field is missing.
    """
    here, _, there = on.partition("=")
    partners = {}
    for row in read_rows(path):
        if (there or here) not in row:
            raise ValueError(f"{path} has rows without the field {there or here!r}")
        partners[row[there or here]] = row
    filled = []
    for number, row in enumerate(rows, start=1):
        partner = partners.get(row.get(here))
        if partner is None:
            raise ValueError(f"row {number} has no partner in {path} with the same {here!r}")
        filled.append({**row, "gold": _first(partner, GOLDS, number)})
    return filled


def self_check(rows: Sequence[dict[str, Any]], judge: Judge) -> SelfCheck:
    """Judge every row.

    Args:
        rows: with a completion (`completion`, `prediction` or `response`: text, or messages), a gold answer (`gold`,
            `answer`, `solution` or `final`) and, where it is known, the right verdict (`expected`, `right`, `label` or
            `is_correct`: true or false, 1 or 0).
        judge: gives the verdict on a completion and a gold answer.

    Raises:
        ValueError: a row lacks one of the two.
    """
    from hf_rlx.verifiers.text import completion_text

    report = SelfCheck()
    for number, row in enumerate(rows, start=1):
        completion = completion_text(_first(row, COMPLETIONS, number))
        gold = _first(row, GOLDS, number)
        given = next((row[name] for name in EXPECTED if name in row), None)
        start = time.perf_counter()
        verdict = judge(completion, gold)
        seconds = time.perf_counter() - start
        expected = bool(given) if isinstance(given, bool | int | float) else None
        report.items.append(Item(number, completion, gold, expected, verdict, seconds))
    return report


def _first(row: dict[str, Any], names: Sequence[str], number: int) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"row {number} has none of the fields {', '.join(names)}")
