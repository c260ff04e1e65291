"""One of two processes of `test_ppo.py`: trains each case on half of the prompts and saves what it saw.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_ppo.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainers.ppo_tools import ppo, ppo_config, some
from tests.trainers.tools import KeepGradients, digest

# Windows of one step: texts of prompts 0 to 7 belong to rank 0, those of 8 to 15 to rank 1.
CASES: dict[str, dict[str, Any]] = {
    "head": {"detach_critic": False, "entropy_coef": 0.1},
    "adapter": {"critic_adapter": True},
    "one rank unscored": {"critic_adapter": True, "kl_in_reward": False},
    "one rank unscored, head": {"bootstrap_truncated": True},
    "nothing scored": {"critic_adapter": True},
    "warm-up": {"critic_warmup_steps": 2, "detach_critic": False},
    "warm-up, adapter": {"critic_warmup_steps": 2, "critic_adapter": True},
    "early stop": {"target_kl": 1e-7, "kl_target": 0.5, "kl_horizon": 100},
    "checkpointing, whitened rewards": {
        "gradient_checkpointing": True,
        "critic_adapter": True,
        "whiten_rewards": True,
    },
}


def of_rank_one(completion_ids, number, **columns):
    """Prompts 8 to 15 only."""
    return [None] * len(completion_ids) if number[0] < 8 else some(completion_ids, number)


def nobody(completion_ids, **columns):
    """No score at all."""
    return [None] * len(completion_ids)


def train(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """Four steps (two epochs of two windows) of a case, split over `processes`."""
    keep = KeepGradients()
    reward = of_rank_one if case.startswith("one rank") else nobody if case.startswith("nothing") else some
    args = ppo_config(
        folder,
        per_device_train_batch_size=16 // processes,
        max_steps=4,
        num_iterations=2,
        learning_rate=0.01,
        critic_learning_rate=0.01,
        shuffle_dataset=False,
        optim="sgd",
        beta=0.1,
        max_unscored_rollouts=None,
        **CASES[case],
    )
    trainer = ppo(args, reward, count=32, drift=0.05, callbacks=[keep])
    trainer.train()
    return {
        "gradients": [{n.removeprefix("module."): g for n, g in step.items()} for step in keep.steps],
        "weights": digest(trainer.shared.named_parameters()),
        "log": [entry for entry in trainer.state.log_history if "train_loss" not in entry],
    }


def main(folder: Path) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    results = {case: train(case, folder, 2) for case in CASES}
    torch.save(results, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
