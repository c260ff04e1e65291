"""What only a CUDA device can show. Skipped without one; `HF_RLX_TEST_GPUS=0 pytest -m gpu` runs them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from hf_rlx import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SharedModel
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.models.loading import mixed_precision_for
from hf_rlx.models.plan import ForwardPlan
from hf_rlx.verifiers import NumberVerifier
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device (HF_RLX_TEST_GPUS=0)"),
]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_packed_equals_padded_on_cuda(family):
    """Values to 1e-4 and gradients to 1e-3 relative in float32: CUDA kernels round more freely than CPU's."""
    shared = SharedModel.build(tiny.causal_lm(family)).to("cuda").eval()
    groups = tiny.ragged_groups()
    results = {}
    for plan in (ForwardPlan(True, True, verified=True), ForwardPlan(False, False, verified=True)):
        shared.plan = plan
        shared.zero_grad()
        scores = shared(groups)
        scores.per_token_logps.sum().backward()
        gradient = torch.cat([p.grad.flatten() for _, p in shared.trainable_parameters()])
        results[plan.packed] = (scores.per_token_logps.detach(), gradient)
    torch.testing.assert_close(results[True][0], results[False][0], atol=1e-4, rtol=0)
    gap = (results[True][1] - results[False][1]).norm() / results[False][1].norm()
    assert gap < 1e-3


@pytest.mark.parametrize("kl", [0.0, 0.04])
def test_grpo_trains_on_cuda_in_the_device_s_precision(tmp_path, kl):
    """Thirty steps lift the bundled model's sampled accuracy above 0.6, in bf16 or fp16 as the device has it."""
    task = arithmetic_task(1000, 256)
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=128,
        max_completion_length=8,
        max_steps=30,
        learning_rate=1e-3,
        beta=kl,
        eval_temperature=1.0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    assert (args.bf16, args.fp16) == (
        mixed_precision_for(torch.device("cuda")) == "bf16",
        mixed_precision_for(torch.device("cuda")) == "fp16",
    )
    trainer = GRPOTrainer(
        "tiny",
        NumberVerifier("whole"),
        args,
        train_dataset=task.train,
        eval_dataset=task.test,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    assert trainer.shared.plan.packed
    assert trainer.evaluate()["eval_accuracy/number_whole"] > 0.6


@pytest.mark.parametrize("own", [False, True])
def test_ppo_trains_on_cuda_in_the_device_s_precision(tmp_path, own):
    """Sixty steps, two epochs a rollout, lift the bundled model's sampled accuracy above 0.6; the ratio of the first
    epoch is 1 to the rounding of one and the same kernel."""
    task = arithmetic_task(1000, 256)
    args = PPOConfig(
        str(tmp_path),
        per_device_train_batch_size=128,
        num_iterations=2,
        max_completion_length=8,
        max_steps=60,
        learning_rate=1e-3,
        beta=0.01,
        critic_adapter=own,
        logging_steps=1,
        eval_temperature=1.0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        "tiny",
        NumberVerifier("whole"),
        args,
        train_dataset=task.train,
        eval_dataset=task.test,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(entry["policy/ratio_max"] for entry in logs[::2]) < 1.05
    assert trainer.evaluate()["eval_accuracy/number_whole"] > 0.6
