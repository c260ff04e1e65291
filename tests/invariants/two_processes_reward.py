"""One of two processes of `test_reward_processes.py`: trains each case on its share of the rows.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_reward.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from hf_rlx.models.classifier import from_causal_lm
from tests.trainers.prm_tools import config as step_config
from tests.trainers.prm_tools import solutions
from tests.trainers.prm_tools import trainer as step_trainer
from tests.trainers.reward_tools import config, lists, pairs, shared_model, trainer
from tests.trainers.tools import KeepGradients, digest, tiny_llama

SAME = {"prompt": "1=", "chosen": "a", "rejected": "a"}

# Steps of four rows over all processes, and a last one of what is left.
CASES: dict[str, dict[str, Any]] = {
    "pairs": {"rows": 6},
    "one row left": {"rows": 5},
    "accumulated": {"rows": 7, "gradient_accumulation_steps": 2},
    "lists": {"rows": 6, "loss_type": "all_pairs"},
    "centred": {"rows": 4, "center_rewards_coefficient": 0.1},
    "ensemble": {"rows": 6, "ensemble_size": 2},
    "classifier": {"rows": 5},
    "one rank without pairs": {"rows": 4},
    "checkpointing": {"rows": 4, "gradient_checkpointing": True},
    "steps": {"rows": 7},
    "one rank without steps": {"rows": 4},
}


def train(case: str, folder: Path, processes: int) -> dict[str, Any]:
    """One epoch of a case, split over `processes`."""
    keep = KeepGradients()
    fields = dict(CASES[case])
    count = fields.pop("rows")
    data = lists(count) if case == "lists" else pairs(count)
    if case == "one rank without pairs":
        data = Dataset.from_list([SAME, SAME, *data.select(range(2))])
    accumulation = fields.get("gradient_accumulation_steps", 1)
    steps = "steps" in case
    if steps:
        unknown = {"prompt": "1=", "completions": ["a"], "labels": [None]}
        data = solutions(count)
        if case == "one rank without steps":
            data = [unknown, unknown, data[0], data[1]]
    args = (step_config if steps else config)(
        folder,
        per_device_train_batch_size=4 // processes // accumulation,
        max_steps=-1,
        num_train_epochs=1,
        learning_rate=0.01,
        max_grad_norm=0.0,
        shuffle_dataset=False,
        optim="sgd",
        **fields,
    )
    model = from_causal_lm(tiny_llama()) if case == "classifier" else shared_model()
    held_out = solutions(5, seed=3) if steps else lists(5, seed=3) if case == "lists" else pairs(5)
    made = step_trainer if steps else trainer
    rewards = made(args, model, data, callbacks=[keep], eval_dataset=held_out)
    rewards.train()
    metrics = rewards.evaluate()
    return {
        "gradients": [{n.removeprefix("module."): g for n, g in step.items()} for step in keep.steps],
        "weights": digest(rewards.shared.named_parameters()),
        "log": rewards.state.log_history,
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
