"""Secrets stay out of files, logs, cards and uploads: what counts as one, masking, and a search before a push."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_NAMES = ("token", "password", "passwd", "secret", "api_key", "access_key", "credentials")
HUB_TOKEN = re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{20,}")
URL_LOGIN = re.compile(r"(?<=://)[^\s/@:'\"<>]+:[^\s/@'\"<>]+(?=@)")
_SHORTEST = 8  # a secret's characters; shorter values stand in files by chance
_CHUNK = 1 << 22


class Finding(NamedTuple):
    """file: in which a secret stands. what: which one, never the secret itself."""

    file: Path
    what: str


class SecretFoundError(RuntimeError):
    """An upload that would have carried a secret."""


def is_secret_name(name: str) -> bool:
    """Whether a field, key or environment variable of this name holds a secret: `hub_token`, `WANDB_API_KEY`."""
    name = name.lower()
    return any(name == part or name.endswith(f"_{part}") for part in _NAMES)


def mask_text(text: str) -> str:
    """`text` with Hub tokens, and user and password inside URLs, made unreadable."""
    return URL_LOGIN.sub("<LOGIN>", HUB_TOKEN.sub("<HUB_TOKEN>", text))


def masked(value: Any) -> Any:
    """`value` with every secret inside made unreadable; types and keys stay."""
    if isinstance(value, dict):
        return {k: f"<{str(k).upper()}>" if _hidden(k, v) else masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(v) for v in value]
    return mask_text(value) if isinstance(value, str) else value


def public(value: Any) -> Any:
    """`value` as plain JSON: entries with a secret's name are left out, secrets in texts made unreadable."""
    if isinstance(value, dict):
        return {str(k): public(v) for k, v in value.items() if not is_secret_name(str(k))}
    if isinstance(value, list | tuple):
        return [public(v) for v in value]
    return value if isinstance(value, int | float | bool | None) else mask_text(str(value))


def scan_for_secrets(
    folder: str | Path, secrets: Iterable[str | None] = (), files: Iterable[Path] | None = None
) -> list[Finding]:
    """Search a folder for Hub tokens, logins in URLs, and the secrets of this process.

    Args:
        folder: searched with everything below it. Of `*.safetensors` the header is read only: the rest is numbers.
        secrets: further values to look for, such as `args.hub_token`; None is skipped.
        files: only these.

    Returns:
        one entry per file and kind of secret, in the order of file names; empty: nothing was found.
    """
    known = _known_secrets(secrets)
    paths = sorted(p for p in Path(folder).rglob("*") if p.is_file()) if files is None else list(files)
    return [Finding(path, what) for path in paths for what in _secrets_in(path, known)]


def refuse_secrets(
    folder: str | Path, secrets: Iterable[str | None] = (), files: Iterable[Path] | None = None
) -> None:
    """`scan_for_secrets`, as a check before an upload.

    Raises:
        SecretFoundError: names every file and what stands in it.
    """
    found = scan_for_secrets(folder, secrets, files)
    if found:
        listed = "; ".join(f"{path} holds {what}" for path, what in found)
        raise SecretFoundError(f"nothing was uploaded: {listed}. Remove it, and revoke what others may have read")


def _hidden(key: Any, value: Any) -> bool:
    return is_secret_name(str(key)) and value is not None and not isinstance(value, bool)


def _known_secrets(secrets: Iterable[str | None]) -> dict[bytes, str]:
    """Value -> what it is: those given, the Hub token in use, and the environment's."""
    from huggingface_hub import get_token

    known = {value: f"the value of {name}" for name, value in os.environ.items() if is_secret_name(name)}
    known |= {value: "the Hub token in use" for value in [get_token()] if value}
    known |= {value: "a secret of the configuration" for value in secrets if value}
    return {value.encode(): what for value, what in known.items() if len(value) >= _SHORTEST}


def _secrets_in(path: Path, known: dict[bytes, str]) -> list[str]:
    overlap = max([512, *(len(value) for value in known)])
    found: dict[str, None] = {}
    with path.open("rb") as file:
        left = 8 + int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else None
        file.seek(0)
        tail = b""
        while chunk := file.read(_CHUNK if left is None else min(_CHUNK, left)):
            left = None if left is None else left - len(chunk)
            text = tail + chunk
            found |= {what: None for value, what in known.items() if value in text}
            found |= {what: None for start, pattern, what in _SHAPES if _stands_in(text, start, pattern)}
            tail = text[-overlap:]
    return list(found)


# What each begins with, its pattern from there on, and what to call it.
_SHAPES = (
    (b"hf_", re.compile(HUB_TOKEN.pattern.encode()), "a Hub token"),
    (b"://", re.compile(b"://" + URL_LOGIN.pattern.removeprefix("(?<=://)").encode()), "user and password in a URL"),
)


def _stands_in(text: bytes, start: bytes, pattern: re.Pattern[bytes]) -> bool:
    """Whether `pattern` matches at any `start`: ten times as fast in binary files as a search for the pattern."""
    at = text.find(start)
    while at >= 0:
        if pattern.match(text, at):
            return True
        at = text.find(start, at + 1)
    return False
