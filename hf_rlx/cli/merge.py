"""`hf-rlx merge`: the policy's adapter merged into its base, as a plain `transformers` model."""

from __future__ import annotations

import argparse
from pathlib import Path

TYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx merge` takes."""
    parser.description = (
        "Merges the policy's adapter into a 16- or 32-bit reload of its base, never into 4-bit weights, and saves a "
        "plain transformers model with its tokenizer and a card. Adapters of other roles are left out."
    )
    parser.add_argument("folder", help="a saved model: an adapter, of any run; also a Hub id")
    parser.add_argument("out", help="folder for the merged model; it must be new or empty")
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="of the saved weights (default: float32)")
    parser.add_argument(
        "--base", metavar="NAME", help="the base, where the adapter's settings name none that is there"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the adapter on the Hub")


def run(args: argparse.Namespace) -> int:
    """Merge, and say where.

    Raises:
        ValueError: the folder holds no adapter, or the base is quantised. OSError: the base is not found; or `out` is
            not empty.
    """
    from hf_rlx.models.export import merge

    print(merge(args.folder, Path(args.out), args.dtype, args.base, args.revision))
    return 0
