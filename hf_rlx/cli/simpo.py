"""`hf-rlx simpo`: SimPO on pairs: no reference, a margin on mean log-probs."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training

RECIPE = training.Recipe(
    "simpo",
    "hf_rlx.trainers.simpo:SimPOConfig",
    "hf_rlx.trainers.simpo:SimPOTrainer",
    "pairs",
    adapter_rate=1e-5,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx simpo` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
