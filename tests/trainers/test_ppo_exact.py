"""One base in all roles is PPO with separate models: gradients of policy and critic over two epochs, in float64,
against a computation that shares no code with the package: every text alone, loops, autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn

from tests.trainers.ppo_tools import ppo, ppo_config, some
from tests.trainers.tools import KeepGradients, lora, relative_gap, tiny_llama

FIELDS: dict[str, Any] = {
    "per_device_train_batch_size": 6,
    "num_iterations": 2,
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.2,
    "critic_learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "shuffle_dataset": False,
    "temperature": 0.7,
    "beta": 0.1,
    "gamma": 0.98,
    "lam": 0.9,
    "entropy_coef": 0.02,
    "vf_coef": 0.5,
    "cliprange": 0.02,
    "cliprange_high": 0.04,
    "cliprange_value": 0.03,
}
KINDS: dict[str, dict[str, Any]] = {
    "own adapter": {"critic_adapter": True},
    "head": {},
    "head that teaches the trunk": {"detach_critic": False},
    "all weights": {"detach_critic": False, "full": True, "learning_rate": 0.02},
}


class Separate:
    """Policy, critic and reference as three models; the critic's head is two plain tensors."""

    def __init__(self, trainer, own: bool, full: bool, detached: bool) -> None:
        self.own, self.full, self.detached = own, full, detached
        shared = dict(trainer.shared.named_parameters())
        self.reference = tiny_llama().double()
        self.policy = self._body(shared, "policy")
        self.critic = self._body(shared, "critic") if own else self.policy
        head = [shared[f"heads.critic.linear.{n}"].detach().double().clone() for n in ("weight", "bias")]
        self.head = [nn.Parameter(t) for t in head]

    def _body(self, shared, adapter: str) -> Any:
        if self.full:
            model = tiny_llama().double()
            model.load_state_dict({n: shared[f"model.{n}"].detach() for n in dict(model.named_parameters())}, False)
            return model
        model = get_peft_model(tiny_llama().double(), lora(), adapter_name=adapter)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(shared[f"model.{name}"])
        return model

    def _hidden(self, model, ids: list[int]) -> torch.Tensor:
        base = model if self.full or model is self.reference else model.get_base_model()
        return base.model(torch.tensor([ids])).last_hidden_state[0]

    def logps(self, model, prompt: list[int], ids: list[int], temperature: float):
        """Log-probs of the tokens, and the entropy before each."""
        base = model if self.full or model is self.reference else model.get_base_model()
        hidden = self._hidden(model, prompt + ids)[len(prompt) - 1 : -1]
        logs = torch.log_softmax(base.lm_head(hidden) / temperature, -1)
        return logs[range(len(ids)), ids], -(logs.exp() * logs).sum(-1)

    def values(self, prompt: list[int], ids: list[int]) -> torch.Tensor:
        """V before each token."""
        hidden = self._hidden(self.critic, prompt + ids)[len(prompt) - 1 : -1]
        hidden = hidden.detach() if self.detached and not self.own else hidden
        return hidden @ self.head[0][0] + self.head[1]

    def parameters(self) -> dict[str, nn.Parameter]:
        """By the names that they have in the shared model."""
        named = {f"model.{n}": p for n, p in self.policy.named_parameters() if p.requires_grad}
        named |= {f"model.{n}": p for n, p in self.critic.named_parameters() if p.requires_grad}
        return named | {f"heads.critic.linear.{n}": p for n, p in zip(("weight", "bias"), self.head, strict=True)}

    def train(self, texts, scores, fields) -> list[dict[str, torch.Tensor]]:
        """Two steps of SGD on the texts (prompt, ids); their gradients."""
        heat, beta, gamma, lam = (fields[n] for n in ("temperature", "beta", "gamma", "lam"))
        old, advantages, returns = [], [], []
        with torch.no_grad():
            for (prompt, ids), score in zip(texts, scores, strict=True):
                logps, values = self.logps(self.policy, prompt, ids, heat)[0], self.values(prompt, ids)
                rewards = -beta * (logps - self.logps(self.reference, prompt, ids, heat)[0])
                rewards[-1] += score
                row = []
                for t in range(len(ids)):  # sum over l of (gamma lam)^l delta_(t+l), as it is defined
                    total = 0.0
                    for u in range(t, len(ids)):
                        after = values[u + 1] if u + 1 < len(ids) else 0.0
                        total = total + (gamma * lam) ** (u - t) * (rewards[u] + gamma * after - values[u])
                    row.append(total)
                old.append((logps, values))
                advantages.append(torch.stack(row))
                returns.append(advantages[-1] + values)
            everything = torch.cat(advantages)
            spread = (everything - everything.mean()).square().mean()
            advantages = [(a - everything.mean()) / (spread + 1e-8).sqrt() for a in advantages]
        tokens, steps = len(everything), []
        for _ in range(2):
            loss = torch.zeros((), dtype=torch.float64)
            for (prompt, ids), a, r, (logps, values) in zip(texts, advantages, returns, old, strict=True):
                new, entropy = self.logps(self.policy, prompt, ids, heat)
                ratio = (new - logps).exp()
                clipped = ratio.clamp(1 - fields["cliprange"], 1 + fields["cliprange_high"])
                loss = loss - torch.minimum(ratio * a, clipped * a).sum() - fields["entropy_coef"] * entropy.sum()
                value, band = self.values(prompt, ids), fields["cliprange_value"]
                held = torch.minimum(torch.maximum(value, values - band), values + band)
                worse = torch.maximum((value - r).square(), (held - r).square())
                loss = loss + fields["vf_coef"] * 0.5 * worse.sum()
            for parameter in self.parameters().values():
                parameter.grad = None
            (loss / tokens).backward()
            steps.append({n: p.grad.clone() for n, p in self.parameters().items()})
            with torch.no_grad():
                for name, parameter in self.parameters().items():
                    critic = ".critic." in name
                    rate = fields["critic_learning_rate"] if critic else fields["learning_rate"]
                    parameter -= rate * parameter.grad
        return steps


