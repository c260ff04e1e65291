"""`hf-rlx ipo`: IPO on pairs: a bounded target for the log-ratio."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training
from hf_rlx.cli.options import REFERENCE

RECIPE = training.Recipe(
    "ipo",
    "hf_rlx.trainers.ipo:IPOConfig",
    "hf_rlx.trainers.ipo:IPOTrainer",
    "pairs",
    adapter_rate=1e-5,
    further=REFERENCE,
    arguments=("ref_model",),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx ipo` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
