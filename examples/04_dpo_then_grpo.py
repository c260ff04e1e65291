"""DPO, iterative DPO and GRPO at equal compute, alone and one after the other: a rule of thumb, tested on a CPU.

    python examples/04_dpo_then_grpo.py

The rule: if you can write a checker, start with GRPO; if you only have preference pairs, start with DPO, and move to
an iterative, on-policy variant when it plateaus. Here a checker exists (is the number right?) and pairs are made with
it, so that all can be run on one task, the bundled model's sums, and be compared:

    DPO          pairs of a right and a wrong answer, sampled once by the model before training, several passes
    iterative    rounds of sampling with the policy as it is, pairs of a right and a wrong answer, one pass of DPO
    GRPO         the checker as reward
    staged       DPO until it plateaus, then iterative DPO until it plateaus, then GRPO
    switch       DPO until it plateaus, then GRPO

Equal compute is equal tokens: every sampled and every trained token counts one, prompts included, wherever they come
from: also the tokens of the pairs that DPO starts with. Looks at validation problems, which tell the plateau, are not
counted; nor are the passes of the reference, which all have. An arm plateaus when the best validation accuracy has
not risen by 0.01 for two looks. Accuracy is of one answer a problem, sampled at temperature 1, on problems that no
model has seen. All arms have the same adapter; learning rates are those of the demo and were not tuned further.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from hf_rlx import (
    DPOConfig,
    DPOTrainer,
    Generator,
    GRPOConfig,
    GRPOTrainer,
    IterativeDPOConfig,
    IterativeDPOTrainer,
    SamplingParams,
    SharedModel,
    load_causal_lm,
    load_tokenizer,
)
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.functional import wilson_interval
from hf_rlx.verifiers import NumberVerifier

MAX_TOKENS, SAMPLES, BATCH = 8, 4, 64
RISE, PATIENCE = 0.01, 2  # what a plateau is
RIGHT = NumberVerifier("whole")


@dataclass
class Meter:
    """Counts an arm's tokens, and keeps its curve: tokens, seconds, validation accuracy, by stage."""

    budget: int
    look: Callable[[], float]
    every: int
    sampled: int = 0
    trained: int = 0
    seconds: float = 0.0
    curve: list[tuple[str, int, float, float]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Sampled and trained."""
        return self.sampled + self.trained

    @property
    def spent(self) -> bool:
        """The budget is."""
        return self.tokens >= self.budget

    def sampler(self, generator: Generator) -> Generator:
        """Count what a generator reads and writes."""
        inner = generator.generate

        def generate(prompt_ids: Any, num_generations: int, *args: Any, **kwargs: Any) -> Any:
            done = inner(prompt_ids, num_generations, *args, **kwargs)
            self.sampled += num_generations * sum(len(ids) for ids in prompt_ids)
            self.sampled += sum(len(c.token_ids) for completions in done for c in completions)
            return done

        generator.generate = generate  # type: ignore[method-assign]
        return generator

    def trainer(self, trainer: Any) -> None:
        """Count what a trainer trains on."""
        inner = trainer.update

        def update(model: Any, batch: Any) -> Any:
            for group in batch.groups:
                self.trained += sum(group.prompt_ids.numel() + ids.numel() for ids in group.response_ids)
            return inner(model, batch)

        trainer.update = update


class Watch(TrainerCallback):
    """Ends a stage when the budget is spent or, where asked for, when it plateaus."""

    def __init__(self, meter: Meter, stage: str, until_plateau: bool) -> None:
        self.meter, self.stage, self.until_plateau = meter, stage, until_plateau
        self.best, self.waited, self.next = -math.inf, 0, meter.tokens
        self.start = time.perf_counter()

    def examine(self) -> bool:
        """Add a point to the curve; whether the stage has plateaued."""
        meter = self.meter
        meter.seconds += time.perf_counter() - self.start
        accuracy = meter.look()
        meter.curve.append((self.stage, meter.tokens, meter.seconds, accuracy))
        self.waited = 0 if accuracy > self.best + RISE else self.waited + 1
        self.best = max(self.best, accuracy)
        self.next = meter.tokens + meter.every
        self.start = time.perf_counter()
        return self.until_plateau and self.waited >= PATIENCE

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Perhaps a look; perhaps the end."""
        done = self.meter.spent
        if self.meter.tokens >= self.next or done:
            done = self.examine() or done
        control.should_training_stop = control.should_training_stop or done


class Bench:
    """One seed: the model, the problems, and how they are judged."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args, self.seed, self.tokenizer = args, seed, load_tokenizer("tiny")
        task = arithmetic_task(args.problems + args.validation, args.questions, seed)
        self.train = task.train.select(range(args.problems))
        self.validation = task.train.select(range(args.problems, args.problems + args.validation))
        self.test = task.test
        self.folder = Path(args.output)

    def model(self) -> SharedModel:
        """The bundled model with a fresh adapter, the same for all arms."""
        torch.manual_seed(self.seed)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        return SharedModel.build(load_causal_lm("tiny"), lora)

    def accuracy(self, model: SharedModel, rows: Dataset) -> float:
        """Share of right answers, one sampled for each problem."""
        prompts = [self.tokenizer(prompt)["input_ids"] for prompt in rows["prompt"]]
        params = SamplingParams(MAX_TOKENS, seed=1234 + self.seed)
        done = Generator(model, self.tokenizer, 128).generate(prompts, 1, params)
        return statistics.mean(RIGHT(rows["prompt"], [c[0].text for c in done], answer=rows["answer"]))

    def pairs(self, model: SharedModel, meter: Meter) -> Dataset:
        """A right and a wrong answer of the model to every problem where it gives both."""
        prompts = [self.tokenizer(prompt)["input_ids"] for prompt in self.train["prompt"]]
        generator = meter.sampler(Generator(model, self.tokenizer, 128))
        done = generator.generate(prompts, SAMPLES, SamplingParams(MAX_TOKENS, seed=self.seed))
        rows = []
        for row, completions in zip(self.train, done, strict=True):
            texts = [c.text for c in completions if c.finished]
            right = RIGHT([row["prompt"]] * len(texts), texts, answer=[row["answer"]] * len(texts))
            sides = {bool(r): text for r, text in zip(right, texts, strict=True)}
            if len(sides) == 2:
                rows.append({"prompt": row["prompt"], "chosen": sides[True], "rejected": sides[False]})
        return Dataset.from_list(rows)

    def settings(self, stage: str) -> dict[str, Any]:
        """Fields that all configurations share."""
        return {
            "output_dir": str(self.folder / stage),
            "max_steps": 1_000_000,  # the watch ends it
            "learning_rate": getattr(self.args, f"{stage}_rate"),
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": 50,
            "disable_tqdm": True,
            "seed": self.seed,
        }

    def dpo(self, model: SharedModel, meter: Meter, watch: Watch) -> None:
        """Passes over pairs that the model made before."""
        trainer = DPOTrainer(
            model,
            args=DPOConfig(**self.settings("dpo"), per_device_train_batch_size=BATCH, beta=self.args.beta),
            train_dataset=self.pairs(model, meter),
            processing_class=self.tokenizer,
            callbacks=[watch],
        )
        meter.trainer(trainer)
        trainer.train()

    def iterative(self, model: SharedModel, meter: Meter, watch: Watch) -> None:
        """Rounds of sampling, pairs, and one pass over them."""
        trainer = IterativeDPOTrainer(
            model,
            RIGHT,
            IterativeDPOConfig(
                **self.settings("iterative"),
                per_device_train_batch_size=BATCH,
                prompts_per_round=min(4 * BATCH, len(self.train)),
                num_generations=SAMPLES,
                max_completion_length=MAX_TOKENS,
                max_rollout_rows=128,
                beta=self.args.beta,
            ),
            train_dataset=self.train,
            processing_class=self.tokenizer,
            callbacks=[watch],
        )
        meter.sampler(trainer.sampler)
        meter.trainer(trainer)
        trainer.train()

    def grpo(self, model: SharedModel, meter: Meter, watch: Watch) -> None:
        """The checker as reward."""
        trainer = GRPOTrainer(
            model,
            RIGHT,
            GRPOConfig(
                **self.settings("grpo"),
                per_device_train_batch_size=2 * BATCH,
                num_generations=8,
                max_completion_length=MAX_TOKENS,
                max_rollout_rows=128,
            ),
            train_dataset=self.train,
            processing_class=self.tokenizer,
            callbacks=[watch],
        )
        meter.sampler(trainer.sampler)
        meter.trainer(trainer)
        trainer.train()

    def run(self, stages: list[str]) -> dict[str, Any]:
        """One arm; all stages but the last end at their plateau, the last with the budget."""
        model = self.model()
        self.folder = Path(self.args.output) / f"seed_{self.seed}" / "_".join(stages)
        meter = Meter(self.args.budget, lambda: self.accuracy(model, self.validation), self.args.budget // 16)
        for stage in stages:
            if not meter.spent:
                getattr(self, stage)(model, meter, Watch(meter, stage, until_plateau=stage != stages[-1]))
        return {
            "stages": stages,
            "accuracy": self.accuracy(model, self.test),
            "sampled": meter.sampled,
            "trained": meter.trained,
            "seconds": meter.seconds,
            "curve": meter.curve,
        }


ARMS = {
    "DPO": ["dpo"],
    "iterative DPO": ["iterative"],
    "GRPO": ["grpo"],
    "DPO, iterative, GRPO": ["dpo", "iterative", "grpo"],
    "DPO, GRPO": ["dpo", "grpo"],
}


def line(name: str, runs: list[dict[str, Any]], questions: int) -> str:
    """One row of the table: all seeds together."""
    each = [run["accuracy"] for run in runs]
    right = round(sum(each) * questions)
    low, high = wilson_interval(right, questions * len(runs))
    means = [statistics.mean(run[name] for run in runs) for name in ("sampled", "trained", "seconds")]
    shares = dict.fromkeys(runs[0]["stages"], 0.0)
    for run in runs:
        before = 0
        for stage, tokens, _, _ in run["curve"]:
            shares[stage] += (tokens - before) / run["curve"][-1][1] / len(runs)
            before = tokens
    told = ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items())
    return (
        f"| {name} | {statistics.mean(each):.3f} | {low:.3f} to {high:.3f} | {min(each):.3f} to {max(each):.3f} | "
        f"{means[0]:,.0f} | {means[1]:,.0f} | {means[2]:.0f} s | {told} |"
    )


def main() -> None:
    """Run all arms on all seeds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/dpo_then_grpo")
    parser.add_argument("--arms", default=",".join("+".join(stages) for stages in ARMS.values()))
    parser.add_argument("--budget", type=int, default=300_000, help="tokens of an arm, sampled and trained")
    parser.add_argument("--problems", type=int, default=1000, help="to train on")
    parser.add_argument("--validation", type=int, default=256, help="problems that tell the plateau")
    parser.add_argument("--questions", type=int, default=512, help="held-out problems")
    parser.add_argument("--beta", type=float, default=0.1, help="of both kinds of DPO")
    parser.add_argument("--dpo-rate", type=float, default=5e-4)
    parser.add_argument("--iterative-rate", type=float, default=5e-4)
    parser.add_argument("--grpo-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # its matrices are too small to share
    wanted = args.arms.split(",")
    arms = {name: stages for name, stages in ARMS.items() if "+".join(stages) in wanted}
    benches = [Bench(args, seed) for seed in range(args.seeds)]
    start = statistics.mean(bench.accuracy(bench.model(), bench.test) for bench in benches)
    print(f"before training: {start:.3f} of {args.questions} held-out problems x {args.seeds} seeds", flush=True)
    print("| arm | accuracy | 95 % interval | over seeds | sampled | trained | time | tokens by stage |")
    print("|---|---|---|---|---|---|---|---|")
    found = {}
    for name, stages in arms.items():
        found[name] = [bench.run(stages) for bench in benches]
        print(line(name, found[name], args.questions), flush=True)
    Path(args.output).mkdir(parents=True, exist_ok=True)
    (Path(args.output) / "arms.json").write_text(json.dumps({"before": start, "arms": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
