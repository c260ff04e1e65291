"""DAPO's dynamic sampling: groups without a signal make room for fresh prompts (2503.14476 section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from hf_rlx.rollout.collect import Collected, is_collective
from hf_rlx.rollout.scoring import ScoreResult

COUNTS = ("abstained", "errors", "timeouts", "unscored", "infra")  # metrics of the scorer that add up

if TYPE_CHECKING:
    from hf_rlx.trainers.online import OnlineTrainer


def has_signal(total: torch.Tensor) -> bool:
    """Whether a group's (K,) rewards differ: at least two scorable ones, compared by max - min with a tolerance.
    Never by `std == 0`: eight equal rewards of 0.1 have a float32 deviation of 7e-9."""
    scored = total[~torch.isnan(total)]
    if scored.numel() < 2:
        return False
    spread = (scored.max() - scored.min()).item()
    return spread > 1e-6 * max(1.0, scored.abs().max().item())


def flatten_noise(total: torch.Tensor) -> torch.Tensor:
    """(P, K) rewards with every group that has no signal set to its mean, NaN where it was NaN.

    A reward model gives identical texts scores that differ by 1e-7 between batches; divided by such a deviation
    they would become advantages.
    """
    flat = torch.tensor([not has_signal(row) for row in total])
    mean = total.nanmean(dim=1, keepdim=True).expand_as(total)
    return torch.where(flat[:, None] & ~torch.isnan(total), mean, total)


def replace_flat_groups(trainer: OnlineTrainer, collected: Collected) -> Collected:
    """Sample fresh prompts for groups without signal, at most `dynamic_sampling_rounds` times.

    Groups that are still flat after the last round stay, and leave loss and denominators like any flat group. With a
    collective sampler, a process without flat groups goes through the rounds of the others with no prompt.
    """
    rollouts = list(collected.rollouts)
    generation, waiting, tokens = collected.generation_seconds, collected.waiting_seconds, collected.tokens
    neutralised = collected.neutralised
    metrics = trainer.metrics["train"]
    metrics.add("dynamic_sampling/first_round_flat", sum(not has_signal(r.total) for r in rollouts) / len(rollouts))
    rounds = 0
    for rounds in range(1, trainer.args.dynamic_sampling_rounds + 1):
        flat = [i for i, r in enumerate(rollouts) if not has_signal(r.total)]
        if not _most(trainer, len(flat)):
            rounds -= 1
            break
        fresh = trainer.rollout(_fresh_rows(trainer, len(flat), rounds), rounds)
        moved = {}
        for rollout_index, (index, rollout) in enumerate(zip(flat, fresh.rollouts, strict=True)):
            if has_signal(rollout.total):
                rollouts[index] = rollout
                moved[index] = rollout_index
        _move_scores(collected.scores, fresh.scores, moved, trainer.args.num_generations)
        generation += fresh.generation_seconds
        waiting += fresh.waiting_seconds
        tokens += fresh.tokens
        neutralised += fresh.neutralised
    metrics.add("dynamic_sampling/rounds", rounds)
    return Collected(rollouts, collected.scores, generation, waiting, tokens, neutralised)


def _most(trainer: OnlineTrainer, count: int) -> int:
    """The largest count of any process that this one must keep step with."""
    together = trainer.accelerator.num_processes > 1 and is_collective(trainer.sampler)
    return max(gather_object([count])) if together else count


def _move_scores(scores: ScoreResult, fresh: ScoreResult, moved: dict[int, int], size: int) -> None:
    """Put the rows of fresh groups where the replaced ones were: `moved` is replaced group -> fresh group. Faults of
    all rounds are counted."""
    for name in fresh.extra:
        scores.extra.setdefault(name, [None] * len(scores.total))
    for old, new in moved.items():
        here, there = slice(old * size, (old + 1) * size), slice(new * size, (new + 1) * size)
        scores.rewards[here], scores.total[here] = fresh.rewards[there], fresh.total[there]
        for name, values in scores.extra.items():
            values[here] = fresh.extra[name][there] if name in fresh.extra else [None] * size
    for name, count in fresh.metrics.items():
        if name.rsplit("/", 1)[-1] in COUNTS:
            scores.metrics[name] = scores.metrics.get(name, 0.0) + count


def _fresh_rows(trainer: OnlineTrainer, count: int, round_index: int) -> list[dict]:
    """Prompts drawn by step, process and round, so that a resumed run draws the same."""
    seed = (trainer.args.seed * 1009 + trainer.state.global_step) * 64 + trainer.accelerator.process_index
    generator = torch.Generator().manual_seed(seed * 16 + round_index)
    picks = torch.randint(len(trainer.train_dataset), (count,), generator=generator).tolist()
    return [trainer.train_dataset[i] for i in picks]
