"""DPO and relatives, with expected values derived by hand."""

import math

import pytest
import torch

import hf_rlx.functional as F

# h = (-10 + 11) - (-12 + 11) = 2
PAIR = [torch.tensor([x], dtype=torch.float64) for x in (-10.0, -12.0, -11.0, -11.0)]


def softplus(x):
    return math.log1p(math.exp(x))


def gradients(function, *arguments, **options):
    chosen, rejected, *rest = arguments
    chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    out = function(chosen, rejected, *rest, **options)
    out.loss.backward()
    return out, chosen.grad.tolist(), rejected.grad.tolist()


def test_dpo_sigmoid():
    """β h = 1: loss log(1 + e⁻¹), gradient -β σ(-1) on the chosen log-prob; rewards ±1/2."""
    out, chosen, rejected = gradients(F.dpo_sigmoid, *PAIR, beta=0.5)
    assert out.loss.item() == pytest.approx(softplus(-1.0))
    assert chosen == pytest.approx([-0.5 / (1 + math.e)])
    assert rejected == pytest.approx([0.5 / (1 + math.e)])
    assert (out.chosen_reward.item(), out.rejected_reward.item()) == (0.5, -0.5)
    assert (out.mean_margin.item(), out.accuracy.item()) == (1.0, 1.0)


def test_dpo_label_smoothing():
    """(1 - ε) log(1 + e⁻¹) + ε log(1 + e); robust: ((1 - ε) log(1 + e⁻¹) - ε log(1 + e)) / (1 - 2ε)."""
    smooth = F.dpo_sigmoid(*PAIR, beta=0.5, label_smoothing=0.1).loss.item()
    assert smooth == pytest.approx(0.9 * softplus(-1.0) + 0.1 * softplus(1.0))
    robust = F.dpo_robust(*PAIR, beta=0.5, label_smoothing=0.1).loss.item()
    assert robust == pytest.approx((0.9 * softplus(-1.0) - 0.1 * softplus(1.0)) / 0.8)


def test_identical_pair():
    """h = 0: log 2, gradients that cancel, and a tie counts 1/2."""
    same = torch.tensor([-10.0])
    out, chosen, rejected = gradients(F.dpo_sigmoid, same, same, same, same)
    assert out.loss.item() == pytest.approx(math.log(2.0))
    assert chosen[0] == -rejected[0]
    assert out.accuracy == 0.5


def test_hinge():
    """1 - 0.1 · 2 = 0.8 with gradient -β; beyond the margin (β = 1: 1 - 2 < 0) both are 0."""
    out, chosen, _ = gradients(F.dpo_hinge, *PAIR, beta=0.1)
    assert (out.loss.item(), chosen) == (pytest.approx(0.8), [-0.1])
    out, chosen, _ = gradients(F.dpo_hinge, *PAIR, beta=1.0)
    assert (out.loss.item(), chosen) == (0.0, [0.0])


def test_ipo():
    """Means: h = 1/10 + 1/5 = 0.3 against 5: 4.7². Sums: h = 2: 3². A length of 0 counts as 1."""
    lengths = torch.tensor([10]), torch.tensor([5])
    assert F.ipo(*PAIR, *lengths, beta=0.1).loss.item() == pytest.approx(4.7**2)
    assert F.ipo(*PAIR, beta=0.1, normalize=False).loss.item() == pytest.approx(9.0)
    zero = torch.tensor([0])
    assert F.ipo(*PAIR, zero, zero, beta=0.1).loss.item() == pytest.approx(9.0)


def test_simpo():
    """β (a - b) - γ = 2 · 0.5 - 1 = 0: log 2, gradient -β/2."""
    out, chosen, _ = gradients(F.simpo, torch.tensor([-0.5]), torch.tensor([-1.0]), beta=2.0, gamma=1.0)
    assert out.loss.item() == pytest.approx(math.log(2.0))
    assert chosen == [-1.0]


def test_orpo():
    """Probabilities 1/2 and 1/5 have odds 1 and 1/4: log OR = log 4, -log σ(log 4) = log(5/4)."""
    a, b = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.2)])
    out = F.orpo(a, b, -a, lam=0.1)
    assert out.log_odds_ratio.item() == pytest.approx(math.log(4.0), rel=1e-6)
    assert out.loss.item() == pytest.approx(math.log(2.0) + 0.1 * math.log(1.25), rel=1e-6)


def test_orpo_at_probability_one_is_finite():
    """At log-prob 0 the ceiling holds: finite loss, no odds gradient on that side."""
    a = torch.tensor([0.0], requires_grad=True)
    b = torch.tensor([-0.5], requires_grad=True)
    out = F.orpo(a, b, torch.tensor([0.0]))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert a.grad.item() == 0.0
    assert math.isfinite(b.grad.item())


@pytest.mark.parametrize("x", [-1e-12, -1e-7, -math.log(2.0), -1.0, -100.0, -800.0])
def test_log1mexp(x):
    """Against log(-expm1(x)) evaluated by Python in double precision; finite gradients in both branches."""
    value = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    out = F.log1mexp(value)
    out.backward()
    assert out.item() == pytest.approx(math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x)))
    assert math.isfinite(value.grad.item())


@pytest.mark.parametrize("function", [F.dpo_sigmoid, F.dpo_hinge, F.dpo_robust])
def test_extreme_log_ratios_are_finite(function):
    big, small, zero = torch.tensor([1000.0, -1000.0]), torch.tensor([-1000.0, 1000.0]), torch.zeros(2)
    out, chosen, _ = gradients(function, big, small, zero, zero)
    assert torch.isfinite(out.pair_loss).all()
    assert all(math.isfinite(x) for x in chosen)


def test_reference_is_constant_and_half_precision_is_lifted():
    leaves = [torch.zeros(2, dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]
    out = F.dpo_sigmoid(*leaves)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert [x.grad is not None for x in leaves] == [True, True, False, False]


def test_errors():
    with pytest.raises(ValueError, match=r"`policy_rejected` has shape \(2,\) but `policy_chosen` has shape \(1,\)"):
        F.dpo_sigmoid(torch.zeros(1), torch.zeros(2), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="`label_smoothing` is 0"):
        F.dpo_sigmoid(*PAIR, label_smoothing=0.7)
    with pytest.raises(ValueError, match="`beta` is 0"):
        F.dpo_hinge(*PAIR, beta=0.0)
    with pytest.raises(ValueError, match="`normalize` is True"):
        F.ipo(*PAIR)
    with pytest.raises(ValueError, match="`ceiling`"):
        F.orpo(torch.zeros(1), torch.zeros(1), torch.zeros(1), ceiling=0.0)
