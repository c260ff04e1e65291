"""What every verifier needs first: the text of a completion, and columns of the right length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Completion = str | list[dict[str, Any]]
"""One prompt or completion as TRL passes it: plain text, or messages `[{"role": ..., "content": ...}, ...]`."""


def message_text(message: dict[str, Any]) -> str:
    """Text of one message, whose content is a string, None (a bare tool call) or a list of typed parts.

    Raises:
        TypeError: when the content is none of the three.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    raise TypeError(f"message content must be text or a list of parts, not {type(content).__name__}")


def completion_text(completion: Completion) -> str:
    """The model's final words: the string itself, or the text of the last assistant message (else "").

    Raises:
        TypeError: when the completion is neither text nor a list of messages.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list):
        raise TypeError(f"a completion must be text or a list of messages, not {type(completion).__name__}")
    for message in reversed(completion):
        if message.get("role") == "assistant":
            return message_text(message)
    return ""


def gold_column(columns: dict[str, Any], chosen: str | None) -> str:
    """The column with gold answers: the chosen one, else `answer`, or `solution` where there is no `answer`."""
    return chosen or ("solution" if "answer" not in columns and "solution" in columns else "answer")


def column_of(columns: dict[str, Any], name: str, n: int, verifier: str) -> Sequence[Any]:
    """Column `name`, one value per completion.

    Raises:
        ValueError: when the dataset has no such column, or its length is not `n`.
    """
    values = columns.get(name)
    if values is None:
        raise ValueError(f"{verifier} reads the column {name!r}; the columns passed are {sorted(columns)}.")
    if len(values) != n:
        raise ValueError(f"{verifier}: {n} completions but {len(values)} values in the column {name!r}.")
    return values
