"""`hf-rlx orpo`: ORPO on pairs: likelihood and odds ratio, no reference."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training

RECIPE = training.Recipe(
    "orpo",
    "hf_rlx.trainers.orpo:ORPOConfig",
    "hf_rlx.trainers.orpo:ORPOTrainer",
    "pairs",
    adapter_rate=1e-5,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx orpo` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
