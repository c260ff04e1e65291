"""Solutions in steps, quiet configurations and small process reward trainers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.prm import PRMConfig, PRMTrainer
from tests.trainers.reward_tools import shared_model, word


def solutions(count: int, seed: int = 0, steps: int = 3) -> Dataset:
    """One to `steps` steps of letters; one with an x in it is wrong. Every fourth has the prompt of the one before."""
    dice = random.Random(seed)
    rows = []
    for i in range(count):
        texts, labels = [], []
        for _ in range(dice.randint(1, steps)):
            right = dice.random() < 0.6
            text = word(dice, dice.randint(1, 4))
            place = dice.randint(0, len(text))
            texts.append(text if right else f"{text[:place]}x{text[place:]}")
            labels.append(right)
        rows.append({"prompt": f"{i - (i % 4 == 3)}+1=", "completions": texts, "labels": labels})
    return Dataset.from_list(rows)


def config(folder: Path | str, **fields: Any) -> PRMConfig:
    """A quiet configuration: batches of four solutions, on the CPU."""
    fields = {
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        **fields,
    }
    return PRMConfig(str(folder), **fields)


def trainer(args: PRMConfig, model: Any = None, dataset: Any = None, **kwargs: Any) -> PRMTrainer:
    """A process reward trainer over the bundled tokenizer."""
    return PRMTrainer(
        shared_model() if model is None else model,
        args,
        train_dataset=solutions(16) if dataset is None else dataset,
        processing_class=kwargs.pop("processing_class", None) or load_tokenizer("tiny"),
        **kwargs,
    )
