"""KL estimators, what their gradients are, shaped rewards and coefficient controllers."""

import math

import pytest
import torch

import hf_rlx.functional as F

ONE = torch.ones(1, 1)


def penalty_and_gradient(d, estimator, old=None, **options):
    logp = torch.tensor([[d]], dtype=torch.float64, requires_grad=True)
    old_logps = None if old is None else torch.tensor([[old]], dtype=torch.float64)
    ref = torch.zeros(1, 1, dtype=torch.float64)
    value = F.kl_penalty(logp, ref, ONE, estimator, old_logps=old_logps, **options)
    value.sum().backward()
    return value.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 1.0, 1.0),
        ("k2", 0.5, 1.0),
        ("k3", math.exp(-1.0), 1.0 - math.exp(-1.0)),
        ("k3_ratio", math.exp(-1.0), 1.0),
    ],
)
def test_estimators_on_policy(estimator, value, gradient):
    """d = 1: k1 = d; k2 = d²/2, gradient d; k3 = e⁻¹, gradient 1 - e⁻¹; ρ·k3 at ρ = 1 has the value of k3 and the
    gradient k3 + (1 - e⁻¹) = d: the gradient of reverse KL, which a value-only test would miss."""
    assert penalty_and_gradient(1.0, estimator) == pytest.approx((value, gradient))


def test_k3_ratio_off_policy():
    """ρ = e^(d - old) = e: value e · e⁻¹ = 1, gradient ρ d = e."""
    assert penalty_and_gradient(1.0, "k3_ratio", old=0.0) == pytest.approx((1.0, math.e))


def test_only_k3_is_clamped():
    """d = -100: k3 = e²⁰ - 21 with gradient 0; k1 and k2 keep -100 and 5000."""
    assert penalty_and_gradient(-100.0, "k3") == pytest.approx((math.expm1(20.0) - 20.0, 0.0))
    assert penalty_and_gradient(-100.0, "k1") == (-100.0, 1.0)
    assert penalty_and_gradient(-100.0, "k2") == (5000.0, -100.0)


def test_k3_is_finite_in_float32():
    value = F.kl_penalty(torch.tensor([[-1000.0]]), torch.zeros(1, 1), ONE)
    assert torch.isfinite(value).all()


def test_nan_under_the_mask_reaches_neither_values_nor_gradients():
    logp = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    ref = torch.tensor([[-2.0, math.nan]])
    for estimator in ("k1", "k2", "k3", "k3_ratio"):
        value = F.kl_penalty(logp, ref, torch.tensor([[1, 0]]), estimator, old_logps=ref)
        (gradient,) = torch.autograd.grad(value.sum(), logp)
        assert value[0, 1] == 0.0
        assert gradient[0, 1] == 0.0
        assert torch.isfinite(gradient).all()


def test_estimators_report_clamping():
    """One of the two selected tokens has |d| = 30 > 20; the masked one does not count."""
    logps = torch.tensor([[30.0, 1.0, 50.0]])
    out = F.kl_estimators(logps, torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
    assert out.clamped_fraction == 0.5
    assert out.max_abs == 30.0
    assert out.k1_sequence.tolist() == [31.0]


def test_score_stands_on_the_last_real_token():
    """β d = 0.1 · (0.5, -0.5); the hole gets 0; the score 2 joins the last token at index 2; the empty row gets 0."""
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])
    logps = torch.tensor([[-1.0, math.nan, -1.0, math.nan], [-1.0] * 4])
    ref = torch.tensor([[-1.5, math.nan, -0.5, math.nan], [-1.5] * 4])
    out = F.shaped_reward(torch.tensor([2.0, math.nan]), logps, ref, mask, beta=0.1)
    torch.testing.assert_close(out.rewards, torch.tensor([[-0.05, 0.0, 2.05, 0.0], [0.0] * 4]))
    assert out.last_index.tolist() == [2, -1]
    torch.testing.assert_close(out.total, torch.tensor([2.0, 0.0]))


def test_shaped_reward_needs_no_reference_without_beta():
    out = F.shaped_reward(
        torch.tensor([2.0]), torch.tensor([[-1.0, -1.0]], requires_grad=True), None, torch.ones(1, 2), 0.0
    )
    assert out.rewards.tolist() == [[0.0, 2.0]]
    assert not out.rewards.requires_grad


def test_adaptive_controller():
    """kl = 2 · target caps the error at 0.2: β = 0.2 · (1 + 0.2 · 256 / 10000) = 0.201024; NaN changes nothing."""
    controller = F.AdaptiveKLController(0.2, target=6.0, horizon=10000)
    assert controller.update(12.0, 256) == pytest.approx(0.201024)
    assert controller.update(math.nan, 256) == pytest.approx(0.201024)
    copy = F.AdaptiveKLController(0.5)
    copy.load_state_dict(controller.state_dict())
    assert copy.coef == controller.coef


def test_controllers_share_an_interface():
    fixed = F.FixedKLController(0.05)
    assert fixed.update(100.0, 256) == fixed.coef == 0.05
    fixed.load_state_dict({"coef": 0.1})
    assert fixed.coef == 0.1


def test_errors():
    with pytest.raises(ValueError, match="`horizon` is 10 episodes but one step has 64"):
        F.AdaptiveKLController(horizon=10, episodes_per_step=64)
    with pytest.raises(ValueError, match="`horizon` is 10 episodes but one step has 64"):
        F.AdaptiveKLController(horizon=10).update(1.0, 64)
    with pytest.raises(ValueError, match="positive"):
        F.AdaptiveKLController(target=0.0)
    with pytest.raises(ValueError, match=r"`ref_logps` has shape \(1, 3\) but `mask` has shape \(1, 2\)"):
        F.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(ValueError, match="`estimator` is 'k4'"):
        F.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), "k4")
    with pytest.raises(ValueError, match=r"`score` has shape \(2,\)"):
        F.shaped_reward(torch.zeros(2), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="`ref_logps` is None but beta"):
        F.shaped_reward(torch.zeros(1), torch.zeros(1, 2), None, torch.ones(1, 2), 0.1)
