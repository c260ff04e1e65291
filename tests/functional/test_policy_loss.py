"""The clipped policy loss, its presets, and the sampler correction."""

import math

import pytest
import torch

import hf_rlx.functional as F

NAN = math.nan


def one_token(new, old, advantage, function=F.policy_loss, **options):
    """Loss and gradient of a single token whose probability went from `old` to `new`."""
    logp = torch.tensor([[math.log(new)]], dtype=torch.float64, requires_grad=True)
    old_logp = torch.tensor([[math.log(old)]], dtype=torch.float64)
    out = function(logp, old_logp, torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 1), **options)
    loss = out.token_loss.sum() if function is F.policy_loss else out.loss
    loss.backward()
    return out, loss.item(), logp.grad.item()


def test_worked_example():
    """0.30 -> 0.40 with A = 1: ρ = 4/3 is cut at 1.2, objective 1.2 (loss -1.2), gradient 0, upper clip active."""
    out, loss, gradient = one_token(0.40, 0.30, 1.0)
    assert (loss, gradient) == (pytest.approx(-1.2), 0.0)
    assert out.clip_high.item()
    assert not out.clip_low.item()


def test_negative_advantage_is_not_clipped_above():
    """The same ratio with A = -1: min(-4/3, -1.2) = -4/3, loss 4/3 and gradient ρ = 4/3."""
    out, loss, gradient = one_token(0.40, 0.30, -1.0)
    assert (loss, gradient) == (pytest.approx(4 / 3), pytest.approx(4 / 3))
    assert not out.clip_high.item()


def test_lower_clip():
    """0.40 -> 0.20 with A = -1: ρ = 1/2 < 0.8, objective min(-0.5, -0.8) = -0.8, gradient 0."""
    out, loss, gradient = one_token(0.20, 0.40, -1.0)
    assert (loss, gradient) == (pytest.approx(0.8), 0.0)
    assert out.clip_low.item()


def test_on_policy_gradient_is_minus_the_advantage():
    """ρ = 1 exactly, inside the band: loss -A, gradient -A; old_logps=None says the same."""
    _, loss, gradient = one_token(0.3, 0.3, 2.0)
    assert (loss, gradient) == (-2.0, -2.0)
    logp = torch.tensor([[-1.0]], requires_grad=True)
    F.policy_loss(logp, None, torch.tensor([2.0]), torch.ones(1, 1)).token_loss.sum().backward()
    assert logp.grad.item() == -2.0


def test_delta_and_dual_clip_bound_negative_advantages():
    """ρ = 8, A = -1: delta 4 gives loss 4 and gradient 0; dual clip 3 gives 3 and 0; without, 8 and 8."""
    assert one_token(0.8, 0.1, -1.0)[1:] == (pytest.approx(8.0), pytest.approx(8.0))
    assert one_token(0.8, 0.1, -1.0, delta=4.0)[1:] == (pytest.approx(4.0), 0.0)
    assert one_token(0.8, 0.1, -1.0, dual_clip=3.0)[1:] == (pytest.approx(3.0), 0.0)
    # With A > 0 neither matters: the upper clip already holds.
    assert one_token(0.8, 0.1, 1.0, delta=4.0, dual_clip=3.0)[1:] == (pytest.approx(-1.2), 0.0)


def test_dapo_asymmetric_clip():
    """ρ = 1.27 lies inside 1.28 and outside 1.2."""
    assert one_token(0.381, 0.3, 1.0, F.dapo_loss)[1:] == (pytest.approx(-1.27), pytest.approx(-1.27))
    assert one_token(0.381, 0.3, 1.0, F.dapo_loss, clip_high=0.2)[1:] == (pytest.approx(-1.2), 0.0)


def test_sequence_ratios():
    """Log-ratios 0.1 and 0.3 (a third token masked): mean ratio e^0.2 (GSPO), summed ratio e^0.4 (RLOO).

    A = -1 leaves both unclipped above: row loss ρ; gradient ρ/2 per token for the mean, ρ for the sum.
    """
    old = torch.tensor([[-1.0, -1.0, NAN]])
    mask = torch.tensor([[1, 1, 0]])
    for function, ratio, gradient in (
        (F.gspo_loss, math.exp(0.2), math.exp(0.2) / 2),
        (F.rloo_loss, math.exp(0.4), math.exp(0.4)),
    ):
        logp = torch.tensor([[-0.9, -0.7, NAN]], requires_grad=True)
        out = function(logp, old, torch.tensor([-1.0]), mask)
        out.loss.backward()
        assert out.ratio.shape == (1, 1)
        torch.testing.assert_close(out.loss, torch.tensor(ratio))
        torch.testing.assert_close(logp.grad, torch.tensor([[gradient, gradient, 0.0]]))


