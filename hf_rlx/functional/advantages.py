"""Advantages: within a group (GRPO, RLOO), over time (GAE), over steps (process supervision), and length shaping.

Nothing in this file carries gradient: every result has `requires_grad` False.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hf_rlx.functional._checks import as_mask, check_choice, check_rank, check_same_shape, select, to_float

GroupStd = Literal["population", "sample", "none", "batch", "batch_sample"]


class GroupAdvantages(NamedTuple):
    """Result of `grpo_advantages` and `rloo_advantages`; P prompts, G completions per prompt."""

    advantages: Tensor  # (P, G), 0 for rewards that are not finite and for groups without spread
    group_mean: Tensor  # (P,), NaN when nothing in the group is scorable
    group_std: Tensor  # (P,), exactly 0 without spread, NaN when nothing is scorable
    keep: Tensor  # (P, G) bool, False = leave this completion out of loss and denominators
    kept_group_fraction: Tensor  # scalar, share of groups with a kept completion, NaN for P = 0


class GaeOutput(NamedTuple):
    """Result of `gae`, in reward units, exactly 0 under the mask."""

    advantages: Tensor  # (B, T)
    returns: Tensor  # (B, T), advantages + values: the targets of the value loss


class _Groups(NamedTuple):
    x: Tensor  # (P, G) rewards, 0 where not scorable
    ok: Tensor  # (P, G) scorable
    size: Tensor  # (P, 1), scorable completions
    mean: Tensor  # (P, 1), 0 when empty
    spread: Tensor  # (P, 1) bool, at least two different rewards


def _group_statistics(rewards: Tensor) -> _Groups:
    x = to_float(rewards)
    ok = torch.isfinite(x)
    x = select(x, ok)
    count = ok.sum(dim=1, keepdim=True)
    low = torch.where(ok, x, torch.inf).amin(dim=1, keepdim=True)
    high = torch.where(ok, x, -torch.inf).amax(dim=1, keepdim=True)
    # Equal rewards are found by max == min: in float32 eight rewards of 0.1 have std 7e-9, not 0.
    mean = torch.where(high == low, low, x.sum(dim=1, keepdim=True) / count.clamp(min=1))
    return _Groups(x, ok, count, mean, high > low)


def _std(deviation: Tensor, count: Tensor, ddof: int, dim: int | None) -> Tensor:
    total = deviation.square().sum() if dim is None else deviation.square().sum(dim=dim, keepdim=True)
    return (total / (count - ddof).clamp(min=1)).sqrt()


@torch.no_grad()
def grpo_advantages(
    rewards: Tensor, std: GroupStd = "population", eps: float = 1e-6, keep_zero_variance: bool = False
) -> GroupAdvantages:
    """Group-relative advantage: Aᵢ = (rᵢ - mean_g) / (std_g + eps).

    std: "population" divides by G (the worked example [1, 0, 0, 1] gives [1, -1, -1, 1]), "sample" by G - 1
    (TRL), "none" does not scale (Dr. GRPO), "batch" uses the population std of all finite rewards of the batch,
    "batch_sample" their sample std (TRL `scale_rewards="batch"`). A group without spread (max = min, or fewer
    than two finite rewards) gets exactly 0, before any division, and keep False.

    Args:
        rewards: one reward per completion; NaN or inf = unscorable. Whole groups only. Shape: `(P, G)`.
        std: see above; `group_std` reports the group's sample std for "sample", else its population std.
        eps: added to the std, reward units.
        keep_zero_variance: True keeps scorable completions of flat groups in the loss (TRL): they dilute the
            mean and feel the KL term.

    Raises:
        ValueError: rewards are not (P, G), or an unknown std.

    Source: DeepSeekMath (2402.03300) section 4.1.2; Dr. GRPO (2503.20783).
    """
    check_rank("rewards", rewards, 2, "(P, G)")
    check_choice("std", std, get_args(GroupStd))
    if rewards.shape[1] == 0:
        raise ValueError(f"`rewards` has shape {tuple(rewards.shape)}: a group needs at least one completion.")
    group = _group_statistics(rewards)
    deviation = select(group.x - group.mean, group.ok & group.spread)
    group_std = _std(deviation, group.size, int(std == "sample"), dim=1)
    advantages = deviation
    if std in ("population", "sample"):
        advantages = deviation / torch.where(group.spread, group_std + eps, torch.ones_like(group_std))
    elif std in ("batch", "batch_sample"):
        total = group.ok.sum()
        batch_mean = group.x.sum() / total.clamp(min=1)
        from_mean = select(group.x - batch_mean, group.ok)
        batch_std = _std(from_mean, total, int(std == "batch_sample"), dim=None)
        advantages = torch.where(group.spread, deviation / (batch_std + eps), torch.zeros_like(deviation))
    keep = group.ok if keep_zero_variance else group.ok & group.spread
    return _group_output(advantages, group, group_std, keep)


@torch.no_grad()
def rloo_advantages(
    rewards: Tensor, kl: Tensor | None = None, beta: float = 0.0, keep_zero_variance: bool = True
) -> GroupAdvantages:
    """Leave-one-out advantage: Aᵢ = rᵢ - mean_{j≠i} rⱼ = G/(G-1) (rᵢ - mean_g), with rᵢ = scoreᵢ - β KLᵢ.

    G counts the finite rewards of the group; with fewer than two of them, or all equal, A is exactly 0.

    Args:
        rewards: one score per completion; NaN or inf = unscorable. Shape: `(P, G)`.
        kl: summed k1 of each completion, nats. Shape: `(P, G)`.
        beta: reward per nat.
        keep_zero_variance: True keeps flat groups in the denominators, as REINFORCE does: their gradient is
            0.

    Raises:
        ValueError: rewards are not (P, G), `kl` has another shape, or beta without `kl`.

    Source: Kool et al. (2019); Ahmadian et al. (2402.14740) eq. 8.
    """
    check_rank("rewards", rewards, 2, "(P, G)")
    if rewards.shape[1] == 0:
        raise ValueError(f"`rewards` has shape {tuple(rewards.shape)}: a group needs at least one completion.")
    total = to_float(rewards)
    if kl is not None:
        check_same_shape("kl", kl, "rewards", rewards)
        if beta != 0:
            total = total - beta * to_float(kl)
    elif beta != 0:
        raise ValueError(f"`kl` is None but beta is {beta}.")
    group = _group_statistics(total)
    deviation = select(group.x - group.mean, group.ok & group.spread)
    size = group.size.to(deviation.dtype)
    advantages = deviation * (size / (size - 1).clamp(min=1))
    keep = group.ok & (group.size >= 2) & (group.spread | keep_zero_variance)
    return _group_output(advantages, group, _std(deviation, group.size, 0, dim=1), keep)


def _group_output(advantages: Tensor, group: _Groups, group_std: Tensor, keep: Tensor) -> GroupAdvantages:
    nothing = group.size.squeeze(1) == 0
    nan = torch.full((), torch.nan, dtype=group.x.dtype, device=group.x.device)
    return GroupAdvantages(
        advantages,
        torch.where(nothing, nan, group.mean.squeeze(1)),
        torch.where(nothing, nan, group_std.squeeze(1)),
        keep,
        keep.any(dim=1).to(group.x.dtype).mean(),
    )


@torch.no_grad()
def step_advantages(
    step_rewards: Tensor,
    step_ends: Tensor,
    mask: Tensor,
    group_size: int,
    std: Literal["population", "sample", "none"] = "population",
    eps: float = 1e-6,
) -> Tensor:
    """Process-supervised GRPO: Aᵢₜ = ∑_{j : endᵢⱼ ≥ t} (rᵢⱼ - mean) / (std + eps).

    Mean and std are over all steps of a group. A group without spread (all step rewards equal, or fewer than two)
    gives exactly 0.

    Args:
        step_rewards: score of each step; NaN where a row has no such step. Shape: `(B, S)`.
        step_ends: index of the last token of each step in [0, T), anything negative where there is none.
            Shape: `(B, S)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        group_size: consecutive rows that answer one prompt.
        std: as in `grpo_advantages`, without the batch forms.
        eps: added to the std, reward units.

    Returns:
        Advantages, exactly 0 under the mask. Shape: `(B, T)`.

    Raises:
        ValueError: shapes do not fit, B is not a multiple of `group_size`, a step ends beyond T, unknown std.

    Source: DeepSeekMath (2402.03300) section 4.1.3.
    """
    check_rank("mask", mask, 2, "(B, T)")
    check_rank("step_rewards", step_rewards, 2, "(B, S)")
    check_same_shape("step_ends", step_ends, "step_rewards", step_rewards)
    check_choice("std", std, ("population", "sample", "none"))
    rows, tokens = mask.shape
    if step_rewards.shape[0] != rows:
        raise ValueError(
            f"`step_rewards` has shape {tuple(step_rewards.shape)} but `mask` has shape {tuple(mask.shape)}."
        )
    if group_size < 1 or rows % group_size:
        raise ValueError(f"`group_size` is {group_size} but the batch has {rows} rows.")
    selected = as_mask(mask)
    x = to_float(step_rewards)
    out = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0 or out.numel() == 0:
        return out
    ends = step_ends.long()
    if bool((ends >= tokens).any()):
        raise ValueError(f"`step_ends` holds {int(ends.max())} but `mask` has {tokens} tokens per row.")
    x = torch.where(ends >= 0, x, torch.nan)
    steps = grpo_advantages(x.reshape(rows // group_size, -1), std=std, eps=eps).advantages.reshape(x.shape)
    out.scatter_add_(1, ends.clamp(min=0), steps)
    # The reverse cumulative sum gives every token the steps that end at or after it.
    return select(out.flip(1).cumsum(1).flip(1), selected)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
) -> GaeOutput:
    """Generalised advantage estimation: δₜ = rₜ + γ Vₜ₊₁ - Vₜ, Aₜ = δₜ + γλ Aₜ₊₁, over selected tokens only.

    t + 1 is the next *selected* token: holes (tool output) are skipped without extra discount. After the last
    one V is 0, or `bootstrap` for a row cut by the length limit. Whiten the advantages afterwards, never the
    returns.

    Args:
        rewards: per token. Shape: `(B, T)`.
        values: V before token t, read at position t - 1 of the sequence; same unit as rewards. Shape: `(B,
            T)`.
        mask: True (or 1) on completion tokens. Shape: `(B, T)`.
        gamma: discount γ per token.
        lam: λ, 1 = Monte Carlo return, 0 = one step.
        bootstrap: V of the state after the last token, 0 for rows that ended. Shape: `(B,)`.

    Raises:
        ValueError: shapes differ.

    Source: Schulman et al. (1506.02438) eq. 16.
    """
    check_rank("mask", mask, 2, "(B, T)")
    check_same_shape("rewards", rewards, "mask", mask)
    check_same_shape("values", values, "mask", mask)
    selected = as_mask(mask)
    r, v = select(rewards, selected), select(values, selected)
    dtype = torch.promote_types(r.dtype, v.dtype)
    advantages = torch.zeros(mask.shape, dtype=dtype, device=r.device)
    next_advantage = torch.zeros(mask.shape[:1], dtype=dtype, device=r.device)
    next_value = next_advantage
    if bootstrap is not None:
        if bootstrap.shape != mask.shape[:1]:
            raise ValueError(
                f"`bootstrap` has shape {tuple(bootstrap.shape)} but `mask` has shape {tuple(mask.shape)}."
            )
        next_value = bootstrap.to(dtype)
    for t in reversed(range(mask.shape[1])):
        real = selected[:, t]
        advantage = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(real, advantage, next_advantage)
        next_value = torch.where(real, v[:, t].to(dtype), next_value)
        advantages[:, t] = select(advantage, real)
    return GaeOutput(advantages, select(advantages + v, selected))


@torch.no_grad()
def soft_overlong(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Length penalty: 0 up to L - C, then ((L - C) - n) / C down to -1 at L, and -1 beyond; added to the reward.

    cache 0 is a step: 0 up to L, -1 beyond.

    Args:
        lengths: completion lengths n in tokens. Shape: `(...)`.
        max_length: L, tokens.
        cache: C, tokens of the ramp, 0 ≤ C ≤ L.

    Returns:
        Penalty in [-1, 0], reward units. Shape: `(...)`.

    Raises:
        ValueError: cache outside [0, L].

    Source: DAPO (2503.14476) eq. 13.
    """
    if not 0 <= cache <= max_length:
        raise ValueError(f"`cache` is {cache} tokens but must lie in [0, max_length = {max_length}].")
    n = to_float(lengths)
    if cache == 0:
        return -(n > max_length).to(n.dtype)
    return -((n - (max_length - cache)) / cache).clamp(min=0.0, max=1.0)
