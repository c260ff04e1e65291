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
    _add_pipeline(commands)
    _add_verify(commands)
    args = parser.parse_args(argv)
    if args.command == "verify":
        return _verify(args)
    for name in ("steps", "sft_steps", "reward_steps", "ppo_steps"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    try:
        Path(args.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {args.output!r} cannot be a folder: {error.strerror}")
    try:
        (_pipeline if args.command == "pipeline" else _demo)(args)
    except (OSError, ValueError, ImportError) as error:
        print(f"hf-rlx {args.command}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _demo(args: argparse.Namespace) -> None:
    # Imported here: `hf-rlx --help` should not wait for torch.
    from hf_rlx.demo import run_demo

    run_demo(args.model, args.output, args.steps, args.seed, args.quiet)


def _add_pipeline(commands: Any) -> None:
    pipeline = commands.add_parser(
        "pipeline",
        help="SFT, a reward model and PPO one after another on one base, in about a minute",
        description="InstructGPT's three stages on a synthetic task whose true reward is known: prints it before and "
        "after, with the reward model's score beside it.",
    )
    pipeline.add_argument("algorithm", choices=["ppo"], help="of the last stage")
    pipeline.add_argument("--model", default="tiny", help='"tiny" (bundled), a folder or a Hub id of one that can add')
    pipeline.add_argument("--output", default="runs/pipeline", help="folder for the model with its roles, and figures")
    pipeline.add_argument("--seed", type=int, default=0, help="of data, adapters and sampling")
    pipeline.add_argument("--quiet", action="store_true", help="no progress bars")
    for stage in ("sft", "reward", "ppo"):
        pipeline.add_argument(
            f"--{stage}-steps", type=int, default=None, help="optimizer steps (default: the recipe's)"
        )


def _pipeline(args: argparse.Namespace) -> None:
    from hf_rlx.pipeline import PPOPipeline

    steps = {name: getattr(args, name) for name in ("sft_steps", "reward_steps", "ppo_steps")}
    given = {name: value for name, value in steps.items() if value is not None}
    PPOPipeline(args.model, args.output, args.seed, args.quiet, **given).run()


def _add_verify(commands: Any) -> None:
    from hf_rlx.selfcheck import COMPLETIONS, EXPECTED, VERIFIERS

    reads = "\n".join(f"  {name:<14} {known.reads}" for name, known in VERIFIERS.items())
    verify = commands.add_parser(
        "verify",
        help="run a verifier over answers whose right verdict is known",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Judge every line of a JSONL file and print the confusion table, the disagreements and the "
        "slowest items.",
        epilog=f"fields of a line:\n  {'completion':<14} text or messages, called {', '.join(COMPLETIONS)}\n"
        f"  {'expected':<14} the right verdict, called {', '.join(EXPECTED)}:\n"
        f'  {"":<14} true or false, 1 or 0; missing, null or "either" where nobody knows\n\n'
        f"and by verifier:\n{reads}\n\n"
        "exit status: 0; with --strict 1 where there is any disagreement; 2 for an error",
    )
    verify.add_argument("file", help="JSONL file, see below")
    verify.add_argument("--verifier", choices=list(VERIFIERS), default="math", help="which one (default: math)")
    verify.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the verifier's class, JSON or text; may be repeated",
    )
    verify.add_argument("--extract", default=None, help="where the answer stands (default: the verifier's)")
    verify.add_argument("--gold-from", default=None, metavar="FILE", help="JSONL with the gold answers")
    verify.add_argument("--on", default="prompt", metavar="HERE=THERE", help="fields that join the two files")
    verify.add_argument("--show", type=int, default=20, help="disagreements to print")
    verify.add_argument("--out", default=None, metavar="FILE", help="JSONL file for all disagreements")
    verify.add_argument("--strict", action="store_true", help="exit with 1 where there is any disagreement")


def _verify(args: argparse.Namespace) -> int:
    from hf_rlx.selfcheck import read_options, read_rows, self_check, verifier_named, with_gold

    verifier: Any = None
    try:
        options = read_options(args.option) | ({} if args.extract is None else {"extract": args.extract})
        rows = read_rows(Path(args.file))
        if args.gold_from is not None:
            rows = with_gold(rows, Path(args.gold_from), args.on)
        verifier = verifier_named(args.verifier, options)
        report = self_check(rows, verifier, args.verifier)
        if args.out is not None:
            report.write(Path(args.out))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print(f"hf-rlx verify: error: {error}", file=sys.stderr)
        return 2
    finally:
        if hasattr(verifier, "close"):
            verifier.close()
    report.print(sys.stdout, args.show)
    return int(args.strict and bool(report.disagreements))


if __name__ == "__main__":
    raise SystemExit(main())
