"""Losses on preference pairs: DPO and its relatives.

Log-probs are of completion tokens only, end of sequence included, the prompt excluded. h = (log π(chosen) -
log π_ref(chosen)) - (log π(rejected) - log π_ref(rejected)). Reference log-probs are held constant.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_rlx.functional._checks import check_rank, check_same_shape, to_float


class PreferenceLossOutput(NamedTuple):
    """Result of the pair losses; everything but `loss` is detached. B pairs."""

    loss: Tensor  # scalar, mean over pairs, 0 for no pair
    pair_loss: Tensor  # (B,)
    chosen_reward: Tensor  # (B,) implicit reward of the chosen answer
    rejected_reward: Tensor  # (B,)
    mean_margin: Tensor  # scalar, mean of chosen_reward - rejected_reward, NaN for no pair
    accuracy: Tensor  # scalar, share of positive margins, ties 1/2, NaN for no pair


class OrpoOutput(NamedTuple):
    """Result of `orpo`; everything but `loss` is detached."""

    loss: Tensor  # scalar
    odds_ratio_loss: Tensor  # (B,), before lam
    log_odds_ratio: Tensor  # (B,)
    accuracy: Tensor  # scalar, share of positive log odds ratios, ties 1/2, NaN for no pair


def _check_pairs(**tensors: Tensor) -> None:
    (first, reference), *rest = tensors.items()
    check_rank(first, reference, 1, "(B,)")
    for name, tensor in rest:
        check_same_shape(name, tensor, first, reference)


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(f"`label_smoothing` is {label_smoothing} but must lie in [0, 0.5].")


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` is {value} but must be positive.")


def _mean_loss(pair_loss: Tensor) -> Tensor:
    return pair_loss.sum() / max(pair_loss.numel(), 1)


def win_rate(margin: Tensor) -> Tensor:
    """Share of positive margins, a tie counting 1/2; NaN for no margin. Shape: `(B,)` to scalar."""
    margin = to_float(margin.detach())
    return ((margin > 0).to(margin.dtype) + 0.5 * (margin == 0).to(margin.dtype)).mean()


def _output(pair_loss: Tensor, chosen_reward: Tensor, rejected_reward: Tensor) -> PreferenceLossOutput:
    chosen, rejected = chosen_reward.detach(), rejected_reward.detach()
    margin = chosen - rejected
    return PreferenceLossOutput(
        _mean_loss(pair_loss), pair_loss.detach(), chosen, rejected, margin.mean(), win_rate(margin)
    )


def smoothed_logistic(z: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Logistic loss with a share ε of flipped labels: -(1 - ε) log σ(z) - ε log σ(-z).

    Args:
        z: margin of the preferred side. Shape: `(...)`.
        label_smoothing: ε in [0, 0.5]; with ε > 0 the optimum is finite, z = log((1 - ε) / ε).

    Returns:
        Nats. Shape: `(...)`.

    Raises:
        ValueError: ε outside [0, 0.5].
    """
    _check_smoothing(label_smoothing)
    if label_smoothing == 0:
        return -F.logsigmoid(z)
    return -(1.0 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)


