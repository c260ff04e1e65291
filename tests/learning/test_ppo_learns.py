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


def by_prompt(completions, number, **_):
    """What is said does not matter."""
    return [n % 7 / 6 for n in number]


@pytest.mark.parametrize("critic", ["head", "adapter"])
def test_the_critic_learns_what_a_prompt_is_worth(tmp_path, critic):
    """The reward is a digit of the prompt, the policy stays (warm-up). An adapter explains nearly all of it; a head is
    a linear probe of states that were made for something else, and explains a part."""
    args = ppo_config(
        tmp_path,
        max_steps=80,
        num_iterations=4,
        critic_warmup_steps=1000,
        critic_adapter=critic == "adapter",
        critic_learning_rate=3e-3,
        lam=1.0,
        beta=0.0,
        per_device_train_batch_size=32,
        logging_steps=20,
    )
    trainer = PPOTrainer(
        "tiny", by_prompt, args, train_dataset=rows(64), peft_config=LoraConfig(r=8, target_modules="all-linear")
    )
    trainer.train()
    explained = [e["value/explained_variance"] for e in trainer.state.log_history if "loss" in e]
    assert explained[-1] > {"head": 0.1, "adapter": 0.95}[critic]


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
