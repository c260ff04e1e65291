"""`hf-rlx pairs`: preference data from rankings, ratings, verifier outcomes, judges or pairs, cleaned and weighed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

_COLUMNS = """what a row holds, with --from:
  pairs        (prompt,) chosen, rejected; score_chosen and score_rejected, or margin, if they are there
  scores       (prompt,) responses, scores: higher is better, null where there is none
  rankings     (prompt,) responses, ranks: lower is better; or ranking: indices, best first
  ratings      (prompt,) responses, ratings: a list or an object of annotators' numbers each
               or one a row: prompt, response, rating, annotator
  outcomes     prompt, completion, label (or reward); one completion a row
  judge        (prompt,) response_a, response_b, verdict: A, B or tie; judge, if there are several
               verdict_swapped, or a row the other way round, is the same judge's verdict with swapped positions
  ultrafeedback  instruction, completions

exit status: 0 done, 1 an error, 2 a wrong command line"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx pairs` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Make pairs (prompt, chosen, rejected) or ranked lists, and report what was left out and why, whether the\n"
        "longer answer is chosen more often, and how far annotators agree."
    )
    parser.epilog = _COLUMNS
    kinds = ["auto", "pairs", "scores", "rankings", "ratings", "outcomes", "judge", "ultrafeedback"]
    add = parser.add_argument
    add("file", help=".jsonl, .json, .csv, .parquet, a folder, or a dataset on the Hub")
    add("--from", dest="kind", choices=kinds, default="auto", help="what the rows are (default: by their columns)")
    add("--split", default=None, help='of a folder or Hub dataset (default: the only one, or "train")')
    add(
        "--columns",
        nargs="+",
        action="extend",
        default=None,
        metavar="NEW=OLD",
        help="rename columns first, new=old: prompt=question chosen=good",
    )
    add(
        "--strategy",
        choices=["best_worst", "all", "ranked"],
        default=None,
        help="one pair a prompt, every pair, or lists (default: all of judges, else best_worst)",
    )
    add("--margin", type=float, default=0.0, help="scores must differ by more than this (default: 0)")
    add("--max-pairs", type=int, default=None, metavar="N", help="with --strategy all: a prompt's N widest")
    add("--by", default=None, metavar="COLUMN", help="outcomes: what rows of one prompt share (default: the prompt)")
    add("--standardise", action="store_true", help="ratings: by each annotator's own mean and spread first")
    add(
        "--dedupe",
        nargs="?",
        choices=["exact", "whitespace"],
        const="whitespace",
        default=None,
        help="drop repeated rows and contradictions; alone it looks past white space",
    )
    add("--keep-duplicates", action="store_true", help="with --dedupe: count repeated rows only")
    add("--keep-contradictions", action="store_true", help="with --dedupe: count contradictions only")
    add("--balance", action="store_true", help="drop pairs until chosen is as often the longer as the shorter answer")
    add("--seed", type=int, default=0, help="of --balance (default: 0)")
    add(
        "--format",
        dest="forms",
        action="append",
        choices=["explicit", "implicit", "text", "messages", "hh"],
        default=[],
        help="of the rows out (default: as they are); may be repeated, e.g. messages and then implicit",
    )
    add("--tokenizer", default=None, metavar="NAME", help='lengths in its tokens too: "tiny", a folder or a Hub id')
    add("--out", "--output", default=None, metavar="FILE", help="write the rows to .jsonl, .json, .csv or .parquet")
    add(
        "--report",
        nargs="?",
        const="",
        default=None,
        metavar="FILE",
        help="name the rows that were left out; with FILE also write the report there as JSON",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report, write the rows; the exit status is as the help says."""
    from hf_rlx.cli import UsageError
    from hf_rlx.cli.data import check_delimiter, renames_of
    from hf_rlx.data.pair_files import ColumnError, check_ending, read_rows, write_rows, write_whole
    from hf_rlx.data.pair_report import prepare_pairs

    if (args.keep_duplicates or args.keep_contradictions) and args.dedupe is None:
        raise UsageError("--keep-duplicates and --keep-contradictions go with --dedupe")
    if args.balance and args.strategy == "ranked":
        raise UsageError("--balance is for pairs, not for --strategy ranked")
    if args.out is not None:
        check_ending(Path(args.out))
    check_delimiter(Path(args.file))
    try:
        found = read_rows(args.file, args.split, renames_of(args.columns))
    except ColumnError as error:
        raise UsageError(f"--columns: {error}") from error
    rows, report = prepare_pairs(
        found,
        args.kind,
        strategy=args.strategy,
        margin=args.margin,
        max_pairs=args.max_pairs,
        by=args.by,
        standardise=args.standardise,
        dedupe=args.dedupe,
        duplicates="keep" if args.keep_duplicates else "drop",
        contradictions="keep" if args.keep_contradictions else "drop",
        balance=args.balance,
        seed=args.seed,
        forms=args.forms,
        count_tokens=None if args.tokenizer is None else _counter(args.tokenizer),
    )
    print(report.text(rows=args.report is not None))
    if args.report:
        write_whole(Path(args.report), json.dumps(report.as_dict(), ensure_ascii=False, indent=1) + "\n")
        print(f"report: {args.report}")
    if args.out is None:
        print("nothing written; --out FILE writes the rows")
    else:
        print(f"rows: {write_rows(rows, args.out)}")
    return 0


def _counter(name: str) -> Callable[[str], int]:
    """Tokens of a text, without those that a tokenizer puts around it."""
    from hf_rlx.models.loading import load_tokenizer

    tokenizer = load_tokenizer(name)
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
