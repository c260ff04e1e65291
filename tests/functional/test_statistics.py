"""Score statistics, running moments, intervals and paired tests."""

import math

import numpy as np
import pytest
import torch

import hf_rlx.functional as F

NAN = math.nan


def test_pairwise_accuracy_counts_ties_half():
    """One right, one wrong, two ties: (1 + 2/2) / 4 = 1/2; a NaN pair is left out."""
    out = F.pairwise_accuracy(torch.tensor([1.0, 0.0, 2.0, 1.0, NAN]), torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0]))
    assert out == (0.5, 2, 4)
    assert math.isnan(F.pairwise_accuracy([], []).accuracy)


def test_calibration_error_folds():
    """Margins ±1: confidence σ(1) = 0.7311 both times, half of them right: |0.5 - 0.7311|; unfolded 1/2."""
    out = F.calibration_error([1.0, -1.0])
    assert out.ece == pytest.approx(1 / (1 + math.exp(-1)) - 0.5)
    assert out.naive_one_sided == pytest.approx(0.5)
    assert out.bin_count == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert F.calibration_error([1000.0]).bin_count[-1] == 1


def test_average_ranks_and_correlation():
    """[3, 1, 3, 2]: the two 3s share ranks 3 and 4. A monotone but bent relation has Spearman 1, Pearson below."""
    assert F.average_ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]
    out = F.reward_length_correlation([1.0, 2.0, 3.0, NAN], [1, 2, 100, 5])
    assert out.spearman == pytest.approx(1.0)
    assert out.pearson == pytest.approx(np.corrcoef([1.0, 2.0, 3.0], [1.0, 2.0, 100.0])[0, 1])
    assert out.n_pairs == 3
    assert math.isnan(F.reward_length_correlation([0.1, 0.1, 0.1], [1, 2, 3]).pearson)


def test_combine_rewards_leaves_missing_components_out():
    """1 · 1 + 0.5 · 2 = 2; with the second missing 1; nothing present is NaN = unscorable."""
    out = F.combine_rewards(torch.tensor([[1.0, 2.0], [1.0, NAN], [NAN, NAN]]), [1.0, 0.5])
    assert out.total[:2].tolist() == [2.0, 1.0]
    assert math.isnan(out.total[2])
    assert out.component_mean.tolist() == [1.0, 2.0]
    assert out.component_std.tolist() == [0.0, 0.0]


def test_running_moments_merge():
    """[1, 3] then [5, 7]: mean 4, population variance (9 + 1 + 1 + 9)/4 = 5; NaN is skipped and stays NaN."""
    running = F.RunningMoments()
    running.update(torch.tensor([1.0, 3.0]))
    running.update([5.0, NAN, 7.0])
    assert (running.mean, running.count) == (4.0, 4)
    assert running.std == pytest.approx(math.sqrt(5.0))
    normalized = running.normalize(torch.tensor([4.0, NAN]))
    assert normalized[0] == 0.0
    assert torch.isnan(normalized[1])


def test_running_moments_keep_a_large_offset():
    """Mean 10⁸ with spread 1: a float64 sum of squares (10¹⁶) has no digits left for the variance 2/3."""
    running = F.RunningMoments()
    for value in (1e8 - 1, 1e8, 1e8 + 1):
        running.update([value])
    assert running.std == pytest.approx(math.sqrt(2.0 / 3.0))


def test_running_moments_of_a_constant_stream_give_exactly_zero():
    running = F.RunningMoments()
    batch = torch.full((3,), 0.1, dtype=torch.float64)
    running.update(batch)
    running.update(batch[:2])
    assert running.normalize(batch).tolist() == [0.0, 0.0, 0.0]


def test_running_moments_modes_clip_and_state():
    running = F.RunningMoments(mode="mean", clip_value=1.5)
    running.update([0.0, 2.0])
    assert running.normalize(torch.tensor([0.0, 9.0])).tolist() == [-1.0, 1.5]
    scale = F.RunningMoments(mode="std")
    scale.load_state_dict(running.state_dict())
    assert scale.normalize(torch.tensor([3.0])).item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="`mode` is 'max'"):
        F.RunningMoments(mode="max")


def test_wilson_interval():
    """5 of 10 at z = 2: centre 1/2, half-width 2/1.4 · √(0.025 + 0.01) = 0.26726."""
    out = F.wilson_interval(5, 10, z=2.0)
    assert out == pytest.approx((0.5 - 0.2672612, 0.5 + 0.2672612))
    assert F.wilson_interval(0, 10).low == 0.0
    assert F.wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="`k` is 3"):
        F.wilson_interval(3, 2)


def test_mcnemar_exact():
    """1 against 5 of 6 discordant pairs: 2 (1 + 6) / 64 = 0.21875; equal counts and none give 1."""
    assert F.mcnemar_exact(1, 5) == F.mcnemar_exact(5, 1) == 0.21875
    assert F.mcnemar_exact(3, 3) == 1.0
    assert F.mcnemar_exact(0, 0) == 1.0
    assert 0.0 < F.mcnemar_exact(1000, 1200) < 1e-4
    with pytest.raises(ValueError, match="n01"):
        F.mcnemar_exact(-1, 0)


def test_paired_bootstrap():
    """A constant difference has no spread; a mixed one brackets its mean and repeats with its seed."""
    assert F.paired_bootstrap([0.0, 1.0, NAN], [0.5, 1.5, 1.0], n_resamples=50) == (0.5, 0.5, 0.5)
    before, after = [0.0] * 20, [1.0] * 10 + [0.0] * 10
    first = F.paired_bootstrap(before, after, n_resamples=200)
    assert first.low < first.mean == 0.5 < first.high
    assert first == F.paired_bootstrap(before, after, n_resamples=200)
    with pytest.raises(ValueError, match=r"`before` has shape \(1,\) but `after` has shape \(2,\)"):
        F.paired_bootstrap([0.0], [0.0, 1.0])
