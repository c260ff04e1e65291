"""`hf-rlx demo`: GRPO with a verifier, end to end, in about a minute on two CPU cores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from rich.console import Console
from rich.table import Table

from hf_rlx.cards.facts import Score
from hf_rlx.data.tasks import Task, arithmetic_task, spoken_arithmetic_task
from hf_rlx.models.loading import SMOLLM2, TINY, weights_note
from hf_rlx.report import before_and_after, write_report
from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_rlx.verifiers.numbers import NumberVerifier

_TINY_NOTE = (
    "The base is the character model that hf_rlx carries; `adapter_config.json` names it by its folder on the machine "
    'that trained the adapter. Elsewhere: `SharedModel.from_pretrained(folder, base=load_causal_lm("tiny"))`.'
)


@dataclass(frozen=True)
class Recipe:
    """What the demo runs for a model: the task, how answers are read, and sizes that fit its cost."""

    task: Task
    extract: str
    max_steps: int
    fields: dict[str, Any]


def recipe_for(model: str, seed: int) -> Recipe:
    """The bundled model knows `17+25=`; any other one is asked in words."""
    if model == TINY:
        fields = {"per_device_train_batch_size": 128, "learning_rate": 1e-3, "eval_steps": 20}
        return Recipe(arithmetic_task(2000, 512, seed), "whole", 120, fields)
    fields = {"per_device_train_batch_size": 32, "learning_rate": 2e-4, "eval_steps": 10}
    return Recipe(spoken_arithmetic_task(500, 128, seed), "last", 30, fields)


def run_demo(
    model: str = TINY, output: str | Path = "runs/demo", steps: int | None = None, seed: int = 0, quiet: bool = False
) -> tuple[Score, Score]:
    """Train `model` on arithmetic with GRPO and a verifier; write adapter, card, plot and tables to `output`.

    Args:
        model: `"tiny"` (bundled), `"smollm2"`, a folder or a Hub id.
        output: folder for everything that is written.
        steps: optimizer steps; None: what the recipe says.
        seed: of prompts, adapter and sampling.
        quiet: no progress bars and no tables of completions.

    Returns:
        held-out scores before and after: one answer a question, sampled at temperature 1.
    """
    console = Console()
    recipe = recipe_for(model, seed)
    if model == TINY:
        # Its matrices are too small to share: on a busy machine a second thread waits longer than it computes.
        torch.set_num_threads(1)
    args = GRPOConfig(
        output_dir=str(output),
        max_steps=recipe.max_steps if steps is None else steps,
        num_generations=8,
        max_completion_length=recipe.task.max_completion_length,
        max_rollout_rows=128,
        # The policy is judged as it samples: greedy decoding would hide most of what is learned.
        eval_temperature=1.0,
        eval_strategy="steps",
        eval_on_start=True,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        seed=seed,
        disable_tqdm=quiet,
        **recipe.fields,
    )
    verifier = NumberVerifier(extract=recipe.extract)  # type: ignore[arg-type]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=verifier,
        args=args,
        train_dataset=recipe.task.train,
        eval_dataset=recipe.task.test,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    console.print(f"[bold]{recipe.task.description}[/bold] {len(recipe.task.test)} questions are held out.")
    start = time.perf_counter()
    trainer.train()
    before, after = before_and_after(trainer)
    card = write_report(
        trainer,
        output,
        before=before,
        after=after,
        **({"base_model": None} if model == TINY else {}),
        model_name=f"{model} + GRPO on {recipe.task.name}",
        dataset=recipe.task.name.replace("_", " "),
        notes=[_TINY_NOTE] if model == TINY else [note] if (note := weights_note(model)) else [],
        decoding="one sample a question at temperature 1",
        license="apache-2.0" if model in (TINY, SMOLLM2) else None,
    )
    console.print(_result(before, after, time.perf_counter() - start))
    console.print(f"Adapter, card, plot and completions: {card.parent}")
    return before, after


def _result(before: Score, after: Score, seconds: float) -> Table:
    table = Table(title=f"Held-out accuracy, one sampled answer a question ({seconds:.0f} s)")
    for column in ("", "accuracy", "95 % interval", "right / questions"):
        table.add_column(column, justify="right" if column else "left")
    for name, score in (("before", before), ("after", after)):
        right = round(score.accuracy * score.n)
        table.add_row(name, f"{score.accuracy:.3f}", f"{score.low:.3f} - {score.high:.3f}", f"{right} / {score.n}")
    return table
