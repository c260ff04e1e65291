"""`hf-rlx ppo`: PPO with a critic on the policy's base, against verifiers or a reward model."""

from __future__ import annotations

import argparse

from hf_rlx.cli import training

RECIPE = training.Recipe(
    "ppo",
    "hf_rlx.trainers.ppo_config:PPOConfig",
    "hf_rlx.trainers.ppo:PPOTrainer",
    "prompts",
    rewards=True,
    adapter_rate=3e-5,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx ppo` takes."""
    training.add_arguments(parser, RECIPE)


def run(args: argparse.Namespace) -> int:
    """Train; see `training.run`."""
    return training.run(args, RECIPE)
