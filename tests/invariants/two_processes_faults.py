"""One of two processes of `test_two_processes_faults.py`: what each case ended with here.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_faults.py <folder> [die]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from hf_rlx.trainers.processes import agreed
from tests.trainers.tools import ScriptedSampler, by_ids, config, digest, rows, scripted, untimed

# Windows of 2 x 8 completions, 4 a prompt: prompts 0, 1 belong to rank 0, prompts 2, 3 to rank 1.
FIELDS: dict[str, Any] = {"per_device_train_batch_size": 8, "shuffle_dataset": False, "on_reward_error": "raise"}


def rank() -> int:
    """Of this process."""
    return torch.distributed.get_rank()


def broken(completion_ids, number, **_):
    """Raises for prompt 3, which is rank 1's."""
    if number[0] == 3:
        raise KeyError("answer")
    return by_ids(completion_ids, number)


def reserved(completion_ids, number, log_metric, **_):
    """Logs a metric under a name that is the trainer's own, on rank 1 only."""
    if number[0] == 3:
        log_metric("loss", 1.0)
    return by_ids(completion_ids, number)


def flat_then_broken(completion_ids, number, **_):
    """No signal at first; on rank 1 a fresh prompt then finds the function broken."""
    flat_then_broken.calls += 1
    if rank() == 1 and flat_then_broken.calls > 2:
        raise KeyError("answer")
    return [0.1] * len(completion_ids)


def broken_steps(completions, number, **_):
    """A step reward function that raises for prompt 3."""
    if number[0] == 3:
        raise KeyError("answer")
    return [[] for _ in completions]


def flat_later(completion_ids, number, **_):
    """A signal in the first window, prompts 0 to 3, and none after it."""
    return by_ids(completion_ids, number) if number[0] < 4 else [0.1] * len(completion_ids)


class Collective(ScriptedSampler):
    """Samples on all processes together, as vLLM does."""

    collective = True


def error_of(action: Any) -> str:
    """Type and text of what `action` raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def faults(folder: Path) -> dict[str, Any]:
    """Each case fails on rank 1 only."""
    told: dict[str, Any] = {}
    told["reward"] = error_of(scripted(config(folder, **FIELDS), reward=broken).train)
    told["metric"] = error_of(scripted(config(folder, **FIELDS), reward=reserved).train)
    told["step reward"] = error_of(scripted(config(folder, **FIELDS), step_reward_funcs=[broken_steps]).train)
    trainer = scripted(config(folder, **FIELDS), reward=broken, eval_dataset=rows(4))
    told["evaluation"] = error_of(trainer.evaluate)
    for name, kind in (("fresh prompts", ScriptedSampler), ("collective", Collective)):
        flat_then_broken.calls = 0
        args = config(folder, dynamic_sampling=True, dynamic_sampling_rounds=3, **FIELDS)
        trainer = scripted(args, reward=flat_then_broken)
        trainer.sampler = kind(trainer.tokenizer, args.max_completion_length)
        told[name] = error_of(trainer.train)
    return told


def uneven(folder: Path) -> dict[str, Any]:
    """Ten prompts in windows of four, twice over; and evaluation sets that leave a process with less, or nothing."""
    seen: list[int] = []

    def watched(completion_ids, number, **_):
        seen.append(number[0])
        return by_ids(completion_ids, number)

    args = config(folder, num_train_epochs=2, max_rollout_rows=1, **{**FIELDS, "max_steps": -1})
    trainer = scripted(args, reward=watched, count=10)
    trainer.train()
    train, seen[:] = list(seen), []
    result = {"steps": trainer.state.global_step, "train": train, "weights": digest(trainer.shared.named_parameters())}
    for count in (1, 3, 4):
        seen.clear()
        result[f"eval {count}"] = [trainer.evaluate(rows(count))["eval_reward"], sorted(seen)]
    return result


def train_flat_later(folder: Path, processes: int) -> list[str]:
    """The weights after each of three steps of Adam with weight decay, of which the first has a signal."""
    fields = {"max_steps": 3, "optim": "adamw_torch", "weight_decay": 0.1, "loss_type": "dr_grpo"}
    fields |= {"per_device_train_batch_size": 16 // processes}
    trainer = scripted(config(folder, **{**FIELDS, **fields}), reward=flat_later)
    kept: list[str] = []
    end = trainer.callback_handler.on_step_end

    def on_step_end(*args: Any, **kwargs: Any) -> Any:
        kept.append(digest(trainer.shared.named_parameters()))
        return end(*args, **kwargs)

    trainer.callback_handler.on_step_end = on_step_end
    trainer.train()
    return kept


def resumed(folder: Path) -> dict[str, Any]:
    """Four steps, and the last two of them once more from a checkpoint."""
    fields = {**FIELDS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "beta": 0.1}
    first = scripted(config(folder / "run", **fields))
    first.train()
    again = scripted(config(folder / "run", **fields))
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    result = {}
    for name, trainer in (("first", first), ("again", again)):
        logs = [untimed(entry) for entry in trainer.state.log_history if "loss" in entry]
        result[name] = [digest(trainer.shared.named_parameters()), logs]
    return result


def die(folder: Path) -> None:
    """Rank 1 is gone in the middle of a rollout, without a word."""

    def deadly(completion_ids, number, **_):
        if number[0] == 3:
            os._exit(9)
        return by_ids(completion_ids, number)

    scripted(config(folder, **FIELDS), reward=deadly).train()


def main(folder: Path) -> None:
    """All cases, one after the other: a failure that all have agreed on leaves the processes usable."""
    torch.set_num_threads(1)
    if sys.argv[2:] == ["die"]:
        die(folder)
        return
    results = {"faults": faults(folder)}
    results["agreed"] = [agreed(False), agreed(rank() == 1), agreed(True)]
    results["uneven"] = uneven(folder)
    results["flat later"] = train_flat_later(folder, 2)
    results["resumed"] = resumed(folder)
    (folder / f"rank{rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
