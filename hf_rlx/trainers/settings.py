"""A configuration as plain JSON, without its secrets."""

from __future__ import annotations

from typing import Any

from hf_rlx.secrets import public
from hf_rlx.trainers.config import BaseConfig

ARGS_FILE = "training_args.json"


def secrets_of(args: BaseConfig) -> list[str]:
    """Values of the configuration that are secrets: the Hub token, and tokens for loading the model."""
    loading = args.model_init_kwargs or {}
    found = [args.hub_token, *(loading.get(name) for name in ("token", "use_auth_token"))]
    return [value for value in found if isinstance(value, str)]


def public_args(args: BaseConfig) -> dict[str, Any]:
    """The configuration as plain JSON values; secrets are left out, also inside dictionaries."""
    return public(args.to_dict())