def test_sequence_ratio_refuses_weighing_by_length():
    arguments = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    for aggregation in ("token_mean", "constant"):
        with pytest.raises(ValueError, match="weighs completions by their length"):
            F.grpo_loss(*arguments, ratio_level="sequence", aggregation=aggregation, max_length=2)


def test_dropped_and_empty_rows_leave_loss_denominator_and_gradient():
    """Only row 0 counts: on-policy with A = 1 its loss is -1, its gradient -1/2 on each of two tokens."""
    logp = torch.tensor([[-1.0, -1.0], [NAN, NAN], [-1.0, -1.0]], requires_grad=True)
    mask = torch.tensor([[1, 1], [0, 0], [1, 1]])
    keep = torch.tensor([True, True, False])
    out = F.grpo_loss(logp, logp.detach(), torch.tensor([1.0, NAN, NAN]), mask, keep=keep)
    out.loss.backward()
    assert out.loss.item() == -1.0
    assert logp.grad.tolist() == [[-0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_sum"])
def test_no_token_at_all(level):
    logp = torch.full((2, 3), NAN, requires_grad=True)
    nan = torch.full((2, 3), NAN)
    out = F.grpo_loss(logp, nan, nan[:, 0], torch.zeros(2, 3), ref_logps=nan, beta=0.1, ratio_level=level)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert logp.grad.abs().max() == 0.0
    assert out.diagnostics.ratio_mean == 1.0
    assert out.diagnostics.approx_kl == 0.0


@pytest.mark.parametrize("kl", ["k2", "k3", "k3_ratio"])
def test_nan_under_the_mask(kl):
    """Poisoning the masked token of every argument changes neither loss nor gradient, and that gradient is 0."""
    mask = torch.tensor([[1, 1, 0]])
    results = []
    for filler in (-5.0, NAN, -math.inf):
        logp = torch.tensor([[-1.0, -2.0, filler]], requires_grad=True)
        old, ref = torch.tensor([[-1.1, -1.9, filler]]), torch.tensor([[-1.5, -2.5, filler]])
        weights = torch.tensor([[1.0, 0.5, filler]])
        out = F.grpo_loss(
            logp, old, torch.tensor([[1.0, -1.0, filler]]), mask, ref_logps=ref, is_weights=weights, beta=0.1, kl=kl
        )
        out.loss.backward()
        assert out.token_loss[0, 2] == 0.0
        results.append((out.loss.item(), logp.grad.tolist()))
    assert results[0] == results[1] == results[2]
    assert results[0][1][0][2] == 0.0


def test_penalty_is_outside_the_sampler_correction():
    """On-policy, A = 1, w = 1/2, d = 1: loss -1/2 + 0.1 · k3(1) = -0.5 + 0.1 e⁻¹."""
    out = F.grpo_loss(
        torch.tensor([[-1.0]]),
        None,
        torch.tensor([1.0]),
        torch.ones(1, 1),
        ref_logps=torch.tensor([[-2.0]]),
        is_weights=torch.tensor([0.5]),
        beta=0.1,
    )
    assert out.loss.item() == pytest.approx(-0.5 + 0.1 * math.exp(-1))
    assert out.kl_mean.item() == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("aggregation", ["completion_mean", "token_mean", "constant"])
def test_micro_batches_add_up(aggregation):
    """Gradient of two micro-batches with the step's normalizer equals that of the whole batch."""
    generator = torch.Generator().manual_seed(0)
    new, old, ref = (-torch.rand(4, 5, generator=generator) for _ in range(3))
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0]])
    options = {"beta": 0.1, "aggregation": aggregation, "max_length": 5}
    gradients = []
    for parts in ([slice(0, 4)], [slice(0, 1), slice(1, 4)]):
        logp = new.clone().requires_grad_()
        normalizer = sum(F.normalizer_count(mask[part], aggregation) for part in parts)
        for part in parts:
            arguments = (logp[part], old[part], advantages[part], mask[part])
            F.grpo_loss(*arguments, ref_logps=ref[part], normalizer=normalizer, **options).loss.backward()
        gradients.append(logp.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_bfloat16_is_lifted_and_constants_are_detached():
    logp = torch.full((1, 2), -1.0, dtype=torch.bfloat16, requires_grad=True)
    others = [torch.full((1, 2), -1.0, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    old, ref, advantages = others
    out = F.grpo_loss(logp, old, advantages, torch.ones(1, 2), ref_logps=ref, beta=0.1)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert logp.grad is not None
    assert all(x.grad is None for x in others)


def test_extreme_log_ratio_is_finite_in_float32():
    """A log-ratio of 1000 is clamped at 20: loss e²⁰, gradient 0 because both bounds hold."""
    logp = torch.tensor([[0.0]], requires_grad=True)
    loss = F.policy_loss(logp, torch.tensor([[-1000.0]]), torch.tensor([-1.0]), torch.ones(1, 1)).token_loss.sum()
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20.0), rel=1e-5)
    assert logp.grad.item() == 0.0


def test_diagnostics():
    """Probabilities 0.3 -> 0.4, A = +1 and -1: one active clip of two tokens, both outside, mean ratio 4/3."""
    logp, old = torch.full((1, 2), math.log(0.4)), torch.full((1, 2), math.log(0.3))
    out = F.ppo_policy_loss(logp, old, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2))
    assert (out.clip_high_fraction, out.clip_low_fraction, out.clip_fraction) == (0.5, 0.0, 0.5)
    assert out.ratio_outside_fraction == 1.0
    x = math.log(4 / 3)
    assert out.ratio_mean.item() == pytest.approx(4 / 3)
    assert out.approx_kl.item() == pytest.approx(4 / 3 - 1 - x, rel=1e-5)
    assert out.old_minus_new.item() == pytest.approx(-x)


