"""Group, leave-one-out, step and time advantages."""

import math

import pytest
import torch

import hf_rlx.functional as F

NAN = math.nan


def test_grpo_worked_example():
    """[1, 0, 0, 1]: mean 1/2, population std 1/2, so (±1/2) / (1/2 + 1e-6) = ±0.999998."""
    out = F.grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    torch.testing.assert_close(out.advantages, torch.tensor([[1.0, -1.0, -1.0, 1.0]]), rtol=0, atol=3e-6)
    assert out.keep.all()


@pytest.mark.parametrize(
    ("std", "expected"),
    [("sample", math.sqrt(0.75)), ("none", 0.5), ("batch", 1.0), ("batch_sample", math.sqrt(0.75))],
)
def test_grpo_std_choices(std, expected):
    """Deviation 1/2 over the sample std √(1/3) is √(3/4); "none" leaves 1/2; one group is its own batch."""
    out = F.grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), std=std, eps=0.0)
    assert out.advantages[0, 0].item() == pytest.approx(expected)


def test_eight_equal_float32_rewards_have_no_advantage():
    """Their float32 std is 7.5e-9, not 0: with eps 1e-8 the advantage would be -0.43."""
    out = F.grpo_advantages(torch.full((1, 8), 0.1), eps=1e-8)
    assert out.advantages.tolist() == [[0.0] * 8]
    assert out.group_std.item() == 0.0
    assert not out.keep.any()
    assert F.grpo_advantages(torch.full((1, 8), 0.1), keep_zero_variance=True).keep.all()
    assert F.grpo_advantages(torch.full((2, 8), 0.1), std="batch", eps=0.0).advantages.abs().max() == 0.0


def test_nan_rewards_leave_their_group():
    """[1, NaN, 0] is [1, 0] with the NaN dropped; one scorable reward is no group; all NaN has no mean."""
    out = F.grpo_advantages(torch.tensor([[1.0, NAN, 0.0], [1.0, NAN, NAN], [NAN, NAN, NAN]]), eps=0.0)
    assert out.advantages.tolist() == [[1.0, 0.0, -1.0], [0.0] * 3, [0.0] * 3]
    assert out.keep.tolist() == [[True, False, True], [False] * 3, [False] * 3]
    assert math.isnan(out.group_mean[2])
    assert out.kept_group_fraction.item() == pytest.approx(1 / 3)


def test_group_advantages_do_not_move_with_a_constant():
    """(r + c) - mean(r + c) = r - mean(r)."""
    rewards = torch.tensor([[0.25, 0.5, 1.0, 0.0], [1.0, 1.0, 0.0, 0.5]])
    for function in (F.grpo_advantages, F.rloo_advantages):
        torch.testing.assert_close(function(rewards + 8.0).advantages, function(rewards).advantages)


def test_rloo():
    """[1, 0, 0, 1]: the others of a 1 average 1/3, those of a 0 average 2/3."""
    out = F.rloo_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    torch.testing.assert_close(out.advantages, torch.tensor([[2.0, -2.0, -2.0, 2.0]]) / 3)
    shaped = F.rloo_advantages(torch.tensor([[1.0, 0.0]]), kl=torch.tensor([[10.0, 0.0]]), beta=0.05)
    torch.testing.assert_close(shaped.advantages, torch.tensor([[0.5, -0.5]]))
    assert F.rloo_advantages(torch.tensor([[3.0], [NAN]])).advantages.tolist() == [[0.0], [0.0]]
    flat = F.rloo_advantages(torch.full((1, 7), 0.1))
    assert flat.advantages.abs().max() == 0.0
    assert flat.keep.all()


def test_advantages_carry_no_gradient():
    rewards = torch.tensor([[1.0, 0.0]], requires_grad=True)
    assert not F.grpo_advantages(rewards).advantages.requires_grad
    assert not F.rloo_advantages(rewards).advantages.requires_grad
    assert not F.gae(rewards, rewards, torch.ones(1, 2)).advantages.requires_grad


