"""`metric_for_best_model` on evaluation data that can give no metric, found before anything is trained."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.data.steps import StepGroup

if TYPE_CHECKING:
    from hf_rlx.trainers.preference import PreferenceTrainer


def check_best_metric(trainer: PreferenceTrainer) -> None:
    """Refuse to choose checkpoints by the metrics of data that have none: rows without a pair (or a labelled step).

    Raises:
        ValueError: names the dataset and the fix.
    """
    metric = trainer.args.metric_for_best_model
    given: Any = trainer.eval_dataset
    if metric is None or given is None or trainer.args.eval_strategy == "no":
        return
    for name, dataset in (given if isinstance(given, dict) else {"": given}).items():
        if name and not metric.removeprefix("eval_").startswith(f"{name}_"):
            continue  # another dataset's metric decides
        rows = (row for index in range(len(dataset)) for row in trainer.encode([(index, dataset[index])]))
        if not any(_judged(trainer, row) for row in rows):
            raise ValueError(
                f"metric_for_best_model={metric!r} has nothing to choose by: no row of eval_dataset"
                f"{f' {name!r}' if name else ''} can be judged (identical answers, ties, no labelled step); give "
                "other rows, or leave metric_for_best_model and load_best_model_at_end out"
            )


def _judged(trainer: PreferenceTrainer, row: RankedGroup) -> bool:
    """Whether evaluation counts a row: of steps all that have a label, also where training takes the last one only."""
    if isinstance(row, StepGroup):
        return any(not math.isnan(label) for label in row.labels[: len(row.ends)])
    return trainer.weight_of(row) > 0
