"""`hf-rlx pipeline`: SFT, a reward model and PPO on one base."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from hf_rlx.cli.demo import check
from hf_rlx.cli.flags import add_flags, dataclass_flags
from hf_rlx.cli.settings import add_config, resolve


def _option(default: Any, text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass
class PipelineOptions:
    """Flags of `hf-rlx pipeline`, also names in its YAML file."""

    model: str = _option("tiny", '"tiny" (bundled), a folder or a Hub id of one that can add', "NAME")
    output: str = _option("runs/pipeline", "folder for the model with its roles, and figures", "FOLDER")
    seed: int = _option(0, "of data, adapters and sampling")
    quiet: bool = _option(False, "no progress bars")
    sft_steps: int | None = _option(None, "optimizer steps of the first stage; null: the recipe's")
    reward_steps: int | None = _option(None, "of the second")
    ppo_steps: int | None = _option(None, "of the third")


FLAGS = tuple(dataclass_flags(PipelineOptions, "settings"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx pipeline` takes."""
    parser.description = (
        "InstructGPT's three stages on a synthetic task whose true reward is known: prints it before and after, with "
        "the reward model's score beside it."
    )
    parser.add_argument("algorithm", choices=["ppo"], help="of the last stage")
    add_config(parser)
    add_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    """Run the three stages.

    Raises:
        UsageError: of settings out of range and of a folder that cannot be one.
    """
    options = PipelineOptions(**resolve(args, FLAGS))
    steps = ("sft_steps", "reward_steps", "ppo_steps")
    check(options, steps)
    from hf_rlx.pipeline import PPOPipeline

    given = {name: value for name in steps if (value := getattr(options, name)) is not None}
    PPOPipeline(options.model, options.output, options.seed, options.quiet, **given).run()
    return 0
