"""Adapters on the embedding itself: prompts are still checked against its rows, and a step trains them."""

from __future__ import annotations

import pytest
import torch

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.generate import Generator
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.trainers.grpo import GRPOTrainer
from tests.trainers.tools import config, lora, rows, tiny_llama

ADAPTERS = [
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": [69, 70]},
]


def letters(completion_ids, **_):
    """A reward that differs within a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.mark.parametrize("fields", ADAPTERS)
def test_one_step_trains_it(tmp_path, fields):
    trainer = GRPOTrainer(
        tiny_llama(),
        letters,
        config(tmp_path),
        train_dataset=rows(8),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(**fields),
    )
    names = [n for n, _ in trainer.shared.trainable_parameters() if "embed_tokens" in n]
    assert names
    before = {n: p.detach().clone() for n, p in trainer.shared.trainable_parameters()}
    trainer.train()
    after = dict(trainer.shared.named_parameters())
    assert any(not torch.equal(before[name], after[name]) for name in names)


@pytest.mark.parametrize("fields", ADAPTERS)
def test_an_id_that_is_not_embedded_is_refused(fields):
    """101 rows: the largest id is 100."""
    generator = Generator(SharedModel.build(tiny_llama(), lora(**fields)), load_tokenizer("tiny"))
    generator.generate([[100]], 2, SamplingParams(1))
    with pytest.raises(ValueError, match="token id 101, but the model embeds 101 tokens only"):
        generator.generate([[101]], 2, SamplingParams(1))
