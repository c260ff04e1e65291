"""One gradient, however the completions of an optimizer step are split (trl#5619, #6024, #3021)."""

from __future__ import annotations

import pytest
import torch

from hf_rlx.functional import grpo_advantages, grpo_loss
from tests.trainers.tools import KeepGradients, by_ids, config, relative_gap, scripted, tiny_llama

TOLERANCE = 2e-6


def gradients(folder, steps: int = 1, **fields):
    """Gradients of the first optimizer steps, weights held still."""
    keep = KeepGradients()
    args = config(folder, max_steps=steps, learning_rate=0.0, max_grad_norm=0.0, shuffle_dataset=False, **fields)
    trainer = scripted(args, drift=0.05, callbacks=[keep])
    trainer.train()
    return keep.steps, trainer.state.log_history


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_micro_batches_do_not_change_the_gradient(tmp_path, loss_type, beta):
    """Four groups of 8, one of them flat, one with an abstained reward: as 1, 2, 4 micro-steps of whole groups, and
    as 8 micro-steps that cut every group in two."""
    whole, log = gradients(tmp_path, per_device_train_batch_size=32, num_generations=8, loss_type=loss_type, beta=beta)
    assert log[0]["frac_reward_zero_std"] == 0.25
    assert log[0]["rewards/by_ids/abstained"] == 1
    for size, accumulation in ((16, 2), (8, 4), (4, 8)):
        split, split_log = gradients(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            num_generations=8,
            loss_type=loss_type,
            beta=beta,
        )
        assert relative_gap(split[0], whole[0]) < TOLERANCE
        assert split_log[0]["loss"] == pytest.approx(log[0]["loss"], abs=1e-6)
        assert split_log[0]["policy_loss"] + split_log[0]["kl_loss"] == pytest.approx(log[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("limit", [1, 60])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_parts_of_a_micro_batch_do_not_change_the_gradient(tmp_path, loss_type, limit):
    """Three groups of 8 in one micro-batch, each for itself, and as many as 60 tokens hold: the same gradient and the
    same logged loss, parts, KL and entropy."""
    fields = {"per_device_train_batch_size": 32, "num_generations": 8, "loss_type": loss_type, "beta": 0.3}
    whole, log = gradients(tmp_path, max_tokens_per_update=10_000, **fields)
    parts, part_log = gradients(tmp_path, max_tokens_per_update=limit, **fields)
    assert relative_gap(parts[0], whole[0]) < TOLERANCE
    for name in ("loss", "policy_loss", "kl_loss", "kl", "entropy", "clip_ratio/region_mean"):
        assert part_log[0][name] == pytest.approx(log[0][name], abs=1e-6), name


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_generation_windows_do_not_change_the_gradient(tmp_path, loss_type):
    """The same 16 completions a step, whether a rollout serves one micro-step, one step, or two steps."""
    base, _ = gradients(tmp_path, steps=2, loss_type=loss_type, beta=0.1)
    for size, window, accumulation in ((8, 2, 2), (8, 4, 2), (4, 4, 4), (16, 2, 1)):
        other, _ = gradients(
            tmp_path,
            steps=2,
            per_device_train_batch_size=size,
            steps_per_generation=window,
            gradient_accumulation_steps=accumulation,
            loss_type=loss_type,
            beta=0.1,
        )
        for step in range(2):
            assert relative_gap(other[step], base[step]) < TOLERANCE


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_gradient_is_the_formula_on_the_padded_batch(tmp_path, loss_type):
    """Against transformers' own logits, the published advantages and one call of the pure loss."""
    keep = KeepGradients()
    args = config(tmp_path, learning_rate=0.0, max_grad_norm=0.0, shuffle_dataset=False, loss_type=loss_type, beta=0.3)
    model = tiny_llama()
    trainer = scripted(args, callbacks=[keep], model=model, peft_config=None)
    with torch.no_grad():
        for parameter in trainer.shared.frozen_copies["reference"].parameters():
            parameter.mul_(1.1)
    trainer.train()

    sampler, tokenizer = trainer.sampler, trainer.tokenizer
    prompts = [list(tokenizer(trainer.train_dataset[i]["prompt"])["input_ids"]) for i in range(4)]
    groups = sampler.generate(prompts, 4, None)
    rewards = torch.tensor(
        [
            [float("nan") if r is None else r for r in by_ids([c.token_ids for c in group], [i] * 4)]
            for i, group in enumerate(groups)
        ]
    )
    result = grpo_advantages(rewards, "population", 1e-6)
    longest = max(len(c.token_ids) for group in groups for c in group)

    def logps(lm):
        table = []
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                ids = completion.token_ids
                logits = lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
                row = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
                table.append(torch.nn.functional.pad(row, (0, longest - len(ids))))
        return torch.stack(table)

    lengths = torch.tensor([len(c.token_ids) for group in groups for c in group])
    mask = torch.arange(longest)[None] < lengths[:, None]
    model.zero_grad()
    with torch.no_grad():
        reference = logps(trainer.shared.frozen_copies["reference"])
    loss = grpo_loss(
        logps(model),
        None,
        result.advantages.flatten(),
        mask,
        ref_logps=reference,
        keep=result.keep.flatten(),
        beta=0.3,
        aggregation={"grpo": "completion_mean", "dapo": "token_mean", "dr_grpo": "constant"}[loss_type],
        normalizer=16 if loss_type == "dr_grpo" else None,
        max_length=6,
    ).loss
    loss.backward()
    expected = {f"model.{n}": p.grad for n, p in model.named_parameters()}
    assert relative_gap(keep.steps[0], expected) < 1e-5
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_activation_checkpointing_does_not_change_the_gradient(tmp_path):
    """Recomputed activations give the gradient of stored ones, packed rows and adapters included."""
    stored, _ = gradients(tmp_path, gradient_checkpointing=False, beta=0.1)
    recomputed, _ = gradients(tmp_path, gradient_checkpointing=True, beta=0.1)
    assert relative_gap(recomputed[0], stored[0]) < TOLERANCE


def test_packing_does_not_change_the_gradient(tmp_path):
    """Prefix-tree rows against padded batches."""
    packed, _ = gradients(tmp_path, packing=True, beta=0.1)
    padded, _ = gradients(tmp_path, packing=False, beta=0.1)
    assert relative_gap(packed[0], padded[0]) < 1e-5
