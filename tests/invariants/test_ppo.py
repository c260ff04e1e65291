"""PPO: one gradient however a step is split, one run however it is stopped, one result however many processes."""

from __future__ import annotations

import shutil

import pytest
import torch

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.ppo import PPOTrainer
from tests.invariants.ranks import ends_of_logs, run_both
from tests.invariants.two_processes_ppo import CASES, sharded, train
from tests.trainers.ppo_tools import ppo, ppo_config
from tests.trainers.tools import KeepGradients, digest, lora, relative_gap, rows, tiny_llama, untimed

KINDS = {"head": {"detach_critic": False}, "adapter": {"critic_adapter": True}}
PARTS = ("loss", "policy_loss", "value_loss", "value/explained_variance", "advantages/std", "entropy", "reward/shaped")


# --- splits ----------------------------------------------------------------------------------------------------------


def gradients(folder, steps: int = 1, **fields):
    """Gradients of the first optimizer steps, weights held still, and the log."""
    keep = KeepGradients()
    given = {"max_steps": steps, "learning_rate": 0.0, "critic_learning_rate": 0.0, "max_grad_norm": 0.0, **fields}
    trainer = ppo(ppo_config(folder, shuffle_dataset=False, entropy_coef=0.1, **given), drift=0.1, callbacks=[keep])
    trainer.train()
    return keep.steps, trainer.state.log_history


