"""`hf-rlx reward`: a reward model from pairs or ranked answers."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training

RECIPE = training.Recipe(
    "reward", "hf_rlx.trainers.reward:RewardConfig", "hf_rlx.trainers.reward:RewardTrainer", "pairs"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx reward` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
