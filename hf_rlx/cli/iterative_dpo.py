"""`hf-rlx iterative-dpo`: rounds of sampling, scoring, pairing, and DPO on the pairs."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training

RECIPE = training.Recipe(
    "iterative-dpo",
    "hf_rlx.trainers.iterative_config:IterativeDPOConfig",
    "hf_rlx.trainers.iterative_dpo:IterativeDPOTrainer",
    "prompts",
    rewards=True,
    adapter_rate=1e-5,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx iterative-dpo` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
