"""`hf-rlx prm`: a process reward model from solutions whose steps are known to be right or wrong."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training

RECIPE = training.Recipe("prm", "hf_rlx.trainers.prm:PRMConfig", "hf_rlx.trainers.prm:PRMTrainer", "steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx prm` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
