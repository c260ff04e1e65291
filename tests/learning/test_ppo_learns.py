"""Toy tasks that PPO must learn, with a fixed seed."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.ppo import PPOTrainer
from tests.learning.test_learns import LIMIT, length, letter_a, rewards
from tests.trainers.ppo_tools import ppo_config
from tests.trainers.tools import rows, tiny_llama


@pytest.mark.parametrize("minibatches", [1, 2])
def test_all_weights_learn_a_letter(tmp_path, minibatches):
    """A random model says every token equally often, 1 % of them the letter; one response a prompt, the critic is the
    only baseline."""
    args = ppo_config(
        tmp_path,
        max_steps=144,
        num_iterations=4,
        num_mini_batches=minibatches,
        learning_rate=1e-2,
        per_device_train_batch_size=32 // minibatches,
        logging_steps=8,
        beta=0.0,
    )
    trainer = PPOTrainer(tiny_llama(), letter_a, args, train_dataset=rows(32), processing_class=load_tokenizer("tiny"))
    trainer.train()
    assert rewards(trainer)[0] < 0.3
    assert rewards(trainer)[-1] > 0.9


@pytest.mark.parametrize("critic", ["head", "adapter"])
def test_an_adapter_learns_to_be_long(tmp_path, critic):
    """The bundled model answers in three tokens of sixteen; it learns to use all of them."""
    args = ppo_config(
        tmp_path,
        max_steps=36,
        num_iterations=2,
        learning_rate=3e-3,
        critic_adapter=critic == "adapter",
        beta=0.0,
        lam=1.0,
        max_completion_length=LIMIT,
        per_device_train_batch_size=32,
        num_generations=4,
        logging_steps=6,
    )
    trainer = PPOTrainer(
        "tiny", length, args, train_dataset=rows(64), peft_config=LoraConfig(r=16, target_modules="all-linear")
    )
    trainer.train()
    assert rewards(trainer)[0] < 0.3
    assert rewards(trainer)[-1] > 0.9
