"""A reward run that stopped and went on is the run that never stopped: weights bit for bit and every logged number."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from transformers import TrainerCallback

from hf_rlx.models.classifier import from_causal_lm
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.persistence.interrupts import TrainingInterrupted
from hf_rlx.trainers.grpo import GRPOTrainer
from tests.trainers.prm_tools import config as step_config
from tests.trainers.prm_tools import solutions
from tests.trainers.prm_tools import trainer as step_trainer
from tests.trainers.reward_tools import config, lists, pairs, shared_model, trainer
from tests.trainers.tools import config as grpo_config
from tests.trainers.tools import digest, lora, rows, tiny_llama, untimed

STEPS = 5
KINDS = ["role", "ensemble", "classifier", "classifier adapter", "lists", "steps"]


def make(folder, kind, **fields):
    """Seven rows in steps of four (two micro-batches) and three: the run crosses an epoch at steps 2 and 4. Logs every
    third step, so most checkpoints fall between two logs; dropout draws from the global random state."""
    fields = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "disable_dropout": False,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **fields,
    }
    if kind == "ensemble":
        fields["ensemble_size"] = 2
    if kind == "lists":
        fields["loss_type"] = "plackett_luce"
    adapter = lora(lora_dropout=0.2)
    if kind == "steps":
        args, held_out = step_config(folder, **fields), solutions(3, seed=1)
        return step_trainer(args, shared_model(), solutions(7), eval_dataset=held_out, peft_config=adapter)
    model = from_causal_lm(tiny_llama(attention_dropout=0.2)) if "classifier" in kind else shared_model()
    data = lists if kind == "lists" else pairs
    return trainer(
        config(folder, **fields),
        model,
        data(7),
        eval_dataset=data(3, seed=1),
        peft_config=None if kind == "classifier" else adapter,
    )


def result(rewards):
    """Weights and logs."""
    logs = [untimed(entry) for entry in rewards.state.log_history if "train_loss" not in entry]
    return digest(rewards.shared.named_parameters()), logs


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    """The run without a stop, with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    rewards = make(folder, request.param)
    rewards.train()
    return folder, request.param, result(rewards)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resume_is_exact_at_every_step(whole, tmp_path, step):
    folder, kind, expected = whole
    shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    rewards = make(tmp_path, kind)
    rewards.train(resume_from_checkpoint=True)
    assert rewards.state.global_step == STEPS
    found = result(rewards)
    assert found[1] == expected[1]
    assert found[0] == expected[0]


def test_a_signal_inside_a_step_loses_nothing(tmp_path):
    """SIGTERM between two micro-steps: the process ends with its code, and the run goes on as if nothing had been."""
    expected = make(tmp_path / "whole", "role", save_strategy="no")
    expected.train()

    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    part = make(tmp_path / "part", "role", save_steps=100)
    part.add_callback(Stop())
    with pytest.raises(TrainingInterrupted):
        part.train()
    resumed = make(tmp_path / "part", "role", save_steps=100)
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(expected)


def test_another_run_s_checkpoint_is_refused(tmp_path):
    """What would change the numbers is named: the adapter, the loss, the length."""
    make(tmp_path, "role", max_steps=1).train()
    with pytest.raises(ValueError, match=r"belongs to another run.*loss_type: 'bradley_terry' -> 'all_pairs'"):
        make(tmp_path, "role", loss_type="all_pairs").train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="max_length: 1024 -> 20"):
        make(tmp_path, "role", max_length=20).train(resume_from_checkpoint=True)
    make(tmp_path / "steps", "steps", max_steps=1).train()
    with pytest.raises(ValueError, match=r"first_error_only: False -> True"):
        make(tmp_path / "steps", "steps", first_error_only=True).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"step_separator: '\\n' -> ';'"):
        make(tmp_path / "steps", "steps", step_separator=";").train(resume_from_checkpoint=True)


def test_a_policy_run_resumes_with_the_running_moments_of_its_reward(tmp_path):
    """The normaliser moves with every rollout; a checkpoint has it as it was at its step."""

    def make_grpo(folder):
        shared = shared_model(trained=False)
        torch.manual_seed(0)
        shared.add_role("reward", lora())
        reward = shared.reward_function(tokenizer=load_tokenizer("tiny"), normalizer="running")
        args = grpo_config(folder, max_steps=4, save_strategy="steps", save_steps=1, learning_rate=1e-2)
        tokenizer = load_tokenizer("tiny")
        return GRPOTrainer(shared, reward, args, train_dataset=rows(64), processing_class=tokenizer)

    uninterrupted = make_grpo(tmp_path / "whole")
    uninterrupted.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "part" / "checkpoint-2")
    resumed = make_grpo(tmp_path / "part")
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(uninterrupted)
    moments = [run.shared.roles["reward"].facts["moments"] for run in (resumed, uninterrupted)]
    assert moments[0] == moments[1]
    assert moments[0]["count"] == 4 * 16


def test_the_checkpoint_holds_the_role_and_no_pickle(whole):
    folder, kind, _ = whole
    checkpoint = folder / "checkpoint-3"
    names = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()}
    assert {n.rsplit(".", 1)[1] for n in names} <= {"json", "safetensors", "jinja"}
    if kind in ("role", "ensemble", "lists"):
        assert {"reward/adapter_model.safetensors", "reward/head.safetensors", "adapter_config.json"} <= names
        facts = json.loads((checkpoint / "reward" / "role.json").read_text())["facts"]
        assert facts["max_length"] == 64  # the model's context, below the 1024 of the configuration
    assert ("reward_1/head.safetensors" in names) == (kind == "ensemble")
    assert ("step_reward/head.safetensors" in names) == (kind == "steps")
