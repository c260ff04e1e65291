"""One of two processes of `test_pair_processes.py`: trains each case on its share of the rows.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_pairs.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tests.trainers.pair_tools import config, trainer
from tests.trainers.reward_tools import lists, pairs, shared_model
from tests.trainers.tools import KeepGradients, digest, tiny_llama

SAME = {"prompt": "1=", "chosen": "a", "rejected": "a"}

# Steps of four rows over all processes, and a last one of what is left.
CASES: dict[str, dict[str, Any]] = {
    "one row left": {"rows": 5},
    "accumulated": {"rows": 7, "gradient_accumulation_steps": 2, "rpo_alpha": 0.5},
    "lists": {"rows": 6},
    "one rank without pairs": {"rows": 4},
    "all weights": {"rows": 5, "precompute_ref_log_probs": True},
    "ipo": {"kind": "ipo", "rows": 6},
    "simpo": {"kind": "simpo", "rows": 6, "num_train_epochs": 2, "shuffle_dataset": True},
    "orpo": {"kind": "orpo", "rows": 5, "nll_on_prompt": True},
}


def train(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """One epoch (simpo: two, in another order) of a case, split over `processes`."""
    keep = KeepGradients()
    fields = dict(CASES[case])
    kind, count = fields.pop("kind", "dpo"), fields.pop("rows")
    data = lists(count) if case == "lists" else pairs(count)
    if case == "one rank without pairs":
        data = Dataset.from_list([SAME, SAME, *data.select(range(2))])
    accumulation = fields.get("gradient_accumulation_steps", 1)
    settings = {
        "per_device_train_batch_size": 4 // processes // accumulation,
        "max_steps": -1,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "optim": "sgd",
        **fields,
    }
    args = config(folder / case.replace(" ", "_"), kind, **settings)
    model = tiny_llama() if case == "all weights" else shared_model()
    made = trainer(args, model, data, callbacks=[keep], eval_dataset=pairs(5, seed=1))
    made.train()
    metrics = made.evaluate()
    return {
        "gradients": [{n.removeprefix("module."): g for n, g in step.items()} for step in keep.steps],
        "weights": digest(made.shared.named_parameters()),
        "log": made.state.log_history,
        "eval": metrics,
    }


def main(folder: Path) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    results = {case: train(case, folder, 2) for case in CASES}
    torch.save(results, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
