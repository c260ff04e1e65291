"""Mixed precision where it can be seen without a GPU: the gradient scaler and the dtype of a frozen base."""

from __future__ import annotations

import torch
from peft import LoraConfig

from hf_rlx import GRPOConfig, GRPOTrainer
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.trainers.windows import MiniBatch
from hf_rlx.types import Group


def _trainer(tmp_path, **fields):
    args = GRPOConfig(
        str(tmp_path),
        per_device_train_batch_size=8,
        max_completion_length=4,
        max_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **fields,
    )

    def constant(completions, **kwargs):
        return [1.0] * len(completions)

    return GRPOTrainer("tiny", constant, args, train_dataset=arithmetic_task(8, 4).train, peft_config=LoraConfig(r=2))


def test_a_step_without_signal_still_feeds_the_gradient_scaler(tmp_path, monkeypatch):
    """`GradScaler.step` asserts that gradients were seen; a step of flat groups only must give it zeros (a T4 in fp16
    meets that at once). Without a scaler the step costs no forward at all."""
    trainer = _trainer(tmp_path)
    trainer.train()
    assert all(p.grad is None for _, p in trainer.shared.trainable_parameters())
    empty = torch.zeros(0, 1)
    batch = MiniBatch([], empty[:, 0], empty.bool(), empty, rows=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
    trainer.update(trainer.model_wrapped, batch)
    gradients = [p.grad for _, p in trainer.shared.trainable_parameters()]
    assert all(g is not None and torch.equal(g, torch.zeros_like(g)) for g in gradients)
    optimizer = torch.optim.SGD([p for _, p in trainer.shared.trainable_parameters()], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_a_trainer_has_its_own_precision(tmp_path):
    """Autocast that one trainer put around the model's forward is not another one's: log-probs in float32 are those
    of a model that was never trained in bfloat16."""
    first = _trainer(tmp_path, bf16=True, use_cpu=True)
    group = [Group.from_lists([5, 6], [[7, 8, 9]])]
    with torch.no_grad(), first.shared.rollout_mode():
        whole = first.shared(group).per_token_logps
        first.train()  # a constant reward: the weights stay
        assert not torch.equal(first.shared(group).per_token_logps, whole)
        GRPOTrainer(first.shared, first.scorer.functions[0].call, first.args, train_dataset=first.train_dataset)
        assert torch.equal(first.shared(group).per_token_logps, whole)
