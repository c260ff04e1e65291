"""What preference data must look like, checked before anything is trained; the table is in `pair_encoding.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hf_rlx.data.formats import about_row, check_container, problem_of, rename_hint, renames

# Columns under other names, and what to call them.
_ALIASES = {
    "chosen": ("accepted", "preferred", "better", "good", "best", "positive", "winner", "chosen_response", "win"),
    "rejected": ("dispreferred", "worse", "bad", "worst", "negative", "loser", "rejected_response", "lose"),
    "responses": ("answers", "completions", "candidates", "outputs"),
    "ranks": ("rank", "ranking", "order"),
    "scores": ("score", "ratings", "rewards"),
    "prompt": ("question", "query", "instruction", "input", "problem"),
}


def check_preferences(dataset: Any, name: str) -> None:
    """Refuse preference data that could not be trained on. Reads every row and tokenizes none.

    Args:
        dataset: a map-style dataset, or None (nothing to check). name: of the argument, for messages.

    Raises:
        ValueError: missing columns (the message has those found and the rename), an empty or streaming dataset, or a
            row, by its index: None or empty, messages that lack a role or a content, text and messages mixed, ranks
            that do not fit the responses, a margin that is no number.
    """
    if dataset is None:
        return
    check_container(dataset, name)
    first = dataset[0]
    if not isinstance(first, dict):
        raise ValueError(f"{name} must have rows that are dictionaries, got {type(first).__name__}")
    columns = list(getattr(dataset, "column_names", None) or first)
    _check_columns(columns, name)
    _check_hidden_prompt(first, columns, name)
    for index in range(len(dataset)):
        try:
            check_row(dataset[index])
        except ValueError as error:
            raise ValueError(f"{name}: row {index} {error}{about_row(dataset[index])}") from error


def _check_columns(columns: list[str], name: str) -> None:
    """That there is a pair or a ranked list."""
    found = set(columns)
    if {"image", "images"} & found:
        raise ValueError(f"{name} has pictures, but hf_rlx does not carry vision models; remove the column")
    if {"chosen_ids", "rejected_ids"} <= found or {"chosen", "rejected"} <= found:
        return
    listed = "responses" in found
    if listed and {"ranks", "scores"} & found:
        return
    wanted = ("chosen", "rejected")
    if listed or (not {"chosen", "rejected"} & found and {"answers", "completions", "candidates"} & found):
        wanted = ("responses", "ranks")
    missing = [column for column in wanted if column not in found]
    fix = rename_hint(columns, missing if "prompt" in found else [*missing, "prompt"], _ALIASES)
    if {"completion", "label"} <= found:
        fix = ". Rows with one completion and a label are no pairs: group them by prompt into chosen and rejected"
    raise ValueError(
        f"{name} has no column {' and no column '.join(f'`{c}`' for c in missing)}; it has {columns}. Preference data "
        "are (prompt,) chosen and rejected, or (prompt,) responses and ranks (or scores)" + fix
    )


def _check_hidden_prompt(row: dict[str, Any], columns: list[str], name: str) -> None:
    """Refuse a prompt under another name that the answers do not hold: it would silently be left out."""
    likely = None if "prompt" in columns else next(iter(renames(columns, ("prompt",), _ALIASES, False)), None)
    answers = row.get("responses") or [row.get("chosen"), row.get("rejected")]
    if likely is None or row[likely] is None or "chosen_ids" in row or not isinstance(answers, list | tuple):
        return
    text = str(row[likely]).strip()
    apart = [a for a in answers if (isinstance(a, list) and len(a) == 1) or (isinstance(a, str) and text not in a)]
    if len(apart) == len(answers):
        raise ValueError(
            f"{name} has no column `prompt`; it has {columns}, and the answers do not hold `{likely}`, so it would be "
            f'left out. If it is the prompt: dataset = dataset.rename_column("{likely}", "prompt"); if not: '
            f'dataset = dataset.remove_columns("{likely}")'
        )


def check_row(row: Any) -> None:
    """Raise a ValueError that reads on from "row 3 ..." where something is wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}; rows are dictionaries")
    if "chosen_ids" in row:
        for column in ("chosen_ids", "rejected_ids"):
            if not row.get(column):
                raise ValueError(f"has an empty `{column}`; drop it")
    elif "responses" in row:
        _check_list(row)
    else:
        for column in ("chosen", "rejected"):
            check_answer(row.get(column), f"`{column}`")
    if "chosen_ids" not in row:
        answers = row["responses"] if "responses" in row else [row["chosen"], row["rejected"]]
        _check_kinds(row.get("prompt"), answers, "prompt" in row)
    margin = row.get("margin")
    if margin is not None and not (_number(margin) and math.isfinite(margin)):
        raise ValueError(f"has the margin {margin!r}; give a finite number, or None for all rows")


def _check_list(row: dict[str, Any]) -> None:
    responses = row["responses"]
    if not isinstance(responses, list | tuple) or len(responses) < 2:
        count = len(responses) if isinstance(responses, list | tuple) else repr(responses)[:40]
        raise ValueError(f"has {count} as `responses`; give a list of at least two, or drop it")
    for place, answer in enumerate(responses):
        check_answer(answer, f"`responses[{place}]`")
    column = "ranks" if row.get("ranks") is not None else "scores"
    values = row.get(column)
    if not isinstance(values, list | tuple) or len(values) != len(responses):
        count = len(values) if isinstance(values, list | tuple) else repr(values)[:40]
        raise ValueError(f"has {count} `{column}` for {len(responses)} `responses`; give one each, or drop it")
    if not all(_number(value) and not math.isnan(value) for value in values):
        raise ValueError(f"has the `{column}` {values!r}; give numbers, or drop it")


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def check_answer(answer: Any, what: str) -> None:
    """Refuse what is neither text nor messages, or empty.

    Args:
        answer: of a row. what: its name in messages, e.g. "`chosen`".

    Raises:
        ValueError: reads on from "row 3 ...".
    """
    if not answer or not isinstance(answer, str | list):
        number = isinstance(answer, int | float)
        cast = ' (numbers become text by dataset.cast_column(name, datasets.Value("string")))' if number else ""
        raise ValueError(f"has {repr(answer)[:80]} as {what}; give it text or messages{cast}, or drop it")
    problem = problem_of(answer)
    if problem is not None:
        raise ValueError(f"{problem} of {what}; give it text or messages, or drop it")


def _check_kinds(prompt: Any, answers: Sequence[Any], explicit: bool) -> None:
    """That prompt and answers are of one kind; texts may follow messages."""
    if explicit:
        if not prompt or not isinstance(prompt, str | list):
            raise ValueError(f"has the prompt {repr(prompt)[:80]}; give it text or messages, or drop it")
        problem = problem_of(prompt)
        if problem is not None:
            raise ValueError(f"{problem} of `prompt`; give it text or messages, or drop it")
    for answer in answers:
        if isinstance(answer, list) and answer[-1]["role"] in ("user", "system"):
            raise ValueError(f"has an answer that ends with a message of {answer[-1]['role']!r}, not the assistant's")
    texts = [isinstance(answer, str) for answer in answers]
    if any(texts) and not all(texts):
        raise ValueError("mixes plain text and messages among its answers; make them alike")
    if isinstance(prompt, str) and not all(texts):
        if all(answer[0]["role"] in ("user", "system") for answer in answers):
            raise ValueError(
                "has a plain-text prompt beside answers that begin with it as messages; drop the column: "
                'dataset = dataset.remove_columns("prompt")'
            )
        raise ValueError(
            'has a plain-text prompt and messages as answers; write the prompt as [{"role": "user", "content": text}]'
        )
