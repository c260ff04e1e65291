"""NaN and infinity in weights, loss and gradient: the run stops where they arise, and no good checkpoint is lost."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

from hf_rlx.persistence import folders
from hf_rlx.trainers.health import NonFiniteError, not_finite
from tests.faults.test_checkpoint_faults import at_update
from tests.invariants.test_resume import make
from tests.trainers.tools import digest


class After(TrainerCallback):
    """Does something after step `step`, before the checkpoint of that step is written."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def poison(parameter, value=float("nan")):
    with torch.no_grad():
        parameter.view(-1)[3] = value


def adapter_weight(trainer, index=0):
    return trainer.shared.trainable_parameters()[index]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_weights_are_never_saved(tmp_path, value):
    """One entry of one weight, after step 3: checkpoint-3 is refused, and the run ends there by the weight's name."""
    trainer = make(tmp_path)
    name, parameter = adapter_weight(trainer)
    trainer.add_callback(After(3, lambda: poison(parameter, value)))
    with pytest.raises(NonFiniteError, match=r"at step 3: .*lora_A.* is not finite.*resume from it"):
        trainer.train()
    assert name in not_finite(trainer.shared.named_parameters())
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-1"]
    with pytest.raises(NonFiniteError, match="at step 3"):
        trainer.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final" / "adapter_model.safetensors").exists()


def test_bad_weights_stop_the_next_step(tmp_path):
    """Nothing is saved in between: the step that would use them does not begin, and samples nothing."""
    trainer = make(tmp_path, save_steps=2)
    _, parameter = adapter_weight(trainer, 1)
    trainer.add_callback(After(3, lambda: poison(parameter)))
    at = at_update(trainer, 10**6, lambda: None)
    with pytest.raises(NonFiniteError, match="after step 3"):
        trainer.train()
    assert at[0] == 6  # two micro-steps a step
    assert trainer.state.global_step == 3
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_bad_frozen_weight_is_found_in_the_loss(tmp_path):
    """The base is not looked at in every step; the first loss that it spoils names it."""
    trainer = make(tmp_path, save_steps=100)
    base = dict(trainer.shared.named_parameters())
    name = next(n for n in base if n.endswith("down_proj.base_layer.weight"))
    at_update(trainer, 5, lambda: poison(base[name]))
    with pytest.raises(NonFiniteError, match=rf"loss of step 3 is nan: of the weights {name} is not finite"):
        trainer.train()
    assert not folders.checkpoints(tmp_path)


@pytest.mark.parametrize("field", ["advantages", "ref_logps"])
def test_a_bad_input_of_the_loss_is_named(tmp_path, field):
    trainer = make(tmp_path, save_steps=2)
    loss, count = trainer.minibatch_loss, [0]

    def spoiled(model, batch):
        count[0] += 1
        if count[0] == 5:
            getattr(batch, field).view(-1)[0] = float("nan")
        return loss(model, batch)

    trainer.minibatch_loss = spoiled
    with pytest.raises(NonFiniteError, match=rf"loss of step 3 is nan: of the loss's inputs {field} is not finite"):
        trainer.train()
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-2"]


def spoil_gradient(trainer, micro_steps):
    """NaN in the gradient of one weight in the backwards with these numbers (from 1)."""
    _, parameter = adapter_weight(trainer)
    count = [0]

    def hook(grad):
        count[0] += 1
        return grad * float("nan") if count[0] in micro_steps else grad

    with torch.enable_grad():
        parameter.register_hook(hook)


def test_one_bad_gradient_costs_one_step(tmp_path, caplog):
    """The optimizer does not move in step 3, momentum included; the count is logged; the run goes on."""
    trainer = make(tmp_path, save_strategy="no", logging_steps=1, lr_scheduler_type="constant")
    spoil_gradient(trainer, {5})
    seen = []
    for step in (2, 3, 4):
        trainer.add_callback(After(step, lambda: seen.append(digest(trainer.shared.trainable_parameters()))))
    trainer.train()
    assert trainer.state.global_step == 8
    assert seen[0] == seen[1] != seen[2]
    assert "step 3 is skipped: the gradient of" in caplog.text
    logged = [entry.get("skipped_steps") for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [None, None, 1.0, None, None, None, None, None]
    assert not not_finite(trainer.shared.named_parameters())


def test_two_bad_gradients_in_a_row_end_the_run(tmp_path):
    trainer = make(tmp_path, save_steps=1)
    spoil_gradient(trainer, {5, 7})
    with pytest.raises(NonFiniteError, match=r"step 4: the gradient of .*lora_A.* is not finite, 2 steps in a row"):
        trainer.train()
    assert not not_finite(trainer.shared.named_parameters())
    # Step 3 was skipped, its weights are those of step 2 and good.
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]


def test_none_may_be_allowed_none(tmp_path):
    trainer = make(tmp_path, save_strategy="no", max_skipped_steps=0, max_grad_norm=0.0)
    spoil_gradient(trainer, {5})
    with pytest.raises(NonFiniteError, match="step 3: "):
        trainer.train()


def test_sums_that_overflow_are_no_fault():
    """Two entries of 3e38 add up to infinity in float32, but each is finite."""
    large = torch.full((2,), 3e38)
    assert not_finite([("a", large), ("b", torch.tensor([1, 2])), ("c", torch.zeros(0))]) == []
    assert not_finite([("a", large), ("b", torch.tensor([1.0, float("-inf"), float("inf")]))]) == ["b"]


def test_nothing_is_sampled_from_bad_weights(tmp_path):
    """The rollout of the second window stops at its first token, not with 16 completions of noise."""
    trainer = make(tmp_path, save_steps=2)
    name = next(n for n, _ in trainer.shared.named_parameters() if n.endswith("down_proj.base_layer.weight"))
    trainer.add_callback(After(4, lambda: poison(dict(trainer.shared.named_parameters())[name])))
    with pytest.raises(NonFiniteError, match="at step 4"):  # where a checkpoint is due, it is found there
        trainer.train()
    trainer = make(tmp_path / "b", save_strategy="no")
    trainer.add_callback(After(4, lambda: poison(dict(trainer.shared.named_parameters())[name])))
    with pytest.raises(FloatingPointError, match="the model's logits are NaN or infinite"):
        trainer.train()
    assert trainer.state.global_step == 4
