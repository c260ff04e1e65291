"""`hf-rlx grpo`: GRPO and its relatives (DAPO, Dr. GRPO, GSPO, RLOO) against verifiers or a reward model."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training
from hf_rlx.cli.options import PRESET

RECIPE = training.Recipe(
    "grpo",
    "hf_rlx.trainers.grpo:GRPOConfig",
    "hf_rlx.trainers.grpo:GRPOTrainer",
    "prompts",
    rewards=True,
    adapter_rate=1e-5,
    further=PRESET,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx grpo` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