def test_step_advantages():
    """Group of two rows with step rewards {1, 0, 0, 1}: normalised ±1 (eps 0).

    Row 0 has steps ending at tokens 1 and 3 with +1 and -1: tokens 0, 1 see both (0), tokens 2, 3 the second (-1).
    Row 1 has -1 ending at 0 and +1 ending at 2: token 0 sees both (0), tokens 1, 2 the second (+1), token 3 none.
    """
    out = F.step_advantages(
        torch.tensor([[1.0, 0.0, NAN], [0.0, 1.0, NAN]]),
        torch.tensor([[1, 3, -1], [0, 2, -1]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        group_size=2,
        eps=0.0,
    )
    assert out.tolist() == [[0.0, 0.0, -1.0, -1.0], [0.0, 1.0, 1.0, 0.0]]


def test_one_step_per_row_is_outcome_grpo():
    """A single step ending at the last token gives every token the outcome advantage."""
    rewards = torch.tensor([1.0, 0.0, 0.25, 1.0])
    out = F.step_advantages(rewards[:, None], torch.full((4, 1), 2), torch.ones(4, 3), group_size=4)
    expected = F.grpo_advantages(rewards[None]).advantages[0]
    torch.testing.assert_close(out, expected[:, None].expand(4, 3))


def test_step_advantages_of_a_flat_group_or_no_step_are_zero():
    flat = F.step_advantages(torch.full((2, 2), 0.1), torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2), 2)
    assert flat.abs().max() == 0.0
    none = F.step_advantages(torch.zeros(2, 0), torch.zeros(2, 0), torch.ones(2, 2), 2)
    assert none.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_gae_monte_carlo_and_one_step():
    """λ = γ = 1: returns-to-go (1, 1, 1) minus V = 1/2. λ = 0: δ = (V₂-V₁, V₃-V₂, 1-V₃)."""
    rewards, values, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.75]]), torch.ones(1, 3)
    out = F.gae(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(out.advantages, torch.tensor([[0.5, 0.75, 0.25]]))
    torch.testing.assert_close(out.returns, torch.ones(1, 3))
    torch.testing.assert_close(F.gae(rewards, values, mask, lam=0.0).advantages, torch.tensor([[-0.25, 0.5, 0.25]]))


def test_gae_skips_holes_and_padding():
    """The real tokens (r, V) = (0, ½), (1, ½) give the same numbers whatever NaN stands between, before or after."""
    compact = F.gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.ones(1, 2), 0.9, 0.8)
    rewards = torch.tensor([[NAN, 0.0, NAN, NAN, 1.0, NAN]])
    values = torch.tensor([[NAN, 0.5, NAN, NAN, 0.5, NAN]])
    mask = torch.tensor([[0, 1, 0, 0, 1, 0]])
    spread = F.gae(rewards, values, mask, 0.9, 0.8)
    torch.testing.assert_close(spread.advantages[mask == 1], compact.advantages[0])
    assert spread.advantages[mask == 0].abs().max() == 0.0
    assert spread.returns[mask == 0].abs().max() == 0.0


def test_gae_bootstrap():
    """A row cut at its last token continues with V = 0.7: A = 0 + 0.7 - 0.5."""
    out = F.gae(torch.zeros(1, 1), torch.full((1, 1), 0.5), torch.ones(1, 1), bootstrap=torch.tensor([0.7]))
    assert out.advantages.item() == pytest.approx(0.2)


def test_soft_overlong():
    """L = 100, C = 20: 0 up to 80, halfway down at 90, -1 at 100 and beyond; C = 0 is a step after L."""
    penalty = F.soft_overlong(torch.tensor([80, 90, 100, 500]), max_length=100, cache=20)
    assert penalty.tolist() == [0.0, -0.5, -1.0, -1.0]
    assert F.soft_overlong(torch.tensor([100, 101]), max_length=100, cache=0).tolist() == [0.0, -1.0]


def test_errors():
    with pytest.raises(ValueError, match=r"`rewards` has shape \(4,\) but must be \(P, G\)"):
        F.grpo_advantages(torch.zeros(4))
    with pytest.raises(ValueError, match="`std` is 'biased'"):
        F.grpo_advantages(torch.zeros(1, 4), std="biased")
    with pytest.raises(ValueError, match="`kl` is None but beta"):
        F.rloo_advantages(torch.zeros(1, 4), beta=0.1)
    with pytest.raises(ValueError, match=r"`bootstrap` has shape \(2,\)"):
        F.gae(torch.zeros(1, 4), torch.zeros(1, 4), torch.ones(1, 4), bootstrap=torch.zeros(2))
    with pytest.raises(ValueError, match="`group_size` is 2 but the batch has 3 rows"):
        F.step_advantages(torch.zeros(3, 1), torch.zeros(3, 1), torch.ones(3, 2), 2)
    with pytest.raises(ValueError, match="`step_ends` holds 7"):
        F.step_advantages(torch.zeros(2, 1), torch.full((2, 1), 7), torch.ones(2, 2), 2)
    with pytest.raises(ValueError, match="`cache` is 30"):
        F.soft_overlong(torch.zeros(1), max_length=20, cache=30)
