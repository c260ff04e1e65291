"""One of two processes of `test_iterative_processes.py`: trains each case on its share.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_iterative.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from tests.trainers.iterative_tools import Scripted, config, trainer
from tests.trainers.tools import KeepGradients, by_ids, digest, rows

CASES: dict[str, dict[str, Any]] = {
    "best and worst": {"prompts_per_round": 7},
    "all, previous": {"pair_strategy": "all", "reference": "previous", "gradient_accumulation_steps": 2},
    "one process without pairs": {"prompts_per_round": 4, "num_rounds": 1},
}


def only_even(completion_ids, number, **_: Any) -> list[float | None]:
    """Prompts at odd places, which are the second process's, tell nothing."""
    return [sum(ids) % 7 / 7 if number[0] % 2 == 0 else 0.5 for ids in completion_ids]


def train(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """The rounds of a case, split over `processes`; completions do not depend on which of them samples."""
    keep = KeepGradients()
    fields = dict(CASES[case])
    accumulation = fields.get("gradient_accumulation_steps", 1)
    args = config(
        folder / f"{case}, {processes}".replace(" ", "_"),
        per_device_train_batch_size=4 // processes // accumulation,
        shuffle_dataset=False,
        max_grad_norm=0.0,
        optim="sgd",
        **fields,
    )
    reward = only_even if "without" in case else by_ids
    made = trainer(args, reward, callbacks=[keep], eval_dataset=rows(3))
    made.sampler = Scripted(made.tokenizer)
    made.train()
    tables = sorted(Path(str(args.output_dir)).glob("pairs/*/train.parquet"))
    return {
        "gradients": [{n.removeprefix("module."): g for n, g in step.items()} for step in keep.steps],
        "weights": digest(made.shared.named_parameters()),
        "log": made.state.log_history,
        "pairs": [pq.read_table(path).to_pylist() for path in tables],
    }


def main(folder: Path) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    results = {case: train(case, folder, 2) for case in CASES}
    torch.save(results, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