def dpo_sigmoid(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PreferenceLossOutput:
    """DPO: -(1 - ε) log σ(β h) - ε log σ(-β h), rewards β (log π - log π_ref).

    TRL's `loss_type="sigmoid"` ignores the smoothing; the DPO repository and this function apply it (cDPO).

    Args:
        policy_chosen, policy_rejected: summed log-probs with gradient, nats. Shape: `(B,)`.
        ref_chosen, ref_rejected: summed reference log-probs, nats. Shape: `(B,)`.
        beta: reward per nat.
        label_smoothing: ε, assumed share of flipped labels, in [0, 0.5].

    Raises:
        ValueError: shapes differ, beta not positive, ε outside [0, 0.5].

    Source: Rafailov et al. (2305.18290) eq. 7; Mitchell (2023) for ε.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    _check_positive("beta", beta)
    return _output(smoothed_logistic(beta * (chosen - rejected), label_smoothing), beta * chosen, beta * rejected)


def _log_ratios(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> tuple[Tensor, Tensor]:
    _check_pairs(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    return (
        to_float(policy_chosen) - to_float(ref_chosen.detach()),
        to_float(policy_rejected) - to_float(ref_rejected.detach()),
    )


def dpo_robust(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> PreferenceLossOutput:
    """Robust DPO: (-(1 - ε) log σ(β h) + ε log σ(-β h)) / (1 - 2ε), unbiased for labels flipped with rate ε.

    Unlike the smoothed `dpo_sigmoid` it can be negative.

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta: as in `dpo_sigmoid`.
        label_smoothing: ε in [0, 0.5).

    Raises:
        ValueError: shapes differ, beta not positive, ε outside [0, 0.5).

    Source: Chowdhury et al. (2403.00409) eq. 12.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    _check_positive("beta", beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"`label_smoothing` is {label_smoothing} but must lie in [0, 0.5).")
    z = beta * (chosen - rejected)
    loss = -(1.0 - label_smoothing) * F.logsigmoid(z) + label_smoothing * F.logsigmoid(-z)
    return _output(loss / (1.0 - 2.0 * label_smoothing), beta * chosen, beta * rejected)


def dpo_hinge(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
) -> PreferenceLossOutput:
    """Hinge on the implicit margin: max(0, 1 - β h), gradient -β or 0.

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta: as in `dpo_sigmoid`.

    Raises:
        ValueError: shapes differ, beta not positive.

    Source: SLiC-HF (2305.10425); TRL `loss_type="hinge"`.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    _check_positive("beta", beta)
    return _output(torch.relu(1.0 - beta * (chosen - rejected)), beta * chosen, beta * rejected)


def ipo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    beta: float = 0.1,
    normalize: bool = True,
) -> PreferenceLossOutput:
    """IPO: (h - 1 / (2 β))², with h from per-token mean log-ratios when `normalize` is True.

    With means the target is a gap of 1 / (2 β) nats *per token*: 5 at β = 0.1, practically out of reach; scan
    β in 0.5 to 1. Rewards are β times the (mean) log-ratios.

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: summed log-probs, nats. Shape: `(B,)`.
        chosen_length, rejected_length: completion tokens, floored at 1; needed to normalise. Shape: `(B,)`.
        beta: strength of the regularisation.
        normalize: False uses sums, as the DPO repository does.

    Raises:
        ValueError: shapes differ, beta not positive, or no lengths although `normalize` is True.

    Source: Azar et al. (2310.12036) eq. 17; TRL for the means.
    """
    chosen, rejected = _log_ratios(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    _check_positive("beta", beta)
    if normalize:
        if chosen_length is None or rejected_length is None:
            raise ValueError("`normalize` is True but `chosen_length` or `rejected_length` is None.")
        _check_pairs(policy_chosen=policy_chosen, chosen_length=chosen_length, rejected_length=rejected_length)
        chosen = chosen / chosen_length.clamp(min=1)
        rejected = rejected / rejected_length.clamp(min=1)
    return _output((chosen - rejected - 1.0 / (2.0 * beta)).square(), beta * chosen, beta * rejected)


def simpo(
    chosen_mean_logp: Tensor,
    rejected_mean_logp: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> PreferenceLossOutput:
    """SimPO: -log σ(β (mean_c - mean_r) - γ), without a reference; rewards β · mean log-prob.

    γ is the margin itself; the SimPO repository's `gamma_beta_ratio` is γ / β.

    Args:
        chosen_mean_logp, rejected_mean_logp: log-prob per completion token, nats. Shape: `(B,)`.
        beta: reward per nat.
        gamma: target margin, reward units.
        label_smoothing: ε in [0, 0.5], see `smoothed_logistic`.

    Raises:
        ValueError: shapes differ, beta not positive, ε outside [0, 0.5].

    Source: Meng et al. (2405.14734) eq. 6.
    """
    _check_pairs(chosen_mean_logp=chosen_mean_logp, rejected_mean_logp=rejected_mean_logp)
    _check_positive("beta", beta)
    chosen, rejected = to_float(chosen_mean_logp), to_float(rejected_mean_logp)
    z = beta * (chosen - rejected) - gamma
    return _output(smoothed_logistic(z, label_smoothing), beta * chosen, beta * rejected)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - eˣ) for x < 0 without losing digits at either end.

    log(-expm1(x)) for x > -log 2, else log1p(-eˣ). Shape: `(...)` to `(...)`.

    Source: Mächler (2012), "Accurately computing log(1 - exp(-|a|))".
    """
    near = x > -math.log(2.0)
    # Each branch sees only its own inputs, so the other one's inf cannot enter the gradient.
    half = torch.full_like(x, -1.0)
    close = torch.log(-torch.expm1(torch.where(near, x, half)))
    far = torch.log1p(-torch.exp(torch.where(near, half, x)))
    return torch.where(near, close, far)


def orpo(
    chosen_mean_logp: Tensor,
    rejected_mean_logp: Tensor,
    chosen_nll: Tensor,
    lam: float = 0.1,
    ceiling: float = -1e-7,
) -> OrpoOutput:
    """ORPO: mean(nll - λ log σ(log OR)), log OR = (a - b) - (log(1 - eᵃ) - log(1 - eᵇ)), a, b mean log-probs.

    a and b are held at `ceiling`, without odds gradient above it: probability 1 has infinite odds.

    Args:
        chosen_mean_logp, rejected_mean_logp: a and b, log-prob per completion token, nats. Shape: `(B,)`.
        chosen_nll: likelihood term of the chosen answer, nats per completion token. Shape: `(B,)`.
        lam: weight λ of the odds-ratio term.
        ceiling: largest a or b, below 0.

    Raises:
        ValueError: shapes differ, or a ceiling not below 0.

    Source: Hong et al. (2403.07691) eq. 6 and 7.
    """
    _check_pairs(chosen_mean_logp=chosen_mean_logp, rejected_mean_logp=rejected_mean_logp, chosen_nll=chosen_nll)
    if not ceiling < 0:
        raise ValueError(f"`ceiling` is {ceiling} but must be below 0.")
    a, b = to_float(chosen_mean_logp).clamp(max=ceiling), to_float(rejected_mean_logp).clamp(max=ceiling)
    log_odds = (a - b) - (log1mexp(a) - log1mexp(b))
    odds_loss = -F.logsigmoid(log_odds)
    loss = _mean_loss(to_float(chosen_nll) + lam * odds_loss)
    return OrpoOutput(loss, odds_loss.detach(), log_odds.detach(), win_rate(log_odds))
