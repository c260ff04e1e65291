"""From a finished run to its folder: adapter, card, plot, logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_rlx.cards import Score, history
from hf_rlx.cards.files import replace_file
from hf_rlx.trainers import model_card
from hf_rlx.trainers.model_card import hardware_line
from hf_rlx.trainers.online import OnlineTrainer


def curve_of(log_history: list[dict[str, Any]], function: str) -> list[dict[str, float | None]]:
    """The columns of `hf_rlx.cards.plot_run` against the step, out of a trainer's log.

    Args:
        log_history: `trainer.state.log_history`. function: reward function whose held-out accuracy is drawn.
    """
    return history.curve(log_history, [function])


def score_of(metrics: dict[str, float], function: str, prefix: str = "eval") -> Score:
    """The accuracy of one evaluation as a `Score`.

    Raises:
        ValueError: the reward function gave other values than 0 and 1, so there is no accuracy.
    """
    key = f"{prefix}_accuracy/{function}"
    if key not in metrics:
        raise ValueError(f"{function} gave other values than 0 and 1: its accuracy is not defined")
    return Score(metrics[key], int(metrics[f"{key}_n"]), metrics[f"{key}_low"], metrics[f"{key}_high"])


def before_and_after(trainer: OnlineTrainer) -> tuple[Score, Score]:
    """The first and the last held-out score of a run with `eval_on_start`; evaluates now if the last step was not."""
    function, log = trainer.scorer.names[0], trainer.state.log_history
    if not any(e["step"] == trainer.state.global_step and "eval_reward" in e for e in log):
        trainer.evaluate()
    evaluations = [e for e in trainer.state.log_history if f"eval_accuracy/{function}" in e]
    if not evaluations:
        raise ValueError(f"{function} gave other values than 0 and 1: its accuracy is not defined")
    return score_of(evaluations[0], function), score_of(evaluations[-1], function)


def write_report(
    trainer: OnlineTrainer, folder: str | Path, *, before: Score | None, after: Score | None, **facts: Any
) -> Path:
    """Save the model and write `README.md` (the card), `training.png` and `log.jsonl` beside it.

    Args:
        trainer: after `train()`. folder: target. before, after: held-out scores on the same rows; None: as the log
            has them.
        facts: further fields of `RunFacts`.

    Returns:
        The card's path. Without matplotlib the plot is left out, and a log line says how to get it.
    """
    folder = Path(folder)
    on, trainer.cards.on = trainer.cards.on, False  # one card, with these facts, and a fault in it is raised
    try:
        trainer.save_model(str(folder))
    finally:
        trainer.cards.on = on
    replace_file(folder / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in trainer.state.log_history))
    scores = {name: score for name, score in (("before", before), ("after", after)) if score is not None}
    return model_card.write(trainer, folder, **scores, **facts)


__all__ = ["before_and_after", "curve_of", "hardware_line", "score_of", "write_report"]
