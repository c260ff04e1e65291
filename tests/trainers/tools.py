"""Small models, a sampler that is told what to say, and a callback that keeps gradients; shared by trainer tests."""

from __future__ import annotations

import hashlib
import random
import zlib
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_rlx.types import Completion

EOS = 2
LETTERS = range(69, 95)  # ids of a..z in the bundled tokenizer


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random 2-layer Llama over the bundled tokenizer's vocabulary; always the same weights."""
    fields: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        **changes,
    }
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**fields))


def lora(**changes: Any) -> LoraConfig:
    """A small adapter on every linear layer."""
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", **changes})


def rows(count: int) -> Dataset:
    """Prompts that all differ, and a column for reward functions."""
    return Dataset.from_list([{"prompt": f"{i}+{i % 7}=", "number": i} for i in range(count)])


def config(folder: Path, preset: str | None = None, **fields: Any) -> GRPOConfig:
    """A quiet configuration: windows of 16 completions, 4 a prompt, on the CPU."""
    fields = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
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
    }
    make = GRPOConfig if preset is None else lambda folder, **kw: GRPOConfig.preset(preset, output_dir=folder, **kw)
    return make(str(folder), **fields)


class ScriptedSampler:
    """Says the same about the same prompt, whatever the weights, the window, or the process."""

    def __init__(self, tokenizer: Any, longest: int = 6, logps: float = float("nan")) -> None:
        self.tokenizer, self.longest, self.logps = tokenizer, longest, logps
        self.calls: list[int] = []

    def generate(self, prompt_ids, num_generations, params, on_group=None, on_step=None):
        """See `rollout.collect.Sampler`."""
        self.calls.append(len(prompt_ids))
        groups = []
        for index, prompt in enumerate(prompt_ids):
            dice = random.Random(zlib.crc32(str(prompt).encode()))
            group = []
            for _ in range(num_generations):
                ids = [dice.choice(LETTERS) for _ in range(dice.randint(1, self.longest))]
                finished = len(ids) < self.longest
                ids += [EOS] * finished
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                group.append(Completion(ids, [self.logps] * len(ids), finished, text))
            groups.append(group)
            if on_step is not None:
                on_step(sum(len(c.token_ids) for c in group))
            if on_group is not None:
                on_group(index, group)
        return groups


# One quiet step of four rows on the CPU, for any configuration.
QUIET: dict[str, Any] = {
    "max_steps": 1,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "use_cpu": True,
    "per_device_train_batch_size": 4,
}


def constant(completions, **_: Any) -> list[float]:
    """A reward that tells nothing apart."""
    return [1.0] * len(completions)


def by_ids(completion_ids, number, **_: Any) -> list[float | None]:
    """A reward that follows from the tokens; prompts 1, 9, ... are flat, and prompts 2, 10, ... abstain once."""
    rewards: list[float | None] = [sum(ids) % 7 / 7 for ids in completion_ids]
    if number[0] % 8 == 1:
        return [0.1] * len(rewards)
    if number[0] % 8 == 2:
        rewards[0] = None
    return rewards


class KeepGradients(TrainerCallback):
    """The gradients and weights of every optimizer step, as they are before it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Called by the Trainer."""
        model = getattr(model, "module", model)
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


class Watched(GRPOTrainer):
    """Keeps what every update computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.outs: list[Any] = []
        self.batches: list[Any] = []
        super().__init__(*args, **kwargs)

    def _record(self, out, batch, scores):
        self.outs.append(out)
        self.batches.append(batch)
        super()._record(out, batch, scores)


def scripted(args: GRPOConfig, reward=by_ids, count: int = 64, drift: float = 0.0, kind=GRPOTrainer, **kwargs: Any):
    """A LoRA trainer on the random Llama whose completions are scripted; `drift` moves it off its reference."""
    given = {"model": tiny_llama(), "peft_config": lora(), **kwargs}
    trainer = kind(
        reward_funcs=reward, args=args, train_dataset=rows(count), processing_class=load_tokenizer("tiny"), **given
    )
    trainer.sampler = ScriptedSampler(trainer.tokenizer, args.max_completion_length)
    if drift:
        move(trainer.shared, drift)
    return trainer


def move(shared, size: float) -> None:
    """Add the same noise to the policy's weights every time."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, parameter in shared.trainable_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def digest(parameters) -> str:
    """sha256 over the bits of named tensors."""
    total = hashlib.sha256()
    for name, tensor in parameters:
        total.update(name.encode())
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def relative_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all tensors together; both must have the same names."""
    assert ours.keys() == theirs.keys()
    assert ours
    difference = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in ours)
    size = sum(float(theirs[n].double().square().sum()) for n in ours)
    assert size > 0
    return (difference / size) ** 0.5


def untimed(log: dict[str, Any]) -> dict[str, Any]:
    """A log entry without what depends on the clock."""
    clocks = ("time", "second", "runtime")
    return {k: v for k, v in log.items() if not any(c in k for c in clocks)}
