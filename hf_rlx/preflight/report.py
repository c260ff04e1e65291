"""What was looked at, what was found, and what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "note", "problem"]

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        what: was looked at, e.g. "precision".
        found: in words.
        verdict: "ok"; "note": works, but worth knowing; "problem": the run fails, or learns nothing.
        fix: what to do; empty where there is nothing to do.
    """

    what: str
    found: str
    verdict: Verdict = "ok"
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.what}: {self.found}" + (f". Fix: {self.fix}" if self.fix else "")


@dataclass
class Report:
    """Findings in the order in which they were made. `print(report)` is plain text; rich prints a table.

    Attributes:
        findings: a line each.
    """

    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        """The findings that a run would fail by."""
        return [finding for finding in self.findings if finding.verdict == "problem"]

    @property
    def notes(self) -> list[Finding]:
        """The findings that are worth knowing."""
        return [finding for finding in self.findings if finding.verdict == "note"]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def add(self, findings: Finding | Iterable[Finding]) -> None:
        """Append one finding or several."""
        self.findings += [findings] if isinstance(findings, Finding) else list(findings)

    def summary(self) -> str:
        """One line: how many problems and notes."""
        if self.ok:
            return "no problems" + (f", {len(self.notes)} notes" if self.notes else "")
        return f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}, {len(self.notes)} notes"

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __str__(self) -> str:
        width = max((len(finding.what) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            head = f"{finding.verdict:<8} {finding.what:<{width}}  "
            lines.append(head + _wrapped(finding.found, len(head)))
            if finding.fix:
                lines.append(" " * len(head) + "-> " + _wrapped(finding.fix, len(head) + 3))
        return "\n".join([*lines, self.summary()])

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table("", "what", "found", "fix", caption=self.summary())
        for finding in self.findings:
            cells = (finding.verdict, finding.what, finding.found, finding.fix)
            # Text and not markup: a message may hold brackets.
            table.add_row(
                *(Text(cell, style=_STYLES[finding.verdict] if i == 0 else "") for i, cell in enumerate(cells))
            )
        return table


def _wrapped(text: str, indent: int) -> str:
    """`text` at 119 characters a line, lines after the first indented."""
    lines = textwrap.wrap(
        " ".join(text.split()), max(119 - indent, 40), break_long_words=False, break_on_hyphens=False
    )
    return ("\n" + " " * indent).join(lines)
