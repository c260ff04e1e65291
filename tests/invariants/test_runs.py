"""What must hold of every run: on-policy means ratio 1, the same seed gives the same run, nothing leaks."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.rollout.reward_models import RewardError
from hf_rlx.trainers.grpo import GRPOTrainer
from tests.trainers.tools import Watched, by_ids, config, digest, lora, move, rows, scripted, tiny_llama, untimed


def gpt2_with_dropout():
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=101,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.5,
            attn_pdrop=0.5,
            embd_pdrop=0.5,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def letters(completion_ids, **_):
    """Share of even ids: spread within almost every group."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("model", ["gpt2", "gpt2 full", "llama"])
def test_first_step_has_ratio_one_and_no_kl(tmp_path, model, passes):
    """Dropout in the model and in the adapter, but policy, old policy and reference are one function (trl: 0.13 nats).
    With two passes the old log-probs come from a forward of their own."""
    base = tiny_llama(attention_dropout=0.5) if model == "llama" else gpt2_with_dropout()
    adapter = None if model == "gpt2 full" else lora(lora_dropout=0.5, target_modules=["c_attn", "c_proj", "c_fc"])
    if model == "llama":
        adapter = lora(lora_dropout=0.5)
    elif adapter is not None:
        adapter.fan_in_fan_out = True
    trainer = Watched(
        base,
        letters,
        config(tmp_path, num_iterations=passes),
        train_dataset=rows(16),
        processing_class=load_tokenizer("tiny"),
        peft_config=adapter,
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["groups/kept_fraction"] > 0
    for out, batch in zip(trainer.outs[:1], trainer.batches[:1], strict=True):
        assert torch.equal(out.ratio[batch.mask], torch.ones(int(batch.mask.sum())))
        assert (batch.old_logps is None) == (passes == 1)
    assert log["kl"] == log["kl/k1_token"] == log["kl/max_log_ratio"] == 0
    # The sampler decodes in evaluation mode: dropout in the update would show here.
    assert log["sampling/sampling_logp_difference/max"] < 1e-4


def test_dropout_stays_on_when_asked_for(tmp_path):
    """`disable_dropout=False` is TRL's behaviour, and shows that the test above can fail."""
    trainer = Watched(
        gpt2_with_dropout(),
        letters,
        config(tmp_path, disable_dropout=False),
        train_dataset=rows(16),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(target_modules=["c_attn"], fan_in_fan_out=True),
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["kl/max_log_ratio"] > 0.01
    assert log["sampling/sampling_logp_difference/max"] > 0.01


def run(folder, seed: int = 7, **fields):
    trainer = GRPOTrainer(
        tiny_llama(),
        letters,
        config(folder, max_steps=4, seed=seed, steps_per_generation=2, learning_rate=1e-2, **fields),
        train_dataset=rows(64),
        eval_dataset=rows(5),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(),
    )
    trainer.train()
    return digest(trainer.shared.named_parameters()), [untimed(entry) for entry in trainer.state.log_history]


def test_the_same_seed_gives_the_same_run(tmp_path):
    """Weights bit for bit and every logged number; another seed gives another run."""
    first, second, other = run(tmp_path), run(tmp_path), run(tmp_path, seed=8)
    assert first == second
    assert first[0] != other[0]
    assert [e.get("reward") for e in first[1]] != [e.get("reward") for e in other[1]]


def test_evaluation_does_not_disturb_training(tmp_path):
    """The run with an evaluation at every step, and one before the first, ends in the same weights."""
    plain, log = run(tmp_path)
    evaluated, eval_log = run(
        tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True, num_generations_eval=2
    )
    assert evaluated == plain
    trained = [e for e in eval_log if not any(k.startswith("eval_") for k in e)]
    assert trained == log
    assert len(eval_log) == len(log) + 5


def test_fifty_rollouts_leave_the_base_bit_identical(tmp_path):
    """Adapters run in place: nothing is merged into the base and taken out again."""
    trainer = GRPOTrainer(
        tiny_llama(),
        letters,
        config(tmp_path),
        train_dataset=rows(16),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(),
    )
    move(trainer.shared, 0.1)
    before = digest(trainer.shared.named_parameters())
    seen = set()
    for index in range(50):
        collected = trainer.rollout([trainer.train_dataset[index % 16]], round_index=index % 16)
        seen.add(tuple(collected.rollouts[0].completions[0].token_ids))
    assert digest(trainer.shared.named_parameters()) == before
    assert len(seen) > 10


def flags(shared):
    return (
        [(n, p.requires_grad) for n, p in shared.named_parameters()],
        [(n, m.training) for n, m in shared.named_modules()],
        list(shared.model.active_adapters),
        shared._active is shared.causal_lm,
    )


def test_a_training_step_leaves_roles_as_they_were(tmp_path):
    """Reference, old policy and rollout all switch; afterwards every flag is what it was."""
    trainer = scripted(config(tmp_path, num_iterations=2, max_steps=2), drift=0.1)
    trainer.shared.train()
    before = flags(trainer.shared)
    trainer.train()
    assert flags(trainer.shared) == before
    assert any(requires for _, requires in before[0])


def test_a_failing_reward_leaves_roles_as_they_were_and_training_can_go_on(tmp_path):
    """The exception names function, prompt and completion; the same trainer trains on once the fault is gone."""
    broken = True

    def fragile(completion_ids, number, **_):
        if broken:
            raise ZeroDivisionError("no such number")
        return by_ids(completion_ids, number)

    trainer = scripted(config(tmp_path, shuffle_dataset=False), reward=fragile)
    trainer.shared.train()
    before = flags(trainer.shared)
    with pytest.raises(RewardError, match=r"'fragile' raised ZeroDivisionError: no such number") as caught:
        trainer.train()
    assert "0+0=" in str(caught.value)
    first = trainer.sampler.generate([list(trainer.tokenizer("0+0=")["input_ids"])], 4, None)[0][0]
    assert repr(first.text) in str(caught.value)
    assert flags(trainer.shared) == before
    broken = False
    trainer.train()
    assert trainer.state.global_step == 1
    assert flags(trainer.shared) == before


def test_a_second_run_does_not_start_in_the_first_ones_window(tmp_path):
    """Stopped in the middle of a window, train() samples anew: old log-probs belong to old prompts."""
    trainer = scripted(config(tmp_path, steps_per_generation=4, max_steps=1), kind=Watched)
    trainer.train()
    assert trainer.sampler.calls == [16]
    trainer.train()
    assert trainer.sampler.calls == [16, 16]


def test_constant_reward_teaches_nothing(tmp_path):
    """No signal, no KL: the weights stay bit-identical, and the loss is 0 and finite."""

    def constant(completions, **_):
        return [0.1] * len(completions)

    trainer = scripted(config(tmp_path, beta=0.0, max_steps=3, weight_decay=0.1), reward=constant)
    before = digest(trainer.shared.named_parameters())
    trainer.train()
    assert digest(trainer.shared.named_parameters()) == before
    for entry in trainer.state.log_history[:3]:
        assert entry["loss"] == 0
        assert entry["frac_reward_zero_std"] == 1
        assert entry["groups/kept_fraction"] == 0


def test_a_dataset_of_dictionaries_does(tmp_path):
    """Any map-style dataset of rows."""
    plain = scripted(config(tmp_path))
    plain.train()
    listed = scripted(config(tmp_path))
    listed.train_dataset = [dict(row) for row in listed.train_dataset]
    listed.train()
    assert isinstance(plain.train_dataset, Dataset)
    assert digest(plain.shared.named_parameters()) == digest(listed.shared.named_parameters())
