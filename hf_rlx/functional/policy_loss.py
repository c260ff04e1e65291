"""One clipped policy loss for PPO, GRPO, DAPO, GSPO and RLOO.

Three switches span the family: where the ratio is taken (`ratio_level`), how far it may move (`clip_low`,
`clip_high`, `delta`, `dual_clip`), and how tokens are averaged (`aggregation`, see `masked.aggregate`). The
named recipes are thin calls in `policy_presets.py`.
"""

import math
from typing import Literal, NamedTuple, get_args

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
from hf_rlx.functional.kl import KLEstimator, kl_penalty
from hf_rlx.functional.masked import Aggregation, aggregate, masked_mean

RatioLevel = Literal["token", "sequence", "sequence_sum"]
ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class PolicyLossOutput(NamedTuple):
    """Result of `policy_loss`."""

    token_loss: Tensor  # (B, T), exactly 0 under the mask
    ratio: Tensor  # ρ with gradient: (B, T), 0 under the mask; or (B, 1), 1 for an empty row
    clip_low: Tensor  # (B, T) bool, the lower bound cut the gradient
    clip_high: Tensor  # (B, T) bool, the upper bound cut the gradient


class PolicyDiagnostics(NamedTuple):
    """Result of `policy_diagnostics`: detached scalars, over tokens, or over non-empty rows for sequence ratios."""

    clip_low_fraction: Tensor
    clip_high_fraction: Tensor
    clip_fraction: Tensor  # their sum (TRL, OpenAI): clips that cut a gradient
    ratio_outside_fraction: Tensor  # ρ outside the band whatever the sign of A (CleanRL, SB3)
    ratio_mean: Tensor  # 1 when nothing is selected
    ratio_max: Tensor  # 1 when nothing is selected
    approx_kl: Tensor  # nats per token, k3 of KL(old, new)
    old_minus_new: Tensor  # nats per token, k1 of KL(old, new), never clamped


class GrpoLossOutput(NamedTuple):
    """Result of `grpo_loss`; everything but `loss` is detached."""

    loss: Tensor  # scalar, policy_loss + kl_loss
    policy_loss: Tensor  # scalar
    kl_loss: Tensor  # scalar, beta already applied
    kl_mean: Tensor  # scalar, k3 per token in nats, 0 without a reference
    token_loss: Tensor  # (B, T), exactly 0 where masked or dropped
    clip_low_fraction: Tensor
    clip_high_fraction: Tensor
    ratio: Tensor  # (B, T) or (B, 1), see PolicyLossOutput
    diagnostics: PolicyDiagnostics


class ImportanceWeights(NamedTuple):
    """Result of `importance_weights`, without gradient."""

    weights: Tensor  # (B, T), exactly 0 under the mask
    outside_fraction: Tensor  # share of tokens whose ratio lay outside [floor, cap]
    mean_weight: Tensor  # over selected tokens, 1 when there is none
    max_weight: Tensor  # over selected tokens
    sampler_kl: Tensor  # nats per token, mean of sample - train where the sampler reported a log-prob


