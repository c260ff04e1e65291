"""A GRPO script written for TRL, with one line changed.

    python examples/migrate_from_trl.py                    # the bundled model, offline, under half a minute on a CPU
    python examples/migrate_from_trl.py --model smollm2    # any Hub id, folder or short name

What stays: the `prompt` column, the reward function's signature, the names of all configuration fields and of the
trainer's arguments, the log keys. What differs on purpose, and why, is in `hf_rlx.DIFFERS_FROM_TRL`; to compute
exactly what TRL's defaults compute, replace `GRPOConfig(` by `GRPOConfig.preset("trl", `.
"""

from __future__ import annotations

import argparse

from datasets import Dataset

# from trl import GRPOConfig, GRPOTrainer
from hf_rlx import GRPOConfig, GRPOTrainer


def num_unique_characters(completions, **kwargs):
    """Reward: how many different characters a completion has."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(set(text))) for text in texts]


def main() -> None:
    """Train, and say what became of the reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="Hub id, folder, or the bundled 'tiny'")
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--output_dir", default="runs/migrate_from_trl")
    options = parser.parse_args()

    dataset = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(40, 90) for b in range(40, 90)]})

    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=num_unique_characters,
        args=GRPOConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            learning_rate=1e-3,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=16,
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=dataset,
    )
    trainer.train()

    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    share = max(1, len(rewards) // 5)
    first, last = (sum(part) / share for part in (rewards[:share], rewards[-share:]))
    print(f"different characters a completion: {first:.2f} in the first steps, {last:.2f} in the last")


if __name__ == "__main__":
    main()
