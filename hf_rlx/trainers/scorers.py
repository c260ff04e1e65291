"""The scorer of a trainer: its reward functions, called as its configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_rlx.rollout.scoring import RewardScorer

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer


def make_scorer(trainer: BaseTrainer, reward_funcs: Any, reward_processing_classes: Any = None) -> RewardScorer:
    """The scorer of a trainer that samples; `close` it, or let the trainer's process end.

    Args:
        trainer: its configuration has the fields on rewards of `OnlineConfig`.
        reward_funcs, reward_processing_classes: the trainer's arguments, see `RewardScorer`.

    Raises:
        ValueError, TypeError, RewardError: see `RewardScorer`.
    """
    args: Any = trainer.args
    return RewardScorer(
        reward_funcs,
        weights=args.reward_weights,
        timeout=args.reward_timeout,
        on_error=args.on_reward_error,
        max_failures=args.max_reward_failures,
        max_unscored=args.max_unscored_rollouts,
        isolate=args.isolate_rewards,
        concurrency=args.reward_concurrency,
        seed=(args.seed, args.process_index),
        reward_processing_classes=reward_processing_classes,
        trainer_state=trainer.state,
        model_init_kwargs=args.model_init_kwargs,
        device=args.device,
    )


__all__ = ["make_scorer"]
