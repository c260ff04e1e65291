"""How far annotators agree: percent agreement, Cohen's and Fleiss' kappa, Krippendorff's alpha.

A table has one row a thing that was judged (a unit) and one column an annotator, None where there is no judgement.

    percent agreement   share of the pairs of annotators of a unit that say the same, mean over the units
    Cohen's kappa       (p - e) / (1 - e), p: share that both say the same, e: expected of their own frequencies
    Fleiss' kappa       the same of n annotators a unit, e of the pooled frequencies
    Krippendorff's alpha  1 - Do / De, observed and expected disagreement; any number of annotators, gaps allowed

Cohen, "A coefficient of agreement for nominal scales", 1960. Fleiss, "Measuring nominal scale agreement among many
raters", 1971. Krippendorff, "Computing Krippendorff's alpha-reliability", 2011.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Level = Literal["nominal", "ordinal", "interval"]
Table = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Agreement:
    """Agreement of annotators on one kind of judgement. NaN: undefined, as where all say the same throughout.

    Args:
        annotators: their number. units: things that two or more of them judged.
        level: of the judgements: names, ranks or numbers.
        percent: see `percent_agreement`, in [0, 1].
        cohen: of exactly two annotators, over the units that both judged; else None.
        fleiss: where every unit has the same number of judgements; else None.
        krippendorff: at `level`.
    """

    annotators: int
    units: int
    level: Level
    percent: float
    cohen: float | None
    fleiss: float | None
    krippendorff: float


def agreement(table: Table, level: Level = "nominal") -> Agreement:
    """All that can be said of one table.

    Args:
        table: U units of A judgements, None where there is none. level: see `krippendorff_alpha`.

    Raises:
        ValueError: rows of different length, one annotator, an unknown level, a judgement that does not fit it.
    """
    rows = _checked(table)
    judged = [[value for value in row if value is not None] for row in rows]
    several = [row for row in judged if len(row) > 1]
    annotators = len(rows[0]) if rows else 0
    both = [row for row in rows if annotators == 2 and None not in row]
    sizes = {len(row) for row in several}
    return Agreement(
        annotators=annotators,
        units=len(several),
        level=level,
        percent=percent_agreement(rows),
        cohen=cohen_kappa([row[0] for row in both], [row[1] for row in both]) if annotators == 2 else None,
        fleiss=fleiss_kappa(several) if len(sizes) == 1 else None,
        krippendorff=krippendorff_alpha(rows, level),
    )


def percent_agreement(table: Table) -> float:
    """Share of the pairs of annotators of a unit that say the same, mean over the units with two or more.

    Returns:
        in [0, 1]; NaN without such a unit.
    """
    shares = []
    for row in _checked(table):
        counts = Counter(value for value in row if value is not None)
        n = sum(counts.values())
        if n > 1:
            shares.append(sum(c * (c - 1) for c in counts.values()) / (n * (n - 1)))
    return sum(shares) / len(shares) if shares else math.nan


def cohen_kappa(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Cohen's kappa of two annotators, unweighted.

    Args:
        first, second: their judgements of the same units, in the same order.

    Returns:
        1: always the same, 0: as by chance; NaN without units, or where both always say one same thing.

    Raises:
        ValueError: of different length, or a missing judgement.
    """
    if len(first) != len(second):
        raise ValueError(f"two annotators judge the same units, got {len(first)} and {len(second)} judgements")
    if any(value is None for value in (*first, *second)):
        raise ValueError("Cohen's kappa takes no missing judgements; leave those units out, or use krippendorff_alpha")
    n = len(first)
    if not n:
        return math.nan
    same = sum(a == b for a, b in zip(first, second, strict=True))
    left, right = Counter(first), Counter(second)
    chance = sum(left[value] * right[value] for value in left)  # over n * n
    return math.nan if chance == n * n else (same * n - chance) / (n * n - chance)


def fleiss_kappa(table: Table) -> float:
    """Fleiss' kappa of n annotators a unit; they need not be the same ones.

    Returns:
        1: always the same, 0: as by chance; NaN without units, or where all always say one same thing.

    Raises:
        ValueError: units with different numbers of judgements, or with fewer than two.
    """
    rows = [[value for value in row if value is not None] for row in table]
    if not rows:
        return math.nan
    n = len(rows[0])
    for index, row in enumerate(rows):
        if len(row) != n or n < 2:
            raise ValueError(
                f"unit {index} has {len(row)} judgements; Fleiss' kappa needs the same number of each, at least 2. "
                "With gaps use krippendorff_alpha"
            )
    observed = percent_agreement(rows)
    pooled = Counter(value for row in rows for value in row)
    chance = sum((count / (n * len(rows))) ** 2 for count in pooled.values())
    return math.nan if len(pooled) == 1 else (observed - chance) / (1 - chance)


def krippendorff_alpha(table: Table, level: Level = "nominal") -> float:
    """Krippendorff's alpha; units with fewer than two judgements do not count.

    Args:
        table: U units of A judgements, None where there is none.
        level: of the difference of two judgements c and k:
            "nominal": 0 if equal, else 1.
            "interval": (c - k)^2.
            "ordinal": the squared number of judgements between them, half of c's and k's own counted. Equal to
            "interval" on the mean ranks of the judgements among all.

    Returns:
        1: always the same, 0: as by chance; NaN without such units, or where all say one same thing.

    Raises:
        ValueError: rows of different length, an unknown level, a judgement that is no number where numbers are meant.
    """
    if level not in get_args(Level):
        raise ValueError(f"level is one of {', '.join(get_args(Level))}, got {level!r}")
    rows = [[value for value in row if value is not None] for row in _checked(table)]
    rows = [row for row in rows if len(row) > 1]
    pooled = [value for row in rows for value in row]
    if level != "nominal":
        odd = next((v for v in pooled if isinstance(v, str) or not hasattr(v, "__float__") or math.isnan(v)), None)
        if odd is not None:
            raise ValueError(f"level {level!r} needs numbers, got {odd!r}; use level='nominal'")
    if len(set(pooled)) < 2:
        return math.nan
    if level == "ordinal":
        place = _mean_ranks(pooled)
        rows = [[place[value] for value in row] for row in rows]
        pooled = [value for row in rows for value in row]
    spread = _differing if level == "nominal" else _squares
    n = len(pooled)
    observed = sum(spread(row) / (len(row) - 1) for row in rows) / n
    return 1 - observed / (spread(pooled) / (n * (n - 1)))


def _differing(values: list[Any]) -> float:
    """Ordered pairs of values that differ."""
    return float(len(values) ** 2 - sum(count**2 for count in Counter(values).values()))


def _squares(values: list[float]) -> float:
    """Squared differences, summed over the ordered pairs: 2 n times the squared deviations from the mean."""
    mean = math.fsum(values) / len(values)
    return 2 * len(values) * math.fsum((value - mean) ** 2 for value in values)


def _mean_ranks(values: list[Any]) -> dict[Any, float]:
    """value -> mean of the places, from 1, that it takes among the sorted values."""
    places, before = {}, 0
    for value, count in sorted(Counter(values).items()):
        places[value] = before + (count + 1) / 2
        before += count
    return places


def _checked(table: Table) -> list[list[Any]]:
    """The rows; those of an annotator each are of one length."""
    rows = [list(row) for row in table]
    for index, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"unit {index} has {len(row)} columns and unit 0 has {len(rows[0])}; give one an annotator, None "
                "where there is no judgement"
            )
    if rows and len(rows[0]) < 2:
        raise ValueError("agreement needs the judgements of two annotators, got those of one")
    return rows
