"""Token log-probs, entropies and their gradients."""

import math

import pytest
import torch

import hf_rlx.functional as F


def test_logits_predict_the_next_token():
    """Logits [log 3, 0] give probabilities 3/4 and 1/4: position 0 predicts ids[1] = 1, position 1 predicts 0."""
    logits = torch.tensor([[math.log(3.0), 0.0], [math.log(3.0), 0.0], [9.0, 9.0]])
    logps = F.token_logprobs(logits, torch.tensor([0, 1, 0]))
    torch.testing.assert_close(logps, torch.tensor([math.log(0.25), math.log(0.75)]))


def test_selected_logprobs_do_not_shift():
    logits = torch.tensor([[[math.log(3.0), 0.0], [0.0, 0.0]]])
    logps = F.selected_logprobs(logits, torch.tensor([[0, 1]]))
    torch.testing.assert_close(logps, torch.tensor([[math.log(0.75), math.log(0.5)]]))


def test_temperature_divides_the_logits():
    """[2 log 3, 0] at temperature 2 is [log 3, 0]: probability 3/4."""
    logps = F.selected_logprobs(torch.tensor([[2 * math.log(3.0), 0.0]]), torch.tensor([0]), temperature=2.0)
    assert logps.item() == pytest.approx(math.log(0.75))


def test_bfloat16_logits_are_normalised_in_float32():
    logps = F.token_logprobs(torch.zeros(1, 3, 50000, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.long))
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps, torch.full((1, 2), -math.log(50000.0)))


def test_entropy_of_banned_tokens_is_finite_with_finite_gradient():
    """[0, 0, -inf] is uniform over two: H = log 2, at its maximum, so the gradient is 0."""
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    entropy = F.entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2.0))
    torch.testing.assert_close(logits.grad, torch.zeros(3))


def test_entropy_gradient():
    """∂H/∂zᵥ = -pᵥ (log pᵥ + H) with p = (3/4, 1/4), H = 0.5623351."""
    logits = torch.tensor([math.log(3.0), 0.0], requires_grad=True)
    entropy = F.entropy_from_logits(logits)
    entropy.backward()
    h = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropy.item() == pytest.approx(h)
    expected = torch.tensor([-0.75 * (math.log(0.75) + h), -0.25 * (math.log(0.25) + h)])
    torch.testing.assert_close(logits.grad, expected)


def test_entropy_mask_hides_nan():
    logits = torch.tensor([[[0.0, 0.0], [math.nan, math.nan]]], requires_grad=True)
    entropy = F.entropy_from_logits(logits, mask=torch.tensor([[1, 0]]))
    entropy.sum().backward()
    torch.testing.assert_close(entropy, torch.tensor([[math.log(2.0), 0.0]]))
    assert logits.grad.abs().max() == 0.0


def test_sequence_logprobs():
    """Row 1: -1 - 3 = -4 over 2 tokens, the hole unread; row 2 is empty: 0, 0, 0."""
    out = F.sequence_logprobs(
        torch.tensor([[-1.0, math.nan, -3.0], [-1.0, -1.0, -1.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]])
    )
    assert (out.sum.tolist(), out.mean.tolist(), out.length.tolist()) == ([-4.0, 0.0], [-2.0, 0.0], [2, 0])


def test_errors():
    with pytest.raises(ValueError, match=r"`ids` has shape \(2,\) but `logits` has shape \(3, 4\)"):
        F.token_logprobs(torch.zeros(3, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"`ids` has shape \(3, 1\)"):
        F.selected_logprobs(torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="`temperature` is 0"):
        F.entropy_from_logits(torch.zeros(3), temperature=0.0)
    with pytest.raises(ValueError, match=r"`mask` has shape \(2,\) but `logits` has shape \(3, 4\)"):
        F.entropy_from_logits(torch.zeros(3, 4), mask=torch.ones(2))