def test_importance_weights():
    """x = log 4 and log ½: truncation at 2 gives 2 and ½; masking gives 0 and ½; the row's product is 2."""
    sample, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    train = torch.tensor([[math.log(4.0), math.log(0.5), NAN]])
    for mode, weights in {
        "token_truncate": [2.0, 0.5, 0.0],
        "token_mask": [0.0, 0.5, 0.0],
        "sequence_truncate": [2.0, 2.0, 0.0],
    }.items():
        out = F.importance_weights(train, sample, mask, mode, cap=2.0 + 1e-6)
        torch.testing.assert_close(out.weights, torch.tensor([weights]), rtol=1e-5, atol=0)
    missing = F.importance_weights(train, torch.tensor([[NAN, 0.0, 0.0]]), mask)
    torch.testing.assert_close(missing.weights, torch.tensor([[1.0, 0.5, 0.0]]))
    long = F.importance_weights(torch.zeros(1, 12), torch.full((1, 12), -100.0), torch.ones(1, 12), "sequence_mask")
    assert long.weights.abs().max() == 0.0


def test_errors():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"`old_logps` has shape \(1, 3\) but `mask` has shape \(1, 2\)"):
        F.policy_loss(two, three, torch.ones(1), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"`advantages` has shape \(2,\) but `mask` has shape \(1, 2\)"):
        F.policy_loss(two, two, torch.ones(2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="`delta` is 1"):
        F.policy_loss(two, two, torch.ones(1), torch.ones(1, 2), delta=1.0)
    with pytest.raises(ValueError, match=r"`keep` has shape \(2,\)"):
        F.grpo_loss(two, two, torch.ones(1), torch.ones(1, 2), keep=torch.ones(2))
    with pytest.raises(ValueError, match="`ref_logps` is None but beta"):
        F.grpo_loss(two, two, torch.ones(1), torch.ones(1, 2), beta=0.1)
    with pytest.raises(ValueError, match="`kl` is 'k1'"):
        F.grpo_loss(two, two, torch.ones(1), torch.ones(1, 2), kl="k1")
    with pytest.raises(ValueError, match="`floor` and `cap`"):
        F.importance_weights(two, two, torch.ones(1, 2), cap=1.0, floor=2.0)
