"""`hf-rlx card`: the model card of a saved run, from what lies in its folder."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx card` takes."""
    parser.description = (
        "Writes README.md with the Hub's metadata, training.png and .eval_results from the facts that a trainer left "
        "beside the model. A card that is there is replaced."
    )
    parser.add_argument("folder", help="a saved model, or a checkpoint of a run")
    parser.add_argument(
        "--out", "--output-dir", metavar="FOLDER", help="where the card goes (default: the model's folder)"
    )
    parser.add_argument("--repo-id", metavar="ID", help="the model's id on the Hub, for the snippet that loads it")
    parser.add_argument("--license", metavar="NAME", help='as the Hub calls it, such as "apache-2.0"')
    parser.add_argument("--dataset-id", metavar="ID", help="the training data's id on the Hub")
    parser.add_argument("--name", metavar="TEXT", help="title of the card")


def run(args: argparse.Namespace) -> int:
    """Write the card and say where.

    Raises:
        FileNotFoundError: there is no such folder. UsageError: an id that the Hub would not take. ValueError: the
            folder holds no model, or a damaged file.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    from hf_rlx.cards import facts_from_folder, write_beside
    from hf_rlx.cli import UsageError

    for flag, value in (("--repo-id", args.repo_id), ("--dataset-id", args.dataset_id)):
        if value is None:
            continue
        try:
            validate_repo_id(value)
        except HFValidationError as error:
            raise UsageError(f"{flag}: {error}") from error
    folder = Path(args.folder)
    facts = facts_from_folder(folder)
    given = {"repo_id": args.repo_id, "license": args.license, "dataset_id": args.dataset_id, "model_name": args.name}
    facts = dataclasses.replace(facts, **{name: value for name, value in given.items() if value is not None})
    card = write_beside(facts, folder if args.out is None else Path(args.out), folder)
    print(card)
    return 0
