"""GRPO against TRL 1.16 on one batch: advantages, loss, gradient of every parameter, and the metrics both log.

The policy is moved away from the reference by the same step on both sides, so the KL is not 0; `shift` moves the old
log-probs by up to half a nat, so that clips are active at both ends (exp(0.5) = 1.65 and exp(-0.5) = 0.61 against
the band 0.8 to 1.2). Tolerance: 1e-6 in float32, where the largest gradients are about 0.5.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

NAN = float("nan")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
KLS = (
    {"beta": 0.0},
    {"beta": 0.1, "use_bias_correction_kl": True},
    {"beta": 0.1, "use_bias_correction_kl": False},
)
SWITCHES = {
    "clip-higher": {"epsilon": 0.1, "epsilon_high": 0.4},
    "delta": {"delta": 1.3},
    "sequence": {"importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    "temperature": {"temperature": 0.7},
    "no-std": {"scale_rewards": "none"},
    "batch-std": {"scale_rewards": "batch"},
}
METRICS = ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
METRICS += ("clip_ratio/low_min", "clip_ratio/high_max")


def assert_equal(ours, trl, metrics=METRICS):
    """Loss and gradients to 1e-6, shared metrics to 1e-5; and there is something to compare."""
    assert max(g.abs().max() for g in trl.grads.values()) > 0.05
    assert ours.loss == pytest.approx(trl.loss, abs=1e-6)
    assert ours.grads.keys() == trl.grads.keys()
    for name, grad in trl.grads.items():
        torch.testing.assert_close(ours.grads[name], grad, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(ours.advantages, trl.advantages, atol=1e-6, rtol=0)
    for name in metrics:
        assert ours.metrics[name] == pytest.approx(trl.metrics[name], abs=1e-5), name


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kl", KLS, ids=["no-kl", "ratio-k3", "k3"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_gradient_and_metrics(sides, shift, loss_type, kl, off_policy):
    """The same fields on both sides, `preset("trl")` under them on ours.

    TRL logs the KL with the ratio on it where the loss has it; ours is the plain k3. They are one number on policy.
    """
    moved = shift if off_policy else None
    trl = sides.run_trl(shift=moved, loss_type=loss_type, **kl)
    ours = sides.run_ours(shift=moved, loss_type=loss_type, **kl)
    same_kl = kl["beta"] > 0 and not (off_policy and kl["use_bias_correction_kl"])
    assert_equal(ours, trl, (*METRICS, "kl") if same_kl else METRICS)
    if off_policy:
        assert trl.metrics["clip_ratio/low_mean"] > 0
        assert trl.metrics["clip_ratio/high_mean"] > 0
    if same_kl:
        assert trl.metrics["kl"] > 0.01


@pytest.mark.parametrize("kl", KLS, ids=["no-kl", "ratio-k3", "k3"])
@pytest.mark.parametrize("switch", SWITCHES)
def test_every_other_switch(sides, shift, switch, kl):
    """Off policy, completion means: the one averaging that goes with every ratio."""
    fields = {"loss_type": "grpo", **kl, **SWITCHES[switch]}
    trl, ours = sides.run_trl(shift=shift, **fields), sides.run_ours(shift=shift, **fields)
    assert_equal(ours, trl)
    default = sides.run_trl(shift=shift, loss_type="grpo", **kl)
    changed = max((trl.grads[name] - grad).abs().max() for name, grad in default.grads.items())
    assert changed > 1e-3, "the switch changes nothing on this batch"


def test_the_preset_is_trl_s_default(sides):
    """Without any field of our own, `GRPOConfig.preset("trl")` computes what a bare TRL configuration computes."""
    assert_equal(sides.run_ours(), sides.run_trl())


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_two_micro_batches_make_one_step(sides, loss_type):
    """Gradients summed over gradient accumulation, groups of equal size; TRL's `bnpo` is left out: it differs."""
    fields = {
        "loss_type": loss_type,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "beta": 0.1,
    }
    trl, ours = sides.run_trl(**fields), sides.run_ours(**fields)
    assert_equal(ours, trl, ())
    one = sides.run_ours(loss_type=loss_type, beta=0.1)
    assert ours.loss == pytest.approx(one.loss, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_entropy_bonus(sides, loss_type):
    """Where the loss is a token mean, the bonus is TRL's."""
    fields = {"loss_type": loss_type, "entropy_coef": 0.5}
    trl, ours = sides.run_trl(**fields), sides.run_ours(**fields)
    assert_equal(ours, trl)
    assert abs(trl.loss - sides.run_trl(loss_type=loss_type).loss) > 0.1
    assert ours.metrics["policy_loss"] == pytest.approx(trl.metrics["policy_loss"], abs=1e-6)


def test_a_window_of_two_optimizer_steps(sides):
    """`steps_per_generation` above the accumulation: old log-probs are computed, and each step has its own
    denominator. TRL's `dapo` takes the window's tokens divided by its steps instead, so compare completion means."""
    fields = {"loss_type": "grpo", "per_device_train_batch_size": 3, "steps_per_generation": 2, "beta": 0.1}
    assert_equal(sides.run_ours(**fields), sides.run_trl(**fields), ())


TABLES = {
    "ordinary": [[1.0, 0.0, 0.5], [0.25, 0.75, 2.0]],
    "a flat group": [[0.1, 0.1, 0.1], [1.0, 0.0, 0.5]],
    "an unscored completion": [[1.0, NAN, 0.0], [0.2, 0.4, 0.9]],
    "an unscored group": [[NAN, NAN, NAN], [1.0, 0.0, 0.0]],
    "one scored completion": [[NAN, 3.0, NAN], [1.0, 0.0, 0.0]],
    "large rewards": [[1e4, 1e4 + 1, 1e4 + 2], [-1e4, 0.0, 1e4]],
}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("table", TABLES)
def test_advantages(sides, table, scale):
    """TRL's own computation on a reward table; 0 where there is no reward."""
    rewards = TABLES[table]
    expected = sides.trl_inputs(sides.trl_trainer(rewards, scale_rewards=scale))["advantages"]
    trainer, rollouts = sides.our_trainer(scale_rewards=scale), sides.rollouts(rewards)
    trainer.compute_advantages(rollouts)
    ours = torch.cat([r.advantages for r in rollouts])
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    assert expected.abs().sum() > 0.5


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_several_functions_normalised_one_by_one(sides, scale):
    """GDPO: each function within its group, the weighted sum over the batch, whatever `scale_rewards` says."""
    rewards = [[[1.0, 0.0], [0.0, 3.0], [0.5, 1.0]], [[0.25, 0.3], [0.75, 1.0], [2.0, 2.0]]]
    fields = {
        "multi_objective_aggregation": "normalize_then_sum",
        "scale_rewards": scale,
        "reward_weights": [1.0, 0.5],
    }
    expected = sides.trl_inputs(sides.trl_trainer(rewards, **fields))["advantages"]
    trainer, rollouts = sides.our_trainer(2, **fields), sides.rollouts(rewards)
    trainer.compute_advantages(rollouts)
    torch.testing.assert_close(torch.cat([r.advantages for r in rollouts]), expected, atol=1e-6, rtol=1e-5)