def _row_values(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """Broadcast (B,), (B, 1) or (B, T) to (B, T); put 0 under the mask; hold constant."""
    if x.shape == mask.shape[:1]:
        x = x.unsqueeze(1)
    if x.shape not in (mask.shape, (mask.shape[0], 1)):
        raise ValueError(
            f"`{name}` has shape {tuple(x.shape)} but `mask` has shape {tuple(mask.shape)}; "
            f"`{name}` must be (B,) or (B, T)."
        )
    return select(x.detach().expand(mask.shape), mask)


def _log_ratio(logps: Tensor, old_logps: Tensor | None, mask: Tensor, level: RatioLevel) -> Tensor:
    difference = masked_difference(logps, logps if old_logps is None else old_logps, mask)
    if level == "token":
        return difference
    total = difference.sum(dim=1, keepdim=True)
    return total if level == "sequence_sum" else total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def policy_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_level: RatioLevel = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Clipped surrogate per token: L = -w · min(ρ A, clip(ρ, 1 - lo, 1 + hi) A), ρ = exp(log π - log π_old).

    A clip is active (gradient 0, flags True) when A > 0 and ρ > 1 + hi, or A < 0 and ρ < 1 - lo. A < 0 with a
    large ρ is not clipped unless `delta` or `dual_clip` bounds it.

    Args:
        logps: policy log-probs in nats, with gradient. Shape: `(B, T)`.
        old_logps: log-probs when the batch was sampled, held constant; None = on-policy, ρ = 1 with gradient.
            Shape: `(B, T)`.
        advantages: held constant, any unit. Shape: `(B,)` or `(B, T)`.
        mask: True (or 1) on completion tokens that enter the loss. Shape: `(B, T)`.
        ratio_level: "token"; "sequence" = exp of the row's mean log-ratio (GSPO eq. 7); "sequence_sum" = exp
            of its sum (RLOO: the completion is one action).
        clip_low: lo, distance of the lower bound from 1.
        clip_high: hi, distance of the upper bound from 1.
        delta: upper bound of ρ in the unclipped term (INTELLECT-2, TRL `delta`); above 1 + hi.
        dual_clip: c > 1, bounds the loss at -c A for A < 0 (Ye et al. 1912.09729 eq. 5).
        log_ratio_clamp: bound on |log ρ| in nats, gradient 0 outside; None for no bound.
        is_weights: sampler correction w, held constant. Shape: `(B,)` or `(B, T)`.

    Raises:
        ValueError: shapes do not fit, unknown ratio level, a negative clip, delta or dual_clip not above 1.

    Source: PPO (1707.06347) eq. 7.
    """
    check_rank("mask", mask, 2, "(B, T)")
    check_same_shape("logps", logps, "mask", mask)
    check_choice("ratio_level", ratio_level, get_args(RatioLevel))
    if old_logps is not None:
        check_same_shape("old_logps", old_logps, "mask", mask)
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"`clip_low` and `clip_high` must be >= 0, got {clip_low} and {clip_high}.")
    for name, bound in (("delta", delta), ("dual_clip", dual_clip)):
        if bound is not None and not bound > 1:
            raise ValueError(f"`{name}` is {bound} but must be above 1.")
    selected = as_mask(mask)
    adv = _row_values("advantages", advantages, selected)
    ratio = clamp_symmetric(_log_ratio(logps, old_logps, selected, ratio_level), log_ratio_clamp).exp()
    free = (ratio if delta is None else ratio.clamp(max=delta)) * adv
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * adv
    # `where` sends the gradient to one branch; torch.min would split it at ties.
    objective = torch.where(bounded < free, bounded, free)
    if dual_clip is not None:
        floor = dual_clip * adv
        objective = torch.where((adv < 0) & (objective < floor), floor, objective)
    if is_weights is not None:
        objective = objective * _row_values("is_weights", is_weights, selected)
    low = selected & (adv < 0) & (ratio.detach() < 1.0 - clip_low)
    high = selected & (adv > 0) & (ratio.detach() > 1.0 + clip_high)
    return PolicyLossOutput(
        select(-objective, selected), select(ratio, selected) if ratio_level == "token" else ratio, low, high
    )


@torch.no_grad()
def policy_diagnostics(
    output: PolicyLossOutput,
    logps: Tensor,
    old_logps: Tensor | None,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    log_ratio_clamp: float | None = 20.0,
) -> PolicyDiagnostics:
    """Numbers to log about a `policy_loss` call; fractions count tokens, or non-empty rows for a (B, 1) ratio.

    approx_kl is the mean over tokens of e^x - 1 - x with x = log π - log π_old, clamped as the loss clamps it
    (Schulman 2020, CleanRL); old_minus_new is the mean of -x.

    Args:
        output: what `policy_loss` returned.
        logps, old_logps, mask, clip_low, clip_high, log_ratio_clamp: as given to `policy_loss`.

    Raises:
        ValueError: shapes differ.
    """
    check_same_shape("logps", logps, "mask", mask)
    selected = as_mask(mask)
    dtype = output.ratio.dtype
    low, high, units = output.clip_low, output.clip_high, selected
    if output.ratio.shape != mask.shape:
        low, high, units = (x.any(dim=1, keepdim=True) for x in (low, high, selected))
    ratio = output.ratio.detach()
    outside = (ratio > 1.0 + clip_high) | (ratio < 1.0 - clip_low)
    low_fraction, high_fraction, clip_fraction, outside_fraction = (
        masked_mean(x.to(dtype), units) for x in (low, high, low | high, outside)
    )
    # Empty units take the neutral ratio 1, so an empty batch reports 1.
    neutral = torch.where(units, ratio, torch.ones_like(ratio))
    none = ~units.any()
    x = masked_difference(logps, logps if old_logps is None else old_logps, selected)
    bounded = clamp_symmetric(x, log_ratio_clamp)
    largest = torch.where(units, ratio, -torch.inf).max() if ratio.numel() else ratio.sum()
    one = torch.ones_like(largest)
    return PolicyDiagnostics(
        low_fraction,
        high_fraction,
        clip_fraction,
        outside_fraction,
        torch.where(none, one, masked_mean(neutral, units)),
        torch.where(none, one, largest),
        masked_mean(torch.expm1(bounded) - bounded, selected),
        masked_mean(-x, selected),
    )


def check_aggregation(ratio_level: RatioLevel, aggregation: Aggregation) -> None:
    """Raise ValueError for a sequence ratio without `completion_mean`.

    A sequence ratio gives every token of a row the same loss; "token_mean" and "constant" would then weigh
    rows by their length.
    """
    if ratio_level != "token" and aggregation != "completion_mean":
        raise ValueError(
            f"ratio_level={ratio_level!r} with aggregation={aggregation!r} weighs completions by their length; "
            "use aggregation='completion_mean'."
        )


def _keep_rows(mask: Tensor, keep: Tensor | None) -> Tensor:
    selected = as_mask(mask)
    if keep is None:
        return selected
    if keep.shape != mask.shape[:1]:
        raise ValueError(f"`keep` has shape {tuple(keep.shape)} but `mask` has shape {tuple(mask.shape)}.")
    return selected & as_mask(keep)[:, None]


def grpo_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logps: Tensor | None = None,
    keep: Tensor | None = None,
    is_weights: Tensor | None = None,
    beta: float = 0.0,
    kl: KLEstimator = "k3",
    aggregation: Aggregation = "completion_mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
    ratio_level: RatioLevel = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    kl_clamp: float | None = 20.0,
) -> GrpoLossOutput:
    """Policy loss plus KL penalty, aggregated: L = agg(w · Lᶜˡⁱᵖ + β · KL).

    Args:
        logps, old_logps, advantages, mask, is_weights, ratio_level, clip_low, clip_high, delta, dual_clip,
            log_ratio_clamp: see `policy_loss`.
        ref_logps: reference log-probs, held constant; needed when beta is not 0. Shape: `(B, T)`.
        keep: False leaves the completion out of loss and denominators. Shape: `(B,)`.
        beta: weight of the penalty.
        kl: "k2", "k3" or "k3_ratio"; ρ of k3_ratio is the policy's own, also at sequence level (TRL).
        aggregation, normalizer, max_length: see `masked.aggregate`; applied after dropping.
        kl_clamp: bound on |log π - log π_ref| inside k3.

    Raises:
        ValueError: see `policy_loss` and `aggregate`; kl = "k1" (its expected gradient is 0: put it into the
            reward), beta without `ref_logps`, a sequence ratio without "completion_mean".

    Source: DeepSeekMath (2402.03300) eq. 3.
    """
    check_aggregation(ratio_level, aggregation)
    check_choice("kl", kl, ("k2", "k3", "k3_ratio"))
    if beta != 0 and ref_logps is None:
        raise ValueError(f"`ref_logps` is None but beta is {beta}.")
    selected = _keep_rows(mask, keep)
    out = policy_loss(
        logps,
        old_logps,
        advantages,
        selected,
        ratio_level=ratio_level,
        clip_low=clip_low,
        clip_high=clip_high,
        delta=delta,
        dual_clip=dual_clip,
        log_ratio_clamp=log_ratio_clamp,
        is_weights=is_weights,
    )
    reduction = (selected, aggregation, normalizer, max_length)
    policy = aggregate(out.token_loss, *reduction)
    token_loss, penalty, kl_mean = out.token_loss, torch.zeros_like(policy), torch.zeros_like(policy)
    if ref_logps is not None:
        k3 = kl_penalty(logps, ref_logps, selected, "k3", clamp=kl_clamp)
        kl_mean = masked_mean(k3.detach(), selected)
        if beta != 0:
            per_token = kl_penalty(logps, ref_logps, selected, "k2") if kl == "k2" else k3
            per_token = beta * (per_token * out.ratio if kl == "k3_ratio" else per_token)
            penalty = aggregate(per_token, *reduction)
            token_loss = token_loss + per_token
    diagnostics = policy_diagnostics(
        out, logps, old_logps, selected, clip_low=clip_low, clip_high=clip_high, log_ratio_clamp=log_ratio_clamp
    )
    scalars = (policy + penalty, policy.detach(), penalty.detach(), kl_mean)
    return GrpoLossOutput(*scalars, token_loss.detach(), *diagnostics[:2], out.ratio.detach(), diagnostics)


@torch.no_grad()
def importance_weights(
    train_logps: Tensor,
    sample_logps: Tensor,
    mask: Tensor,
    mode: ImportanceMode = "token_truncate",
    cap: float | None = 2.0,
    floor: float | None = None,
) -> ImportanceWeights:
    """Correct for a sampler that is not the trainer: w = exp(x), x = log π_train - log π_sample at the same weights.

    "truncate" clips w into [floor, cap]; "mask" sets w to 0 outside; "sequence" uses the row's summed x for
    each of its tokens. A missing sampler log-prob (NaN) counts as x = 0, weight 1. The weight multiplies the
    policy term only, not the KL.

    Args:
        train_logps: the trainer's log-probs of the sampled tokens, nats. Shape: `(B, T)`.
        sample_logps: the sampler's, NaN where it reported none. Shape: `(B, T)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        mode: see above.
        cap: largest weight C; None for no bound.
        floor: smallest weight; None for no bound.

    Raises:
        ValueError: shapes differ, unknown mode, or not 0 < floor <= cap.

    Source: Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy RL training"; TRL,
    verl.
    """
    check_choice("mode", mode, get_args(ImportanceMode))
    check_rank("mask", mask, 2, "(B, T)")
    check_same_shape("train_logps", train_logps, "mask", mask)
    check_same_shape("sample_logps", sample_logps, "mask", mask)
    if not 0 < (floor or 1e-300) <= (cap if cap is not None else math.inf):
        raise ValueError(f"`floor` and `cap` must satisfy 0 < floor <= cap, got {floor} and {cap}.")
    selected = as_mask(mask)
    known = selected & ~torch.isnan(to_float(sample_logps))
    x = masked_difference(train_logps, sample_logps, known)
    log_w = x.sum(dim=1, keepdim=True).expand_as(x) if mode.startswith("sequence") else x
    low = math.log(floor) if floor else -math.inf
    high = math.log(cap) if cap is not None else math.inf
    outside = (log_w < low) | (log_w > high)
    # Clipped in log space: a summed x of 1200 overflows any exp.
    weights = log_w.clamp(low, high).exp()
    if mode.endswith("mask"):
        weights = select(weights, ~outside)
    weights = select(weights, selected)
    one = torch.ones((), dtype=weights.dtype, device=weights.device)
    return ImportanceWeights(
        weights,
        masked_mean(outside.to(weights.dtype), selected),
        torch.where(selected.any(), masked_mean(weights, selected), one),
        weights.max() if weights.numel() else one,
        masked_mean(-x, known),
    )
