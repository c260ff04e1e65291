"""Log-probabilities and entropies of tokens, in nats."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rlx.functional._checks import as_mask, check_same_shape, select, to_float
from hf_rlx.functional.masked import masked_sum


class SequenceLogprobs(NamedTuple):
    """Result of `sequence_logprobs`."""

    sum: Tensor  # (B,) nats
    mean: Tensor  # (B,) nats per token, 0 for an empty row
    length: Tensor  # (B,) int64, selected tokens


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"`temperature` is {temperature} but must be positive.")
    scaled = to_float(logits)
    return F.log_softmax(scaled if temperature == 1.0 else scaled / temperature, dim=-1)


def selected_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each id under the logits at the *same* position: log softmax(z / τ)[id].

    No causal shift: use it when the caller has already paired `logits[t - 1]` with `ids[t]`.

    Args:
        logits: unnormalised scores z. Shape: `(..., V)`.
        ids: token ids in [0, V). Shape: `(...)`.
        temperature: sampling temperature τ, applied before the softmax.

    Returns:
        Nats, float32 at least. Shape: `(...)`.

    Raises:
        ValueError: `ids` does not match the leading shape of `logits`, or a temperature not above 0.
    """
    if logits.dim() < 1 or logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"`ids` has shape {tuple(ids.shape)} but `logits` has shape {tuple(logits.shape)}; "
            "`ids` must have the shape of `logits` without its last dimension."
        )
    return _log_softmax(logits, temperature).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of every token but the first under a causal model: out[t] = log softmax(z[t] / τ)[ids[t + 1]].

    The logits at position t predict the token at t + 1, so T tokens give T - 1 log-probs.

    Args:
        logits: unnormalised scores z. Shape: `(..., T, V)`.
        ids: the tokens that were read, in [0, V). Shape: `(..., T)`.
        temperature: sampling temperature τ, applied before the softmax.

    Returns:
        Nats, float32 at least. Shape: `(..., T - 1)`.

    Raises:
        ValueError: `ids` does not match the leading shape of `logits`, or a temperature not above 0.
    """
    if logits.dim() < 2 or logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"`ids` has shape {tuple(ids.shape)} but `logits` has shape {tuple(logits.shape)}; "
            "expected (..., T) and (..., T, V)."
        )
    return selected_logprobs(logits[..., :-1, :], ids[..., 1:], temperature)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Entropy of the softmax: H = -∑ᵥ pᵥ log pᵥ with p = softmax(z / τ), finite for banned tokens (z = -inf).

    ∂H/∂zᵥ = -pᵥ (log pᵥ + H) / τ. TRL's `entropy_from_logits` gives NaN for a logit of -inf.

    Args:
        logits: unnormalised scores z. Shape: `(..., V)`.
        temperature: sampling temperature τ.
        mask: True (or 1) on positions to read; the others give 0 and may hold NaN logits. Shape: `(...)`.

    Returns:
        Nats, float32 at least. Shape: `(...)`.

    Raises:
        ValueError: `mask` does not match the leading shape of `logits`, or a temperature not above 0.
    """
    if mask is not None:
        if logits.shape[:-1] != mask.shape:
            raise ValueError(
                f"`mask` has shape {tuple(mask.shape)} but `logits` has shape {tuple(logits.shape)}; "
                "`mask` must have the shape of `logits` without its last dimension."
            )
        logits = select(logits, as_mask(mask).unsqueeze(-1))
    logp = _log_softmax(logits, temperature)
    # 0 · (-inf) is NaN in the value and in the gradient of exp, so -inf is replaced before the product.
    finite = torch.where(logp == -torch.inf, torch.zeros_like(logp), logp)
    entropy = -(logp.exp() * finite).sum(dim=-1)
    return entropy if mask is None else select(entropy, as_mask(mask))


def sequence_logprobs(per_token_logps: Tensor, mask: Tensor) -> SequenceLogprobs:
    """Log-prob of each completion: ∑ₜ mₜ log πₜ, its length ∑ₜ mₜ, and sum / max(length, 1).

    Args:
        per_token_logps: nats; NaN under the mask is allowed. Shape: `(B, T)`.
        mask: True (or 1) on completion tokens, end of sequence included. Shape: `(B, T)`.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape("per_token_logps", per_token_logps, "mask", mask)
    total = masked_sum(per_token_logps, mask, dim=-1)
    length = as_mask(mask).sum(dim=-1)
    return SequenceLogprobs(total, total / length.clamp(min=1), length)
