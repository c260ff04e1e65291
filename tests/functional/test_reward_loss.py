"""Reward-model and process-reward-model losses, and reading steps."""

import math

import pytest
import torch

import hf_rlx.functional as F

NAN = math.nan


def softplus(x):
    return math.log1p(math.exp(x))


def test_bradley_terry():
    """c - r = 1: log(1 + e⁻¹), gradient -σ(-1); a margin of 1 makes it log 2; centering adds k (c + r)²."""
    chosen = torch.tensor([1.0], requires_grad=True)
    rejected = torch.tensor([0.0])
    out = F.bradley_terry(chosen, rejected)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(softplus(-1.0))
    assert chosen.grad.item() == pytest.approx(-1 / (1 + math.e))
    assert F.bradley_terry(chosen, rejected, torch.ones(1)).loss.item() == pytest.approx(math.log(2.0))
    centred = F.bradley_terry(chosen, rejected, center_coef=0.1)
    assert centred.loss.item() == pytest.approx(softplus(-1.0) + 0.1)
    assert centred.pair_loss.item() == pytest.approx(softplus(-1.0))


def test_bradley_terry_is_stable_and_shift_invariant():
    chosen, rejected = torch.tensor([-200.0, 3.0]), torch.tensor([200.0, 1.0])
    loss = F.bradley_terry(chosen, rejected).loss
    assert loss.item() == pytest.approx((400.0 + softplus(-2.0)) / 2)
    torch.testing.assert_close(F.bradley_terry(chosen + 8, rejected + 8).loss, loss)


def test_soft_labels_leave_out_nan():
    """p = 1/2 at equal scores: log 2 with gradient 0; the unusable pair has neither loss nor gradient."""
    a = torch.tensor([0.0, NAN], requires_grad=True)
    out = F.soft_bradley_terry(a, torch.zeros(2), torch.tensor([0.5, NAN]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.log(2.0))
    assert a.grad.tolist() == [0.0, 0.0]


def test_ranked_all_pairs():
    """Scores 2, 1, 0 ranked 0, 1, 2: margins 1, 2, 1 over three pairs."""
    out = F.ranked_all_pairs(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0, 1, 2]]))
    assert out.loss.item() == pytest.approx((2 * softplus(-1.0) + softplus(-2.0)) / 3)
    assert (out.n_pairs.tolist(), out.accuracy.item()) == ([3], 1.0)