@pytest.mark.parametrize("in_reward", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_do_not_change_the_gradient(tmp_path, kind, in_reward):
    """Sixteen texts of four prompts, one prompt unscored, as 1, 2, 4, 8 micro-steps; the last cut groups in two."""
    fields = {"num_generations": 4, "kl_in_reward": in_reward, "beta": 0.3, **KINDS[kind]}
    whole, log = gradients(tmp_path, **fields)
    for size, accumulation in ((8, 2), (4, 4), (2, 8)):
        split, split_log = gradients(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, **fields
        )
        assert relative_gap(split[0], whole[0]) < 3e-6
        for name in (*PARTS, "kl"):
            assert split_log[0][name] == pytest.approx(log[0][name], abs=2e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_packing_and_checkpointing_do_not_change_the_gradient(tmp_path, kind):
    """Prefix-tree rows against padded batches; recomputed activations against stored ones."""
    fields = {"num_generations": 4, **KINDS[kind]}
    packed, _ = gradients(tmp_path, **fields)
    padded, _ = gradients(tmp_path, packing=False, **fields)
    assert relative_gap(padded[0], packed[0]) < 1e-5
    again, _ = gradients(tmp_path, gradient_checkpointing=True, **fields)
    assert relative_gap(again[0], packed[0]) < 3e-6


def test_minibatches_add_up_to_the_window(tmp_path):
    """Two minibatches at the same weights: their gradients, weighted by their tokens, are that of one."""
    whole, _ = gradients(tmp_path)
    keep = KeepGradients()
    args = ppo_config(
        tmp_path,
        max_steps=2,
        learning_rate=0.0,
        critic_learning_rate=0.0,
        max_grad_norm=0.0,
        entropy_coef=0.1,
        shuffle_dataset=False,
        per_device_train_batch_size=8,
        num_mini_batches=2,
    )
    trainer = ppo(args, drift=0.1, callbacks=[keep])
    trainer.train()
    tokens = [float(batch.normalizer) for batch in trainer.batches]
    summed = {n: (keep.steps[0][n] * tokens[0] + keep.steps[1][n] * tokens[1]) / sum(tokens) for n in whole[0]}
    assert relative_gap(summed, whole[0]) < 3e-6


# --- resuming --------------------------------------------------------------------------------------------------------

STEPS = 7


def resumable(folder, kind, **fields):
    """Windows of two minibatches of two micro-steps, two epochs in another order; a warm-up; beta adapts; the third
    window stops early. Six rows, so every window is an epoch of the data."""
    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
        "num_generations": 2,
        "num_iterations": 2,
        "max_steps": STEPS,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "beta": 0.05,
        "kl_target": 0.5,
        "critic_warmup_steps": 2,
        "target_kl": 1e-6,
        "bootstrap_truncated": True,
        "disable_dropout": False,
        **KINDS[kind],
        **fields,
    }
    return PPOTrainer(
        tiny_llama(),
        noisy,
        ppo_config(folder, **given),
        train_dataset=rows(6),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(lora_dropout=0.2),
    )


def noisy(completion_ids, **_):
    """Share of even ids, and something of torch's random state."""
    noise = float(torch.rand(())) * 1e-3
    return [sum(i % 2 == 0 for i in ids) / len(ids) + noise * k for k, ids in enumerate(completion_ids)]


def result(trainer):
    logs = [untimed(entry) for entry in trainer.state.log_history if "train_loss" not in entry]
    return logs, digest(trainer.shared.named_parameters()), trainer.kl_controller.coef


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    """The run without a stop, with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp(f"ppo_{request.param}")
    trainer = resumable(folder, request.param)
    trainer.train()
    return folder, request.param, result(trainer)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resume_is_exact_at_every_step(whole, tmp_path, step):
    """Policy, critic, optimizer, window, order of the minibatches, beta and random states: bit for bit."""
    folder, kind, expected = whole
    shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    trainer = resumable(tmp_path, kind)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert result(trainer) == expected


def test_the_resumed_run_has_what_it_claims(whole):
    """Early stop and adaptation really happened, so the test above is about them."""
    logs, _, beta = whole[2]
    assert beta != 0.05
    assert any(entry.get("early_stop", 0) > 0 for entry in logs)


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What rank 0 and rank 1 saw."""
    folder = tmp_path_factory.mktemp("processes")
    codes = run_both("two_processes_ppo.py", folder, limit=120)
    assert codes == [0, 0], ends_of_logs(folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(both, tmp_path, case):
    """Gradients of every step (the early stop's and the warm-up's too), weights and logs."""
    one = train(case, tmp_path, 1)
    for rank in range(2):
        ours = both[rank][case]
        assert len(ours["gradients"]) == len(one["gradients"])
        for mine, theirs in zip(ours["gradients"], one["gradients"], strict=True):
            assert mine.keys() == theirs.keys()
            if theirs:
                assert relative_gap(mine, theirs) < 2e-5
    assert both[0][case]["weights"] == both[1][case]["weights"]
    assert [untimed(e) for e in both[0][case]["log"]] == [untimed(e) for e in both[1][case]["log"]]
    for mine, theirs in zip(both[0][case]["log"], one["log"], strict=True):
        for name in (*PARTS, "kl", "kl_loss", "beta", "early_stop", "returns/std", "value/mean"):
            assert (name in mine) == (name in theirs), name
            if name in theirs:
                assert mine[name] == pytest.approx(theirs[name], abs=2e-5), name


def test_processes_take_minibatches_in_one_order(both):
    """The denominators of twelve steps, each a minibatch's tokens on both processes: epochs two and three are other
    orders of the first."""
    first, second = (both[rank]["shuffled"] for rank in range(2))
    epochs = [first["denominators"][i : i + 4] for i in range(0, 12, 4)]
    assert len(set(epochs[0])) == 4
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[1] != epochs[0] or epochs[2] != epochs[0]
    assert second["denominators"] == first["denominators"]
    assert second["weights"] == first["weights"]


def test_fsdp_is_one_process(both, tmp_path):
    """Split weights, head included: the weights of one process, also from a checkpoint; a critic's own adapter is
    refused by name."""
    one, two = sharded(tmp_path, 1), both[0]["fsdp"]
    assert one["weights"].keys() == two["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, atol=2e-5, rtol=0)
        assert torch.equal(two["again"][name], two["weights"][name])
    for mine, theirs in zip(two["log"], one["log"], strict=True):
        for part in ("loss", "policy_loss", "value_loss", "entropy", "policy/approx_kl"):
            assert mine[part] == pytest.approx(theirs[part], abs=2e-5), part
    assert "under FSDP is not carried; leave critic_adapter off" in two["refused"]