@pytest.mark.parametrize("kind", KINDS)
def test_one_base_is_separate_models(tmp_path, kind):
    """Six texts of one to six tokens, cut and ended, one of which nobody scores; clips are tight enough to act in the
    second epoch."""
    options = dict(KINDS[kind])
    full = options.pop("full", False)
    fields = {**FIELDS, **options}
    keep = KeepGradients()
    trainer = ppo(
        ppo_config(tmp_path, **fields),
        model=tiny_llama().double(),
        peft_config=None if full else lora(),
        drift=0.02 if full else 0.1,
        callbacks=[keep],
    )
    apart = Separate(trainer, trainer.own_critic, full, trainer.args.detach_critic)
    trainer.train()

    prompts = [list(trainer.tokenizer(trainer.train_dataset[i]["prompt"])["input_ids"]) for i in range(6)]
    said = [group[0].token_ids for group in trainer.sampler.generate(prompts, 1, None)]
    scores = [some([ids], [i])[0] for i, ids in enumerate(said)]
    kept = [i for i, score in enumerate(scores) if score is not None]
    assert len(kept) == 5
    expected = apart.train([(prompts[i], said[i]) for i in kept], [scores[i] for i in kept], fields)
    for ours, theirs in zip(keep.steps, expected, strict=True):
        critic, policy = ({n: g for n, g in theirs.items() if (".critic." in n) == of_critic} for of_critic in (1, 0))
        assert relative_gap({n: ours[n].double() for n in policy}, policy) < 1e-6
        assert relative_gap({n: ours[n].double() for n in critic}, critic) < 1e-6
        assert ours.keys() == theirs.keys()
    log = trainer.state.log_history[1]
    assert log["clip_ratio/region_mean"] > 0
    assert log["value/clip_fraction"] > 0
