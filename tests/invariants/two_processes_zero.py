"""One of two processes of `test_zero.py`: trains each case under DeepSpeed's ZeRO on half of the prompts.

RANK=0 WORLD_SIZE=2 ... python tests/invariants/two_processes_zero.py <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from hf_rlx.rollout.generate import Generator
from tests.invariants.two_processes_fsdp import SYNC, flat, flat_on_rank_zero
from tests.tiny import causal_lm
from tests.trainers.pair_tools import config as pair_config
from tests.trainers.pair_tools import trainer as pair_trainer
from tests.trainers.ppo_tools import ppo, ppo_config, some
from tests.trainers.reward_tools import config as reward_config
from tests.trainers.reward_tools import pairs, shared_model
from tests.trainers.reward_tools import trainer as reward_trainer
from tests.trainers.tools import by_ids, config, rows, scripted, tiny_llama, untimed


def stage(number: int) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {"zero_optimization": {"stage": number}, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}


# As in `two_processes_fsdp.py`: prompts 0, 1 belong to rank 0, prompts 2, 3 to rank 1.
CASES: dict[str, dict[str, Any]] = {
    "lora": {"beta": 0.3, "max_grad_norm": 0.05},
    "full": {"beta": 0.3, "max_grad_norm": 0.05},
    "full, stage 1, accumulated": {"gradient_accumulation_steps": 2, "loss_type": "dapo"},
    "lora, accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0},
    "lora, adam, two passes": {"num_iterations": 2, "beta": 0.3, "optim": "adamw_torch", "learning_rate": 1e-3},
    "lora, checkpointing": {"gradient_checkpointing": True},
    "lora, one rank flat": {"beta": 0.3},
    "lora, all flat": {"optim": "adamw_torch"},
    "full, experts": {"max_tokens_per_forward": 20, "beta": 0.3},
    "lora, reference moves": {"beta": 0.3, "max_steps": 2, **SYNC},
    "full, reference moves": {"beta": 0.3, "max_steps": 2, **SYNC},
    "full, padded": {"packing": False, "max_tokens_per_forward": 30, "kl_in_reward": True, "beta": 0.3},
}


def trainer_of(case: str, folder: Path, processes: int, drift: float = 0.05, **fields: Any) -> Any:
    """A trainer of one step of SGD, unless `fields` say otherwise."""
    fields = {"optim": "sgd", "learning_rate": 0.1, "shuffle_dataset": False, **CASES.get(case, {}), **fields}
    if processes > 1:
        fields.setdefault("deepspeed", stage(1 if "stage 1" in case else 2))
    batch = 16 // processes // fields.get("gradient_accumulation_steps", 1)
    args = config(folder, per_device_train_batch_size=batch, **fields)
    reward = flat_on_rank_zero if "one rank flat" in case else flat if "all flat" in case else by_ids
    given: dict[str, Any] = {"model": causal_lm("qwen3_moe", vocab_size=101) if "experts" in case else tiny_llama()}
    if case.startswith("full"):
        given["peft_config"] = None
    return scripted(args, reward=reward, drift=drift, eval_dataset=rows(5), **given)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Every weight by name."""
    return {name: p.detach().clone() for name, p in trainer.shared.named_parameters()}


def train(case: str, folder: Path, processes: int, **fields: Any) -> dict[str, Any]:
    """Train and evaluate a case, split over `processes`."""
    trainer = trainer_of(case, folder, processes, **fields)
    trainer.train()
    evaluated = trainer.evaluate()
    return {
        "zero": trainer.zero,
        "weights": weights_of(trainer),
        "log": [untimed(entry) for entry in trainer.state.log_history],
        "eval": untimed(evaluated),
    }


def ppo_steps(folder: Path, processes: int, **fields: Any) -> dict[str, Any]:
    """Two windows of two passes with the critic as a head."""
    fields |= {"deepspeed": stage(2)} if processes > 1 else {}
    args = ppo_config(
        folder,
        per_device_train_batch_size=16 // processes,
        max_steps=4,
        num_iterations=2,
        shuffle_dataset=False,
        beta=0.1,
        max_grad_norm=0.0,
        detach_critic=False,
        **fields,
    )
    trainer = ppo(args, some, count=32, drift=0.05)
    trainer.train()
    return {"weights": weights_of(trainer), "log": [untimed(e) for e in trainer.state.log_history if "loss" in e]}


