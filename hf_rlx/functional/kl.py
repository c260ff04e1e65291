"""KL divergence to the reference policy: per-token estimators, the shaped reward, coefficient controllers.

d = log π(token) - log π_ref(token) on tokens sampled from π. All values in nats.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hf_rlx.functional._checks import (
    as_mask,
    check_choice,
    check_rank,
    check_same_shape,
    clamp_symmetric,
    masked_difference,
    select,
    to_float,
)
from hf_rlx.functional.masked import masked_mean, masked_sum

KLEstimator = Literal["k1", "k2", "k3", "k3_ratio"]


class KLEstimates(NamedTuple):
    """Result of `kl_estimators`; per token (B, T), per sequence (B,) = sum, mean = over all selected tokens."""

    k1: Tensor
    k2: Tensor
    k3: Tensor
    k1_sequence: Tensor
    k2_sequence: Tensor
    k3_sequence: Tensor
    k1_mean: Tensor
    k2_mean: Tensor
    k3_mean: Tensor
    clamped_fraction: Tensor  # share of selected tokens with |d| above the clamp of k3
    max_abs: Tensor  # largest |d|, 0 when nothing is selected


class ShapedReward(NamedTuple):
    """Result of `shaped_reward`."""

    rewards: Tensor  # (B, T), exactly 0 under the mask
    last_index: Tensor  # (B,) int64, position of the last selected token, -1 for an empty row
    kl_sequence: Tensor  # (B,) nats, summed k1
    total: Tensor  # (B,) summed rewards


def _k3(d: Tensor, clamp: float | None) -> Tensor:
    # expm1 keeps d ≈ 1e-9, where exp(-d) - 1 + d cancels to 0; the clamp keeps d < -88 finite in float32.
    d = clamp_symmetric(d, clamp)
    return torch.expm1(-d) + d


def kl_penalty(
    logps: Tensor,
    ref_logps: Tensor,
    mask: Tensor,
    estimator: KLEstimator = "k3",
    old_logps: Tensor | None = None,
    clamp: float | None = 20.0,
    log_ratio_clamp: float | None = 20.0,
) -> Tensor:
    """Per-token KL estimate: k1 = d, k2 = d²/2, k3 = e⁻ᵈ - 1 + d, k3_ratio = ρ·k3 with ρ = exp(log π - log π_old).

    As a loss term: k2 has the gradient of reverse KL on-policy; k3 that of *forward* KL although its value
    estimates reverse KL without bias; k3_ratio, whose ρ carries gradient, that of reverse KL (at ρ = 1: d).
    k1 has expected gradient 0, so it belongs into the reward only.

    Args:
        logps: policy log-probs, with gradient. Shape: `(B, T)`.
        ref_logps: reference log-probs, held constant. Shape: `(B, T)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        estimator: which formula.
        old_logps: log-probs of the sampling policy, read by k3_ratio; None means ρ = 1 with gradient. Shape:
            `(B, T)`.
        clamp: bound on |d| in nats inside k3 only (gradient 0 outside); None for no bound.
        log_ratio_clamp: bound on |log ρ| in nats; None for no bound.

    Returns:
        Nats, exactly 0 under the mask. Shape: `(B, T)`.

    Raises:
        ValueError: shapes differ, unknown estimator.

    Source: Schulman, "Approximating KL divergence" (2020); DeepSeekMath (2402.03300) eq. 4; TRL
    `use_bias_correction_kl` for k3_ratio.
    """
    check_choice("estimator", estimator, get_args(KLEstimator))
    check_same_shape("logps", logps, "mask", mask)
    check_same_shape("ref_logps", ref_logps, "mask", mask)
    selected = as_mask(mask)
    d = masked_difference(logps, ref_logps, selected)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    k3 = _k3(d, clamp)
    if estimator == "k3":
        return k3
    old = logps if old_logps is None else old_logps
    check_same_shape("old_logps", old, "mask", mask)
    return k3 * clamp_symmetric(masked_difference(logps, old, selected), log_ratio_clamp).exp()


def kl_estimators(logps: Tensor, ref_logps: Tensor, mask: Tensor, clamp: float | None = 20.0) -> KLEstimates:
    """All three estimators at once, per token, per sequence (sum) and as token mean; for logging and tests.

    Args:
        logps: policy log-probs. Shape: `(B, T)`.
        ref_logps: reference log-probs, held constant. Shape: `(B, T)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        clamp: bound on |d| in nats inside k3 only; None for no bound.

    Raises:
        ValueError: shapes differ.
    """
    check_rank("mask", mask, 2, "(B, T)")
    k1 = kl_penalty(logps, ref_logps, mask, "k1")
    k2 = kl_penalty(logps, ref_logps, mask, "k2")
    k3 = kl_penalty(logps, ref_logps, mask, "k3", clamp=clamp)
    size = k1.detach().abs()
    beyond = size > (math.inf if clamp is None else clamp)
    return KLEstimates(
        k1,
        k2,
        k3,
        masked_sum(k1, mask, dim=1),
        masked_sum(k2, mask, dim=1),
        masked_sum(k3, mask, dim=1),
        masked_mean(k1, mask),
        masked_mean(k2, mask),
        masked_mean(k3, mask),
        clamped_fraction=masked_mean(beyond.to(k1.dtype), mask),
        max_abs=size.max() if size.numel() else size.sum(),
    )


def shaped_reward(
    score: Tensor, logps: Tensor, ref_logps: Tensor | None, mask: Tensor, beta: float = 0.05
) -> ShapedReward:
    """Token rewards of RLHF: rₜ = -β dₜ + score · 1[t is the last selected token].

    The score stands *on* the last real token; TRL's PPO puts it one position after. An empty row gets zeros
    and its score is dropped. k1 is never clamped. Nothing here carries gradient.

    Args:
        score: one reward per completion. Shape: `(B,)`.
        logps: log-probs of the sampling policy. Shape: `(B, T)`.
        ref_logps: reference log-probs; None only with beta = 0. Shape: `(B, T)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        beta: reward per nat.

    Raises:
        ValueError: shapes differ, or no `ref_logps` although beta is not 0.

    Source: Ziegler et al. (1909.08593) eq. 2; InstructGPT (2203.02155) eq. 2.
    """
    check_rank("mask", mask, 2, "(B, T)")
    check_same_shape("logps", logps, "mask", mask)
    if score.shape != mask.shape[:1]:
        raise ValueError(f"`score` has shape {tuple(score.shape)} but `mask` has shape {tuple(mask.shape)}.")
    if ref_logps is None:
        if beta != 0:
            raise ValueError(f"`ref_logps` is None but beta is {beta}.")
        ref_logps = logps
    check_same_shape("ref_logps", ref_logps, "mask", mask)
    with torch.no_grad():
        selected = as_mask(mask)
        d = masked_difference(logps, ref_logps, selected)
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(selected, positions, -1)
        last_index = last.amax(dim=1) if mask.shape[1] else last.new_full(mask.shape[:1], -1)
        is_last = (positions == last_index[:, None]) & selected
        rewards = -beta * d + select(to_float(score).to(d.dtype)[:, None].expand_as(d), is_last)
        return ShapedReward(rewards, last_index, d.sum(dim=1), rewards.sum(dim=1))


class FixedKLController:
    """A constant KL coefficient β behind the interface of `AdaptiveKLController`."""

    def __init__(self, coef: float) -> None:
        self.coef = float(coef)

    def update(self, kl: float, n: int) -> float:
        """Return the coefficient unchanged."""
        return self.coef

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient."""
        self.coef = float(state["coef"])


class AdaptiveKLController:
    """Steer β towards a target KL: e = clip(KL / target - 1, ±0.2), β ← β (1 + e · n / horizon).

    KL is the mean over sequences of the summed k1 (nats per sequence, may be negative), n the episodes of the
    step. A KL that is not finite leaves β alone.

    Args:
        init_coef: first β.
        target: nats per sequence.
        horizon: episodes over which a full error moves β by 20 %.
        episodes_per_step: if given, checked against the horizon at once; `update` checks every n.

    Raises:
        ValueError: target or horizon not positive, or a horizon smaller than the episodes of a step.

    Source: Ziegler et al. (1909.08593) section 2.2; lm-human-preferences `AdaptiveKLController`.
    """

    def __init__(
        self,
        init_coef: float = 0.2,
        target: float = 6.0,
        horizon: float = 10000,
        episodes_per_step: int | None = None,
    ) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"`target` and `horizon` must be positive, got {target} and {horizon}.")
        self.coef = float(init_coef)
        self.target = float(target)
        self.horizon = float(horizon)
        if episodes_per_step is not None:
            self._check(episodes_per_step)

    def _check(self, n: int) -> None:
        # Beyond 5 · horizon episodes the factor is negative and β changes sign.
        if n > self.horizon:
            raise ValueError(f"`horizon` is {self.horizon:g} episodes but one step has {n}; raise the horizon.")

    def update(self, kl: float, n: int) -> float:
        """Move β after a step of `n` episodes with measured `kl` (nats per sequence) and return it."""
        self._check(n)
        if math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * n / self.horizon
        return self.coef

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient; target and horizon stay those of the configuration."""
        self.coef = float(state["coef"])
