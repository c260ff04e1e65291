"""`hf-rlx dpo`: direct preference optimisation on pairs."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training
from hf_rlx.cli.options import REFERENCE

RECIPE = training.Recipe(
    "dpo",
    "hf_rlx.trainers.dpo:DPOConfig",
    "hf_rlx.trainers.dpo:DPOTrainer",
    "pairs",
    adapter_rate=1e-5,
    further=REFERENCE,
    arguments=("ref_model",),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx dpo` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
