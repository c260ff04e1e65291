"""`hf-rlx demo`: GRPO on the bundled model, end to end."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_rlx.cli import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx demo` takes."""
    parser.add_argument("--model", default="tiny", help='"tiny" (bundled), "smollm2", a folder or a Hub id')
    parser.add_argument(
        "--output", "--output-dir", default="runs/demo", help="folder for adapter, card, plot and completions"
    )
    parser.add_argument(
        "--steps", "--max-steps", type=int, default=None, help="optimizer steps (default: the recipe's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts, adapter and sampling")
    parser.add_argument("--quiet", action="store_true", help="no progress bars, no tables of completions")


def run(args: argparse.Namespace) -> int:
    """Train, and write the folder.

    Raises:
        UsageError: of numbers out of range and of a folder that cannot be one.
    """
    check(args, ("steps",))
    from hf_rlx.demo import run_demo

    run_demo(args.model, args.output, args.steps, args.seed, args.quiet)
    return 0


def check(args: Any, steps: tuple[str, ...]) -> None:
    """Refuse what no run can begin with, and make the folder.

    Args:
        args: with `seed` and `output`. steps: names of numbers that are at least 1 where they are given.

    Raises:
        UsageError: the first thing that is wrong.
    """
    for name in steps:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.seed < 0:
        raise UsageError(f"--seed must not be negative, got {args.seed}")
    try:
        Path(args.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {args.output!r} cannot be a folder: {error.strerror}") from error
