"""From a finished run to its folder: adapter, card, plot, logs."""

from __future__ import annotations

import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

from hf_rlx.cards.card import PLOT_NAME, write_card
from hf_rlx.cards.facts import RunFacts, Score, installed_versions
from hf_rlx.cards.plots import plot_run
from hf_rlx.trainers.online import OnlineTrainer

logger = logging.getLogger(__name__)

_SHOWN = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "max_completion_length",
    "temperature",
    "beta",
    "loss_type",
    "scale_rewards",
    "epsilon",
    "seed",
)


def curve_of(log_history: list[dict[str, Any]], function: str) -> list[dict[str, float | None]]:
    """Reward, KL and held-out accuracy against the step, out of a trainer's log.

    Args:
        log_history: `trainer.state.log_history`. function: reward function whose held-out accuracy is drawn.
    """
    names = {
        "reward": "reward",
        "kl": "kl",
        f"eval_accuracy/{function}": "accuracy",
        f"eval_accuracy/{function}_low": "low",
        f"eval_accuracy/{function}_high": "high",
    }
    rows: dict[int, dict[str, float | None]] = {}
    for entry in log_history:
        found = {short: float(entry[name]) for name, short in names.items() if name in entry}
        if found:
            rows.setdefault(int(entry["step"]), {"step": float(entry["step"])}).update(found)
    return [rows[step] for step in sorted(rows)]


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
    function, history = trainer.scorer.names[0], trainer.state.log_history
    if not any(e["step"] == trainer.state.global_step and "eval_reward" in e for e in history):
        trainer.evaluate()
    evaluations = [e for e in trainer.state.log_history if f"eval_accuracy/{function}" in e]
    if not evaluations:
        raise ValueError(f"{function} gave other values than 0 and 1: its accuracy is not defined")
    return score_of(evaluations[0], function), score_of(evaluations[-1], function)


def hardware_line(device: torch.device) -> str:
    """The device in one line, without the host's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), {torch.get_num_threads()} threads"


def write_report(
    trainer: OnlineTrainer, folder: str | Path, *, before: Score | None, after: Score | None, **facts: Any
) -> Path:
    """Save the model and write `README.md` (the card), `training.png` and `log.jsonl` beside it.

    Args:
        trainer: after `train()`. folder: target. before, after: held-out scores on the same rows.
        facts: further fields of `RunFacts`.

    Returns:
        The card's path. Without matplotlib the plot is left out, and a log line says how to get it.
    """
    folder = Path(folder)
    trainer.save_model(str(folder))
    history = trainer.state.log_history
    staged = folder / ".log.jsonl"
    staged.write_text("".join(json.dumps(entry) + "\n" for entry in history), encoding="utf-8")
    os.replace(staged, folder / "log.jsonl")
    curve = curve_of(history, trainer.scorer.names[0])
    try:
        plot_run(curve, folder / PLOT_NAME)
    except ImportError as error:
        logger.warning("no plot: %s", error)
    run = next((e for e in reversed(history) if "train_runtime" in e), {})
    known: dict[str, Any] = {
        "method": trainer.method,
        "base_model": trainer.shared.config.name_or_path or None,
        "adapter": trainer.shared.roles["policy"].adapter is not None,
        "rewards": trainer.scorer.names,
        "hyper_parameters": {n: getattr(trainer.args, n) for n in _SHOWN if hasattr(trainer.args, n)},
        "before": before,
        "after": after,
        "steps": trainer.state.global_step,
        "seconds": run.get("train_runtime"),
        "versions": installed_versions(),
        "hardware": hardware_line(trainer.args.device),
        "curve": curve,
    }
    return write_card(RunFacts(**{**known, **facts}), folder)
