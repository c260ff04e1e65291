"""How good a reward model is, from its scores on rows whose ranking is known: one report for held-out pairs and for
fresh samples of a policy.

| field (logged as eval_*) | unit | what it is |
|---|---|---|
| n_pairs, ties, identical | count | pairs of different rank; of those with equal scores; rows of identical answers |
| accuracy, accuracy_low, accuracy_high | share | pairs in the right order, a tie 1/2; 95 % Wilson interval |
| loss | nats | mean over rows of the mean over pairs of -log sigma(difference - margin) |
| margin | score | mean difference of the better and the worse answer |
| mean_reward, std_reward, min_reward, max_reward | score | of all answers |
| ece | share | expected calibration error of sigma(difference), see the reliability table |
| temperature, ece_tempered | -, share | fitted on these pairs; error, each half of the rows by the other's |
| length_pearson, length_spearman | - | correlation of score and length in tokens, over all answers |
| length_pearson_within, length_spearman_within | - | the same within each row: pooled mixes prompts with length |
| accuracy_chosen_shorter, n_chosen_shorter | share, count | pairs whose better answer is the shorter one |
| ensemble_std | score | mean standard deviation of an ensemble's members, 0 of a single one |

The intervals take pairs as independent; those of one list are not, so of lists they are too narrow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_rlx.cards.files import replace_file
from hf_rlx.functional.statistics import (
    CalibrationError,
    average_ranks,
    calibration_error,
    pairwise_accuracy,
    reward_length_correlation,
    wilson_interval,
)
from hf_rlx.trainers.config import BaseConfig

TEMPERATURES = (0.01, 100.0)  # bounds of a fit


class ScoredRow(NamedTuple):
    """One row of K answers: scores, lengths in tokens, ranks (lower is better), each K long; the margin of a pair, and
    the K standard deviations of an ensemble's scores."""

    scores: list[float]
    lengths: list[int]
    ranks: list[float]
    margin: float | None = None
    spreads: tuple[float, ...] = ()

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Indices of every pair, the better answer first."""
        places = range(len(self.ranks))
        return ((i, j) for i in places for j in places if self.ranks[i] < self.ranks[j])


class Bin(NamedTuple):
    """One line of the reliability table: pairs (or steps) whose confidence lies in [low, high)."""

    low: float
    high: float
    pairs: int
    confidence: float  # mean; NaN for no pair
    accuracy: float  # share that is right; NaN for no pair


def reliability(calibration: CalibrationError) -> list[Bin]:
    """The table of a calibration error, equal bins over [1/2, 1]."""
    width = 0.5 / len(calibration.bin_count)
    found = zip(calibration.bin_count, calibration.bin_confidence, calibration.bin_accuracy, strict=True)
    return [Bin(0.5 + width * i, 0.5 + width * (i + 1), *b) for i, b in enumerate(found)]


@dataclass(frozen=True)
class Report:
    """Numbers by name, and a reliability table of ten bins over [1/2, 1]; NaN: nothing to tell."""

    def metrics(self) -> dict[str, float]:
        """Every number by its name, without the table and without NaN."""
        numbers = {name: value for name, value in asdict(self).items() if name != "reliability"}
        return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}

    def __str__(self) -> str:
        """A small table: the numbers, an interval beside its number, without what is NaN and the reliability table;
        `table()` has all of it."""
        facts = {name: value for name, value in vars(self).items() if name != "reliability" and value == value}
        lines = []
        for name, value in facts.items():
            if name.endswith(("_low", "_high")) and name.rpartition("_")[0] in facts:
                continue
            ends = [facts[f"{name}_{end}"] for end in ("low", "high") if f"{name}_{end}" in facts]
            lines.append(
                f"{name:24} {_shown(value)}" + (" ({:.4f} to {:.4f})".format(*ends) if len(ends) == 2 else "")
            )
        return "\n".join(lines)

    def table(self) -> str:
        """Readable text: the numbers, then the reliability table."""
        facts = asdict(self)
        bins = facts.pop("reliability")
        lines = [f"{name:24} {_shown(value)}" for name, value in facts.items()]
        lines += ["", "confidence     count  mean confidence  right"]
        for low, high, count, confidence, accuracy in bins:
            lines.append(f"{low:.2f} to {high:.2f} {count:7d}  {_shown(confidence):>15}  {_shown(accuracy):>5}")
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write `<path>.json` (NaN as null) and the readable `<path>.txt`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = asdict(self)
        facts["reliability"] = [Bin(*b)._asdict() for b in facts["reliability"]]
        replace_file(path.with_name(path.name + ".json"), json.dumps(_without_nan(facts), indent=2) + "\n")
        replace_file(path.with_name(path.name + ".txt"), self.table())

    def keep(self, args: BaseConfig, prefix: str, step: int) -> dict[str, float]:
        """Write it below `reports/` in the run's folder, on the process that saves; returns `metrics`.

        Args:
            args: of the run. prefix: of the evaluation. step: optimizer steps done.
        """
        if args.should_save:
            self.save(Path(str(args.output_dir)) / "reports" / f"{prefix}_{step:06d}")
        return self.metrics()


@dataclass(frozen=True)
class RewardReport(Report):
    """See the table at the head of this file."""

    n_pairs: int
    ties: int
    identical: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    loss: float
    margin: float
    mean_reward: float
    std_reward: float
    min_reward: float
    max_reward: float
    ece: float
    temperature: float
    ece_tempered: float
    length_pearson: float
    length_spearman: float
    length_pearson_within: float
    length_spearman_within: float
    accuracy_chosen_shorter: float
    n_chosen_shorter: int
    ensemble_std: float
    reliability: list[Bin]


def reward_report(rows: Sequence[ScoredRow]) -> RewardReport:
    """Sum up scored rows.

    Args:
        rows: P of them; those without a pair count in the score and length statistics only.
    """
    better, worse, lengths = [], [], []
    for row in rows:
        for i, j in row.pairs():
            better.append(row.scores[i])
            worse.append(row.scores[j])
            lengths.append(row.lengths[i] < row.lengths[j])
    best, rest = torch.tensor(better).double(), torch.tensor(worse).double()
    accuracy = pairwise_accuracy(best, rest)
    interval = wilson_interval(accuracy.accuracy * accuracy.n_pairs if accuracy.n_pairs else 0, accuracy.n_pairs)
    shorter = torch.tensor(lengths, dtype=torch.bool)
    short = pairwise_accuracy(best[shorter], rest[shorter])
    calibration = calibration_error(best - rest)
    scores = torch.tensor([s for row in rows for s in row.scores]).double()
    tokens = torch.tensor([n for row in rows for n in row.lengths]).double()
    length = reward_length_correlation(scores, tokens)
    spreads = [s for row in rows for s in row.spreads]
    return RewardReport(
        n_pairs=accuracy.n_pairs,
        ties=accuracy.ties,
        identical=sum(len(row.ranks) == 2 and row.ranks[0] == row.ranks[1] for row in rows),
        accuracy=accuracy.accuracy,
        accuracy_low=interval.low,
        accuracy_high=interval.high,
        loss=_loss(rows),
        margin=float((best - rest).mean()) if better else math.nan,
        mean_reward=float(scores.mean()) if len(scores) else math.nan,
        std_reward=float(scores.std(correction=0)) if len(scores) else math.nan,
        min_reward=float(scores.min()) if len(scores) else math.nan,
        max_reward=float(scores.max()) if len(scores) else math.nan,
        ece=calibration.ece,
        temperature=fit_temperature(best - rest),
        ece_tempered=_cross_fitted(rows),
        length_pearson=length.pearson,
        length_spearman=length.spearman,
        length_pearson_within=_within(rows, lambda x: x),
        length_spearman_within=_within(rows, average_ranks),
        accuracy_chosen_shorter=short.accuracy,
        n_chosen_shorter=short.n_pairs,
        ensemble_std=sum(spreads) / len(spreads) if spreads else 0.0,
        reliability=reliability(calibration),
    )


def fit_temperature(margins: Tensor) -> float:
    """The T that minimises the mean of -log sigma(margin / T), convex in 1 / T; within [0.01, 100].

    Args:
        margins: score of the better answer minus that of the worse. Shape: `(n,)`.

    Returns:
        0.01 where every pair is right (the more certain the better), 100 where the scores know nothing; NaN for no
        pair.

    Source: Guo et al. (1706.04599) section 4.2.
    """
    m = margins.detach().cpu().double()
    if not m.numel():
        return math.nan

    def slope(inverse: float) -> float:
        return -float((m * torch.sigmoid(-inverse * m)).mean())

    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    if slope(low) >= 0:
        return TEMPERATURES[1]
    if slope(high) <= 0:
        return TEMPERATURES[0]
    for _ in range(100):  # bisection in the logarithm: the slope rises with 1 / T
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)


def _margins(rows: Sequence[ScoredRow]) -> Tensor:
    return torch.tensor([row.scores[i] - row.scores[j] for row in rows for i, j in row.pairs()]).double()


def _cross_fitted(rows: Sequence[ScoredRow]) -> float:
    """Calibration error with a temperature that the pairs in question had no share in."""
    halves = [_margins(rows[0::2]), _margins(rows[1::2])]
    if any(not half.numel() for half in halves):
        return math.nan
    tempered = [halves[0] / fit_temperature(halves[1]), halves[1] / fit_temperature(halves[0])]
    return calibration_error(torch.cat(tempered)).ece


def _loss(rows: Sequence[ScoredRow]) -> float:
    losses = []
    for row in rows:
        m = torch.tensor([row.scores[i] - row.scores[j] for i, j in row.pairs()]).double()
        if m.numel():
            losses.append(float(-torch.nn.functional.logsigmoid(m - (row.margin or 0.0)).mean()))
    return sum(losses) / len(losses) if losses else math.nan


def _within(rows: Sequence[ScoredRow], change: Callable[[Tensor], Tensor]) -> float:
    """Pearson correlation of `change`d scores and lengths after each row's own means are taken off."""
    parts: list[tuple[Tensor, Tensor]] = []
    for row in rows:
        s, n = change(torch.tensor(row.scores).double()), change(torch.tensor(row.lengths).double())
        parts.append((s - s.mean(), n - n.mean()))
    if not parts:
        return math.nan
    scores, lengths = (torch.cat(side) for side in zip(*parts, strict=True))
    size = float(scores.square().sum().sqrt() * lengths.square().sum().sqrt())
    return float((scores * lengths).sum()) / size if size > 0 else math.nan


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
