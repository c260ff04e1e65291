"""A run that stopped and went on is the run that never stopped: weights bit for bit and every logged number."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import get_peft_model

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.grpo import GRPOTrainer
from tests.trainers.tools import config, digest, lora, rows, tiny_llama, untimed

STEPS = 8


def letters(completion_ids, **_):
    """Share of even ids: spread within almost every group; reads Python's and torch's global random state too."""
    noise = float(torch.rand(())) * 1e-3
    return [sum(i % 2 == 0 for i in ids) / len(ids) + noise * k for k, ids in enumerate(completion_ids)]


def make(folder, full: bool = False, dataset=None, eval_dataset=None, model=None, **fields):
    """Windows of four micro-steps, two passes, two micro-steps a step: four optimizer steps a window. Logs every third
    step, so most checkpoints fall between two logs; the reference moves and beta adapts."""
    fields = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": STEPS,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "beta": 0.05,
        "kl_target": 0.5,
        "sync_ref_model": True,
        "ref_model_sync_steps": 3,
        "disable_dropout": False,
        **fields,
    }
    adapter = None if full else lora(lora_dropout=0.2)
    return GRPOTrainer(
        tiny_llama(attention_dropout=0.2 if full else 0.0) if model is None else model,
        letters,
        config(folder, **fields),
        train_dataset=rows(6) if dataset is None else dataset,
        eval_dataset=eval_dataset,
        processing_class=load_tokenizer("tiny"),
        peft_config=adapter,
    )


def result(trainer):
    logs = [untimed(entry) for entry in trainer.state.log_history if "train_loss" not in entry]
    return digest(trainer.shared.named_parameters()), logs


@pytest.fixture(scope="module", params=["lora", "full"])
def whole(request, tmp_path_factory):
    """The run without a stop, with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp(f"whole_{request.param}")
    trainer = make(folder, full=request.param == "full")
    trainer.train()
    return folder, request.param == "full", result(trainer)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resume_is_exact_at_every_step(whole, tmp_path, step):
    """6 rows make one window of 4 prompts an epoch, of four optimizer steps: the run crosses an epoch at step 4."""
    folder, full, expected = whole
    shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    trainer = make(tmp_path, full)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    found = result(trainer)
    assert found[1] == expected[1]
    assert found[0] == expected[0]


def test_there_is_no_pickle(whole):
    """Every file is JSON, safetensors or the tokenizer's text, and the manifest lists all of them."""
    checkpoint = whole[0] / "checkpoint-5"
    names = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()}
    assert {n.rsplit(".", 1)[1] for n in names} <= {"json", "safetensors", "jinja"}
    listed = json.loads((checkpoint / "manifest.json").read_text())
    assert names == {*listed["files"], "manifest.json"}
    assert listed["step"] == 5
    assert {"optimizer.json", "scheduler.json", "rank-0.json", "reference.json", "run.json"} <= names


def test_the_window_is_not_sampled_again(whole, tmp_path):
    """Resumed inside a window, the first thing that happens is an update: no prompt is generated for."""
    folder, full, _ = whole
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    trainer = make(tmp_path, full, max_steps=4)
    asked = []
    generate = trainer.sampler.generate
    trainer.sampler.generate = lambda *a, **k: asked.append(1) or generate(*a, **k)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert not asked


@pytest.mark.parametrize("name", ["default", "policy", "my-adapter_1", "sft"])
def test_an_adapter_of_any_name_resumes(tmp_path, name):
    """transformers looks for other names than `default` in a sub-folder (transformers#28531)."""

    def trainer(folder, steps):
        model = get_peft_model(tiny_llama(), lora(), adapter_name=name)
        return GRPOTrainer(
            model,
            letters,
            config(folder, max_steps=steps, save_strategy="steps", save_steps=2, learning_rate=1e-2),
            train_dataset=rows(64),
            processing_class=load_tokenizer("tiny"),
        )

    whole = trainer(tmp_path / "whole", 4)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "part" / "checkpoint-2")
    resumed = trainer(tmp_path / "part", 4)
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(whole)


def with_roles(seed):
    """A policy, a critic head on it, a reward model with an adapter and a head of its own; new heads for each seed."""
    shared = SharedModel.build(tiny_llama(), lora())
    torch.manual_seed(seed)
    shared.add_role("critic", zero_init=False)
    shared.add_role("reward", lora(r=2))
    with torch.no_grad():
        for role in ("critic", "reward"):
            for _, parameter in shared.trainable_parameters(role):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return shared


def test_several_roles_resume(tmp_path):
    """Every role's adapter and head comes back, though only the policy trains."""

    def trainer(folder, seed):
        args = config(folder, max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-2)
        shared = with_roles(seed)
        return GRPOTrainer(shared, letters, args, train_dataset=rows(64), processing_class=load_tokenizer("tiny"))

    whole = trainer(tmp_path / "whole", seed=1)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "part" / "checkpoint-2")
    resumed = trainer(tmp_path / "part", seed=2)
    assert digest(resumed.shared.heads.named_parameters()) != digest(whole.shared.heads.named_parameters())
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(whole)


def test_weights_outside_the_adapter_resume(tmp_path):
    """A norm that trains beside the adapter is in no adapter file; the checkpoint has it."""

    def trainer(folder):
        model = get_peft_model(tiny_llama(), lora())
        model.base_model.model.model.norm.weight.requires_grad_(True)
        args = config(folder, max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-2)
        return GRPOTrainer(model, letters, args, train_dataset=rows(64), processing_class=load_tokenizer("tiny"))

    whole = trainer(tmp_path / "whole")
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "part" / "checkpoint-2")
    resumed = trainer(tmp_path / "part")
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(whole)


def test_a_checkpoint_of_another_adapter_is_refused(tmp_path):
    """Fewer target modules: PEFT would load what fits and leave the rest at random."""
    make(tmp_path, max_steps=1).train()
    trainer = GRPOTrainer(
        tiny_llama(),
        letters,
        make(tmp_path).args,
        train_dataset=rows(6),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(target_modules=["q_proj"]),
    )
    with pytest.raises(
        ValueError, match=r"belongs to another run.* policy: .*k_proj.* -> .*'target_modules': \['q_proj'\]"
    ):
        trainer.train(resume_from_checkpoint=True)
