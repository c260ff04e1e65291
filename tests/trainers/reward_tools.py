"""Pairs, quiet configurations and small reward trainers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.reward import RewardConfig, RewardTrainer
from tests.tiny import randomise_lora
from tests.trainers.tools import lora, tiny_llama


def word(dice: random.Random, length: int) -> str:
    """Random letters."""
    return "".join(dice.choice("abcdefgh") for _ in range(length))


def pairs(count: int, seed: int = 0, shorter: bool = True) -> Dataset:
    """Answers of different length; the shorter one is better, or the longer one."""
    dice = random.Random(seed)
    rows = []
    for i in range(count):
        short, long = sorted(dice.sample(range(1, 12), 2))
        better, worse = (short, long) if shorter else (long, short)
        rows.append({"prompt": f"{i}+{i % 7}=", "chosen": word(dice, better), "rejected": word(dice, worse)})
    return Dataset.from_list(rows)


def lists(count: int, seed: int = 0) -> Dataset:
    """Two to four answers a prompt, ranked by length; some tie."""
    dice = random.Random(seed)
    rows = []
    for i in range(count):
        lengths = [dice.randint(1, 6) for _ in range(2 + i % 3)]
        rows.append(
            {
                "prompt": f"{i}+1=",
                "responses": [word(dice, n) for n in lengths],
                "scores": [-float(n) for n in lengths],
            }
        )
    return Dataset.from_list(rows)


def config(folder: Path | str, **fields: Any) -> RewardConfig:
    """A quiet configuration: batches of four pairs, on the CPU."""
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
    return RewardConfig(str(folder), **fields)


def shared_model(packing: bool = True, trained: bool = True, **changes: Any) -> SharedModel:
    """The random Llama with a policy adapter that is not the identity."""
    shared = SharedModel.build(tiny_llama(**changes), lora(), packing=packing)
    if trained:
        randomise_lora(shared.model, "policy")
    return shared


def trainer(args: RewardConfig, model: Any = None, dataset: Any = None, **kwargs: Any) -> RewardTrainer:
    """A reward trainer over the bundled tokenizer."""
    return RewardTrainer(
        shared_model() if model is None else model,
        args,
        train_dataset=pairs(16) if dataset is None else dataset,
        processing_class=kwargs.pop("processing_class", None) or load_tokenizer("tiny"),
        **kwargs,
    )
