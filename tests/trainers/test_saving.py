"""What a trainer writes, and that it can be read again."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import AutoModelForCausalLM

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.grpo import GRPOTrainer
from tests.trainers.tools import by_ids, config, digest, lora, move, rows, scripted, tiny_llama


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def base_folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    load_tokenizer("tiny").save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_an_adapter_is_saved_at_the_root_and_loads_without_us(tmp_path):
    """No pickle, no token in any file, and `AutoPeftModelForCausalLM` gives the same log-probs."""
    args = config(tmp_path / "out", hub_token="hf_CANARY_1", model_init_kwargs={"token": "hf_CANARY_2"})
    trainer = GRPOTrainer(
        base_folder(tmp_path), by_ids, args, train_dataset=rows(16), peft_config=lora(), eval_dataset=rows(2)
    )
    move(trainer.shared, 0.1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    names = files(tmp_path / "saved")
    assert {"adapter_config.json", "adapter_model.safetensors", "training_args.json", "tokenizer.json"} <= set(names)
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pth", ".pkl"))]
    for path in (tmp_path / "saved").rglob("*"):
        assert path.is_dir() or b"CANARY" not in path.read_bytes()
    saved = json.loads((tmp_path / "saved" / "training_args.json").read_text())
    assert saved["learning_rate"] == 1e-3
    assert "hub_token" not in saved

    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.shared.causal_lm(ids).logits, atol=1e-6, rtol=1e-6)


def test_full_weights_load_without_us(tmp_path):
    trainer = scripted(config(tmp_path), peft_config=None)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    names = files(tmp_path / "saved")
    assert {"config.json", "model.safetensors", "training_args.json"} <= set(names)
    assert not [n for n in names if n.endswith((".bin", ".pt"))]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert digest(loaded.named_parameters()) == digest(trainer.shared.causal_lm.named_parameters())


def test_a_checkpoint_holds_no_token(tmp_path):
    """Every file of a checkpoint is searched: states, settings, weights."""
    args = config(tmp_path, hub_token="hf_CANARY_1", save_strategy="steps", save_steps=1)
    scripted(args).train()
    folder = tmp_path / "checkpoint-1"
    assert "training_args.bin" not in files(folder)
    for path in folder.rglob("*"):
        assert path.is_dir() or b"CANARY" not in path.read_bytes()


@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_the_best_model_is_loaded_at_the_end(tmp_path, adapter):
    """By an evaluation reward, for an adapter of any name (row 16): the reward falls, so the first step is best."""
    scores = iter([3.0, 2.0, 1.0])

    def falling(completions, completion_ids, number, **_):
        if len(completions) == 1:  # evaluation
            return [next(scores)]
        return by_ids(completion_ids, number)

    args = config(
        tmp_path,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        learning_rate=0.1,
    )
    model = get_peft_model(tiny_llama(), lora(), adapter_name=adapter)
    trainer = scripted(args, reward=falling, model=model, peft_config=None, eval_dataset=rows(1))
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert trainer.state.best_metric == 3.0
    best = SharedModel.from_pretrained(tmp_path / "checkpoint-1", base=tiny_llama())
    last = SharedModel.from_pretrained(tmp_path / "checkpoint-3", base=tiny_llama())
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        ours, first, third = (m.causal_lm(ids).logits for m in (trainer.shared, best, last))
    torch.testing.assert_close(ours, first)
    assert (ours - third).abs().max() > 1e-3


@pytest.mark.parametrize("adapter", [True, False])
def test_resume_loads_weights_and_goes_on(tmp_path, adapter):
    """At a window's border the resumed run is the uninterrupted one: weights, optimizer, order of the prompts."""
    kwargs = {} if adapter else {"peft_config": None}
    whole = scripted(config(tmp_path / "a", max_steps=6, save_strategy="steps", save_steps=2), count=20, **kwargs)
    whole.train()
    resumed = scripted(config(tmp_path / "b", max_steps=6), count=20, **kwargs)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert resumed.state.global_step == 6
    assert len(resumed.sampler.calls) == 4
    assert digest(resumed.shared.trainable_parameters()) == digest(whole.shared.trainable_parameters())
    for ours, theirs in zip(resumed.state.log_history[2:6], whole.state.log_history[2:6], strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["reward"] == theirs["reward"]
    assert all(e["step_time"] < 60 for e in resumed.state.log_history[2:6])


def test_resume_from_the_wrong_kind_is_named(tmp_path):
    scripted(config(tmp_path / "a", save_strategy="steps", save_steps=1), peft_config=None).train()
    trainer = scripted(config(tmp_path / "b", max_steps=2))
    with pytest.raises(ValueError, match=r"policy: 'all weights' -> \{'peft_type': 'LORA'"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
