"""Statistics of scores and outcomes: reward-model evaluation, running moments, intervals and paired tests.

Computed in float64 on the CPU from tensors or sequences; nothing here carries gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_rlx.functional._checks import check_choice, check_rank

Numbers = Tensor | Sequence[float] | np.ndarray


class PairwiseAccuracy(NamedTuple):
    """Result of `pairwise_accuracy`."""

    accuracy: float  # ties count 1/2; NaN for no pair
    ties: int
    n_pairs: int


class CalibrationError(NamedTuple):
    """Result of `calibration_error`; one entry per bin over [1/2, 1], NaN for an empty bin."""

    ece: float
    bin_count: list[int]
    bin_confidence: list[float]
    bin_accuracy: list[float]
    naive_one_sided: float  # 1 - mean σ(margin): what binning σ(margin) against "chosen won" measures


class Correlation(NamedTuple):
    """Result of `reward_length_correlation`; NaN when a side is constant or fewer than two pairs."""

    pearson: float
    spearman: float
    n_pairs: int


class CombinedRewards(NamedTuple):
    """Result of `combine_rewards`."""

    total: Tensor  # (B,), NaN where no component is present
    component_mean: Tensor  # (C,), before weighting
    component_std: Tensor  # (C,), population, before weighting


class Interval(NamedTuple):
    """Result of `wilson_interval`."""

    low: float
    high: float


class PairedDifference(NamedTuple):
    """Result of `paired_bootstrap`, in score units."""

    mean: float
    low: float
    high: float


def _float64(x: Numbers) -> Tensor:
    # Python floats must not pass through torch's float32 default.
    return x.detach().cpu().double() if isinstance(x, Tensor) else torch.tensor(np.asarray(x, dtype=np.float64))


def _flat(name: str, x: Numbers) -> Tensor:
    x = _float64(x)
    check_rank(name, x, 1, "one-dimensional")
    return x


def _pair(name: str, x: Numbers, other_name: str, y: Numbers) -> tuple[Tensor, Tensor]:
    a, b = _flat(name, x), _flat(other_name, y)
    if a.shape != b.shape:
        raise ValueError(
            f"`{name}` has shape {tuple(a.shape)} but `{other_name}` has shape {tuple(b.shape)}; they must be equal."
        )
    return a, b


def pairwise_accuracy(chosen: Numbers, rejected: Numbers) -> PairwiseAccuracy:
    """Share of pairs whose chosen score is higher; a tie counts 1/2, so a constant scorer gets 1/2, not 0.

    Args:
        chosen: scores of the preferred answers; a pair with NaN is left out. Shape: `(B,)`.
        rejected: scores of the others. Shape: `(B,)`.

    Raises:
        ValueError: shapes differ.
    """
    a, b = _pair("chosen", chosen, "rejected", rejected)
    usable = ~(a.isnan() | b.isnan())
    count, ties = int(usable.sum()), int((a == b).sum())
    wins = int((a > b).sum())
    return PairwiseAccuracy((wins + 0.5 * ties) / count if count else math.nan, ties, count)


def calibration_error(margins: Numbers, n_bins: int = 10) -> CalibrationError:
    """Expected calibration error of σ(margin), folded: confidence σ(|m|) in [1/2, 1], correct = [m > 0], a tie 1/2.

    ECE = ∑_b n_b / n · |accuracy_b - confidence_b| over equal bins [lo, hi), the last one closed. Without
    folding the label is always "chosen won" and the number degenerates to `naive_one_sided`.

    Args:
        margins: chosen score minus rejected score, NaN left out. Shape: `(B,)`.
        n_bins: bins over [1/2, 1].

    Raises:
        ValueError: margins are not one-dimensional, or no bin.

    Source: Guo et al. (1706.04599) eq. 3.
    """
    if n_bins < 1:
        raise ValueError(f"`n_bins` is {n_bins} but must be at least 1.")
    m = _flat("margins", margins)
    m = m[~m.isnan()]
    confidence = torch.sigmoid(m.abs())
    correct = (m > 0).double() + 0.5 * (m == 0).double()
    index = ((confidence - 0.5) * (2 * n_bins)).floor().long().clamp(0, n_bins - 1)
    count = torch.bincount(index, minlength=n_bins)
    # 0 / 0 is NaN: an empty bin has neither confidence nor accuracy.
    bin_confidence = torch.bincount(index, weights=confidence, minlength=n_bins) / count
    bin_accuracy = torch.bincount(index, weights=correct, minlength=n_bins) / count
    gap = torch.where(count > 0, (bin_accuracy - bin_confidence).abs() * count, torch.zeros(()))
    n = m.numel()
    return CalibrationError(
        float(gap.sum()) / n if n else math.nan,
        count.tolist(),
        bin_confidence.tolist(),
        bin_accuracy.tolist(),
        1.0 - float(torch.sigmoid(m).mean()) if n else math.nan,
    )


def average_ranks(x: Numbers) -> Tensor:
    """Ranks 1..n of the values, equal values sharing the mean of their ranks.

    Args:
        x: values without NaN. Shape: `(n,)`.

    Returns:
        float64. Shape: `(n,)`.
    """
    _, inverse, count = torch.unique(_flat("x", x), return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count.double() - 1.0) / 2.0)[inverse]


def _pearson(x: Tensor, y: Tensor) -> float:
    # max == min, because equal floats may differ from their rounded mean.
    if x.numel() < 2 or x.max() == x.min() or y.max() == y.min():
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x.square().sum().sqrt() * y.square().sum().sqrt()))


def reward_length_correlation(rewards: Numbers, lengths: Numbers) -> Correlation:
    """Pearson and Spearman (average ranks) correlation of reward and response length.

    Args:
        rewards: NaN left out. Shape: `(B,)`.
        lengths: tokens. Shape: `(B,)`.

    Raises:
        ValueError: shapes differ.
    """
    r, n = _pair("rewards", rewards, "lengths", lengths)
    usable = ~(r.isnan() | n.isnan())
    r, n = r[usable], n[usable]
    return Correlation(_pearson(r, n), _pearson(average_ranks(r), average_ranks(n)), r.numel())


def combine_rewards(components: Tensor, weights: Tensor | Sequence[float]) -> CombinedRewards:
    """Weighted sum over the components that are present: totalᵢ = ∑_{c present} w_c x_ic.

    A missing component (NaN) is left out, not 0; a row without any is NaN = unscorable.

    Args:
        components: reward of each component. Shape: `(B, C)`.
        weights: one per component. Shape: `(C,)`.

    Raises:
        ValueError: shapes do not fit.
    """
    check_rank("components", components, 2, "(B, C)")
    x = components.detach()
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    w = torch.as_tensor(weights, dtype=x.dtype, device=x.device)
    if w.shape != x.shape[1:]:
        raise ValueError(f"`weights` has shape {tuple(w.shape)} but `components` has shape {tuple(x.shape)}.")
    present = ~x.isnan()
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    total = torch.where(present, x * w, zero).sum(dim=1)
    total = torch.where(present.any(dim=1), total, torch.full_like(total, torch.nan))
    count = present.sum(dim=0)
    mean = torch.where(present, x, zero).sum(dim=0) / count
    std = (torch.where(present, x - mean, zero).square().sum(dim=0) / count).sqrt()
    return CombinedRewards(total, mean, std)


class RunningMoments:
    """Running population mean and std of a reward stream, and the normalisation by them.

    Batches are merged with Chan's update in float64: δ = mean_b - mean; mean += δ n_b / n;
    M₂ += M₂_b + δ² · count · n_b / n (a sum of squares would lose a large offset). NaN is skipped.
    Attributes: mean, std (1 before anything was seen) and count. Freeze it during evaluation by calling
    `normalize` only.

    Args:
        mode: "mean_std" = (x - mean) / (std + eps), "mean" = x - mean, "std" = x / (std + eps).
        clip_value: bound on the normalised value, None for none.
        eps: added to the std.

    Raises:
        ValueError: unknown mode.

    Source: Chan, Golub, LeVeque (1979).
    """

    def __init__(
        self,
        mode: Literal["mean_std", "mean", "std"] = "mean_std",
        clip_value: float | None = None,
        eps: float = 1e-8,
    ) -> None:
        check_choice("mode", mode, ("mean_std", "mean", "std"))
        self.mode, self.clip_value, self.eps = mode, clip_value, eps
        self.count, self.mean, self._m2 = 0, 0.0, 0.0
        self._low, self._high = math.inf, -math.inf

    @property
    def std(self) -> float:
        """Population std; 1 before anything was seen, exactly 0 for a constant stream."""
        if self.count == 0:
            return 1.0
        return 0.0 if self._low == self._high else math.sqrt(max(self._m2, 0.0) / self.count)

    def update(self, batch: Numbers) -> None:
        """Merge a batch of any shape; NaN entries are skipped."""
        x = _float64(batch).flatten()
        x = x[~x.isnan()]
        n = x.numel()
        if n == 0:
            return
        batch_mean = float(x.mean())
        total = self.count + n
        delta = batch_mean - self.mean
        self._m2 += float((x - batch_mean).square().sum()) + delta * delta * self.count * n / total
        self.mean += delta * n / total
        self.count = total
        self._low, self._high = min(self._low, float(x.min())), max(self._high, float(x.max()))
        if self._low == self._high:
            self.mean = self._low

    def normalize(self, batch: Tensor) -> Tensor:
        """Normalise a batch by the moments so far; NaN stays NaN, a constant stream gives exactly 0.

        In mode "std" a constant stream has no scale and passes unchanged.
        """
        x = batch.detach().to("cpu", torch.float64)
        if self.mode != "std":
            x = x - self.mean
        if self.mode == "mean_std" or (self.mode == "std" and self.std > 0):
            x = x / (self.std + self.eps)
        if self.clip_value is not None:
            x = x.clamp(-self.clip_value, self.clip_value)
        dtype = batch.dtype if batch.dtype == torch.float64 else torch.float32
        return x.to(batch.device, dtype) if batch.device.type != "mps" else x.to(dtype).to(batch.device)

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        return {
            "count": self.count,
            "mean": self.mean,
            "m2": self._m2,
            "low": self._low,
            "high": self._high,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the moments."""
        self.count, self.mean, self._m2 = int(state["count"]), float(state["mean"]), float(state["m2"])
        self._low, self._high = float(state["low"]), float(state["high"])


