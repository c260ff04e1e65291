"""Quiet configurations and small trainers of iterative DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.iterative_dpo import IterativeDPOConfig, IterativeDPOTrainer
from hf_rlx.types import Completion
from tests.trainers.reward_tools import shared_model
from tests.trainers.tools import EOS, ScriptedSampler, by_ids, rows


def config(folder: Path | str, **fields: Any) -> IterativeDPOConfig:
    """Two rounds of eight prompts in two steps, four completions each, on the CPU."""
    fields = {
        "num_rounds": 2,
        "prompts_per_round": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        **fields,
    }
    return IterativeDPOConfig(str(folder), **fields)


def trainer(args: IterativeDPOConfig, reward: Any = by_ids, model: Any = None, **kwargs: Any) -> IterativeDPOTrainer:
    """A trainer on the random Llama with an adapter, over the bundled tokenizer."""
    return IterativeDPOTrainer(
        shared_model() if model is None else model,
        reward,
        args,
        kwargs.pop("train_dataset", None) or rows(16),
        processing_class=load_tokenizer("tiny"),
        **kwargs,
    )


class Scripted(ScriptedSampler):
    """Says the same about the same prompt, and always to the end."""

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
        """See `rollout.collect.Sampler`."""
        on_group = kwargs.pop("on_group", None) or (args[3] if len(args) > 3 else None)
        groups = super().generate(*args[:3], **kwargs)
        for index, group in enumerate(groups):
            for completion in group:
                if not completion.finished:
                    completion.token_ids[-1], completion.finished = EOS, True
                    completion.text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            if on_group is not None:
                on_group(index, group)
        return groups
