"""The command `hf-rlx`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the sub-command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-rlx", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train the bundled model with GRPO and a verifier, in about a minute")
    demo.add_argument("--model", default="tiny", help='"tiny" (bundled), "smollm2", a folder or a Hub id')
    demo.add_argument("--output", default="runs/demo", help="folder for adapter, card, plot and completions")
    demo.add_argument("--steps", type=int, default=None, help="optimizer steps (default: the recipe's)")
    demo.add_argument("--seed", type=int, default=0, help="of prompts, adapter and sampling")
    demo.add_argument("--quiet", action="store_true", help="no progress bars, no tables of completions")
    _add_verify(commands)
    args = parser.parse_args(argv)
    if args.command == "verify":
        return _verify(args)
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    try:
        Path(args.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {args.output!r} cannot be a folder: {error.strerror}")
    # Imported here: `hf-rlx --help` should not wait for torch.
    from hf_rlx.demo import run_demo

    try:
        run_demo(args.model, args.output, args.steps, args.seed, args.quiet)
    except (OSError, ValueError, ImportError) as error:
        print(f"hf-rlx {args.command}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser("verify", help="run a verifier over answers whose right verdict is known")
    verify.add_argument("file", help="JSONL with completion, gold (or answer) and expected (or right, label) verdict")
    verify.add_argument("--verifier", choices=["math", "number"], default="math", help="which one")
    verify.add_argument("--extract", default=None, help="where the answer stands (default: the verifier's)")
    verify.add_argument("--gold-from", default=None, metavar="FILE", help="JSONL with the gold answers")
    verify.add_argument("--on", default="prompt", metavar="HERE=THERE", help="fields that join the two files")
    verify.add_argument("--show", type=int, default=20, help="disagreements to print")
    verify.add_argument("--strict", action="store_true", help="exit with 1 where there is any disagreement")


def _verify(args: argparse.Namespace) -> int:
    from hf_rlx.selfcheck import VERIFIERS, read_rows, self_check, with_gold

    try:
        rows = read_rows(Path(args.file))
        if args.gold_from is not None:
            rows = with_gold(rows, Path(args.gold_from), args.on)
        options = {} if args.extract is None else {"extract": args.extract}
        report = self_check(rows, VERIFIERS[args.verifier](**options))
    except (OSError, ValueError, ImportError) as error:
        print(f"hf-rlx verify: error: {error}", file=sys.stderr)
        return 2
    report.print(sys.stdout, args.show)
    return int(args.strict and bool(report.disagreements))


if __name__ == "__main__":
    raise SystemExit(main())
