"""Solutions in steps to groups: text with step labels for a process reward model, and completions to be scored by it.

| columns | what |
|---|---|
| prompt | text, or messages; behind messages the solution is the assistant's turn |
| completions | the steps, a list of texts |
| labels | one a step: whether it is right (True, 1), or the share of its roll-outs that end right; None: not known |

    tokens   the prompt as a policy sees it; each step by itself, and behind it the separator by itself (as TRL's
             PRMTrainer), so that no token belongs to two steps and a step has the same tokens wherever it is scored
    read     at the last token of a step's separator; by position, never by searching for the separator's ids
    cut      a solution loses its end, and the steps whose end is gone; the prompt its beginning but for BOS

One function, `encode_steps`, serves the trainer and the step rewards in RL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.formats import PromptError, about_row, check_container, rename_hint
from hf_rlx.data.pair_checks import check_answer
from hf_rlx.data.pair_encoding import EncodedAnswers, RankedGroup, fit
from hf_rlx.data.special_tokens import SpecialTokens
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.types import Group

_COLUMNS = ("prompt", "completions", "labels")
_ALIASES = {
    "prompt": ("question", "query", "instruction", "input", "problem"),
    "completions": ("completion", "steps", "solution", "responses", "process"),
    "labels": ("label", "ratings", "scores", "step_labels"),
}


@dataclass(frozen=True)
class StepGroup(RankedGroup):
    """One solution: a group with one response.

    Args:
        ends: for each step that was not cut off, the index in the response of the token at which it is read.
        labels: of every step, cut off or not, the probability that it is right, 0 to 1; NaN where that is not known.
    """

    ends: tuple[int, ...] = ()
    labels: tuple[float, ...] = ()


class EncodedSteps(NamedTuple):
    """prompt: token ids. ids: of the solution. ends: see `StepGroup`, of the first steps, all that were not cut off; a
    step without tokens ends where the one before does. cut: 1 where prompt or solution lost tokens. neutralised:
    special tokens in messages that became plain text."""

    prompt: list[int]
    ids: list[int]
    ends: tuple[int, ...]
    cut: int = 0
    neutralised: int = 0


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """The steps of a solution: what stands between separators, blank pieces left out.

    Returns:
        (text of the step without separator, where it ends in characters with its separator), in order.

    >>> split_steps("a=1\\n\\nb=2", "\\n")
    [('a=1', 4), ('b=2', 8)]
    """
    steps, start = [], 0
    for piece in text.split(separator):
        end = min(start + len(piece) + len(separator), len(text))
        if piece.strip():
            steps.append((piece, end))
        start = end
    return steps


def encode_steps(
    prompt: Any,
    steps: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    separator: str = "\n",
    max_length: int | None = None,
    max_completion_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens = "split",
) -> EncodedSteps:
    """Tokenize a prompt and a solution in steps, and say at which token each step is read.

    Args:
        prompt: text or messages.
        steps: texts, without the separator or with it at their end.
        separator: what stands behind every step.
        max_length: tokens of prompt and solution together; the solution keeps at least half. None: unlimited.
        max_completion_length: tokens of the solution; None: unlimited.
        chat_template_kwargs, special_tokens: of messages, see `encode_prompt`.

    Raises:
        ValueError: the prompt cannot be tokenized; reads on from "row 3 ...".
    """
    try:
        start = encode_prompt(prompt, tokenizer, chat_template_kwargs, special_tokens)
    except PromptError as error:
        raise ValueError(f"cannot be tokenized: {error}") from error
    behind = list(tokenizer(separator, add_special_tokens=False)["input_ids"])
    ids: list[int] = []
    ends = []
    for step in steps:
        ids += [*tokenizer(step.removesuffix(separator), add_special_tokens=False)["input_ids"], *behind]
        ends.append(max(len(ids) - 1, 0))
    whole = len(ids)
    ids = ids[:max_completion_length]
    if max_length is not None:
        ids = ids[: max(max_length - len(start.ids), min(len(ids), max_length // 2), 1)]
    fitted = fit(EncodedAnswers(list(start.ids), [ids]), max_length, tokenizer.bos_token_id)
    cut = len(ids) < whole or len(fitted.prompt) < len(start.ids)
    kept = tuple(end for end in ends if end < len(ids))
    return EncodedSteps(fitted.prompt, ids, kept, int(cut), start.neutralised)


def encode_step_row(
    row: dict[str, Any],
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    separator: str = "\n",
    ratings: bool = False,
    neutral: float = 1.0,
    max_length: int | None = None,
    max_completion_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens = "split",
) -> StepGroup:
    """Tokenize one row; see the table at the head of this file.

    Args:
        row, index: of the dataset.
        ratings: labels are PRM800K's -1, 0 and 1; neutral: the label that 0 then stands for, NaN to leave it out.
        tokenizer, separator, max_length, max_completion_length, chat_template_kwargs, special_tokens: see
            `encode_steps`.

    Raises:
        ValueError: names the row.
    """
    try:
        _check_row(row, ratings)
        encoded = encode_steps(
            row["prompt"],
            row["completions"],
            tokenizer,
            separator=separator,
            max_length=max_length,
            max_completion_length=max_completion_length,
            chat_template_kwargs={**(chat_template_kwargs or {}), **(row.get("chat_template_kwargs") or {})},
            special_tokens=special_tokens,
        )
    except (ValueError, TypeError, TemplateError) as error:
        raise ValueError(f"row {index} {error}") from error
    for place, end in enumerate(encoded.ends):
        if place and end == encoded.ends[place - 1]:
            raise ValueError(f"row {index} has a step {place} without tokens, {row['completions'][place]!r}; drop it")
    if not encoded.ids:
        raise ValueError(f"row {index} has no tokens in its steps; drop it")
    labels = [math.nan if label is None else float(label) for label in row["labels"]]
    if ratings:
        labels = [neutral if label == 0 else max(label, 0.0) for label in labels]  # NaN stays NaN
    return StepGroup(
        (Group.from_lists(encoded.prompt, [encoded.ids]),),
        (0.0,),
        None,
        index,
        encoded.cut,
        encoded.neutralised,
        encoded.ends,
        tuple(labels),
    )


def check_step_rows(dataset: Any, name: str, separator: str = "\n", ratings: bool = False) -> int:
    """Refuse data that a process reward model could not be trained on. Reads every row and tokenizes none.

    Args:
        dataset: a map-style dataset, or None (nothing to check). name: of the argument, for messages.
        separator, ratings: see `encode_step_row`.

    Returns:
        The number of steps that have the separator inside: scoring a completion would take each for several.

    Raises:
        ValueError: missing columns (the message has those found and the rename), an empty or streaming dataset, or a
            row, by its index: no step, an empty one, one that is no text; labels that do not fit.
    """
    if dataset is None:
        return 0
    check_container(dataset, name)
    first = dataset[0]
    if not isinstance(first, dict):
        raise ValueError(f"{name} must have rows that are dictionaries, got {type(first).__name__}")
    columns = list(getattr(dataset, "column_names", None) or first)
    missing = [column for column in _COLUMNS if column not in columns]
    if missing:
        fix = rename_hint(columns, missing, _ALIASES)
        if {"chosen", "rejected"} <= set(columns):
            fix = ". Pairs have no steps: train on them with RewardTrainer"
        raise ValueError(
            f"{name} has no column {' and no column '.join(f'`{c}`' for c in missing)}; it has {columns}. A process "
            f"reward model needs prompt, completions (the steps, a list of texts) and labels (one a step){fix}"
        )
    inside = 0
    for index in range(len(dataset)):
        row = dataset[index]
        try:
            _check_row(row, ratings)
        except ValueError as error:
            raise ValueError(f"{name}: row {index} {error}{about_row(row)}") from error
        inside += sum(separator in step.removesuffix(separator).strip() for step in row["completions"])
    return inside


def _check_row(row: Any, ratings: bool) -> None:
    """Raise a ValueError that reads on from "row 3 ..." where something is wrong."""
    if not isinstance(row, dict) or any(column not in row for column in _COLUMNS):
        raise ValueError(f"is {str(row)[:80]!r}; it needs prompt, completions and labels")
    check_answer(row["prompt"], "`prompt`")
    steps, labels = row["completions"], row["labels"]
    if isinstance(steps, str):
        raise ValueError("has a text as `completions`; split it into its steps, e.g. text.split(separator)")
    if not isinstance(steps, list | tuple) or not len(steps):
        raise ValueError(f"has {repr(steps)[:40]} as `completions`; give a list of at least one step, or drop the row")
    for place, step in enumerate(steps):
        if isinstance(step, dict | list):
            raise ValueError(
                f"has messages as step {place}; steps are texts of one answer: give the message's `content`, split"
            )
        if not isinstance(step, str) or not step.strip():
            raise ValueError(f"has {step!r} as step {place}; give it text, or drop it with its label")
        check_answer(step, f"`completions[{place}]`")
    if not isinstance(labels, list | tuple) or len(labels) != len(steps):
        found = len(labels) if isinstance(labels, list | tuple) else repr(labels)[:40]
        raise ValueError(f"has {found} `labels` for {len(steps)} steps; give one each, None where it is not known")
    for place, label in enumerate(labels):
        _check_label(label, place, ratings)


def _check_label(label: Any, place: int, ratings: bool) -> None:
    label = label.item() if hasattr(label, "item") else label  # of NumPy
    if label is None or label != label:
        return
    if not isinstance(label, int | float):
        raise ValueError(f"has the label {label!r} at step {place}; give True or False, or None where it is not known")
    if ratings and label not in (-1, 0, 1):
        raise ValueError(f"has the label {label!r} at step {place}; with ratings=True labels are -1, 0 or 1")
    if not ratings and label == -1:
        raise ValueError(f"has the label -1 at step {place}; for ratings of -1, 0 and 1 (PRM800K) set ratings=True")
    if not ratings and not 0 <= label <= 1:
        raise ValueError(
            f"has the label {label!r} at step {place}; labels are True or False, or the share of roll-outs that end "
            "right, 0 to 1"
        )


__all__ = ["EncodedSteps", "StepGroup", "check_step_rows", "encode_step_row", "encode_steps", "split_steps"]
