"""The critic's loss and how much it explains."""

import math

import pytest
import torch

import hf_rlx.functional as F

NAN = math.nan
ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("target", "loss", "gradient", "clipped"), [(2.0, 0.5 * 1.8**2, 0.0, 1.0), (-1.0, 2.0, 2.0, 0.0)]
)
def test_the_larger_error_counts(target, loss, gradient, clipped):
    """V went 0 -> 1 (clipped to 0.2). Target 2: 1.8² > 1², gradient 0. Target -1: 2² > 1.2², gradient V - R = 2."""
    values = torch.tensor([[1.0]], requires_grad=True)
    out = F.value_loss(values, torch.zeros(1, 1), torch.tensor([[target]]), ONE)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert out.clip_fraction == clipped


def test_nan_under_the_mask():
    values = torch.tensor([[1.0, NAN]], requires_grad=True)
    other = torch.tensor([[0.0, NAN]])
    out = F.value_loss(values, other, other, torch.tensor([[1, 0]]))
    out.loss.backward()
    assert out.token_loss.tolist() == [[0.5, 0.0]]
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_plain_squared_error():
    out = F.value_loss(torch.tensor([[3.0]]), None, torch.tensor([[1.0]]), ONE, clip_range=None)
    assert out.loss.item() == 2.0


def test_explained_variance():
    """Residuals of a constant offset have no variance: 1 in the var form; MSE 1 over Var(R) = 1 gives 0."""
    values, returns = torch.tensor([[2.0, 4.0, NAN]]), torch.tensor([[1.0, 3.0, NAN]])
    mask = torch.tensor([[1, 1, 0]])
    assert F.explained_variance(values, returns, mask).item() == 1.0
    assert F.explained_variance(values, returns, mask, form="mse").item() == 0.0
    assert math.isnan(F.explained_variance(values, torch.full((1, 3), 0.1), mask))


def test_errors():
    with pytest.raises(ValueError, match=r"`returns` has shape \(1, 2\) but `mask` has shape \(1, 1\)"):
        F.value_loss(ONE, ONE, torch.zeros(1, 2), ONE)
    with pytest.raises(ValueError, match="`old_values` is None but `clip_range`"):
        F.value_loss(ONE, None, ONE, ONE)
