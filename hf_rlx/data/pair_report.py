"""From any preference data to pairs in one call, with a report of what happened. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from hf_rlx.data.pair_agreement import Agreement
from hf_rlx.data.pair_building import Pairs, Strategy, build_pairs
from hf_rlx.data.pair_filters import Keep, LengthBalance, Same, balance_lengths, deduplicate, length_balance
from hf_rlx.data.pair_formats import Form, convert, from_pairs, from_ultrafeedback
from hf_rlx.data.pair_judges import SIDES, VERDICTS, from_judgements
from hf_rlx.data.pair_sources import COMPLETIONS, LABELS, from_outcomes, from_rankings, from_ratings

Kind = Literal["pairs", "scores", "rankings", "ratings", "outcomes", "judge", "ultrafeedback"]

_SHOWN = 8  # rows of one reason


@dataclass(frozen=True)
class Step:
    """One thing that was done.

    Args:
        name: in words. rows_in, rows_out: before and after. left_out: reason -> indices of the rows before it.
        notes: what else was counted.
    """

    name: str
    rows_in: int
    rows_out: int
    left_out: dict[str, list[int]]
    notes: dict[str, int]


@dataclass
class PairReport:
    """What became of preference data.

    Args:
        kind: of the rows that came in. lists: whether the rows out are ranked lists. steps: in their order.
        balance: of the rows that came out. agreement: of several annotators, by what they judged.
    """

    kind: Kind
    lists: bool = False
    steps: list[Step] = field(default_factory=list)
    balance: LengthBalance | None = None
    agreement: dict[str, Agreement] = field(default_factory=dict)

    @property
    def rows_in(self) -> int:
        """Rows that came in."""
        return self.steps[0].rows_in if self.steps else 0

    @property
    def rows_out(self) -> int:
        """Pairs or lists that came out."""
        return self.steps[-1].rows_out if self.steps else 0

    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON; None where a number is undefined."""
        balance = self.balance and asdict(self.balance) | {
            "share_longer": self.balance.share_longer,
            "to_balance": self.balance.to_balance,
        }
        return _finite(
            {
                "kind": self.kind,
                "rows_in": self.rows_in,
                "rows_out": self.rows_out,
                "steps": [asdict(step) for step in self.steps],
                "length_balance": balance,
                "agreement": {name: asdict(found) for name, found in self.agreement.items()},
            }
        )

    def text(self, rows: bool = False) -> str:
        """For people.

        Args:
            rows: whether to name the first rows that were left out, by reason.
        """
        what = "ranked list" if self.lists else "pair"
        lines = [f"{_count(self.rows_in, 'row')} ({self.kind}) -> {_count(self.rows_out, what)}"]
        for number, step in enumerate(self.steps):
            lines.append(f"{step.name}: {step.rows_in:,} -> {step.rows_out:,}")
            lines += [f"  {count:,} {note}" for note, count in step.notes.items()]
            for reason, found in step.left_out.items():
                where = f" ({'row' if number == 0 else what}s {_some(found)})" if rows else ""
                lines.append(f"  {len(found):,} left out: {reason}{where}")
        if self.balance is not None and self.balance.pairs:
            lines += _balance_lines(self.balance, self.lists)
        for name, judged in self.agreement.items():
            lines += _agreement_lines(name, judged)
        return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _some(indices: Sequence[int]) -> str:
    more = ", ..." if len(indices) > _SHOWN else ""
    return ", ".join(map(str, indices[:_SHOWN])) + more


def _balance_lines(balance: LengthBalance, lists: bool) -> list[str]:
    equal = balance.pairs - balance.longer - balance.shorter
    against = "score" if balance.scored else "choice"
    tokens = balance.mean_difference_tokens
    lines = [
        f"length: chosen is the longer answer in {balance.share_longer:.1%} of {_count(balance.pairs, 'pair')} "
        f"({balance.longer:,} longer, {balance.shorter:,} shorter, {equal:,} equal)",
        f"  chosen minus rejected: {balance.mean_difference:+.1f} characters on average"
        + ("" if tokens is None else f", {tokens:+.1f} tokens"),
        f"  correlation of {against} and length: Pearson {_number(balance.pearson)}, "
        f"Spearman {_number(balance.spearman)}",
    ]
    if balance.to_balance and not lists:
        lines.append(f"  to balance: {_count(balance.to_balance, 'pair')} to drop")
    return lines


def _agreement_lines(name: str, found: Agreement) -> list[str]:
    kappas = [("Cohen's kappa", found.cohen), ("Fleiss' kappa", found.fleiss)]
    figures = [f"{what} {_number(value)}" for what, value in kappas if value is not None]
    figures.append(f"Krippendorff's alpha ({found.level}) {_number(found.krippendorff)}")
    percent = "undefined" if math.isnan(found.percent) else f"{found.percent:.1%}"
    return [
        f"agreement on {name}: {found.annotators} annotators, {found.units:,} judged by two or more",
        f"  the same: {percent}; {', '.join(figures)}",
    ]


def _number(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.3f}"


