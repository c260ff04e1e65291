"""A configuration as plain JSON, without its secrets."""

from __future__ import annotations

from typing import Any

from hf_rlx.trainers.config import BaseConfig

ARGS_FILE = "training_args.json"
_SECRETS = ("token", "password", "secret", "api_key")


def public_args(args: BaseConfig) -> dict[str, Any]:
    """The configuration as plain JSON values; secrets are left out, also inside dictionaries."""
    return _public(args.to_dict())


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        shown = {str(k): v for k, v in value.items()}
        return {k: _public(v) for k, v in shown.items() if not any(k == s or k.endswith(f"_{s}") for s in _SECRETS)}
    if isinstance(value, list | tuple):
        return [_public(v) for v in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
