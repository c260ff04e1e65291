"""A configuration as plain JSON, without its secrets."""

from __future__ import annotations

from typing import Any

from hf_rlx.secrets import public
from hf_rlx.trainers.config import BaseConfig

ARGS_FILE = "training_args.json"


def public_args(args: BaseConfig) -> dict[str, Any]:
    """The configuration as plain JSON values; secrets are left out, also inside dictionaries."""
    return public(args.to_dict())
