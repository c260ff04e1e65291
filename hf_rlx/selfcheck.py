"""Run a verifier over answers whose right verdict is known: `hf-rlx verify FILE`."""

from __future__ import annotations

import importlib
import inspect
import json
import re
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
_OPEN = ("either", "open")  # words for an expected verdict that nobody knows
_AS_WRITTEN = {
    "pattern",
    "task_name",
    "column",
    "name",
    "prefill",
    "ignore",
}  # options that are text whatever is in it

Reward = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class Known:
    """A verifier that can be named.

    Args:
        where: module under `hf_rlx.verifiers` and class.
        reads: what of a row it reads, for people.
        columns: attributes of the class that name the columns it reads; a gold answer goes under several names.
        needs: options that have to be given.
    """

    where: str
    reads: str
    columns: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def by_gold(self) -> bool:
        """Whether it compares with a gold answer."""
        return self.where.startswith(("math", "numbers"))


VERIFIERS: dict[str, Known] = {
    "math": Known("math:MathVerifier", f"a gold answer, called {', '.join(GOLDS)}"),
    "number": Known("numbers:NumberVerifier", "a gold answer, likewise"),
    "code": Known("code:CodeVerifier", "tests", ("column",)),
    "countdown": Known("countdown:CountdownVerifier", "numbers, target", ("numbers_column", "target_column")),
    "nim": Known("nim:NimVerifier", "state", ("column",)),
    "reasoning_gym": Known(
        "reasoning_gym:ReasoningGymVerifier", "metadata; needs --option task_name=...", ("column",), ("task_name",)
    ),
    "regex": Known("format:RegexVerifier", "prompt, if it is there; needs --option pattern=...", (), ("pattern",)),
    "tags": Known("format:TagVerifier", 'prompt, if it is there; --option \'tags=["think", "answer"]\''),
    "json": Known("format:JsonVerifier", "nothing; --option 'schema={...}', or --option column=schema", ("column",)),
    "coq": Known("proof:CoqVerifier", "statement; theorem and header if they are there", ("column",)),
    "lean": Known("proof:LeanVerifier", "statement; theorem and header if they are there", ("column",)),
}
"""What `--verifier` takes."""


def verifier_named(name: str, options: dict[str, Any] | None = None) -> Reward:
    """The verifier of a name.

    Args:
        name: one of `VERIFIERS`. options: what its class takes.

    Raises:
        ValueError: no such verifier or option, one that is missing, or one that the class refuses.
        ImportError, RuntimeError: it cannot work here; the message says what is missing.
    """
    if name not in VERIFIERS:
        raise ValueError(f"no verifier is called {name!r}; there are {', '.join(VERIFIERS)}")
    known, options = VERIFIERS[name], options or {}
    module, _, cls = known.where.partition(":")
    make = getattr(importlib.import_module(f"hf_rlx.verifiers.{module}"), cls)
    takes = inspect.signature(make).parameters
    more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    if unknown := [option for option in options if option not in takes and not more]:
        raise ValueError(f"the verifier {name} has no option {unknown[0]!r}; it has {', '.join(takes)}")
    if missing := [option for option in known.needs if option not in options]:
        raise ValueError(f"the verifier {name} needs --option {missing[0]}=...")
    try:
        verifier: Reward = make(**options)
    except (TypeError, re.error) as error:
        raise ValueError(f"the verifier {name} refuses its options: {error}") from error
    return verifier


def read_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options from `key=value` texts; a value is read as JSON where it is JSON, else it is the text.

    Raises:
        ValueError: one has no `=`.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--option takes key=value, not {text!r}")
        key = key.strip().replace("-", "_")
        options[key] = value
        if key not in _AS_WRITTEN:
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                continue  # text
    return options


