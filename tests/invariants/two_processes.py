"""One of two processes of `test_processes.py`: trains each case on half of the prompts and saves what it saw.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from tests.trainers.tools import KeepGradients, by_ids, config, digest, rows, scripted

# Windows of 2 x 8 completions, or of 1 x 16: prompts 0, 1 belong to rank 0, prompts 2, 3 to rank 1.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.3, "log_completions": True},
    "dapo": {"loss_type": "dapo", "beta": 0.3},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": 0.3},
    "one rank flat": {"loss_type": "grpo", "beta": 0.3},
    "one rank flat, accumulated": {"loss_type": "dapo", "gradient_accumulation_steps": 2},
    "all flat": {"loss_type": "grpo"},
    "batch std": {"scale_rewards": "batch", "beta": 0.0},
    "checkpointing": {"gradient_checkpointing": True},
    "two passes": {"num_iterations": 2, "beta": 0.3},
}


def flat_on_rank_zero(completion_ids, number, **columns):
    """Signal on prompts 2 and 3 only."""
    return [0.1] * len(completion_ids) if number[0] < 2 else by_ids(completion_ids, number)


def flat(completion_ids, **columns):
    """No signal at all."""
    return [0.1] * len(completion_ids)


def train(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """One step of a case, split over `processes`."""
    keep = KeepGradients()
    fields = dict(CASES[case])
    accumulation = fields.get("gradient_accumulation_steps", 1)
    reward = flat_on_rank_zero if case.startswith("one rank") else flat if case == "all flat" else by_ids
    args = config(
        folder,
        per_device_train_batch_size=16 // processes // accumulation,
        learning_rate=0.01,
        max_grad_norm=0.0,
        shuffle_dataset=False,
        optim="sgd",
        **fields,
    )
    trainer = scripted(args, reward=reward, drift=0.05, callbacks=[keep], eval_dataset=rows(5))
    trainer.train()
    metrics = trainer.evaluate()
    return {
        "gradients": {n.removeprefix("module."): g for n, g in (keep.steps[0] if keep.steps else {}).items()},
        "weights": digest(trainer.shared.named_parameters()),
        "log": trainer.state.log_history,
        "eval": metrics,
        "tables": read_tables(folder / "completions") if trainer.is_world_process_zero() else {},
        "prompts": sum(trainer.sampler.calls[:1]),
    }


def read_tables(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of every file of completions, by file name."""
    return {path.name: pq.read_table(path).to_pylist() for path in folder.iterdir()}


def main(folder: Path) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    results = {case: train(case, folder, 2) for case in CASES}
    torch.save(results, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
