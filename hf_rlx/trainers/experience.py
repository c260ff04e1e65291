"""PPO's experience: what a rollout's tokens were worth, and how much better that was than the critic expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_rlx.functional import explained_variance, gae, kl_estimators, kl_penalty, masked_whiten, shaped_reward
from hf_rlx.models.roles import CRITIC
from hf_rlx.trainers.metrics import MetricStore, gathered
from hf_rlx.trainers.windows import MiniBatch, row_of
from hf_rlx.types import Group, Rollout

if TYPE_CHECKING:
    from hf_rlx.trainers.ppo import PPOTrainer


class _Rows(NamedTuple):
    """One micro-batch on the CPU in float64."""

    rewards: Tensor  # (B, R), KL included where it is a part of the reward
    values: Tensor  # (B, R)
    mask: Tensor  # (B, R) bool
    bootstrap: Tensor | None  # (B,) value after the last token, 0 where the completion ended


def fill_in(
    trainer: PPOTrainer, rollouts: list[Rollout], step_rewards: list[Tensor], batches: list[MiniBatch]
) -> None:
    """Set `advantages` and `returns` of the micro-batches of a window, and `advantages` of its rollouts.

    Rewards and advantages are whitened over all tokens of the window, on all processes; every process must call it.

    Args:
        rollouts: P, with `total` (NaN counts 0: such a completion is kept for its steps only).
        step_rewards: P of (K, R), the step rewards on the tokens that end the steps.
        batches: of one pass, with `places`, `old_logps`, `old_values`, and `ref_logps` where there is a KL.
    """
    args, store = trainer.args, trainer.metrics["train"]
    full = [batch for batch in batches if batch.groups]
    rows = [_rows(trainer, rollouts, step_rewards, batch) for batch in full]
    if args.whiten_rewards:
        scaled = _whitened([r.rewards for r in rows], [r.mask for r in rows], shift_mean=False)
        rows = [r._replace(rewards=x) for r, x in zip(rows, scaled, strict=True)]
    results = [gae(r.rewards, r.values, r.mask, args.gamma, args.lam, r.bootstrap) for r in rows]
    _record(store, rows, [out.advantages for out in results], [out.returns for out in results])
    advantages = [out.advantages for out in results]
    if args.whiten_advantages:
        advantages = _whitened(advantages, [r.mask for r in rows], shift_mean=True)
    for batch, ours, out in zip(full, advantages, results, strict=True):
        batch.advantages = ours.float().to(batch.mask.device)
        batch.returns = out.returns.float().to(batch.mask.device)
        for (p, k), row in zip(batch.places, ours.float(), strict=True):
            width = min(row.numel(), rollouts[p].advantages.shape[1])
            rollouts[p].advantages[k, :width] = row[:width]
        if args.kl_in_reward:
            batch.ref_logps = None  # the loss has no use for them


def _rows(trainer: PPOTrainer, rollouts: list[Rollout], step_rewards: list[Tensor], batch: MiniBatch) -> _Rows:
    args = trainer.args
    assert batch.old_logps is not None  # set by `recall`, as the values are
    assert batch.old_values is not None
    mask, old = batch.mask.cpu(), batch.old_logps.double().cpu()
    reference = None if batch.ref_logps is None else batch.ref_logps.double().cpu()
    score = torch.stack([rollouts[p].total[k] for p, k in batch.places]).double().nan_to_num(nan=0.0)
    in_reward = args.kl_in_reward and reference is not None
    beta = trainer.kl_controller.coef if in_reward else 0.0
    by_k1 = beta if args.kl_form == "k1" else 0.0
    rewards = shaped_reward(score, old, reference, mask, by_k1).rewards
    if in_reward and args.kl_form != "k1":
        rewards = rewards - beta * kl_penalty(old, reference, mask, args.kl_form)  # type: ignore[arg-type]
    if reference is not None:
        _note_kl(trainer, old, reference, mask)
    if step_rewards:
        steps = torch.stack([row_of(step_rewards[p], k, mask.shape[1]) for p, k in batch.places]).double()
        rewards = rewards + steps
    trainer.metrics["train"].add("reward/shaped", rewards.sum(dim=1).mean(), len(rewards))
    return _Rows(rewards, batch.old_values.double().cpu(), mask, _bootstrap(trainer, rollouts, batch))


def _note_kl(trainer: PPOTrainer, old: Tensor, reference: Tensor, mask: Tensor) -> None:
    """For the controller, and for the log: of the policy that sampled; a KL in the loss is logged with the update."""
    kl = kl_estimators(old, reference, mask)
    trainer.note_kl(kl.k1_sequence.float())
    if trainer.args.kl_in_reward:
        store, tokens = trainer.metrics["train"], int(mask.sum())
        store.add("kl", kl.k3_mean, tokens)
        store.add("kl/k1_token", kl.k1_mean, tokens)
        store.add("kl/k1_sequence", kl.k1_sequence.mean(), len(mask))
        store.add("kl/k3_sequence", kl.k3_sequence.mean(), len(mask))
        store.add("kl/max_log_ratio", kl.max_abs, reduce="max")


def _bootstrap(trainer: PPOTrainer, rollouts: list[Rollout], batch: MiniBatch) -> Tensor | None:
    """(B,) the critic's value of the state after the last token of completions that were cut, 0 for the others."""
    if not trainer.args.bootstrap_truncated:
        return None
    cut = torch.tensor([not rollouts[p].completions[k].finished for p, k in batch.places])
    result = torch.zeros(len(cut), dtype=torch.float64)
    if cut.any():
        kept = iter(cut.tolist())
        groups: list[Group] = []
        for group in batch.groups:
            which = [i for i in range(group.num_responses) if next(kept)]
            if which:
                groups.append(group.select(which))
        with trainer.metrics["train"].stage("old_logps"), trainer.accelerator.autocast():
            # The score of a response is read at its last token, whose state is the one before the next token.
            after = trainer.forward_limit.run(lambda most: trainer.shared.score(groups, CRITIC, most), groups)
            result[cut] = after.double().cpu()
    return result