def two_trainers_of_one_model(folder: Path, processes: int) -> dict[str, Any]:
    """A reward role, then DPO on the policy of the same model."""
    fields: dict[str, Any] = {"deepspeed": stage(2)} if processes > 1 else {}
    common = {"per_device_train_batch_size": 4 // processes, "max_steps": 3, "optim": "adamw_torch", **fields}
    model = shared_model()
    reward_trainer(reward_config(folder / "reward", shuffle_dataset=False, **common), model, pairs(12)).train()
    dpo = pair_trainer(pair_config(folder / "dpo", shuffle_dataset=False, **common), model, pairs(12))
    dpo.train()
    return {"weights": weights_of(dpo), "log": [untimed(e) for e in dpo.state.log_history if "loss" in e]}


def save_and_resume(case: str, folder: Path) -> dict[str, Any]:
    """Four steps of Adam; the last two of them once more from a checkpoint."""
    fields = {"optim": "adamw_torch", "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "beta": 0.1}
    run = folder / f"run {case}"
    first = trainer_of(case, run, 2, **fields)
    first.train()
    again = trainer_of(case, run, 2, **fields)
    again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    first.save_model(str(run / "saved"))
    result: dict[str, Any] = {}
    for name, trainer in (("first", first), ("again", again)):
        result[name] = [weights_of(trainer), [untimed(e) for e in trainer.state.log_history if "loss" in e]]
    try:
        again.train()
    except RuntimeError as error:
        result["twice"] = str(error)
    return result


def half(folder: Path, bf16: bool) -> dict[str, Any]:
    """bfloat16 or float32, with a reference that the policy has not left yet, and the built-in generator."""
    trainer = trainer_of("full", folder, 2, max_steps=2, bf16=bf16, drift=0.0)
    trainer.sampler = Generator(trainer.shared, trainer.tokenizer, 64)
    trainer.train()
    return {
        "log": [untimed(entry) for entry in trainer.state.log_history],
        "types": {p.dtype for p in trainer.shared.parameters()},
    }


def not_finite(folder: Path) -> dict[str, Any]:
    """Rank 1's gradient is NaN in the second of three steps, or in every one."""
    result: dict[str, Any] = {}
    for name, steps in (("once", [1]), ("always", [0, 1, 2])):
        trainer = trainer_of("lora", folder, 2, max_steps=3, max_skipped_steps=1, optim="adamw_torch")
        add_up = trainer.backward

        def backward(loss: torch.Tensor, trainer: Any = trainer, steps: Any = steps, add_up: Any = add_up) -> None:
            bad = torch.distributed.get_rank() == 1 and trainer.state.global_step in steps
            add_up(loss * float("nan") if bad else loss)

        trainer.backward = backward
        try:
            trainer.train()
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
        else:
            finite = all(bool(w.isfinite().all()) for w in weights_of(trainer).values())
            skipped = [e.get("skipped_steps", 0) for e in trainer.state.log_history if "loss" in e]
            result[name] = {"finite": finite, "skipped": skipped}
    return result


def refused(folder: Path) -> list[str]:
    """What PPO says of a critic that steps by itself."""
    messages = []
    for fields in ({"critic_adapter": True}, {"critic_warmup_steps": 1}):
        try:
            ppo(ppo_config(folder, deepspeed=stage(2), **fields), some)
        except ValueError as error:
            messages.append(str(error))
    return messages


def main(folder: Path) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {case: train(case, folder, 2) for case in CASES}
    for case in ("lora", "full"):
        results[f"resumed {case}"] = save_and_resume(case, folder)
    results["ppo"] = ppo_steps(folder, 2)
    results["ppo, early stop"] = ppo_steps(folder, 2, target_kl=1e-7)
    results["two trainers"] = two_trainers_of_one_model(folder, 2)
    results["half"], results["float"] = half(folder, True), half(folder, False)
    results["not finite"] = not_finite(folder)
    results["refused"] = refused(folder)
    rank = torch.distributed.get_rank()
    torch.save(results, folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
