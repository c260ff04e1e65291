"""`hf-rlx merge`: the policy's adapter merged into its base, as a plain `transformers` model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_rlx.cli import UsageError

POLICY = "policy"
TYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx merge` takes."""
    parser.description = (
        "Merges the policy's adapter into a 16- or 32-bit reload of its base, never into 4-bit weights, and saves a "
        "plain transformers model with its tokenizer and a card. Other roles (reward, critic) are adapters with heads "
        "that score, which no plain language model has: they are left out, and the message says so."
    )
    parser.add_argument("folder", help="a saved model: an adapter, of any run; also a Hub id")
    parser.add_argument("out", help="folder for the merged model; it must be new or empty")
    parser.add_argument(
        "--role", metavar="NAME", help="which adapter: policy; needed where the policy was never trained"
    )
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="of the saved weights (default: float32)")
    parser.add_argument(
        "--base", metavar="NAME", help="the base, where the adapter's settings name none that is there"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the adapter on the Hub")


def run(args: argparse.Namespace) -> int:
    """Merge, and say where.

    Raises:
        UsageError: the role is no policy. ValueError: the folder holds no adapter, or that of another role, or one
            that was never trained; or the base is quantised. OSError: the base is not found; or `out` is not empty.
    """
    from hf_rlx.models.export import merge

    folder = Path(args.folder)
    if folder.is_dir():
        told = check_role(folder, args.role)
        print(f"hf-rlx merge: {told}", file=sys.stderr)
    elif args.role not in (None, POLICY):
        raise UsageError(_no_policy(args.role, args.folder))
    print(merge(args.folder, Path(args.out), args.dtype, args.base, args.revision))
    return 0


def check_role(folder: Path, role: str | None) -> str:
    """What is merged, in words.

    Args:
        folder: a saved model. role: that was asked for; None: the policy, where it was trained.

    Raises:
        UsageError: a role that is not there, or is no policy. ValueError: the folder is that of another role alone, or
            its policy was never trained while other roles were.
    """
    from hf_rlx.models.hub import ADAPTER_FILE, ROLE_FILE, role_folders

    others = [place.name for place in role_folders(folder)]
    if role not in (None, POLICY):
        there = f"; {folder} has {', '.join([POLICY, *others])}"
        raise UsageError(_no_policy(role, str(folder)) if role in others else f"--role: no role {role!r}{there}")
    if (folder / ROLE_FILE).is_file() and "own_adapter" in (folder / ROLE_FILE).read_text(encoding="utf-8"):
        name = folder.resolve().name
        raise ValueError(f"{_no_policy(name, str(folder.parent))} The policy is merged with {folder.parent} as folder")
    if not (folder / ADAPTER_FILE).is_file():
        if others:
            raise ValueError(f"{folder} has no adapter of a policy. {_no_policy(others[0], str(folder))}")
        return "merging"  # what the folder lacks is told there
    if others and role is None and not _was_trained(folder):
        raise ValueError(
            f"the policy in {folder} was never trained, so merging it gives the base; what was trained is the role "
            f"{' and '.join(others)}. {_no_policy(others[0], str(folder))} --role policy merges the policy anyhow"
        )
    return "merging the policy" + (f"; the roles left out: {', '.join(others)}" if others else "")


def _no_policy(role: str, folder: str) -> str:
    """Why a role other than the policy is not merged, and how it is used."""
    use = f": hf-rlx ppo --model {folder} --reward role" if role == "reward" else ""
    return (
        f"The role {role} is an adapter with a head that scores, which a plain language model has no place for, so it "
        f"is not merged. It is used as it is, from {folder}{use}, or in Python "
        f'SharedModel.from_pretrained("{folder}").'
    )


def _was_trained(folder: Path) -> bool:
    """Whether the adapter changes anything: LoRA's B begins at zero. True where it has more than LoRA's matrices."""
    from safetensors import safe_open

    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        return True
    with safe_open(path, framework="pt") as weights:
        names = list(weights.keys())
        if not all("lora_A" in name or "lora_B" in name for name in names):
            return True
        return any(bool(weights.get_tensor(name).any()) for name in names if "lora_B" in name)