def _finite(value: Any) -> Any:
    """With None for every NaN."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def kind_of(row: Any) -> Kind:
    """What a row holds, by its columns.

    Raises:
        ValueError: nothing that is known; the message has the columns found and those of each kind.
    """
    columns = set(row) if isinstance(row, dict) else set()
    if {"chosen", "rejected"} <= columns:
        return "pairs"
    if any(a in columns and b in columns for a, b in SIDES) and columns & set(VERDICTS):
        return "judge"
    if {"instruction", "completions"} <= columns:
        return "ultrafeedback"
    if "responses" in columns:
        by: dict[str, Kind] = {"scores": "scores", "ratings": "ratings", "ranks": "rankings", "ranking": "rankings"}
        found = next((kind for name, kind in by.items() if row.get(name) is not None), None)
        if found is not None:
            return found
    if "rating" in columns and columns & set(COMPLETIONS):
        return "ratings"
    if columns & set(COMPLETIONS) and columns & set(LABELS):
        return "outcomes"
    has = f"has the columns {sorted(map(str, columns))}" if isinstance(row, dict) else f"is a {type(row).__name__}"
    raise ValueError(
        f"row 0 {has}, which is none of: pairs (chosen, rejected), scores (responses, scores), rankings (responses, "
        "ranks or ranking), ratings (responses, ratings; or response, rating, annotator), outcomes (prompt, "
        "completion, label), judge (response_a, response_b, verdict), ultrafeedback (instruction, completions); "
        "rename the columns"
    )


def prepare_pairs(
    rows: Iterable[dict[str, Any]],
    kind: Kind | Literal["auto"] = "auto",
    *,
    strategy: Strategy | None = None,
    margin: float = 0.0,
    dedupe: Same | None = None,
    duplicates: Keep = "drop",
    contradictions: Keep = "drop",
    balance: bool = False,
    seed: int = 0,
    forms: Sequence[Form] = (),
    standardise: bool = False,
    by: str | None = None,
    max_pairs: int | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> tuple[Pairs, PairReport]:
    """Read, pair, clean and weigh preference data of any kind.

    Args:
        rows: see the functions that `hf_rlx.data.pairs` lists. kind: which of them; "auto": by the columns of row 0.
        strategy, margin, max_pairs: see `build_pairs`; None: "all" of judges, else "best_worst".
        dedupe, duplicates, contradictions: see `deduplicate`; None: repeated rows stay.
        balance, seed: see `balance_lengths`. forms: see `convert`, one after another.
        standardise: see `from_ratings`. by: see `from_outcomes`. count_tokens: see `length_balance`.

    Returns:
        rows for a trainer, and the report.

    Raises:
        ValueError: no rows, an unknown kind or option, or as the function of the kind, by the row's index.
    """
    found = list(rows)
    if not found:
        raise ValueError("there are no rows")
    if kind not in ("auto", *get_args(Kind)):
        raise ValueError(f"the kind is one of auto, {', '.join(get_args(Kind))}, got {kind!r}")
    known: Kind = kind_of(found[0]) if kind == "auto" else kind
    for given, option, needed in ((standardise, "standardise", "ratings"), (by, "by", "outcomes")):
        if given and known != needed:
            raise ValueError(f"{option} is for {needed}, but the rows are {known}")
    used = strategy or ("all" if known == "judge" else "best_worst")
    if max_pairs is not None and (known == "pairs" or used != "all"):
        raise ValueError('max_pairs is for the strategy "all", which makes several pairs of a prompt')
    made = _made(found, known, strategy, margin, max_pairs, standardise, by)
    report = PairReport(known, lists=strategy == "ranked", agreement=made.agreement)
    _record(report, f"{'checked' if known == 'pairs' else used}, margin {margin:g}", made)
    if dedupe is not None:
        made = deduplicate(made, dedupe, duplicates=duplicates, contradictions=contradictions)
        _record(report, f"repeats and contradictions, {dedupe} texts", made)
    if balance:
        made = balance_lengths(made, seed)
        _record(report, f"balanced by length, seed {seed}", made)
    for form in forms:
        made = convert(made, form)
        _record(report, f"as {form}", made)
    report.balance = length_balance(made, count_tokens)
    return made, report


def _made(
    rows: list[dict[str, Any]],
    kind: Kind,
    strategy: Strategy | None,
    margin: float,
    max_pairs: int | None,
    standardise: bool,
    by: str | None,
) -> Pairs:
    """Pairs or lists of one kind of rows."""
    if kind == "pairs":
        if strategy == "ranked":
            raise ValueError("the rows are pairs; lists are made of rows with responses and scores or ranks")
        return from_pairs(rows, margin)
    if kind == "judge":
        return from_judgements(rows, strategy or "all", margin, max_pairs=max_pairs)
    way: Strategy = strategy or "best_worst"
    if kind == "rankings":
        return from_rankings(rows, way, margin, max_pairs=max_pairs)
    if kind == "ratings":
        return from_ratings(rows, way, margin, standardise=standardise, max_pairs=max_pairs)
    if kind == "outcomes":
        return from_outcomes(rows, way, margin, by=by, max_pairs=max_pairs)
    columns = ["models"] if kind == "ultrafeedback" else []
    rows = list(from_ultrafeedback(rows)) if kind == "ultrafeedback" else rows
    return build_pairs(rows, way, margin, max_pairs=max_pairs, response_columns=columns)


def _record(report: PairReport, name: str, made: Pairs) -> None:
    report.steps.append(Step(name, made.rows_in, len(made), made.left_out, made.notes))
