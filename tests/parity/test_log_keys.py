"""Log keys of TRL that are not here, and those in their place; entries of `DIFFERS_FROM_TRL`."""

from __future__ import annotations

import pytest
from datasets import Dataset

import hf_rlx
from hf_rlx import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from hf_rlx.models.loading import load_tokenizer
from tests.trainers.tools import QUIET, constant, lora, rows, tiny_llama


def keys(trainer) -> set[str]:
    """What one step and one evaluation log."""
    trainer.train()
    trainer.evaluate()
    return {name for entry in trainer.state.log_history for name in entry}


def made(trainer, config, data, **arguments):
    return trainer(
        tiny_llama(),
        args=config,
        train_dataset=data,
        eval_dataset=data,
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(),
        **arguments,
    )


def test_sft(tmp_path):
    data = Dataset.from_list([{"prompt": "a", "completion": "b"}] * 4)
    found = keys(made(SFTTrainer, SFTConfig(str(tmp_path), **QUIET), data))
    assert found >= {"loss", "entropy", "num_tokens", "eval_loss", "eval_perplexity"}
    assert not {name for name in found if "token_accuracy" in name}


@pytest.mark.parametrize("name", ["DPO", "IPO", "SimPO", "ORPO"])
def test_pairs(tmp_path, name):
    data = Dataset.from_list([{"prompt": "a", "chosen": "bc", "rejected": "d"}] * 4)
    config = getattr(hf_rlx, f"{name}Config")(str(tmp_path), **QUIET)
    found = keys(made(getattr(hf_rlx, f"{name}Trainer"), config, data))
    assert found >= {"loss", "rewards/margins", "logps/chosen", "entropy", "num_tokens", "eval_rewards/accuracies_low"}
    assert ("nll_loss" in found) == ("eval_nll_loss" in found) == (name in ("SimPO", "ORPO"))
    assert not {each for each in found if "logits/" in each or "token_accuracy" in each}


@pytest.mark.parametrize("answers", [1, 2])
def test_evaluation_of_grpo(tmp_path, answers):
    config = GRPOConfig(
        str(tmp_path), **QUIET, num_generations=2, num_generations_eval=answers, max_completion_length=4, beta=0.0
    )
    found = keys(made(GRPOTrainer, config, rows(4), reward_funcs=constant))
    assert "eval_reward" in found
    assert "eval_loss" not in found
    assert ("eval_reward_std" in found) == ("eval_frac_reward_zero_std" in found) == (answers > 1)
