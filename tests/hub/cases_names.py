"""Names of the Hub where trainers take names: reward functions, and the tokenizer that was pushed with a model."""

from __future__ import annotations

import pytest

from hf_rlx.models.classifier import from_causal_lm
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.reward_models import resolve
from tests.hub.tools import all_roles, tokenizer
from tests.trainers import pair_tools, reward_tools
from tests.trainers.tools import tiny_llama


def test_reward_functions_by_hub_id(hub):
    shared = all_roles(hub)
    shared.push_to_hub("me/judge")
    rows = {"prompts": ["1+1=", "2+2="], "completions": ["2", "5"]}
    found = resolve("me/judge")
    assert found.__name__ == "judge"
    assert found(**rows) == pytest.approx(shared.reward_function()(**rows), abs=1e-6)
    whole = SharedModel(from_causal_lm(tiny_llama()))
    whole.roles["reward"].facts = {"temperature": 2.0}
    whole.push_to_hub("me/whole-judge", tokenizer=tokenizer())
    assert resolve("me/whole-judge").temperature == 2.0
    with pytest.raises(ImportError, match="no such repository"):
        resolve("me/no-judge")


def test_a_trainer_takes_the_pushed_tokenizer(hub, tmp_path):
    own = tokenizer()
    own.chat_template = "{{ messages }}"
    all_roles(hub).push_to_hub("me/own-template", tokenizer=own)
    from hf_rlx.trainers.dpo import DPOTrainer

    for model in ("me/own-template", SharedModel.from_pretrained("me/own-template")):
        trainer = DPOTrainer(model, args=pair_tools.config(tmp_path), train_dataset=reward_tools.pairs(16))
        assert trainer.processing_class.chat_template == "{{ messages }}"
