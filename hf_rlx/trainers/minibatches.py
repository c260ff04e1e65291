"""From rollouts to micro-batches: dealt, compared with the old policy and the reference, and normalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_rlx.functional import importance_weights
from hf_rlx.models.roles import REFERENCE
from hf_rlx.models.sharding import is_sharded
from hf_rlx.trainers.windows import MiniBatch, deal, row_of
from hf_rlx.types import Rollout

if TYPE_CHECKING:
    from hf_rlx.trainers.online import OnlineTrainer


def make_minibatches(trainer: OnlineTrainer, rollouts: list[Rollout]) -> list[MiniBatch]:
    """The micro-batches of one pass over a window, in the order of the optimizer steps.

    Args:
        rollouts: P of them, with `advantages` and `keep`.
    """
    args = trainer.args
    steps = args.optimizer_steps_per_window
    off_policy = trainer.recalls or steps * args.num_iterations > 1
    batches = []
    for shares in deal(rollouts, steps, args.gradient_accumulation_steps):
        rows = sum(len(r.completions) for r in rollouts) // steps // len(shares)
        step = [_minibatch(trainer, rollouts, share, rows, off_policy) for share in shares]
        count = torch.stack([trainer.loss_count(b.mask, b.rows).float() for b in step]).sum()
        pair = torch.stack([count, torch.tensor(float(any(b.groups for b in step)))])
        normalizer, signals = trainer.accelerator.reduce(pair.to(args.device), "sum")
        for batch in step:
            batch.normalizer = normalizer.clamp(min=1)
            batch.idle = not signals
        batches.extend(step)
    if is_sharded(trainer.shared):  # decided here: the forward that trains must be one on every process
        trainer.shared.verify(trainer.dummy_groups())
    return batches


def _minibatch(
    trainer: OnlineTrainer, rollouts: Sequence[Rollout], share: list, rows: int, off_policy: bool
) -> MiniBatch:
    device = trainer.args.device
    groups = [rollouts[p].group().select(ks) for p, ks in share]
    if not groups:
        empty = torch.zeros(0, 1, device=device)
        return MiniBatch([], empty[:, 0], empty.bool(), empty, rows)
    completions = [rollouts[p].completions[k] for p, ks in share for k in ks]
    sampler_logps = nn.utils.rnn.pad_sequence([torch.tensor(c.logps) for c in completions], batch_first=True)
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    mask = torch.arange(sampler_logps.shape[1])[None] < lengths[:, None]
    advantages = torch.stack([row_of(rollouts[p].advantages, k, mask.shape[1]) for p, ks in share for k in ks])
    batch = MiniBatch(groups, advantages.to(device), mask.to(device), sampler_logps.to(device), rows)
    batch.places = [(p, k) for p, ks in share for k in ks]
    correct = trainer.args.use_vllm and trainer.args.vllm_importance_sampling_correction
    if off_policy or correct:
        with trainer.metrics["train"].stage("old_logps"):
            trainer.recall(batch)
    if correct and batch.old_logps is not None:
        weights = importance_weights(
            batch.old_logps,
            batch.sampler_logps,
            batch.mask,
            trainer.args.vllm_importance_sampling_mode,
            trainer.args.vllm_importance_sampling_clip_max,
            trainer.args.vllm_importance_sampling_clip_min,
        )
        batch.is_weights = weights.weights
        trainer.metrics["train"].add_spread("sampling/importance_sampling_ratio", weights.weights[batch.mask])
    if trainer.needs_reference_in_loss():
        with trainer.metrics["train"].stage("reference"):
            batch.ref_logps = trainer.reference_logps(groups, REFERENCE, trainer.args.temperature)
    return batch
