"""PPO on the random Llama, with completions and rewards that tests write down."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.trainers.ppo_config import PPOConfig
from hf_rlx.types import Completion
from tests.trainers.tools import EOS, ScriptedSampler, lora, move, rows, tiny_llama

# Every train() collects garbage, for a quarter of a second over all that the libraries hold; it is kept out of that.
gc.freeze()


def ppo_config(folder: Path | str, **fields: Any) -> PPOConfig:
    """A quiet configuration: windows of 16 completions, one a prompt, on the CPU; one optimizer step."""
    return PPOConfig(
        str(folder),
        **{
            "per_device_train_batch_size": 16,
            "num_iterations": 1,
            "max_completion_length": 6,
            "max_steps": 1,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "use_cpu": True,
            **fields,
        },
    )


def some(completion_ids, number, **_: Any) -> list[float | None]:
    """A reward that follows from the tokens; the completions of prompts 2, 10, ... abstain."""
    return [None if number[0] % 8 == 2 else sum(ids) % 7 / 7 for ids in completion_ids]


class WatchedPPO(PPOTrainer):
    """Keeps what every update computed and what every window was made of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.outs: list[Any] = []
        self.batches: list[Any] = []
        self.windows: list[Any] = []
        super().__init__(*args, **kwargs)

    def _record(self, out, batch, scores):
        self.outs.append(out)
        self.batches.append(batch)
        super()._record(out, batch, scores)

    def minibatches(self, rollouts):
        batches = super().minibatches(rollouts)
        self.windows.append((rollouts, batches))
        return batches


class Said:
    """A sampler that says these token ids about every prompt, in order; a text is finished where it ends by EOS."""

    def __init__(self, tokenizer: Any, texts: list[list[int]]) -> None:
        self.tokenizer, self.texts = tokenizer, texts

    def generate(self, prompt_ids, num_generations, params, on_group=None, on_step=None):
        """See `rollout.collect.Sampler`."""
        groups, texts = [], iter(self.texts)
        for index in range(len(prompt_ids)):
            group = []
            for _ in range(num_generations):
                ids = next(texts)
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                group.append(Completion(ids, [float("nan")] * len(ids), ids[-1:] == [EOS], text))
            groups.append(group)
            if on_group is not None:
                on_group(index, group)
        return groups


def ppo(args: PPOConfig, reward=some, count: int = 64, drift: float = 0.0, texts=None, **kwargs: Any) -> WatchedPPO:
    """A LoRA trainer whose completions are scripted (or `texts`); `drift` moves policy and critic off their start."""
    kind = kwargs.pop("kind", WatchedPPO)
    given = {"model": tiny_llama(), "peft_config": lora(), "train_dataset": rows(count), **kwargs}
    trainer = kind(reward_funcs=reward, args=args, processing_class=load_tokenizer("tiny"), **given)
    if texts is None:
        trainer.sampler = ScriptedSampler(trainer.tokenizer, args.max_completion_length)
    else:
        trainer.sampler = Said(trainer.tokenizer, texts)
    if drift:
        move(trainer.shared, drift)
        if trainer.own_critic:
            move_critic(trainer.shared, drift)
    return trainer


def move_critic(shared, size: float) -> None:
    """Add the same noise to the critic's weights every time."""
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for _, parameter in shared.trainable_parameters("critic"):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
