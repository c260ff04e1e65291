"""Sums, means, whitening and aggregation under a mask."""

import pytest
import torch

import hf_rlx.functional as F

NAN = float("nan")


def test_masked_sum_and_mean_skip_what_is_masked():
    """[1, NaN, 3] under [1, 0, 1]: sum 4, mean 2; an empty row sums and averages to 0."""
    values = torch.tensor([[1.0, NAN, 3.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert F.masked_sum(values, mask) == 4.0
    assert F.masked_mean(values, mask) == 2.0
    assert F.masked_sum(values, mask, dim=1).tolist() == [4.0, 0.0]
    assert F.masked_mean(values, mask, dim=1).tolist() == [2.0, 0.0]


def test_masked_mean_accepts_zero_one_masks_and_keeps_nan_out_of_gradients():
    """d mean / dx is 1/2 on the two selected entries and exactly 0, not NaN, on the masked one."""
    values = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    F.masked_mean(values, torch.tensor([1, 0, 1])).backward()
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


def test_whiten_population():
    """[1, 2, 3]: mean 2, variance 2/3, so ∓√(3/2) = ∓1.2247449 (eps 1e-8 changes the ninth digit)."""
    out = F.masked_whiten(torch.tensor([[1.0, 2.0, 3.0, NAN]]), torch.tensor([[1, 1, 1, 0]]))
    torch.testing.assert_close(out.whitened, torch.tensor([[-1.2247449, 0.0, 1.2247449, 0.0]]))
    torch.testing.assert_close(out.var, torch.tensor(2.0 / 3.0))


def test_whiten_constant_is_exactly_zero_in_float32():
    """0.1 is no binary fraction: its float32 mean over 7 entries is off, but equal entries must give 0."""
    values = torch.full((1, 7), 0.1)
    assert F.masked_whiten(values, torch.ones(1, 7)).whitened.abs().max() == 0.0
    assert F.masked_whiten(torch.tensor([[5.0]]), torch.ones(1, 1), ddof=1).whitened.item() == 0.0


def test_whiten_can_keep_the_mean():
    """shift_mean=False adds the mean 2 back: the whitened mean is 2."""
    values, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3)
    out = F.masked_whiten(values, mask, shift_mean=False)
    torch.testing.assert_close(out.whitened.mean(), torch.tensor(2.0))


VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("completion_mean", 3.0), ("token_mean", 2.5), ("constant", 10.0 / 12.0)]
)
def test_aggregate(aggregation, expected):
    """Row means 2 and 4 average to 3 over the two non-empty rows; four tokens sum to 10: 10/4; 10/(3 rows · 4)."""
    loss = F.aggregate(VALUES, MASK, aggregation, max_length=4)
    assert loss.item() == pytest.approx(expected)
    weights = F.aggregation_weights(MASK, aggregation, max_length=4)
    assert (weights * VALUES.nan_to_num()).sum().item() == pytest.approx(expected)
    assert weights[MASK == 0].tolist() == [0.0] * 5


@pytest.mark.parametrize("aggregation", ["completion_mean", "token_mean", "constant"])
def test_aggregate_does_not_depend_on_the_split(aggregation):
    """With the step's normalizer the losses of micro-batches of 1 and 2 rows add up to that of the whole batch."""
    whole = F.aggregate(VALUES, MASK, aggregation, max_length=4)
    parts = [(VALUES[:1], MASK[:1]), (VALUES[1:], MASK[1:])]
    normalizer = sum(F.normalizer_count(mask, aggregation) for _, mask in parts)
    split = sum(F.aggregate(v, m, aggregation, normalizer, 4) for v, m in parts)
    torch.testing.assert_close(split, whole)


@pytest.mark.parametrize("aggregation", ["completion_mean", "token_mean", "constant"])
@pytest.mark.parametrize("normalizer", [None, 0, 8])
def test_aggregate_of_nothing_is_zero_with_zero_gradient(aggregation, normalizer):
    values = torch.full((2, 3), NAN, requires_grad=True)
    loss = F.aggregate(values, torch.zeros(2, 3), aggregation, normalizer, max_length=3)
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.abs().max() == 0.0


def test_aggregate_lifts_bfloat16():
    """512 tokens of 1 + 2⁻⁷ average exactly in float32; a bfloat16 sum would stop growing at 256."""
    values = torch.full((1, 512), 1.0078125, dtype=torch.bfloat16)
    loss = F.aggregate(values, torch.ones(1, 512), "token_mean")
    assert loss.dtype == torch.float32
    assert loss.item() == 1.0078125


def test_errors_name_argument_and_shapes():
    with pytest.raises(ValueError, match=r"`values` has shape \(2, 3\) but `mask` has shape \(2, 1\)"):
        F.masked_mean(torch.zeros(2, 3), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"`aggregation` is 'mean'.*'completion_mean'"):
        F.aggregate(torch.zeros(2, 3), torch.ones(2, 3), "mean")
    with pytest.raises(ValueError, match="`max_length`"):
        F.aggregate(torch.zeros(2, 3), torch.ones(2, 3), "constant")
    with pytest.raises(ValueError, match="`normalizer` is -1"):
        F.aggregate(torch.zeros(2, 3), torch.ones(2, 3), "token_mean", normalizer=-1)