def wilson_interval(k: float, n: int, z: float = 1.959963984540054) -> Interval:
    """Wilson score interval of a proportion: (p̂ + z²/2n ± z √(p̂(1-p̂)/n + z²/4n²)) / (1 + z²/n).

    Args:
        k: successes, 0 ≤ k ≤ n; a tie may count 1/2.
        n: trials.
        z: standard normal quantile, default 95 % two-sided.

    Returns:
        Lower and upper bound of the proportion; 0 and 1 for n = 0.

    Raises:
        ValueError: k outside [0, n].

    Source: Wilson (1927), JASA 22.
    """
    if not 0 <= k <= n:
        raise ValueError(f"`k` is {k} but must lie in [0, n = {n}].")
    if n == 0:
        return Interval(0.0, 1.0)
    p, shrink = k / n, 1.0 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(p * (1.0 - p) / n + z * z / (4 * n * n))
    return Interval(max(centre - half, 0.0), min(centre + half, 1.0))


def mcnemar_exact(n01: int, n10: int) -> float:
    """Two-sided exact McNemar p-value: min(1, 2 ∑_{i ≤ min} C(n, i) / 2ⁿ) with n = n01 + n10 discordant pairs.

    Args:
        n01: problems wrong before and right after.
        n10: problems right before and wrong after.

    Returns:
        The p-value; 1 for no discordant pair.

    Raises:
        ValueError: a negative count.

    Source: McNemar (1947), Psychometrika 12.
    """
    if n01 < 0 or n10 < 0:
        raise ValueError(f"`n01` and `n10` must be >= 0, got {n01} and {n10}.")
    n = n01 + n10
    tail = sum(math.comb(n, i) for i in range(min(n01, n10) + 1))
    # An integer ratio, because 2.0 ** n overflows beyond n = 1023.
    return min(1.0, 2 * tail / 2**n)


def paired_bootstrap(
    before: Numbers, after: Numbers, n_resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Percentile bootstrap interval of mean(after - before) over paired problems.

    Args:
        before: score of each problem; a pair with NaN is left out. Shape: `(n,)`.
        after: score of the same problem. Shape: `(n,)`.
        n_resamples: bootstrap samples.
        confidence: coverage in (0, 1).
        seed: of the resampling.

    Returns:
        The mean difference with its bounds, in score units; NaN for no pair.

    Raises:
        ValueError: shapes differ, confidence outside (0, 1), or no resample.

    Source: Efron and Tibshirani (1993), chapter 13.
    """
    if not 0 < confidence < 1 or n_resamples < 1:
        raise ValueError(f"need 0 < confidence < 1 and n_resamples >= 1, got {confidence} and {n_resamples}.")
    a, b = _pair("before", before, "after", after)
    difference = (b - a).numpy()
    difference = difference[~np.isnan(difference)]
    if difference.size == 0:
        return PairedDifference(math.nan, math.nan, math.nan)
    generator = np.random.default_rng(seed)
    means = [generator.choice(difference, difference.size).mean() for _ in range(n_resamples)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return PairedDifference(float(difference.mean()), float(low), float(high))