def test_ranked_pairs_pad_ties_and_reductions():
    """Prompt 0 has one pair at margin 1, prompt 1 three pairs at margin 0 (ties of rank give none)."""
    scores = torch.tensor([[1.0, 0.0, NAN], [0.0, 0.0, 0.0], [5.0, 5.0, 5.0]], requires_grad=True)
    ranks = torch.tensor([[0, 1, 0], [0, 1, 2], [0, 0, 0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
    out = F.ranked_all_pairs(scores, ranks, mask)
    out.loss.backward()
    assert out.n_pairs.tolist() == [1, 3, 0]
    assert out.loss.item() == pytest.approx((softplus(-1.0) + math.log(2.0)) / 2)
    assert scores.grad[0, 2] == 0.0
    flat = F.ranked_all_pairs(scores, ranks, mask, reduction="pair_mean")
    assert flat.loss.item() == pytest.approx((softplus(-1.0) + 3 * math.log(2.0)) / 4)
    assert flat.accuracy.item() == pytest.approx((1 + 1.5) / 4)


def test_plackett_luce():
    """Equal scores: log 3 + log 2 + log 1 = log 6; K = 2 is Bradley-Terry; padding and K = 1 do not count."""
    assert F.plackett_luce(torch.zeros(1, 3)).loss.item() == pytest.approx(math.log(6.0))
    scores = torch.tensor([[1.0, 0.0, NAN], [7.0, NAN, NAN]], requires_grad=True)
    out = F.plackett_luce(scores, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(softplus(-1.0))
    torch.testing.assert_close(scores.grad, torch.tensor([[-1.0, 1.0, 0.0], [0.0] * 3]) / (1 + math.e))


def test_rank_losses_are_shift_invariant():
    scores = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.25, -0.5]])
    ranks = torch.tensor([[2, 0, 1], [0, 1, 2]])
    torch.testing.assert_close(F.ranked_all_pairs(scores + 4, ranks).loss, F.ranked_all_pairs(scores, ranks).loss)
    torch.testing.assert_close(F.plackett_luce(scores + 4).loss, F.plackett_luce(scores).loss)


def test_prm_hard_loss():
    """Uniform logits: log 2 per labelled step whatever stands elsewhere; NaN logits there get gradient 0."""
    logits = torch.tensor([[[0.0, 0.0], [NAN, NAN], [0.0, 0.0]]], requires_grad=True)
    out = F.prm_hard_loss(logits, torch.tensor([[1, -100, 0]]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.log(2.0))
    assert out.n_steps == 2
    assert logits.grad.tolist() == [[[0.25, -0.25], [0.0, 0.0], [-0.25, 0.25]]]


def test_prm_labels_stop_at_the_first_error():
    """Labels +1, -1, +1: the third is dropped; with three classes -1, 0, +1 are classes 0, 1, 2."""
    logits = torch.zeros(1, 3, 3)
    assert F.prm_hard_loss(logits, torch.tensor([[1, -1, 1]]), first_error_only=True).n_steps == 2
    certain = torch.tensor([[[100.0, 0.0, 0.0], [0.0, 100.0, 0.0], [0.0, 0.0, 100.0]]])
    assert F.prm_hard_loss(certain, torch.tensor([[-1, 0, 1]])).loss.item() == pytest.approx(0.0, abs=1e-6)


def test_prm_without_a_label_is_zero():
    logits = torch.full((1, 2, 2), NAN, requires_grad=True)
    out = F.prm_hard_loss(logits, torch.full((1, 2), -100))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert logits.grad.abs().max() == 0.0
    assert math.isnan(out.accuracy)


def test_prm_soft_loss():
    """z = 0: log 2 for any target, gradient 1/2 - y over one step; unlabelled steps are left out."""
    logits = torch.tensor([[0.0, NAN]], requires_grad=True)
    out = F.prm_soft_loss(logits, torch.tensor([[0.75, NAN]]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.log(2.0))
    assert logits.grad.tolist() == [[-0.25, 0.0]]


def test_step_scores():
    logits = torch.tensor([[math.log(1.0), math.log(2.0), math.log(5.0)]])
    assert F.step_scores(logits).item() == pytest.approx(7 / 8)
    assert F.step_scores(logits, neutral="bad").item() == pytest.approx(5 / 8)


@pytest.mark.parametrize(("how", "expected"), [("min", 0.2), ("prod", 0.09), ("mean", 1.6 / 3), ("last", 0.9)])
def test_step_aggregate(how, expected):
    """Steps 0.5, 0.2, 0.9 wherever padding stands: product 0.09, mean 1.6/3; no step: NaN."""
    scores = torch.tensor([[0.5, NAN, 0.2, 0.9, NAN], [NAN] * 5])
    out = F.step_aggregate(scores, torch.tensor([[1, 0, 1, 1, 0], [0] * 5]), how)
    assert out[0].item() == pytest.approx(expected)
    assert math.isnan(out[1])


def test_step_product_does_not_underflow_early():
    """0.5³⁰ through logs equals 2⁻³⁰; a zero step gives 0."""
    assert F.step_aggregate(torch.full((1, 30), 0.5), how="prod").item() == pytest.approx(2.0**-30)
    assert F.step_aggregate(torch.tensor([[0.0, 1.0]]), how="prod").item() == 0.0


def test_errors():
    with pytest.raises(ValueError, match=r"`rejected` has shape \(2,\) but `chosen` has shape \(1,\)"):
        F.bradley_terry(torch.zeros(1), torch.zeros(2))
    with pytest.raises(ValueError, match=r"`labels` has shape \(1, 3\)"):
        F.prm_hard_loss(torch.zeros(1, 2, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="C must be 2 or 3"):
        F.prm_hard_loss(torch.zeros(1, 2, 5), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="expected -1, 0, 1"):
        F.prm_hard_loss(torch.zeros(1, 2, 3), torch.tensor([[2, 0]]))
    with pytest.raises(ValueError, match="`how` is 'max'"):
        F.step_aggregate(torch.zeros(1, 2), how="max")