def _whitened(values: list[Tensor], masks: list[Tensor], shift_mean: bool) -> list[Tensor]:
    """`masked_whiten` over the selected entries of all tensors of all processes together."""
    mine = _selected(values, masks)
    parts = gathered([mine])
    whole = torch.cat(parts)
    white = masked_whiten(whole, torch.ones_like(whole, dtype=torch.bool), shift_mean).whitened
    # Parts come rank by rank; with one process there is one.
    start = sum(len(part) for part in parts[: _rank() if len(parts) > 1 else 0])
    result = []
    for value, mask in zip(values, masks, strict=True):
        count = int(mask.sum())
        row = torch.zeros_like(value)
        row[mask] = white[start : start + count]
        result.append(row)
        start += count
    return result


def _selected(values: list[Tensor], masks: list[Tensor]) -> Tensor:
    """(n,) float64: the entries that the masks select, one after the other."""
    empty = torch.zeros(0, dtype=torch.float64)
    return torch.cat([empty, *(value[mask] for value, mask in zip(values, masks, strict=True))])


def _rank() -> int:
    return torch.distributed.get_rank()


def _record(store: MetricStore, rows: list[_Rows], advantages: list[Tensor], returns: list[Tensor]) -> None:
    """How well the critic did before it learns from this rollout, over all processes."""
    masks = [r.mask for r in rows]
    mine = torch.stack([_selected(x, masks) for x in (advantages, returns, [r.values for r in rows])])
    ours, target, value = torch.cat(gathered([mine]), dim=1)
    if not target.numel():
        return
    everything = torch.ones_like(target, dtype=torch.bool)[None]
    store.add("value/explained_variance", explained_variance(value[None], target[None], everything))
    store.add("value/mean", value.mean())
    store.add("returns/mean", target.mean())
    store.add("returns/std", target.std(correction=0))
    store.add("advantages/mean", ours.mean())
    store.add("advantages/std", ours.std(correction=0))
