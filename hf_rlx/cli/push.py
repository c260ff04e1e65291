"""`hf-rlx push`: a saved model with its roles, or preference data, to the Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_rlx.secrets import SecretFoundError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx push` takes."""
    parser.description = (
        "Upload a folder that save_pretrained or a trainer wrote, in one commit: weights, adapters and heads of all "
        "roles, tokenizer, card. Logs, checkpoints and other files stay. Files with a token in them are refused. The "
        "token is that of `hf auth login` or HF_TOKEN."
    )
    parser.add_argument("folder", help="the model's folder; with --dataset a file or folder of preference data")
    parser.add_argument("repo", help="name of the repository, such as me/my-model")
    parser.add_argument("--private", action="store_true", help="make it private; an existing public one is refused")
    parser.add_argument("--revision", default=None, help="branch (default: main)")
    parser.add_argument("--message", default=None, help="of the commit")
    parser.add_argument("--dataset", action="store_true", help="the folder holds pairs: JSONL, JSON, CSV or parquet")
    parser.add_argument("--split", default="train", help="with --dataset: the split's name (default: train)")
    parser.add_argument("--license", default=None, help="with --dataset: the licence's identifier for the card")


def run(args: argparse.Namespace) -> int:
    """Upload, and say what and where to."""
    from huggingface_hub import constants

    try:
        done = _push_pairs(args) if args.dataset else _push_model(args)
    except SecretFoundError as error:
        raise ValueError(str(error)) from error
    kind = "datasets/" if args.dataset else ""
    branch = "" if args.revision is None else f"/tree/{args.revision}"
    print(f"{constants.ENDPOINT}/{kind}{done.repo_url.repo_id}{branch}")
    return 0


def _push_model(args: argparse.Namespace) -> Any:
    from hf_rlx.models.hub import files_of_model, push_folder

    folder = Path(args.folder)
    if not folder.is_dir():
        hint = "; pairs in a file need --dataset" if folder.is_file() else ""
        raise FileNotFoundError(f"{folder} is no folder{hint}")
    for path in files_of_model(folder):
        print(f"{path.stat().st_size:>14,}  {path.relative_to(folder).as_posix()}")
    if not (folder / "README.md").is_file():
        print("There is no card (README.md): `hf-rlx card` writes one")
    return push_folder(
        folder, args.repo, private=args.private or None, revision=args.revision, commit_message=args.message
    )


def _push_pairs(args: argparse.Namespace) -> Any:
    from hf_rlx.data.hub import push_pairs
    from hf_rlx.data.pair_files import read_rows

    if not Path(args.folder).exists():
        raise FileNotFoundError(f"{args.folder} does not exist")
    rows = read_rows(args.folder)
    print(f"{len(rows):,} rows with {', '.join(rows[0])}")
    return push_pairs(
        rows,
        args.repo,
        split=args.split,
        private=args.private or None,
        revision=args.revision,
        license=args.license,
        commit_message=args.message,
    )
