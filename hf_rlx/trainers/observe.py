"""What a rollout and an update tell: metrics under TRL's names, and ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_rlx.functional import kl_estimators, masked_mean
from hf_rlx.rollout.collect import Collected
from hf_rlx.trainers.dynamic_sampling import COUNTS, has_signal
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.types import Rollout, TokenScores

if TYPE_CHECKING:
    from hf_rlx.functional import GrpoLossOutput
    from hf_rlx.trainers.online import OnlineTrainer
    from hf_rlx.trainers.windows import MiniBatch


class UpdateBar:
    """A bar over the micro-steps of a window, so that a long update is not silent."""

    def __init__(self, disable: bool) -> None:
        self.disable = disable
        self._bar: tqdm | None = None

    def start(self, total: int) -> None:
        """A window of `total` micro-steps begins."""
        if not self.disable and total > 1:
            self._bar = tqdm(total=total, desc="update", unit="micro-step", leave=False)

    def advance(self, done: bool) -> None:
        """One micro-step is over; `done`: it was the last."""
        if self._bar is not None:
            self._bar.update(1)
            if done:
                self._bar.close()
                self._bar = None


def record_rollouts(trainer: OnlineTrainer, collected: Collected) -> int:
    """Record what a rollout tells into the training metrics; returns tokens that went through it."""
    store = trainer.metrics["train"]
    rollouts = collected.rollouts
    record_rewards(store, rollouts, collected.scores.names, collected.scores.metrics)
    record_lengths(store, rollouts)
    store.add("prompts/special_tokens_neutralised", collected.neutralised, reduce="sum")
    seconds = collected.generation_seconds
    store.add_seconds("rollout", seconds)
    store.add_seconds("rewards", collected.waiting_seconds)
    store.add("rollout/tokens_per_second", collected.tokens / max(seconds, 1e-9), seconds)
    prompt_tokens = sum(len(r.prompt_ids) * len(r.completions) for r in rollouts)
    return prompt_tokens + collected.tokens


def lost_signal(collected: Collected, weights: Sequence[float] = ()) -> tuple[str, str] | None:
    """Why a whole rollout teaches nothing although it should: nobody scored it, or components cancel.

    Args:
        collected: with rewards and totals. weights: of the functions; one of 0 cancels nothing. Empty: all count.

    Returns:
        a name of the reason, and a sentence; None where some group has a signal, or all rewards are just equal.
    """
    rollouts, names = collected.rollouts, ", ".join(collected.scores.names)
    if not rollouts or any(has_signal(r.total) for r in rollouts):
        return None
    if all(torch.isnan(r.total).all() for r in rollouts):
        return "unscored", (
            f"no completion was scored, every reward function abstained on all of them ({names}): check that it finds "
            "what it looks for in prompts, completions and columns"
        )
    count = len(collected.scores.names)
    counted = [place for place, weight in enumerate(weights or [1.0] * count) if weight and place < count]
    if any(has_signal(r.rewards[:, place]) for r in rollouts for place in counted):
        return "cancelled", (
            "single reward functions tell the completions of a prompt apart, but their weighted sum does not: the "
            f"components cancel, and nothing is learned ({names}); change reward_weights"
        )
    return None


# Names that the trainer logs itself: a reward function's `log_metric` would falsify the curves.
RESERVED = frozenset(
    [
        *("loss", "policy_loss", "kl_loss", "grad_norm", "learning_rate", "epoch", "step", "step_time", "num_tokens"),
        *("reward", "reward_std", "frac_reward_zero_std", "kl", "beta", "entropy"),
    ]
)


def record_rewards(store: MetricStore, rollouts: list[Rollout], names: list[str], extra: dict[str, float]) -> None:
    """Every component by itself, the total, and the share of groups without a signal."""
    rewards = torch.cat([r.rewards for r in rollouts])
    for index, name in enumerate(names):
        values = rewards[:, index][~torch.isnan(rewards[:, index])]
        store.add(f"rewards/{name}/mean", values.mean() if values.numel() else float("nan"), values.numel())
        store.add(f"rewards/{name}/std", values.std() if values.numel() > 1 else float("nan"), values.numel())
    for name, value in extra.items():
        if name in RESERVED:
            raise ValueError(f"a reward function logs the metric {name!r}, which is the trainer's own; rename it")
        store.add(name, value, reduce="sum" if name.rsplit("/", 1)[-1] in COUNTS else "mean")
    for rollout in rollouts:
        total = rollout.total[~torch.isnan(rollout.total)]
        if total.numel():
            store.add("reward", total.mean(), total.numel())
        if total.numel() > 1:
            store.add("reward_std", total.std(), total.numel())
        if len(rollout.total) > 1:  # a single completion has none to be compared with
            store.add("frac_reward_zero_std", float(not has_signal(rollout.total)))


def record_lengths(store: MetricStore, rollouts: list[Rollout]) -> None:
    """Lengths in tokens, of all completions and of those that ended by themselves; the truncated share."""
    completions = [c for r in rollouts for c in r.completions]
    lengths = torch.tensor([float(len(c.token_ids)) for c in completions])
    ended = lengths[torch.tensor([c.finished for c in completions])]
    for name, values in (("length", lengths), ("terminated_length", ended)):
        if values.numel():
            store.add(f"completions/mean_{name}", values.mean(), values.numel())
            store.add(f"completions/min_{name}", values.min(), reduce="min")
            store.add(f"completions/max_{name}", values.max(), reduce="max")
    store.add("completions/clipped_ratio", 1 - ended.numel() / max(lengths.numel(), 1), lengths.numel())


def record_update(store: MetricStore, batch: MiniBatch, scores: TokenScores) -> Tensor | None:
    """Entropy, KL in every form, and the gap between sampler and trainer; returns summed k1 (B,) if there is a KL."""
    tokens = int(batch.mask.sum())
    if scores.entropies is not None:
        store.add("entropy", masked_mean(scores.entropies.detach(), batch.mask), tokens)
    logps = scores.per_token_logps.detach()
    trainer_logps = batch.old_logps if batch.old_logps is not None else logps
    known = batch.mask & ~torch.isnan(batch.sampler_logps)
    gap = (trainer_logps - batch.sampler_logps)[known].abs()
    if gap.numel():
        store.add("sampling/sampling_logp_difference/mean", gap.mean(), gap.numel())
        store.add("sampling/sampling_logp_difference/max", gap.max(), reduce="max")
    if batch.ref_logps is None:
        return None
    kl = kl_estimators(logps, batch.ref_logps, batch.mask)
    rows = len(batch.mask)
    store.add("kl", kl.k3_mean, tokens)
    store.add("kl/k1_token", kl.k1_mean, tokens)
    store.add("kl/k1_sequence", kl.k1_sequence.mean(), rows)
    store.add("kl/k3_sequence", kl.k3_sequence.mean(), rows)
    store.add("kl/max_log_ratio", kl.k1.abs().max(), reduce="max")
    return kl.k1_sequence


def record_clips(store: MetricStore, batch: MiniBatch, out: GrpoLossOutput, lowest: float, highest: float) -> None:
    """Shares of tokens (of completions, where the ratio is theirs) whose gradient the clip cut; the extremes are over
    completions: the share of each one's tokens."""
    real = batch.mask.any(dim=1)
    units = int((batch.mask if out.ratio.shape == batch.mask.shape else real).sum())
    store.add("clip_ratio/low_mean", out.clip_low_fraction, units)
    store.add("clip_ratio/high_mean", out.clip_high_fraction, units)
    store.add("clip_ratio/region_mean", out.clip_low_fraction + out.clip_high_fraction, units)
    if not real.any():
        return
    advantages = batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None]
    low, high = (advantages < 0) & (out.ratio < lowest), (advantages > 0) & (out.ratio > highest)
    shares = [masked_mean(cut.expand(batch.mask.shape).float(), batch.mask, dim=1)[real] for cut in (low, high)]
    store.add("clip_ratio/low_min", shares[0].min(), reduce="min")
    store.add("clip_ratio/high_max", shares[1].max(), reduce="max")
