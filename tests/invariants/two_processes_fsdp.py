"""One of two processes of `test_fsdp.py`: trains each case under FSDP2 on half of the prompts.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_fsdp.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from hf_rlx.models.sharding import (
    full_optimizer_state,
    full_state,
    is_sharded,
    load_full_state,
    whole,
    whole_weights,
)
from hf_rlx.rollout.generate import Generator
from tests.tiny import causal_lm
from tests.trainers.tools import by_ids, config, rows, scripted, tiny_llama, untimed

SYNC: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
# Windows of 2 x 8 completions, or of 1 x 16: prompts 0, 1 belong to rank 0, prompts 2, 3 to rank 1.
CASES: dict[str, dict[str, Any]] = {
    "lora": {"beta": 0.3, "max_grad_norm": 0.05},
    "full": {"beta": 0.3, "max_grad_norm": 0.05},
    "full, accumulated": {"gradient_accumulation_steps": 2, "loss_type": "dapo"},
    "full, tied, two passes": {"num_iterations": 2, "beta": 0.3},
    "lora, checkpointing": {"gradient_checkpointing": True},
    "lora, one rank flat": {"beta": 0.3},
    "lora, all flat": {},
    "lora, reference moves": {"beta": 0.3, "max_steps": 2, **SYNC},
    "full, reference moves": {"beta": 0.3, "max_steps": 2, **SYNC},
    "full, experts": {"max_tokens_per_forward": 20, "beta": 0.3},
    "full, padded": {"packing": False, "max_tokens_per_forward": 30, "kl_in_reward": True, "beta": 0.3},
}


def flat_on_rank_zero(completion_ids, number, **_):
    """Signal on prompts 2 and 3 only."""
    return [0.1] * len(completion_ids) if number[0] < 2 else by_ids(completion_ids, number)


def flat(completion_ids, **_):
    """No signal at all."""
    return [0.1] * len(completion_ids)


def trainer_of(case: str, folder: Path, processes: int, drift: float = 0.05, **fields: Any) -> Any:
    """A trainer of one step of SGD, unless `fields` say otherwise."""
    fields = {"optim": "sgd", "learning_rate": 0.1, "shuffle_dataset": False, **CASES.get(case, {}), **fields}
    batch = 16 // processes // fields.get("gradient_accumulation_steps", 1)
    args = config(folder, per_device_train_batch_size=batch, **fields)
    reward = flat_on_rank_zero if "one rank flat" in case else flat if "all flat" in case else by_ids
    given: dict[str, Any] = {"model": tiny_llama(tie_word_embeddings="tied" in case)}
    if "experts" in case:
        given["model"] = causal_lm("qwen3_moe", vocab_size=101)
    if case.startswith("full"):
        given["peft_config"] = None
    return scripted(args, reward=reward, drift=drift, eval_dataset=rows(5), **given)


def train(case: str, folder: Path, processes: int, **fields: Any) -> dict[str, Any]:
    """Train and evaluate a case, split over `processes`."""
    trainer = trainer_of(case, folder, processes, **fields)
    trainer.train()
    evaluated = trainer.evaluate()
    return {
        "sharded": is_sharded(trainer.shared),
        "packed": trainer.shared.plan.packed,
        "weights": full_state(trainer.shared),
        "log": [untimed(entry) for entry in trainer.state.log_history],
        "eval": untimed(evaluated),
    }


def sample(folder: Path, **fields: Any) -> dict[str, Any]:
    """Two windows from the built-in generator, whose completions end at different lengths on each process."""
    trainer = trainer_of("lora", folder, 2, max_steps=2, max_completion_length=12, **fields)
    trainer.sampler = Generator(trainer.shared, trainer.tokenizer, 64)
    trainer.train()
    return {"weights": full_state(trainer.shared), "log": [untimed(entry) for entry in trainer.state.log_history]}


def save_and_resume(case: str, folder: Path) -> dict[str, Any]:
    """Four steps of Adam; the last two of them once more from a checkpoint; and the files."""
    fields = {
        "optim": "adamw_torch",
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "beta": 0.1,
        "fsdp": True,
    }
    run = folder / f"run {case}"
    first = trainer_of(case, run, 2, **fields)
    first.train()
    again = trainer_of(case, run, 2, **fields)
    again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    first.save_model(str(run / "saved"))
    result = {
        "first": [full_state(first.shared), [untimed(e) for e in first.state.log_history if "loss" in e]],
        "again": [full_state(again.shared), [untimed(e) for e in again.state.log_history if "loss" in e]],
        "optimizer": full_optimizer_state(first.shared, first.optimizer),
    }
    box = [result["first"][0]]
    torch.distributed.broadcast_object_list(box)
    load_full_state(again.shared, {name: tensor + 1 for name, tensor in box[0].items()})
    return {**result, "put back": full_state(again.shared)}


def not_finite(folder: Path) -> str:
    """A weight of which only rank 1 holds the entry that is NaN."""
    trainer = trainer_of("full", folder, 2, max_steps=2, fsdp=True)
    step = trainer.callback_handler.on_step_end

    def on_step_end(*args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            next(trainer.shared.parameters()).to_local().data[-1, -1] = float("nan")
        return step(*args, **kwargs)

    trainer.callback_handler.on_step_end = on_step_end
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def half(folder: Path) -> dict[str, Any]:
    """bfloat16, with a reference that the policy has not left yet, and the built-in generator."""
    trainer = trainer_of("full", folder, 2, max_steps=2, fsdp=True, bf16=True, drift=0.0)
    trainer.sampler = Generator(trainer.shared, trainer.tokenizer, 64)
    trainer.train()
    types = {p.dtype for p in trainer.shared.parameters()}
    return {"log": [untimed(entry) for entry in trainer.state.log_history], "types": types}


def gathered(folder: Path) -> dict[str, Any]:
    """Weights are whole inside the block and split around it, also after an exception. Training goes twice."""
    trainer = trainer_of("full", folder, 2, fsdp=True)
    evaluated = trainer.evaluate()["eval_reward"]
    trainer.train()
    trainer.train()
    assert trainer.evaluate()["eval_reward"] == evaluated

    def held() -> int:
        return sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in trainer.shared.parameters())

    before = held()
    with whole_weights(trainer.shared):
        inside = held()
    try:
        with whole_weights(trainer.shared):
            raise KeyError
    except KeyError:
        pass
    return {"before": before, "inside": inside, "after": held()}


class Forked(torch.nn.Module):
    """Each process goes through a layer of its own, as tokens go to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 2) -> (n, 2)"""
        return self.ways[torch.distributed.get_rank()](x)


def forked() -> list[torch.Tensor]:
    """The gradients of both layers."""
    model = fully_shard(Forked())
    with whole_weights(model):
        pass
    model(torch.ones(1, 2)).sum().backward()
    return [whole(layer.weight.grad) for layer in model.ways]


def main(folder: Path) -> None:
    """All cases, one after the other; DDP first, as FSDP stays on in a process."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"sampled, ddp": sample(folder)}
    for case in CASES:
        results[case] = train(case, folder, 2, fsdp=True)
    results["sampled"] = sample(folder, fsdp=True)
    for case in ("lora", "full, tied"):
        results[f"resumed {case}"] = save_and_resume(case, folder)
    results["half"] = half(folder)
    results["nan"] = not_finite(folder)
    results["forked"] = forked()
    results["gathered"] = gathered(folder)
    rank = torch.distributed.get_rank()
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
