"""One of two processes of `test_ppo.py`: trains each case on half of the prompts and saves what it saw.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_ppo.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from hf_rlx.models.sharding import full_state
from tests.trainers.ppo_tools import ppo, ppo_config, some
from tests.trainers.tools import KeepGradients, digest, untimed

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

# Minibatches are other texts than those of one process.
SHUFFLED: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_mini_batches": 4,
    "max_steps": 12,
    "num_iterations": 3,
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
    fields = {
        "per_device_train_batch_size": 16 // processes,
        "max_steps": 4,
        "num_iterations": 2,
        "learning_rate": 0.01,
        "critic_learning_rate": 0.01,
        "shuffle_dataset": False,
        "optim": "sgd",
        "beta": 0.1,
        "max_unscored_rollouts": None,
        **CASES.get(case, SHUFFLED),
    }
    trainer = ppo(ppo_config(folder, **fields), reward, count=64, drift=0.05, callbacks=[keep])
    trainer.train()
    return {
        "gradients": [{n.removeprefix("module."): g for n, g in step.items()} for step in keep.steps],
        "denominators": [float(batch.normalizer) for batch in trainer.batches],
        "weights": digest(trainer.shared.named_parameters()),
        "log": [entry for entry in trainer.state.log_history if "train_loss" not in entry],
    }


def sharded(folder: Path, processes: int) -> dict[str, Any]:
    """Four steps of Adam under FSDP2 (alone: without), the last two once more from a checkpoint. Last of all cases: a
    process stays with it."""
    fields: dict[str, Any] = {"fsdp": True} if processes > 1 else {}

    def make(**changes: Any) -> Any:
        args = ppo_config(
            folder / "fsdp",
            per_device_train_batch_size=16 // processes,
            max_steps=4,
            num_iterations=2,
            shuffle_dataset=False,
            optim="adamw_torch",
            beta=0.1,
            bootstrap_truncated=True,
            save_strategy="steps",
            save_steps=2,
            max_unscored_rollouts=None,
            **fields,
            **{"detach_critic": False, **changes},
        )
        return ppo(args, some, count=32, drift=0.05)

    first = make()
    first.train()
    found = {"weights": full_state(first.shared), "log": [untimed(e) for e in first.state.log_history if "loss" in e]}
    if processes > 1:
        again = make()
        again.train(resume_from_checkpoint=str(folder / "fsdp" / "checkpoint-2"))
        found["again"] = full_state(again.shared)
        try:
            make(critic_adapter=True)
        except ValueError as error:
            found["refused"] = str(error)
    return found


def main(folder: Path) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    results = {case: train(case, folder, 2) for case in [*CASES, "shuffled"]}
    results["fsdp"] = sharded(folder, 2)
    torch.save(results, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
