"""Sums, means, whitening and loss aggregation over the tokens that a mask selects."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hf_rlx.functional._checks import as_mask, check_choice, check_rank, check_same_shape, select, to_float

Aggregation = Literal["completion_mean", "token_mean", "constant"]


class WhitenOutput(NamedTuple):
    """Result of `masked_whiten`."""

    whitened: Tensor  # same shape as the input, exactly 0 under the mask
    mean: Tensor  # scalar, over selected entries; 0 when there is none
    var: Tensor  # scalar, over selected entries; 0 for fewer than two


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the selected values: ∑ₜ mₜ xₜ, never reading a value under the mask.

    Args:
        values: any unit. Shape: `(...)`.
        mask: True (or 1) selects. Shape: that of `values`.
        dim: dimension to reduce; None reduces all.

    Returns:
        The sum in float32 at least, 0 where nothing is selected.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("values", values, "mask", mask)
    kept = select(values, as_mask(mask))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the selected values: ∑ₜ mₜ xₜ / max(∑ₜ mₜ, 1), so 0 where nothing is selected.

    Args:
        values: any unit. Shape: `(...)`.
        mask: True (or 1) selects. Shape: that of `values`.
        dim: dimension to reduce; None reduces all.

    Raises:
        ValueError: the shapes differ.
    """
    total = masked_sum(values, mask, dim)
    selected = as_mask(mask)
    count = selected.sum() if dim is None else selected.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(
    values: Tensor, mask: Tensor, shift_mean: bool = True, ddof: int = 0, eps: float = 1e-8
) -> WhitenOutput:
    """Standardise over all selected entries: (x - μ) / √(σ² + eps), plus μ again when `shift_mean` is False.

    σ² is the population variance for ddof = 0 (lm-human-preferences, `tf.nn.moments`) and the sample variance
    for ddof = 1 (TRL PPO). Fewer than two entries or equal entries give exactly 0 (before the mean is added
    back). Call it once on the rollout batch of all processes, before minibatching; never on GRPO advantages.

    Args:
        values: any unit. Shape: `(...)`.
        mask: True (or 1) selects. Shape: that of `values`.
        shift_mean: False keeps the mean, as for rewards.
        ddof: subtracted from the count in the variance.
        eps: added to the variance.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("values", values, "mask", mask)
    selected = as_mask(mask)
    x = select(values, selected)
    count = selected.sum()
    mean = x.sum() / count.clamp(min=1)
    centred = select(x - mean, selected)
    var = centred.square().sum() / (count - ddof).clamp(min=1)
    # Equal entries can differ from their rounded mean; 1e-9 / √1e-8 would then survive as 1e-5.
    infinity = torch.full((), float("inf"), dtype=x.dtype, device=x.device)
    spread = _safe_max(torch.where(selected, x, -infinity)) - _safe_max(torch.where(selected, -x, -infinity)).neg()
    flat = (count < 2) | (spread == 0)
    var = torch.where(flat, torch.zeros_like(var), var)
    whitened = torch.where(flat, torch.zeros_like(x), centred / (var + eps).sqrt())
    if not shift_mean:
        whitened = whitened + mean
    return WhitenOutput(select(whitened, selected), mean, var)


def _safe_max(x: Tensor) -> Tensor:
    return x.max() if x.numel() else x.sum()


def normalizer_count(mask: Tensor, aggregation: Aggregation) -> Tensor:
    """Count what this batch contributes to the `normalizer` of `aggregate`.

    Sum it over the micro-batches and processes of an optimiser step and pass the sum as `normalizer`: the
    loss of the step then does not depend on how it was split. The unit follows the aggregation: non-empty
    rows for "completion_mean", tokens for "token_mean", all rows (empty and dropped ones too) for "constant".

    Args:
        mask: True (or 1) on tokens that enter the loss, after dropping. Shape: `(B, T)`.
        aggregation: see `aggregate`.

    Returns:
        int64 scalar.
    """
    check_rank("mask", mask, 2, "(B, T)")
    check_choice("aggregation", aggregation, get_args(Aggregation))
    selected = as_mask(mask)
    if aggregation == "completion_mean":
        return selected.any(dim=1).sum()
    if aggregation == "token_mean":
        return selected.sum()
    return torch.tensor(mask.shape[0], device=mask.device)


def aggregation_weights(
    mask: Tensor,
    aggregation: Aggregation = "completion_mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of every token in `aggregate`: 1/(N·lenᵢ), 1/tokens or 1/(N·L), and 0 under the mask.

    Args:
        mask, aggregation, normalizer, max_length: as in `aggregate`.
        dtype: of the result.

    Returns:
        Weights. Shape: `(B, T)`.

    Raises:
        ValueError: as in `aggregate`.
    """
    check_rank("mask", mask, 2, "(B, T)")
    check_choice("aggregation", aggregation, get_args(Aggregation))
    if isinstance(normalizer, int | float) and not normalizer >= 0:
        raise ValueError(f"`normalizer` is {normalizer} but must be a count over the optimiser step.")
    if aggregation == "constant" and (max_length is None or max_length < 1):
        raise ValueError(f"aggregation='constant' needs `max_length` >= 1 (tokens), got {max_length}.")
    selected = as_mask(mask)
    if normalizer is None:
        normalizer = normalizer_count(mask, aggregation)
    count = torch.as_tensor(normalizer, dtype=dtype, device=mask.device)
    if aggregation == "completion_mean":
        count = count * selected.sum(dim=1, keepdim=True)
    elif aggregation == "constant":
        count = count * (max_length or 1)
    # A count of zero divides to inf, but only where nothing is selected.
    return select((1.0 / count).expand(mask.shape), selected)


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: Aggregation = "completion_mean",
    normalizer: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Reduce a per-token loss to a scalar: ∑ᵢₜ wᵢₜ xᵢₜ.

    ================  ================  =========================  ==========================
    aggregation       w of a token      N without `normalizer`     known as
    ================  ================  =========================  ==========================
    completion_mean   1 / (N · lenᵢ)    non-empty rows             GRPO, DeepSeekMath eq. 3
    token_mean        1 / N             selected tokens            DAPO eq. 8, TRL `dapo`
    constant          1 / (N · L)       all rows, dropped too      Dr. GRPO, L = `max_length`
    ================  ================  =========================  ==========================

    Args:
        values: per-token loss; NaN under the mask is allowed. Shape: `(B, T)`.
        mask: True (or 1) on tokens that enter the loss, after dropping. Shape: `(B, T)`.
        aggregation: one of the table.
        normalizer: N over the whole optimiser step (rows, tokens, rows): the sum of `normalizer_count` over
            micro-batches and processes. None: this batch alone.
        max_length: L in tokens, the generation limit; read by "constant" only.

    Returns:
        Scalar in float32 at least; 0 with gradient 0 when nothing is selected.

    Raises:
        ValueError: shapes differ, unknown aggregation, negative normalizer, "constant" without `max_length`.
    """
    check_same_shape("values", values, "mask", mask)
    x = to_float(values)
    weights = aggregation_weights(mask, aggregation, normalizer, max_length, dtype=x.dtype)
    return (select(x, as_mask(mask)) * weights).sum()
