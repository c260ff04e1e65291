"""One batch on two sides: the same weights, prompts, completions and rewards through TRL's trainer and through ours.

Nothing of either side is re-implemented here. TRL computes its advantages, reference log-probs and loss in
`_generate_and_score_completions` (with its sampling replaced by fixed completions) and `_compute_loss`; ours in
`compute_advantages`, `minibatches` (dealing, old and reference log-probs, normalizers) and `minibatch_loss`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rlx import Completion, GRPOConfig, GRPOTrainer, Rollout, load_tokenizer
from hf_rlx.models.roles import POLICY

# Two prompts of different length, three completions each; the last token of some is EOS, others were cut.
PROMPTS = ["1+2=", "12+345="]
COMPLETIONS = [["3", "12", "9876"], ["357", "35", "3"]]
CUT = {(0, 2), (1, 1)}
REWARDS = [[1.0, 0.0, 0.5], [0.25, 0.75, 2.0]]


@dataclass
class Outcome:
    """What one side made of the batch: loss of each micro-batch and their sum, gradient by parameter name, metrics,
    per-row advantages."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    metrics: dict[str, float]
    advantages: torch.Tensor

    @property
    def loss(self) -> float:
        """Sum over micro-batches."""
        return sum(self.losses)


def make_model(tokenizer: Any, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers, 32 wide; weights large enough that log-probs are far from uniform."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(**(fields | changes)))


def move(model: torch.nn.Module) -> None:
    """Move the policy away from its reference, by the same step on both sides."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def old_minus_new(rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) nats between -0.5 and 0.5, no pattern: old log-probs off the current policy."""
    return 0.5 * torch.sin(2.0 + 5.0 * torch.arange(rows)[:, None] + 2.3 * torch.arange(columns)[None, :])


class Sides:
    """Builds both trainers from one model folder and runs the same batch through them.

    Args:
        folder: for the model and for outputs.
    """

    prompts, completions, cut = PROMPTS, COMPLETIONS, CUT

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = load_tokenizer("tiny")
        self.model_path = str(folder / "model")
        make_model(self.tokenizer).save_pretrained(self.model_path)

    def model(self) -> LlamaForCausalLM:
        """A fresh copy of the weights."""
        return LlamaForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)

    def ids(self, group: int, index: int) -> list[int]:
        """Token ids of a completion, EOS at its end unless the limit cut it."""
        ids = self.tokenizer(self.completions[group][index], add_special_tokens=False)["input_ids"]
        return ids + ([] if (group, index) in self.cut else [self.tokenizer.eos_token_id])

    def prompt_ids(self, group: int) -> list[int]:
        """Token ids of a prompt."""
        return self.tokenizer(self.prompts[group])["input_ids"]

    def rollouts(self, rewards: list[list[float]] | list[list[list[float]]] | None = None) -> list[Rollout]:
        """The batch in our types; `rewards` is (P, K), or (P, K, F) for several functions."""
        table = torch.tensor(REWARDS if rewards is None else rewards)
        table = table[:, :, None] if table.ndim == 2 else table
        return [
            Rollout(
                prompt=self.prompts[p],
                prompt_text=self.prompts[p],
                prompt_ids=self.prompt_ids(p),
                completions=[
                    Completion(self.ids(p, k), [0.0] * len(self.ids(p, k)), (p, k) not in self.cut, text)
                    for k, text in enumerate(self.completions[p])
                ],
                rewards=table[p],
                total=torch.where(torch.isnan(table[p]).all(1), torch.nan, table[p].nansum(1)),
            )
            for p in range(len(self.prompts))
        ]

    def our_trainer(self, num_rewards: int = 1, model: Any = None, **fields: Any) -> GRPOTrainer:
        """Our trainer on the batch: TRL's recipe with `fields` on top."""
        batch = {"num_generations": 3, "per_device_train_batch_size": 6, "max_completion_length": 8}
        recipe = fields.pop("preset", "trl")
        args = GRPOConfig.preset(
            recipe, output_dir=str(self.folder / "ours"), use_cpu=True, disable_tqdm=True, **(batch | fields)
        )
        return GRPOTrainer(
            self.model() if model is None else model,
            reward_functions(num_rewards),
            args,
            train_dataset=Dataset.from_dict({"prompt": self.prompts * 4}),
            processing_class=self.tokenizer,
        )

    def trl_trainer(self, rewards: Any = None, **fields: Any) -> Any:
        """TRL's trainer, sampling replaced by the batch's completions."""
        import trl

        table = torch.tensor(REWARDS if rewards is None else rewards)
        table = table[:, :, None] if table.ndim == 2 else table
        flat = table.flatten(0, 1)
        batch = {"num_generations": 3, "per_device_train_batch_size": 6, "max_completion_length": 8}
        args = trl.GRPOConfig(
            str(self.folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            **(batch | fields),
        )
        trainer = trl.GRPOTrainer(
            self.model_path,
            reward_functions(table.shape[2], flat),
            args,
            train_dataset=Dataset.from_dict({"prompt": self.prompts * 4}),
            processing_class=self.tokenizer,
        )
        rows = [(p, k) for p in range(len(self.prompts)) for k in range(len(self.completions[p]))]

        def generate(prompts: list[str]) -> tuple[Any, ...]:
            ids = [self.prompt_ids(p) for p, _ in rows]
            texts = [self.completions[p][k] for p, k in rows]
            return ids, [self.ids(p, k) for p, k in rows], None, texts, None, {}, None, None

        trainer._generate = generate
        trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        trainer.model.train()
        return trainer

    def trl_inputs(self, trainer: Any) -> dict[str, torch.Tensor]:
        """TRL's own preparation of the batch: padding, reference log-probs, rewards, advantages."""
        rows = [{"prompt": p} for p, group in zip(self.prompts, self.completions, strict=True) for _ in group]
        return trainer._generate_and_score_completions(rows)

    def run_trl(
        self,
        rewards: Any = None,
        shift: torch.Tensor | None = None,
        ref_shift: torch.Tensor | None = None,
        **fields: Any,
    ) -> Outcome:
        """Loss, gradients and metrics by TRL, micro-batch by micro-batch.

        `shift`: old minus new log-probs; `ref_shift`: added to the reference's.
        """
        trainer = self.trl_trainer(rewards, **fields)
        move(trainer.model)
        inputs = self.trl_inputs(trainer)
        if shift is not None:
            inputs["old_per_token_logps"] = self.current_logps(**fields) + shift
        if ref_shift is not None:
            inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] + ref_shift
        steps = trainer.args.steps_per_generation
        size = len(inputs["advantages"]) // steps
        losses = []
        for start in range(0, size * steps, size):
            part = {k: v if v.ndim == 0 else v[start : start + size] for k, v in inputs.items()}
            share = trainer.compute_loss(trainer.model, part)
            share.backward()
            losses.append(share.item())
        metrics = {k: sum(v) / len(v) for k, v in trainer._metrics["train"].items()}
        return Outcome(losses, gradients(trainer.model), metrics, inputs["advantages"])

    def run_ours(
        self,
        rewards: Any = None,
        shift: torch.Tensor | None = None,
        ref_shift: torch.Tensor | None = None,
        **fields: Any,
    ) -> Outcome:
        """Loss, gradients and metrics by us, through the packed forward; the shifts as in `run_trl`."""
        rollouts = self.rollouts(rewards)
        trainer = self.our_trainer(rollouts[0].rewards.shape[1], **fields)
        move(trainer.shared.causal_lm)
        trainer.compute_advantages(rollouts)
        losses = []
        for batch in trainer.minibatches(rollouts):
            if shift is not None:
                batch.old_logps = trainer.reference_logps(batch.groups, POLICY, trainer.args.temperature) + shift
            if ref_shift is not None:
                batch.ref_logps = batch.ref_logps + ref_shift
            with trainer.shared.as_role(POLICY):
                share = trainer.update(trainer.model, batch)
            losses.append(share.item())
        assert trainer.shared.plan.packed, trainer.shared.plan.reason
        advantages = torch.cat([r.advantages for r in rollouts])
        return Outcome(losses, gradients(trainer.shared.causal_lm), trainer.metrics["train"].flush(), advantages)

    def current_logps(self, **fields: Any) -> torch.Tensor:
        """(6, T) log-probs of the moved policy, by our forward; the old policy's are these plus a shift."""
        trainer = self.our_trainer(temperature=fields.get("temperature", 1.0))
        move(trainer.shared.causal_lm)
        groups = [r.group() for r in self.rollouts()]
        return trainer.reference_logps(groups, POLICY, trainer.args.temperature)


def reward_functions(count: int, table: torch.Tensor | None = None) -> list[Any]:
    """`count` functions that return the columns of `table`, NaN as None; without one, zeros."""

    def column(index: int) -> Any:
        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
            if table is None:
                return [0.0] * len(completions)
            return [None if v != v else v for v in table[:, index].tolist()]

        reward.__name__ = f"reward_{index}"
        return reward

    return [column(i) for i in range(count)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradient of every parameter, zeros where there is none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    """The batch and both trainers."""
    return Sides(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def shift() -> torch.Tensor:
    """Old minus new log-probs of the batch's 6 rows of up to 4 tokens."""
    return old_minus_new(6, 4)
