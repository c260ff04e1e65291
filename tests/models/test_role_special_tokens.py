"""What a reward model learned to do with special tokens inside messages, it does when it scores, reloaded too."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.prm import PRMConfig, PRMTrainer
from hf_rlx.trainers.reward import RewardConfig, RewardTrainer
from tests import tiny
from tests.trainers.tools import lora, tiny_llama

PROMPT = [{"role": "user", "content": "1<eos>2"}]
ROWS = {"prompts": [PROMPT], "completions": [[{"role": "assistant", "content": "3<eos>4\n"}]]}


def made(role: str, **facts) -> SharedModel:
    """A model whose role looks trained."""
    shared = SharedModel.build(tiny_llama(), lora())
    torch.manual_seed(5)
    shared.add_role(role, lora(r=2))
    tiny.randomise_lora(shared.model, role, scale=0.5)
    shared.roles[role].facts = facts
    return shared


def score(shared: SharedModel, role: str, **options) -> float:
    made_of = {"reward": shared.reward_function, "step_reward": shared.step_reward_function}[role]
    found = made_of(tokenizer=load_tokenizer("tiny"), **options)(**ROWS)[0]
    return found if isinstance(found, float) else found[0][1]


@pytest.mark.parametrize("role", ["reward", "step_reward"])
@pytest.mark.parametrize(("trained", "scored"), [("allow", "allow"), ("split", "split"), ("refuse", "split")])
def test_it_scores_as_it_was_trained(role, trained, scored, tmp_path):
    """`<eos>` is one token or five; "refuse" was a check of the rows. What is given goes before what was saved."""
    shared = made(role, special_tokens_in_messages=trained)
    both = {way: score(shared, role, special_tokens=way) for way in ("allow", "split")}
    assert abs(both["allow"] - both["split"]) > 1e-4
    shared.save_pretrained(tmp_path)
    loaded = SharedModel.from_pretrained(tmp_path, base=tiny_llama())
    for model in (shared, loaded):
        assert score(model, role) == pytest.approx(both[scored], abs=1e-6)
    assert score(made(role), role) == pytest.approx(both["split"], abs=1e-6)  # saved by an earlier version
    with pytest.raises(ValueError, match="special_tokens_in_messages"):
        score(shared, role, special_tokens="refuse")


def test_the_reward_trainer_says_so(tmp_path):
    data = Dataset.from_list([{"prompt": PROMPT, "chosen": "3", "rejected": "4"}] * 2)
    args = RewardConfig(str(tmp_path), report_to="none", use_cpu=True, special_tokens_in_messages="allow")
    shared = SharedModel.build(tiny_llama(), lora())
    RewardTrainer(shared, args, train_dataset=data, processing_class=load_tokenizer("tiny"))
    assert shared.roles["reward"].facts["special_tokens_in_messages"] == "allow"
    assert shared.reward_function(tokenizer=load_tokenizer("tiny")).special_tokens == "allow"


def test_the_step_reward_trainer_says_so(tmp_path):
    data = Dataset.from_list([{"prompt": PROMPT, "completions": ["3", "4"], "labels": [True, False]}] * 2)
    args = PRMConfig(str(tmp_path), report_to="none", use_cpu=True, special_tokens_in_messages="allow")
    shared = SharedModel.build(tiny_llama(), lora())
    PRMTrainer(shared, args, train_dataset=data, processing_class=load_tokenizer("tiny"))
    assert shared.roles["step_reward"].facts["special_tokens_in_messages"] == "allow"
    assert shared.step_reward_function(tokenizer=load_tokenizer("tiny")).special_tokens == "allow"
