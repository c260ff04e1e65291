"""A model with every role, and what the cases compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from tests.hub.server import Hub
from tests.tiny import ragged_groups, randomise_lora
from tests.trainers.tools import lora, tiny_llama

BASE = "me/base"
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]
TOKENIZER = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
SCORED = ("critic", "reward", "step_reward")


def base(hub: Hub) -> str:
    """The id of the random Llama, pushed by transformers once."""
    if ("model", BASE) not in hub.repos:
        tiny_llama().push_to_hub(BASE)
        tokenizer().push_to_hub(BASE)
    return BASE


def tokenizer() -> PreTrainedTokenizerBase:
    """The bundled one."""
    return load_tokenizer("tiny")


def all_roles(hub: Hub, seed: int = 1) -> SharedModel:
    """Policy, reward and step reward with adapters and heads of their own, a critic on the policy, and facts."""
    shared = SharedModel.from_pretrained(base(hub), peft_config=lora())
    shared.add_role("critic", zero_init=False)
    shared.add_role("reward", lora(r=2), zero_init=False)
    shared.add_role("step_reward", lora(r=3), zero_init=False)
    randomise_lora(shared.model, seed=seed)
    shared.roles["reward"].facts = {"temperature": 1.5, "normalizer": "none"}
    shared.tokenizer = tokenizer()
    return shared


def read(shared: SharedModel) -> dict[str, torch.Tensor]:
    """Log-probs of the policy, and the score of every role that has one, on the same ragged groups."""
    groups = ragged_groups()
    with torch.no_grad(), shared.rollout_mode():
        found = {"logps": shared(groups).per_token_logps}
        for role in SCORED:
            if role in shared.roles:
                found[role] = shared.score(groups, role)
    return found


def assert_same(actual: SharedModel, expected: SharedModel) -> None:
    """The same roles, facts, log-probs and scores (to 1e-6)."""
    assert set(actual.roles) == set(expected.roles)
    assert {n: r.facts for n, r in actual.roles.items()} == {n: r.facts for n, r in expected.roles.items()}
    ours, theirs = read(actual), read(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-6, msg=name)


def names(hub: Hub, repo: str, revision: str = "main", kind: str = "model") -> list[str]:
    """What a repository holds, sorted; without the plot, which needs matplotlib."""
    others = (".gitattributes", "training.png")
    return sorted(name for name in hub.files(repo, revision, kind) if name not in others)


def puts(hub: Hub) -> int:
    """Large files sent so far."""
    return hub.requests.count("PUT lfs")


def contents(folder: Path) -> dict[str, Any]:
    """Name -> bytes of everything below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
