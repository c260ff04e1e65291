"""Contracts and conversions that every function of floor 0 opens with.

Shape legend of this package: B rows (completions), T completion tokens, V vocabulary, P prompts, G
completions per prompt, K ranked answers, S steps, C classes or components.
"""

import torch
from torch import Tensor


def as_mask(mask: Tensor) -> Tensor:
    """Turn a bool or 0/1 mask of any dtype into a bool mask (True = selected)."""
    return mask if mask.dtype == torch.bool else mask != 0


def to_float(x: Tensor) -> Tensor:
    """Lift integers, bool and half precisions to float32; float32 and float64 pass unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def check_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError naming both arguments and both shapes unless the shapes are equal."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"`{name}` has shape {tuple(tensor.shape)} but `{other_name}` has shape {tuple(other.shape)}; "
            "they must be equal."
        )


def check_rank(name: str, tensor: Tensor, rank: int, layout: str) -> None:
    """Raise ValueError unless `tensor` has `rank` dimensions laid out as `layout`, e.g. "(B, T)"."""
    if tensor.dim() != rank:
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)} but must be {layout}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r} but must be one of {', '.join(map(repr, choices))}.")


def select(x: Tensor, mask: Tensor) -> Tensor:
    """Keep `x` where the mask is True and put 0 elsewhere, in float32 at least.

    Selecting before any exp or log keeps NaN and inf under the mask out of values and out of gradients: a
    multiplication would turn them into NaN, and so would a `where` applied only after the exp.
    """
    x = to_float(x)
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_difference(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Return a - b on selected entries and exactly 0 elsewhere; `b` is held constant (detached)."""
    return select(a, mask) - select(b.detach(), mask)


def clamp_symmetric(x: Tensor, limit: float | None) -> Tensor:
    """Clamp to [-limit, limit] (gradient 0 outside); None leaves `x` alone."""
    return x if limit is None else x.clamp(min=-limit, max=limit)
