"""Time to a result: training time until a held-out accuracy is reached, hf_rlx against TRL with the same settings.

    pip install "hf_rlx" trl
    python examples/benchmarks/time_to_result.py                                  # the bundled model, three seeds
    python examples/benchmarks/time_to_result.py --model smollm2 --target 0.45    # hours for TRL on two cores

Both sides train the same LoRA (r=16, all linear layers) from the same model on the same prompts with the same reward,
learning rate, batch, beta 0.04 and averaging, each in a process of its own. Every few steps both are asked the same
held-out questions through transformers' own `generate`, one answer at temperature 1 with a fixed seed; the time of
that is not counted. A run ends when the accuracy reaches the target, or after `--max-steps` without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from hf_rlx import load_causal_lm
from hf_rlx.data.tasks import Task, arithmetic_task, spoken_arithmetic_task
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.verifiers import NumberVerifier


def task_of(model: str, questions: int, seed: int) -> tuple[Task, NumberVerifier, dict[str, Any]]:
    """Task, reward and sizes: sums as text for the bundled model, in words for any other."""
    if model == "tiny":
        fields = {"per_device_train_batch_size": 128, "learning_rate": 1e-3}
        return arithmetic_task(2000, questions, seed), NumberVerifier("whole"), fields
    fields = {"per_device_train_batch_size": 32, "learning_rate": 2e-4}
    return spoken_arithmetic_task(500, questions, seed), NumberVerifier("last"), fields


class Watch(TrainerCallback):
    """Counts training time, and asks the held-out questions every `every` steps until the target is reached."""

    def __init__(self, task: Task, verifier: NumberVerifier, tokenizer: Any, args: argparse.Namespace) -> None:
        self.rows, self.verifier, self.tokenizer, self.args = task.test.to_list(), verifier, tokenizer, args
        self.length = task.max_completion_length
        self.prompts = [encode_prompt(row["prompt"], tokenizer, {}).ids for row in self.rows]
        self.policy: Any = None
        self.seconds, self._start = 0.0, 0.0
        self.curve: list[tuple[int, float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The clock runs."""
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock stops; perhaps an examination."""
        self.seconds += time.perf_counter() - self._start
        if state.global_step % self.args.every == 0:
            accuracy = self.accuracy()
            self.curve.append((state.global_step, self.seconds, accuracy))
            control.should_training_stop = control.should_training_stop or accuracy >= self.args.target

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out questions that one sampled answer solves."""
        training = self.policy.training
        self.policy.eval()
        right, state = 0.0, torch.get_rng_state()
        torch.manual_seed(1234)
        for start in range(0, len(self.rows), 64):
            rows, prompts = self.rows[start : start + 64], self.prompts[start : start + 64]
            batch = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
            ids = self.policy.generate(
                **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=self.length
            )
            texts = self.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
            right += sum(self.verifier(prompts=None, completions=texts, **columns))
        torch.set_rng_state(state)
        self.policy.train(training)
        return right / len(self.rows)


def run(side: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train one side until the target; the curve of (step, seconds, accuracy)."""
    torch.set_num_threads(args.threads)
    task, verifier, sizes = task_of(args.model, args.questions, args.seed)
    tokenizer = load_tokenizer(args.model)
    watch = Watch(task, verifier, tokenizer, args)
    fields = {
        "output_dir": folder,
        "max_steps": args.max_steps,
        "num_generations": 8,
        "max_completion_length": task.max_completion_length,
        "beta": 0.04,
        "loss_type": "grpo",
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 50,
        "disable_tqdm": True,
        "seed": args.seed,
        **sizes,
    }
    if side == "ours":
        from hf_rlx import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer
    trainer = GRPOTrainer(
        load_causal_lm(args.model),
        verifier,
        GRPOConfig(**fields),
        train_dataset=task.train,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[watch],
    )
    watch.policy = trainer.shared.model if side == "ours" else trainer.model
    before = watch.accuracy()
    trainer.train()
    return {"before": before, "curve": watch.curve}


def main() -> None:
    """Print one line a run, and the ratio over all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help='"tiny", "smollm2", a folder or a Hub id')
    parser.add_argument("--target", type=float, default=0.8, help="held-out accuracy that ends a run")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps between two examinations")
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        with tempfile.TemporaryDirectory() as folder:
            Path(args.result).write_text(json.dumps(run(args.side, args, folder)))
        return
    times: dict[str, list[float]] = {"ours": [], "trl": []}
    for seed in args.seeds:
        for side in times:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result.json"
                command = [sys.executable, __file__, *sys.argv[1:]]
                command += [f"--side={side}", f"--seed={seed}", f"--result={result}"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(done.stderr[-3000:])
                found = json.loads(result.read_text())
            step, seconds, accuracy = found["curve"][-1]
            reached = accuracy >= args.target
            times[side].append(seconds if reached else float("nan"))
            print(
                f"seed {seed} {side:5} {found['before']:.3f} -> {accuracy:.3f} in {step} steps, {seconds:.1f} s "
                f"({seconds / step:.2f} s a step){'' if reached else ', target not reached'}",
                flush=True,
            )
    ours, theirs = (statistics.median(times[side]) for side in times)
    print(f"median time to {args.target}: ours {ours:.1f} s, TRL {theirs:.1f} s, {theirs / ours:.2f}x")


if __name__ == "__main__":
    main()
