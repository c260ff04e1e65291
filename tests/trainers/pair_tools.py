"""Quiet configurations and small trainers on pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.dpo import DPOConfig, DPOTrainer
from hf_rlx.trainers.ipo import IPOConfig, IPOTrainer
from hf_rlx.trainers.orpo import ORPOConfig, ORPOTrainer
from hf_rlx.trainers.pair_logps import Pairs
from hf_rlx.trainers.simpo import SimPOConfig, SimPOTrainer
from hf_rlx.types import Group
from tests.trainers.reward_tools import pairs, shared_model

KINDS: dict[str, tuple[Any, Any]] = {
    "dpo": (DPOConfig, DPOTrainer),
    "ipo": (IPOConfig, IPOTrainer),
    "simpo": (SimPOConfig, SimPOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
}


def config(folder: Path | str, kind: str = "dpo", **fields: Any) -> Any:
    """Batches of four pairs, one step, on the CPU."""
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
    return KINDS[kind][0](str(folder), **fields)


def trainer(args: Any, model: Any = None, dataset: Any = None, **kwargs: Any) -> Any:
    """The trainer of a configuration, over the bundled tokenizer; the policy's adapter is not the identity."""
    kind = next(cls for made, cls in KINDS.values() if type(args) is made)
    return kind(
        shared_model() if model is None else model,
        args=args,
        train_dataset=pairs(16) if dataset is None else dataset,
        processing_class=kwargs.pop("processing_class", None) or load_tokenizer("tiny"),
        **kwargs,
    )


def row(chosen: int, rejected: int, index: int = 0) -> RankedGroup:
    """A pair of answers of so many tokens."""
    group = Group.from_lists([1], [[69] * chosen, [70] * rejected])
    return RankedGroup((group,), (0.0, 1.0), row=index)


def table_of(values: list[list[float]]) -> tuple[Tensor, Tensor]:
    """(B, R) values and mask of ragged rows."""
    longest = max(len(row) for row in values)
    mask = torch.tensor([[i < len(row) for i in range(longest)] for row in values])
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in values]), mask


def given_pairs(policy: list[list[float]], reference: list[list[float]] | None = None) -> Pairs:
    """Pairs whose answers have these log-probs a token: chosen, rejected, chosen, rejected, ..."""
    logps, mask = table_of(policy)
    ref = None if reference is None else table_of(reference)[0]
    better = torch.arange(0, len(policy), 2)
    return Pairs(logps.requires_grad_(), mask, torch.zeros_like(logps), better, better + 1, ref)
