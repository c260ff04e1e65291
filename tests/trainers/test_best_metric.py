"""`metric_for_best_model` on evaluation data that have no metric: said before anything is trained."""

from __future__ import annotations

import pytest
from datasets import Dataset

from tests.trainers import pair_tools, prm_tools, reward_tools

SAME = Dataset.from_list([{"prompt": "1=", "chosen": "a", "rejected": "a"}] * 3)
TIES = Dataset.from_list([{"prompt": "1=", "responses": ["a", "b"], "scores": [1.0, 1.0]}])
UNKNOWN = Dataset.from_list([{"prompt": "1=", "completions": ["a"], "labels": [None]}])
BEST = {
    "metric_for_best_model": "accuracy",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


def make(kind, folder, eval_dataset, **fields):
    tools = {"reward": reward_tools, "prm": prm_tools}.get(kind, pair_tools)
    args = tools.config(folder, **({"kind": kind} if tools is pair_tools else {}), **{**BEST, **fields})
    return tools.trainer(args, eval_dataset=eval_dataset)


@pytest.mark.parametrize(
    ("kind", "rows", "metric"),
    [
        ("reward", SAME, "accuracy"),
        ("reward", TIES, "eval_accuracy"),
        ("dpo", SAME, "rewards/accuracies"),
        ("orpo", SAME, "loss"),
        ("prm", UNKNOWN, "accuracy"),
    ],
)
def test_rows_that_teach_nothing_have_no_metric(tmp_path, kind, rows, metric):
    trainer = make(kind, tmp_path, rows, metric_for_best_model=metric)
    message = f"metric_for_best_model='{metric}' has nothing to choose by: no row of eval_dataset can be judged"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert not (tmp_path / "checkpoint-1").exists()


def test_of_several_datasets_the_one_that_decides_counts(tmp_path):
    """`x` has pairs, `y` none: x_accuracy is there, y_accuracy is not."""
    several = {"x": reward_tools.pairs(3, seed=1), "y": SAME}
    make("reward", tmp_path, several, metric_for_best_model="x_accuracy").train()
    with pytest.raises(ValueError, match="no row of eval_dataset 'y' can be judged"):
        make("reward", tmp_path / "y", several, metric_for_best_model="eval_y_accuracy").train()


def test_one_pair_among_many_is_enough(tmp_path):
    rows = Dataset.from_list([*SAME, *reward_tools.pairs(1, seed=1)])
    trainer = make("reward", tmp_path, rows)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None


def test_evaluation_judges_steps_that_training_leaves_out(tmp_path):
    """The last label is not known, so nothing here could be trained on; evaluation reads the two before it."""
    rows = Dataset.from_list([{"prompt": "1=", "completions": ["a", "b", "c"], "labels": [True, False, None]}])
    trainer = make("prm", tmp_path, rows, train_on_last_step_only=True)
    trainer.train()
    assert trainer.state.log_history[-2]["eval_n_steps"] == 2
    assert trainer.state.best_model_checkpoint is not None


def test_nobody_chooses_nobody_asks(tmp_path):
    """Without the metric, and without evaluation."""
    make("reward", tmp_path, SAME, metric_for_best_model=None, save_strategy="no").train()
    make("reward", tmp_path / "no", SAME, eval_strategy="no", save_strategy="no").train()