@dataclass(frozen=True)
class Item:
    """One line of the file, judged.

    Args:
        line: its number, from 1.
        row: what stands there. completion: its text.
        expected: the verdict that the file gives; None where it leaves it open.
        verdict: ours.
        seconds: that the verdict took.
    """

    line: int
    row: dict[str, Any]
    completion: str
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
            if (gold := next((name for name in GOLDS if name in item.row), None)) is not None:
                print(f"  gold {str(item.row[gold])[-_SHOWN:]!r}", file=to)
            print(f"  completion ends {end!r}", file=to)
        hidden = len(self.disagreements) - show
        if hidden > 0:
            print(f"\n{hidden} more disagreements; --show {len(self.disagreements)} lists all", file=to)
        print("\nslowest:", file=to)
        for item in sorted(self.items, key=lambda item: -item.seconds)[:slowest]:
            print(f"  {1000 * item.seconds:8.1f} ms  line {item.line}: {item.verdict.reason}", file=to)

    def write(self, path: Path) -> None:
        """The disagreements as JSONL: each row as it stood, with `line`, `verdict`, `reason` and `seconds`.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("w", encoding="utf-8") as file:
            for item in self.disagreements:
                ours = {"line": item.line, "verdict": item.verdict.outcome, "reason": item.verdict.reason}
                print(json.dumps({**item.row, **ours, "seconds": round(item.seconds, 4)}), file=file)


class Row(dict[str, Any]):
    """A row that knows its line."""

    line = 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no JSON object; the message names it.
    """
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is no JSON: {error}; write one object a line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} is no JSON object; write one a line, {{...}}")
        row = Row(row)
        row.line = number
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
            raise ValueError(f"{path}:{_line(row, 0)} has no field {there or here!r}; name it with --on HERE=THERE")
        partners[row[there or here]] = row
    filled: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        partner = partners.get(row.get(here))
        if partner is None:
            raise ValueError(f"line {_line(row, number)} has no partner in {path} with the same {here!r}")
        new = Row({**row, "gold": _first(partner, GOLDS, _line(partner, 0))})
        new.line = _line(row, number)
        filled.append(new)
    return filled


def self_check(rows: Sequence[dict[str, Any]], verifier: Reward, name: str = "math") -> SelfCheck:
    """Judge every row.

    Args:
        rows: with a completion (`completion`, `prediction` or `response`: text, or messages), what the verifier reads
            (see `VERIFIERS`) and, where it is known, the right verdict (`expected`, `right`, `label` or `is_correct`:
            true or false, 1 or 0; missing, null or "either" leave it open).
        verifier: of `verifier_named`; a reward of 1 means right, none no verdict, everything else wrong.
        name: its name.

    Raises:
        ValueError: a row lacks something or holds what cannot be read; the message names its line.
        RuntimeError: the verifier does not work.
    """
    from hf_rlx.verifiers.text import completion_text

    known = VERIFIERS[name]
    needs = [column for a in known.columns if (column := getattr(verifier, a)) is not None]
    gold = (getattr(verifier, "column", None) or "answer") if known.by_gold else None
    report = SelfCheck()
    for number, row in enumerate(rows, start=1):
        line = _line(row, number)
        completion = _first(row, COMPLETIONS, line)
        columns = dict(row)
        if gold is not None:
            columns[gold] = row[gold] if gold != "answer" and gold in row else _first(row, GOLDS, line)
        if missing := [column for column in needs if column not in row]:
            raise ValueError(
                f"line {line} has no field {missing[0]!r}, which the verifier {name} reads: {known.reads}"
            )
        expected = _expected(row, line)
        reasons: dict[str, list[Any]] = {}
        passed = {key: [value] for key, value in columns.items() if key not in ("prompts", "completions", "prompt")}
        start = time.perf_counter()
        try:
            text = completion_text(completion)
            reward = verifier([row.get("prompt", "")], [completion], **passed, log_extra=reasons.__setitem__)[0]
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {line}: {error}") from error
        seconds = time.perf_counter() - start
        reason = next((str(v[0]) for key, v in reasons.items() if key.endswith("/reason")), f"reward {reward}")
        outcome: Outcome = "failed" if reward is None else "right" if reward == 1 else "wrong"
        report.items.append(Item(line, row, text, expected, Verdict(outcome, reason), seconds))
    return report


def _line(row: dict[str, Any], number: int) -> int:
    return row.line if isinstance(row, Row) else number


def _expected(row: dict[str, Any], line: int) -> bool | None:
    name = next((name for name in EXPECTED if name in row), None)
    value = None if name is None else row[name]
    if value is None or (isinstance(value, str) and value in _OPEN):
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(
        f"line {line}: {name} is {value!r}, which is no verdict; write true or false (1 or 0), or null where nobody "
        "knows"
    )


def _first(row: dict[str, Any], names: Sequence[str], line: int) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"line {line} has none of the fields {', '.join(names)}; rename the one that is meant")
