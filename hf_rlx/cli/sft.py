"""`hf-rlx sft`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training

RECIPE = training.Recipe(
    "sft",
    "hf_rlx.trainers.sft:SFTConfig",
    "hf_rlx.trainers.sft:SFTTrainer",
    "demonstrations",
    adapter_rate=2e-4,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx sft` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
