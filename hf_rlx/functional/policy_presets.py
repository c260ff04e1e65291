"""The named recipes: each is one call of `policy_loss` or `grpo_loss` with other switches."""

from typing import Any, NamedTuple

from torch import Tensor

from hf_rlx.functional.masked import Aggregation, aggregate
from hf_rlx.functional.policy_loss import GrpoLossOutput, grpo_loss, policy_diagnostics, policy_loss


class PpoPolicyLossOutput(NamedTuple):
    """Result of `ppo_policy_loss`; everything but `loss` is detached, fractions count selected tokens."""

    loss: Tensor
    token_loss: Tensor  # (B, T), exactly 0 under the mask
    clip_low_fraction: Tensor
    clip_high_fraction: Tensor
    clip_fraction: Tensor
    ratio_outside_fraction: Tensor
    ratio_mean: Tensor
    ratio_max: Tensor
    approx_kl: Tensor
    old_minus_new: Tensor


def ppo_policy_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = "token_mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
    delta: float | None = None,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    is_weights: Tensor | None = None,
) -> PpoPolicyLossOutput:
    """PPO's clipped surrogate with its diagnostics: L = agg(-min(ρ A, clip(ρ, 1 - lo, 1 + hi) A)).

    Args:
        logps, old_logps, advantages, mask: as in `policy_loss`; advantages (B, T) from `gae`, whitened.
        clip_low, clip_high, delta, dual_clip, log_ratio_clamp, is_weights: as in `policy_loss`.
        aggregation, normalizer, max_length: as in `aggregate`.

    Raises:
        ValueError: see `policy_loss` and `aggregate`.

    Source: PPO (1707.06347) eq. 7.
    """
    bounds: dict[str, Any] = {
        "clip_low": clip_low,
        "clip_high": clip_high,
        "log_ratio_clamp": log_ratio_clamp,
    }
    out = policy_loss(
        logps,
        old_logps,
        advantages,
        mask,
        delta=delta,
        dual_clip=dual_clip,
        is_weights=is_weights,
        **bounds,
    )
    loss = aggregate(out.token_loss, mask, aggregation, normalizer, max_length)
    diagnostics = policy_diagnostics(out, logps, old_logps, mask, **bounds)
    return PpoPolicyLossOutput(loss, out.token_loss.detach(), *diagnostics)


def dapo_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    **options: Any,
) -> GrpoLossOutput:
    """DAPO: `grpo_loss` with an asymmetric clip and the mean over all kept tokens, no reference.

    Args:
        logps, old_logps, advantages, mask: as in `grpo_loss`.
        clip_low, clip_high: 0.28 leaves room for unlikely tokens to grow.
        **options: any other argument of `grpo_loss`.

    Source: DAPO (2503.14476) eq. 8.
    """
    options.setdefault("aggregation", "token_mean")
    return grpo_loss(logps, old_logps, advantages, mask, clip_low=clip_low, clip_high=clip_high, **options)


def gspo_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    **options: Any,
) -> GrpoLossOutput:
    """GSPO: one ratio per completion, sᵢ = exp(meanₜ(log π - log π_old)), and the mean over non-empty rows.

    log s is a mean, so the band is about 1000 times tighter than PPO's; 0.2 would switch clipping off.

    Args:
        logps, old_logps, advantages, mask: as in `grpo_loss`.
        clip_low, clip_high: band around 1 for s.
        **options: any other argument of `grpo_loss`.

    Source: GSPO (2507.18071) eq. 5 and 7.
    """
    return grpo_loss(
        logps,
        old_logps,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        ratio_level="sequence",
        **options,
    )


def rloo_loss(
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **options: Any,
) -> GrpoLossOutput:
    """RLOO: the completion is one action, ρᵢ = exp(∑ₜ(log π - log π_old)), and the mean over non-empty rows.

    On-policy it is REINFORCE with gradient -Aᵢ / N on every token. The KL belongs into the reward.

    Args:
        logps, old_logps, advantages, mask: as in `grpo_loss`; advantages from `rloo_advantages`.
        clip_low, clip_high: band around 1 for ρ; long answers leave it after tiny drifts.
        **options: any other argument of `grpo_loss`.

    Source: Ahmadian et al. (2402.14740); TRL RLOO.
    """
    return grpo_loss(
        logps,
        old_logps,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        ratio_level="sequence_sum",
        **options,
    )
