"""The critic: clipped value loss and explained variance."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_rlx.functional._checks import as_mask, check_choice, check_rank, check_same_shape, select
from hf_rlx.functional.masked import Aggregation, aggregate, masked_mean


class ValueLossOutput(NamedTuple):
    """Result of `value_loss`; everything but `loss` is detached."""

    loss: Tensor  # scalar
    token_loss: Tensor  # (B, T), exactly 0 under the mask
    clip_fraction: Tensor  # share of selected tokens where the clipped error was the larger one


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float | None = 0.2,
    aggregation: Aggregation = "token_mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
) -> ValueLossOutput:
    """Clipped squared error: L = agg(½ max((V - R)², (clip(V, V_old ± c) - R)²)).

    The *larger* error counts: a value that moved past the band towards its target gets gradient 0, one that
    moved away is not clipped. c is in reward units, so 0.2 means little unless rewards are normalised; None
    often trains better. The ½ is inside; the caller multiplies by vf_coef.

    Args:
        values: V before each token, with gradient. Shape: `(B, T)`.
        old_values: V at rollout time, held constant; may be None without clipping. Shape: `(B, T)`.
        returns: targets, held constant. Shape: `(B, T)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        clip_range: c, None for the plain squared error.
        aggregation, normalizer, max_length: see `aggregate`.

    Raises:
        ValueError: shapes differ, or `clip_range` without `old_values`.

    Source: PPO2 in openai/baselines; lm-human-preferences.
    """
    check_rank("mask", mask, 2, "(B, T)")
    check_same_shape("values", values, "mask", mask)
    check_same_shape("returns", returns, "mask", mask)
    selected = as_mask(mask)
    v, target = select(values, selected), select(returns.detach(), selected)
    squared = (v - target).square()
    clipped_wins = torch.zeros_like(selected)
    if clip_range is not None:
        if old_values is None:
            raise ValueError(f"`old_values` is None but `clip_range` is {clip_range}.")
        check_same_shape("old_values", old_values, "mask", mask)
        old = select(old_values.detach(), selected)
        clipped = (v.clamp(min=old - clip_range, max=old + clip_range) - target).square()
        clipped_wins = clipped > squared
        squared = torch.where(clipped_wins, clipped, squared)
    token_loss = 0.5 * squared
    loss = aggregate(token_loss, mask, aggregation, normalizer, max_length)
    return ValueLossOutput(loss, token_loss.detach(), masked_mean(clipped_wins.to(v.dtype), mask))


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, form: Literal["var", "mse"] = "var") -> Tensor:
    """How much of the returns the critic predicts: 1 - Var(R - V) / Var(R), or 1 - mean((R - V)²) / Var(R).

    "var" (CleanRL, SB3) forgives a constant offset; "mse" (lm-human-preferences) does not. 1 is perfect, 0 as
    good as a constant. Report it before the update.

    Args:
        values: V before each token. Shape: `(B, T)`.
        returns: targets. Shape: `(B, T)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        form: see above.

    Returns:
        Scalar, NaN when the selected returns are all equal or fewer than two.

    Raises:
        ValueError: shapes differ, unknown form.
    """
    check_choice("form", form, ("var", "mse"))
    check_same_shape("values", values, "mask", mask)
    check_same_shape("returns", returns, "mask", mask)
    selected = as_mask(mask)
    v, r = select(values, selected), select(returns, selected)
    residual = r - v

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, selected)).square(), selected)

    error = variance(residual) if form == "var" else masked_mean(residual.square(), selected)
    nan = torch.full((), torch.nan, dtype=error.dtype, device=error.device)
    if r.numel() == 0:
        return nan
    spread = torch.where(selected, r, -torch.inf).max() > torch.where(selected, r, torch.inf).min()
    return torch.where(spread, 1.0 - error / variance(r), nan)
