"""Losses of outcome and process reward models, and what is read from a process reward model."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rlx.functional._checks import as_mask, check_choice, check_rank, check_same_shape, select, to_float
from hf_rlx.functional.preference_loss import win_rate


class PairRewardOutput(NamedTuple):
    """Result of `bradley_terry` and `soft_bradley_terry`; everything but `loss` is detached."""

    loss: Tensor  # scalar
    pair_loss: Tensor  # (B,), without the centering term; 0 for a pair that was left out
    mean_margin: Tensor  # scalar, mean of chosen - rejected over the pairs used, NaN for none
    accuracy: Tensor  # scalar, ties 1/2, NaN for none


class RankedOutput(NamedTuple):
    """Result of `ranked_all_pairs` and `plackett_luce`; everything but `loss` is detached."""

    loss: Tensor  # scalar, 0 when no prompt counts
    prompt_loss: Tensor  # (P,), 0 for a prompt that does not count
    n_pairs: Tensor  # (P,) int64, pairs with different rank (plackett_luce: K - 1 choices)
    accuracy: Tensor  # scalar, over all pairs, ties 1/2, NaN for none


class StepLossOutput(NamedTuple):
    """Result of `prm_hard_loss` and `prm_soft_loss`; everything but `loss` is detached."""

    loss: Tensor  # scalar, mean over labelled steps of the batch, 0 for none
    n_steps: int
    step_loss: Tensor  # (n_steps,), row by row
    accuracy: Tensor  # scalar, NaN for no step; soft labels: agreement of p > 1/2 with target > 1/2


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, center_coef: float = 0.0
) -> PairRewardOutput:
    """Bradley-Terry: mean(-log σ(c - r - m)) + k · mean((c + r)²).

    Args:
        chosen: score c of the preferred answer. Shape: `(B,)`.
        rejected: score r of the other. Shape: `(B,)`.
        margin: m, how much better c should be, score units. Shape: `(B,)`.
        center_coef: k, keeps the absolute scale near 0; 0.01 is usual, 0 switches it off.

    Raises:
        ValueError: shapes differ.

    Source: InstructGPT (2203.02155) eq. 1; Llama 2 (2307.09288) for m; Eisenstein et al. (2312.09244) for k.
    """
    check_rank("chosen", chosen, 1, "(B,)")
    check_same_shape("rejected", rejected, "chosen", chosen)
    c, r = to_float(chosen), to_float(rejected)
    z = c - r
    if margin is not None:
        check_same_shape("margin", margin, "chosen", chosen)
        z = z - to_float(margin.detach())
    pair_loss = -F.logsigmoid(z)
    count = max(z.numel(), 1)
    loss = pair_loss.sum() / count
    if center_coef != 0:
        loss = loss + center_coef * (c + r).square().sum() / count
    difference = (c - r).detach()
    return PairRewardOutput(loss, pair_loss.detach(), difference.mean(), win_rate(difference))


def soft_bradley_terry(score_a: Tensor, score_b: Tensor, preference: Tensor) -> PairRewardOutput:
    """Bradley-Terry with soft labels: -(p log σ(a - b) + (1 - p) log σ(b - a)), mean over usable labels.

    The minimum is the entropy of p, not 0.

    Args:
        score_a, score_b: scores of the two answers. Shape: `(B,)`.
        preference: p = P(A better) in [0, 1]; NaN = unusable, left out. Shape: `(B,)`.

    Raises:
        ValueError: shapes differ.

    Source: RLAIF (2309.00267) section 2.
    """
    check_rank("score_a", score_a, 1, "(B,)")
    check_same_shape("score_b", score_b, "score_a", score_a)
    check_same_shape("preference", preference, "score_a", score_a)
    p = to_float(preference.detach())
    usable = ~p.isnan()
    p = select(p, usable)
    z = select(score_a, usable) - select(score_b, usable)
    pair_loss = select(-(p * F.logsigmoid(z) + (1.0 - p) * F.logsigmoid(-z)), usable)
    loss = pair_loss.sum() / usable.sum().clamp(min=1)
    used = z.detach()[usable]
    agreement = torch.where(p[usable] < 0.5, -used, used)
    return PairRewardOutput(loss, pair_loss.detach(), used.mean(), win_rate(agreement))


def _real_answers(scores: Tensor, mask: Tensor | None) -> Tensor:
    check_rank("scores", scores, 2, "(P, K)")
    if mask is None:
        return torch.ones_like(scores, dtype=torch.bool)
    check_same_shape("mask", mask, "scores", scores)
    return as_mask(mask)


def ranked_all_pairs(
    scores: Tensor,
    ranks: Tensor,
    mask: Tensor | None = None,
    reduction: Literal["prompt_mean", "pair_mean"] = "prompt_mean",
) -> RankedOutput:
    """All pairs of a ranking: -log σ(s_i - s_j) averaged over the pairs rank_i < rank_j of each prompt, then prompts.

    Equal ranks give no pair and prompts without a pair are not counted. "pair_mean" flattens the batch
    instead, so that a prompt with K = 9 weighs 36 times one with K = 2.

    Args:
        scores: of K answers to each prompt. Shape: `(P, K)`.
        ranks: lower is better. Shape: `(P, K)`.
        mask: True (or 1) on real answers, for prompts with fewer than K; None = all. Shape: `(P, K)`.
        reduction: see above.

    Raises:
        ValueError: shapes differ, unknown reduction.

    Source: InstructGPT (2203.02155) eq. 1.
    """
    check_choice("reduction", reduction, ("prompt_mean", "pair_mean"))
    real = _real_answers(scores, mask)
    check_same_shape("ranks", ranks, "scores", scores)
    s = select(scores, real)
    pairs = (ranks[:, :, None] < ranks[:, None, :]) & real[:, :, None] & real[:, None, :]
    margin = s[:, :, None] - s[:, None, :]
    pair_loss = select(-F.logsigmoid(margin), pairs)
    n_pairs = pairs.sum(dim=(1, 2))
    total = pair_loss.sum(dim=(1, 2))
    prompt_loss = total / n_pairs.clamp(min=1)
    if reduction == "prompt_mean":
        loss = prompt_loss.sum() / (n_pairs > 0).sum().clamp(min=1)
    else:
        loss = total.sum() / n_pairs.sum().clamp(min=1)
    return RankedOutput(loss, prompt_loss.detach(), n_pairs, win_rate(margin.detach()[pairs]))


def plackett_luce(scores: Tensor, mask: Tensor | None = None, normalize: bool = False) -> RankedOutput:
    """Likelihood of a whole ranking, best answer first: ∑ₖ (logsumexp(sₖ, ..., s_K) - sₖ).

    Averaged over prompts with K ≥ 2. K = 2 is Bradley-Terry. Ties cannot be expressed: use `ranked_all_pairs`.

    Args:
        scores: best first. Shape: `(P, K)`.
        mask: True (or 1) on real answers; None = all. Shape: `(P, K)`.
        normalize: divide each prompt by its K - 1 choices.

    Raises:
        ValueError: shapes differ.

    Source: Plackett (1975); Luce (1959); ListMLE.
    """
    real = _real_answers(scores, mask)
    s = select(scores, real)
    size = s.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=s.device).triu()
    candidates = later & real[:, None, :] & real[:, :, None]
    # Rows of padded answers keep their diagonal, so that no logsumexp is over nothing.
    candidates = candidates | torch.eye(size, dtype=torch.bool, device=s.device)
    table = s[:, None, :].expand(-1, size, -1).masked_fill(~candidates, -torch.inf)
    choice_loss = select(table.logsumexp(dim=2) - s, real)
    n_choices = (real.sum(dim=1) - 1).clamp(min=0)
    counted = n_choices > 0
    prompt_loss = select(choice_loss.sum(dim=1), counted)
    if normalize:
        prompt_loss = prompt_loss / n_choices.clamp(min=1)
    loss = prompt_loss.sum() / counted.sum().clamp(min=1)
    pairs = later.triu(1) & real[:, None, :] & real[:, :, None]
    margin = (s[:, :, None] - s[:, None, :]).detach()
    return RankedOutput(loss, prompt_loss.detach(), n_choices, win_rate(margin[pairs]))


def _labelled(labels: Tensor) -> Tensor:
    """True where a label is given: neither NaN nor -100."""
    return ~(labels.isnan() if labels.is_floating_point() else labels == -100) & (labels != -100)


def prm_hard_loss(logits: Tensor, labels: Tensor, first_error_only: bool = False) -> StepLossOutput:
    """Process reward model on step labels: mean cross-entropy over the labelled positions of the batch.

    Three classes [bad, neutral, good] read labels -1, 0, +1 (PRM800K); two classes [bad, good] read ≤ 0 and
    1. The logits are read at the labelled token itself, without shift.

    Args:
        logits: unnormalised class scores. Shape: `(B, T, C)`, C = 2 or 3.
        labels: at the last token of each step; -100 (or NaN) elsewhere. Shape: `(B, T)`.
        first_error_only: True drops the labels after a row's first bad step (Lightman et al.); False for
            labels estimated by rollouts.

    Raises:
        ValueError: shapes do not fit, C not 2 or 3, or a label outside {-1, 0, 1}.

    Source: Lightman et al. (2305.20050) section 2.
    """
    check_rank("logits", logits, 3, "(B, T, C)")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"`labels` has shape {tuple(labels.shape)} but `logits` has shape {tuple(logits.shape)}.")
    if logits.shape[-1] not in (2, 3):
        raise ValueError(f"`logits` has shape {tuple(logits.shape)} but C must be 2 or 3.")
    used = _labelled(labels)
    label = torch.where(used, labels, torch.zeros_like(labels)).long()
    if bool((label.abs() > 1).any()):
        raise ValueError(f"`labels` holds {int(label.min())}..{int(label.max())}; expected -1, 0, 1 or -100.")
    classes = label + 1 if logits.shape[-1] == 3 else (label > 0).long()
    if first_error_only:
        bad = used & (classes == 0)
        used = used & (bad.cumsum(dim=1) - bad.long() == 0)
    z, target = to_float(logits[used]), classes[used]
    step_loss = F.cross_entropy(z, target, reduction="none")
    n = target.numel()
    accuracy = (z.argmax(dim=-1) == target).to(z.dtype).mean()
    return StepLossOutput(step_loss.sum() / max(n, 1), n, step_loss.detach(), accuracy)


def prm_soft_loss(logits: Tensor, targets: Tensor) -> StepLossOutput:
    """Process reward model on soft labels: mean of -(y log σ(z) + (1 - y) log σ(-z)) over labelled positions.

    Args:
        logits: one score per position. Shape: `(B, T)`.
        targets: y in [0, 1], the share of rollouts from this step that reach the right answer; NaN (or -100)
            elsewhere. Shape: `(B, T)`.

    Raises:
        ValueError: shapes differ.

    Source: Math-Shepherd (2312.08935) eq. 2 to 4.
    """
    check_same_shape("targets", targets, "logits", logits)
    used = _labelled(targets)
    z, y = to_float(logits[used]), to_float(targets[used].detach())
    step_loss = -(y * F.logsigmoid(z) + (1.0 - y) * F.logsigmoid(-z))
    n = y.numel()
    agreement = ((z.detach() > 0) == (y > 0.5)).to(z.dtype).mean()
    return StepLossOutput(step_loss.sum() / max(n, 1), n, step_loss.detach(), agreement)


def step_scores(logits: Tensor, neutral: Literal["good", "bad"] = "good") -> Tensor:
    """Score of a step from class logits: P(good) + P(neutral), or P(good) alone with neutral="bad".

    Args:
        logits: [bad, good] or [bad, neutral, good]. Shape: `(..., C)`, C = 2 or 3.
        neutral: on which side the neutral class counts.

    Returns:
        Probability in [0, 1]. Shape: `(...)`.

    Raises:
        ValueError: C not 2 or 3, unknown neutral.

    Source: Lightman et al. (2305.20050) appendix F.
    """
    check_choice("neutral", neutral, ("good", "bad"))
    if logits.dim() < 1 or logits.shape[-1] not in (2, 3):
        raise ValueError(f"`logits` has shape {tuple(logits.shape)} but must be (..., 2) or (..., 3).")
    p = to_float(logits).softmax(dim=-1)
    return p[..., 1:].sum(dim=-1) if neutral == "good" else p[..., -1]


def step_aggregate(
    scores: Tensor, mask: Tensor | None = None, how: Literal["min", "prod", "mean", "last"] = "min"
) -> Tensor:
    """One score per solution from its step scores; NaN for a solution without a step.

    "min" suits human or hard labels and ignores length; "last" value-like models from rollouts; "prod" is the
    probability that every step is right and decays with length (summed in logs).

    Args:
        scores: in [0, 1] for "prod". Shape: `(B, S)`.
        mask: True (or 1) on real steps; None = all. Shape: `(B, S)`.
        how: see above.

    Returns:
        Shape: `(B,)`.

    Raises:
        ValueError: shapes differ, unknown `how`.

    Source: Lightman et al. (2305.20050) for "prod" and "min"; Snell et al. (2408.03314) for "last".
    """
    check_choice("how", how, ("min", "prod", "mean", "last"))
    check_rank("scores", scores, 2, "(B, S)")
    real = torch.ones_like(scores, dtype=torch.bool) if mask is None else as_mask(mask)
    check_same_shape("mask", real, "scores", scores)
    x = to_float(scores)
    nan = torch.full(x.shape[:1], torch.nan, dtype=x.dtype, device=x.device)
    if x.shape[1] == 0:
        return nan
    one = torch.ones((), dtype=x.dtype, device=x.device)
    if how == "min":
        out = torch.where(real, x, torch.inf * one).amin(dim=1)
    elif how == "prod":
        out = torch.where(real, x, one).log().sum(dim=1).exp()
    elif how == "mean":
        out = select(x, real).sum(dim=1) / real.sum(dim=1).clamp(min=1)
    else:
        last = torch.where(real, torch.arange(x.shape[1], device=x.device), 0).amax(dim=1, keepdim=True)
        out = x.gather(1, last).squeeze(1)
    return torch.where(real.any(dim=1), out, nan)
