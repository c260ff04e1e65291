"""`hf-rlx verify`: a verifier over answers whose right verdict is known."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_rlx.cli import told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx verify` takes."""
    from hf_rlx.selfcheck import COMPLETIONS, EXPECTED, VERIFIERS

    reads = "\n".join(f"  {name:<14} {known.reads}" for name, known in VERIFIERS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Judge every line of a JSONL file and print the confusion table, the disagreements and the slowest items."
    )
    parser.epilog = (
        f"fields of a line:\n  {'completion':<14} text or messages, called {', '.join(COMPLETIONS)}\n"
        f"  {'expected':<14} the right verdict, called {', '.join(EXPECTED)}:\n"
        f'  {"":<14} true or false, 1 or 0; missing, null or "either" where nobody knows\n\n'
        f"and by verifier:\n{reads}\n\n"
        "exit status: 0; with --strict 1 where there is any disagreement; 1 for a file without rows; 2 for another "
        "error"
    )
    parser.add_argument("file", help="JSONL file, see below")
    parser.add_argument("--verifier", choices=list(VERIFIERS), default="math", help="which one (default: math)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the verifier's class, JSON or text; may be repeated",
    )
    parser.add_argument("--extract", default=None, help="where the answer stands (default: the verifier's)")
    parser.add_argument("--gold-from", default=None, metavar="FILE", help="JSONL with the gold answers")
    parser.add_argument("--on", default="prompt", metavar="HERE=THERE", help="fields that join the two files")
    parser.add_argument("--show", type=int, default=20, help="disagreements to print")
    parser.add_argument("--out", "--output", default=None, metavar="FILE", help="JSONL file for all disagreements")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there is any disagreement")


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit status is as the help says."""
    from hf_rlx.selfcheck import read_options, read_rows, self_check, verifier_named, with_gold

    verifier: Any = None
    try:
        options = read_options(args.option) | ({} if args.extract is None else {"extract": args.extract})
        rows = read_rows(Path(args.file))
        if not rows:
            print(f"hf-rlx verify: error: {args.file} has no rows", file=sys.stderr)
            return 1
        if args.gold_from is not None:
            rows = with_gold(rows, Path(args.gold_from), args.on)
        verifier = verifier_named(args.verifier, options)
        report = self_check(rows, verifier, args.verifier)
        if args.out is not None:
            report.write(Path(args.out))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print(f"hf-rlx verify: error: {told(error)}", file=sys.stderr)
        return 2
    finally:
        if hasattr(verifier, "close"):
            verifier.close()
    report.print(sys.stdout, args.show)
    return int(args.strict and bool(report.disagreements))
