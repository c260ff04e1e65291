"""Demonstrations to groups of one answer, for supervised fine-tuning.

| columns | what is learned |
|---|---|
| prompt, completion | the completion, text or messages |
| messages | the last message, an assistant's, behind all before it |
| text | every token but the first |
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.formats import about_row, check_container, rename_hint
from hf_rlx.data.pair_checks import check_answer
from hf_rlx.data.pair_encoding import RankedGroup, encode_answers, template_arguments
from hf_rlx.data.special_tokens import SpecialTokens
from hf_rlx.types import Group

_KINDS = (("prompt", "completion"), ("messages",), ("text",))
_ALIASES = {
    "completion": ("response", "answer", "output", "target", "chosen", "solution"),
    "prompt": ("question", "query", "instruction", "input", "problem"),
    "messages": ("conversation", "conversations", "chat"),
    "text": ("content", "document"),
}


def check_demonstrations(dataset: Any, name: str) -> None:
    """Refuse demonstrations that could not be trained on. Reads every row and tokenizes none.

    Args:
        dataset: a map-style dataset, or None (nothing to check). name: of the argument, for messages.

    Raises:
        ValueError: missing columns (the message has those found and the rename), an empty or streaming dataset, or a
            row, by its index: None or empty, messages that lack a role or a content or end with no assistant's.
    """
    if dataset is None:
        return
    check_container(dataset, name)
    first = dataset[0]
    if not isinstance(first, dict):
        fix = '; write [{"text": text} for text in texts]' if isinstance(first, str) else ""
        raise ValueError(f"{name} must have rows that are dictionaries, got {type(first).__name__}{fix}")
    columns = list(getattr(dataset, "column_names", None) or first)
    if _kind(columns) is None:
        missing = [column for column in _ALIASES if column not in columns]
        fix = rename_hint(columns, missing, _ALIASES)
        raise ValueError(
            f"{name} has the columns {columns}; it needs prompt and completion, or messages, or text{fix}"
        )
    for index in range(len(dataset)):
        try:
            _check_row(dataset[index])
        except ValueError as error:
            raise ValueError(f"{name}: row {index} {error}{about_row(dataset[index])}") from error


def encode_demonstration(
    row: dict[str, Any],
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens = "split",
) -> RankedGroup:
    """Tokenize one row: a group with one answer.

    Args:
        row: see the table at the head of this file; `tools` and `chat_template_kwargs` columns go to the template.
        index, tokenizer, max_length, chat_template_kwargs, special_tokens: as in `encode_preference`.

    Raises:
        ValueError: names the row.
    """
    try:
        _check_row(row)
        prompt, answer = _parts(row)
        encoded = encode_answers(
            prompt,
            [answer],
            tokenizer,
            max_length=max_length,
            chat_template_kwargs=template_arguments(row, chat_template_kwargs),
            special_tokens=special_tokens,
        )
    except (ValueError, TypeError, TemplateError) as error:
        raise ValueError(f"row {index} {error}") from error
    (ids,) = encoded.answers
    start = encoded.prompt
    if prompt is None:
        whole = [*start, *ids]
        start, ids = whole[:1], whole[1:]
        if not ids:
            raise ValueError(f"row {index} has a single token; there is nothing to predict from, drop it")
    group = Group.from_lists(start, [ids])
    return RankedGroup((group,), (0.0,), None, index, encoded.cut, encoded.neutralised)


def _kind(columns: list[str]) -> tuple[str, ...] | None:
    return next((kind for kind in _KINDS if set(kind) <= set(columns)), None)


def _parts(row: dict[str, Any]) -> tuple[Any, Any]:
    """Prompt (None where there is none) and answer."""
    kind = _kind(list(row))
    if kind == ("messages",):
        messages = list(row["messages"])
        return messages[:-1] or None, messages[-1:]
    return (None, row["text"]) if kind == ("text",) else (row["prompt"], row["completion"])


def _check_row(row: Any) -> None:
    """Raise a ValueError that reads on from "row 3 ..." where something is wrong."""
    kind = _kind(list(row)) if isinstance(row, dict) else None
    if kind is None:
        raise ValueError(f"is {str(row)[:80]!r}; it needs prompt and completion, or messages, or text")
    for column in kind:
        check_answer(row[column], f"`{column}`")
    if kind == ("messages",) and row["messages"][-1]["role"] != "assistant":
        raise ValueError(f"ends with a message of {row['messages'][-1]['role']!r}; nothing of an assistant to learn")
    if kind == ("prompt", "completion") and isinstance(row["prompt"], str) and not isinstance(row["completion"], str):
        raise ValueError("has a plain-text prompt and messages as completion; make them alike")
