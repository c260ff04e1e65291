"""How good a process reward model is, from its scores on solutions whose steps are known to be right or wrong.

| field (logged as eval_*) | unit | what it is |
|---|---|---|
| n_solutions, n_steps, n_good, n_bad | count | solutions; steps with a label; right and wrong ones |
| accuracy, accuracy_low, accuracy_high | share | steps told right from wrong at probability 1/2; 95 % interval |
| accuracy_majority | share | what always giving the more frequent label would get |
| accuracy_good, accuracy_bad | share | of the right, and of the wrong steps |
| loss | nats | mean over steps of the binary cross-entropy, against soft labels too |
| ece | share | expected calibration error of the probability, see the reliability table |
| mean_probability | share | that steps are right, mean |
| error_accuracy, n_erroneous | share, count | erroneous solutions whose first wrong step is found, none before it |
| correct_accuracy, n_correct | share, count | correct solutions in which no step is called wrong |
| first_error_f1 | share | harmonic mean of both (ProcessBench, 2412.06559) |
| auc_min, auc_prod, auc_mean, auc_last | share | correct solutions above erroneous ones, a tie 1/2, by aggregate |
| length_pearson, length_spearman | - | correlation of a solution's `min` score and its number of steps |

A soft label above 1/2 counts as right. A solution is erroneous where a step is wrong and all before it are known;
correct where all are known and right; the others count for their steps only. The interval takes steps as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_rlx.functional import step_aggregate
from hf_rlx.functional.statistics import (
    average_ranks,
    calibration_error,
    reward_length_correlation,
    wilson_interval,
)
from hf_rlx.trainers.reward_report import Bin, Report, reliability

AGGREGATES = ("min", "prod", "mean", "last")


class ScoredSteps(NamedTuple):
    """One solution: of each step the log-odds that it is right, and its label (0 to 1, NaN where not known).
    `whole`: no step was cut off."""

    scores: list[float]
    labels: list[float]
    whole: bool = True

    @property
    def first_error(self) -> int | None:
        """Index of the first wrong step, -1 where all are right, None where that is not known."""
        for place, label in enumerate(self.labels):
            if math.isnan(label):
                return None
            if label <= 0.5:
                return place
        return -1 if self.whole else None

    @property
    def found_error(self) -> int:
        """Index of the first step whose probability is below 1/2, -1 for none."""
        return next((place for place, score in enumerate(self.scores) if score < 0), -1)


@dataclass(frozen=True)
class StepReport(Report):
    """See the table at the head of this file."""

    n_solutions: int
    n_steps: int
    n_good: int
    n_bad: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    accuracy_majority: float
    accuracy_good: float
    accuracy_bad: float
    loss: float
    ece: float
    mean_probability: float
    error_accuracy: float
    n_erroneous: int
    correct_accuracy: float
    n_correct: int
    first_error_f1: float
    auc_min: float
    auc_prod: float
    auc_mean: float
    auc_last: float
    length_pearson: float
    length_spearman: float
    reliability: list[Bin]


def step_report(rows: Sequence[ScoredSteps]) -> StepReport:
    """Sum up scored solutions; those without a step are left out."""
    rows = [row for row in rows if row.scores]
    scores = torch.tensor([score for row in rows for score in row.scores]).double()
    labels = torch.tensor([label for row in rows for label in row.labels]).double()
    known = ~labels.isnan()
    z, y = scores[known], labels[known]
    good = y > 0.5
    # A score of exactly 0 says nothing: half right.
    right = torch.where(z == 0, 0.5, ((z > 0) == good).double())
    loss = -(y * torch.nn.functional.logsigmoid(z) + (1 - y) * torch.nn.functional.logsigmoid(-z))
    interval = wilson_interval(float(right.sum()), len(right))
    calibration = calibration_error(torch.where(good, z, -z))
    errors = [row for row in rows if row.first_error is not None and row.first_error >= 0]
    correct = [row for row in rows if row.first_error == -1]
    found = _mean([row.found_error == row.first_error for row in errors])
    clean = _mean([row.found_error == -1 for row in correct])
    steps = torch.tensor([len(row.scores) for row in rows]).double()
    length = reward_length_correlation(_scores(rows, "min"), steps)
    told = [row for row in rows if row.first_error is not None]
    is_correct = torch.tensor([row.first_error == -1 for row in told], dtype=torch.bool)
    areas = {how: _area(_scores(told, how), is_correct) for how in AGGREGATES}
    return StepReport(
        n_solutions=len(rows),
        n_steps=len(y),
        n_good=int(good.sum()),
        n_bad=int((~good).sum()),
        accuracy=_mean(right.tolist()),
        accuracy_low=interval.low,
        accuracy_high=interval.high,
        accuracy_majority=max(_mean(good.tolist()), _mean((~good).tolist())),
        accuracy_good=_mean(right[good].tolist()),
        accuracy_bad=_mean(right[~good].tolist()),
        loss=_mean(loss.tolist()),
        ece=calibration.ece,
        mean_probability=_mean(scores.sigmoid().tolist()),
        error_accuracy=found,
        n_erroneous=len(errors),
        correct_accuracy=clean,
        n_correct=len(correct),
        first_error_f1=_harmonic(found, clean),
        **{f"auc_{how}": area for how, area in areas.items()},
        length_pearson=length.pearson,
        length_spearman=length.spearman,
        reliability=reliability(calibration),
    )


def _scores(rows: Sequence[ScoredSteps], how: str) -> Tensor:
    """(n,) aggregated probabilities of solutions."""
    each = [torch.tensor(row.scores).double().sigmoid() for row in rows]
    found = [step_aggregate(row[None], None, how)[0] for row in each]  # type: ignore[arg-type]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def _area(scores: Tensor, correct: Tensor) -> float:
    """The share of (correct, erroneous) pairs in which the correct solution scores higher, a tie 1/2; NaN for none."""
    n, m = int(correct.sum()), int((~correct).sum())
    if not n or not m:
        return math.nan
    return float(average_ranks(scores)[correct].sum() - n * (n + 1) / 2) / (n * m)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if len(values) else math.nan


def _harmonic(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return 2 * a * b / (a + b) if a + b else 0.0


__all__ = ["ScoredSteps", "StepReport", "step_report"]
