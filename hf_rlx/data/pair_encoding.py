"""Preference data to groups: pairs and ranked lists, text and messages, with or without a prompt of their own.

| columns | what |
|---|---|
| prompt, chosen, rejected | a pair; `margin` optional (score units) |
| chosen, rejected | a pair whose prompt is what both have in common |
| prompt, responses, ranks (or scores) | K >= 2 answers, ranks: lower is better, scores: higher is better; K may vary |
| chosen_ids, rejected_ids | a pair that is tokenized already, prompt included |

How an answer is tokenized:

    text      prompt and answer in one go, as a model reads them, EOS behind the answer
    messages  through the chat template; white space behind the last EOS is left out, as no policy samples it
    prompt    the tokens that the prompt alone and all answers begin with: identical in every branch, computed once
    cut       an answer loses its end but for the last token (EOS), the prompt its beginning but for BOS

One function, `encode_answers`, serves reward and preference trainers and the reward role in RL, so that a score is
always of the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.pair_checks import check_preferences, check_row
from hf_rlx.data.special_tokens import SpecialTokens, encode_messages
from hf_rlx.data.tokenize import is_conversational
from hf_rlx.types import Group


@dataclass(frozen=True)
class RankedGroup:
    """One row of preference data.

    Args:
        groups: one group of K answers; K groups of one answer where the texts have no token in common to share.
        ranks: K, lower is better, equal is a tie, as answers of the same tokens are. Of a pair: (0, 1) or (0, 0).
        margin: how much better the first of a pair should be, score units; None without such a column.
        row: index in the dataset.
        cut: answers that lost tokens to `max_length`, the prompt counted as one.
        neutralised: special tokens inside messages that became plain text.
    """

    groups: tuple[Group, ...]
    ranks: tuple[float, ...]
    margin: float | None = None
    row: int = 0
    cut: int = 0
    neutralised: int = 0

    @property
    def num_responses(self) -> int:
        """K."""
        return len(self.ranks)

    @property
    def num_pairs(self) -> int:
        """Pairs of answers of different rank."""
        ranks = self.ranks
        return sum(ranks[i] != ranks[j] for i in range(len(ranks)) for j in range(i))

    @property
    def lengths(self) -> list[int]:
        """(K,) tokens of each answer, EOS included."""
        return [ids.numel() for group in self.groups for ids in group.response_ids]


class EncodedAnswers(NamedTuple):
    """prompt: token ids that all answers share, empty where they share none. answers: K lists of token ids, the last
    one EOS where the text has one. cut: see `RankedGroup`. neutralised: special tokens that became plain text."""

    prompt: list[int]
    answers: list[list[int]]
    cut: int = 0
    neutralised: int = 0

    def groups(self) -> tuple[Group, ...]:
        """As one group; without a shared prompt as K groups, whose prompts are the answers' first tokens."""
        if self.prompt:
            return (Group.from_lists(self.prompt, self.answers),)
        return tuple(Group.from_lists(ids[:1], [ids[1:]]) for ids in self.answers)


def encode_preference(
    row: dict[str, Any],
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens = "split",
) -> RankedGroup:
    """Tokenize one row of preference data.

    Args:
        row: see the table at the head of this file; `tools` and `chat_template_kwargs` columns go to the template.
        index: of the row, for messages.
        tokenizer, max_length, chat_template_kwargs, special_tokens: see `encode_answers`.

    Raises:
        ValueError: names the row.
    """
    try:
        check_row(row)
        if "chosen_ids" in row:
            given = [list(row["chosen_ids"]), list(row["rejected_ids"])]
            foreign = [i for ids in given for i in ids if not (hasattr(i, "__index__") and 0 <= i < len(tokenizer))]
            if foreign:
                raise ValueError(f"has the token id {foreign[0]!r}, but the tokenizer has {len(tokenizer)} tokens")
            encoded = _split(None, given)
            encoded = fit(encoded, max_length, tokenizer.bos_token_id)
        else:
            encoded = encode_answers(
                row.get("prompt"),
                list(row["responses"]) if "responses" in row else [row["chosen"], row["rejected"]],
                tokenizer,
                max_length=max_length,
                chat_template_kwargs=template_arguments(row, chat_template_kwargs),
                special_tokens=special_tokens,
            )
    except (ValueError, TypeError, TemplateError) as error:
        raise ValueError(f"row {index} {error}") from error
    margin = row.get("margin")
    return RankedGroup(
        encoded.groups(),
        _ranks(row, encoded.answers),
        None if margin is None else float(margin),
        index,
        encoded.cut,
        encoded.neutralised,
    )


def template_arguments(row: dict[str, Any], given: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of the chat template: those that are given for all rows, and the row's own; `tools` may be JSON.

    Raises:
        ValueError: `tools` are no JSON; reads on from "row 3 ...".
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"has `tools` that are no JSON ({error})") from error
    return {**(given or {}), **(row.get("chat_template_kwargs") or {}), **({"tools": tools} if tools else {})}


def encode_answers(
    prompt: Any,
    answers: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens = "split",
    finished: Sequence[bool] | None = None,
) -> EncodedAnswers:
    """Tokenize a prompt and its answers so that the prompt's tokens are the same in front of every answer.

    Args:
        prompt: text, messages, or None: what the answers have in common, leaving each at least one token.
        answers: K texts, or K message lists; a text behind messages is the assistant's.
        max_length: tokens of prompt and answer together; None: unlimited.
        chat_template_kwargs: further arguments of the template.
        special_tokens: what becomes of special tokens inside messages, see `encode_messages`.
        finished: K, whether an answer gets its EOS; None: all do. A policy's answer that was cut has none.

    Raises:
        ValueError: nothing to tokenize, messages without a chat template or that it refuses, `max_length` below 2.
    """
    if max_length is not None and max_length < 2:
        raise ValueError(f"needs max_length >= 2 for a prompt and an answer, got {max_length}")
    ends = [True] * len(answers) if finished is None else list(finished)
    if is_conversational(prompt) or any(is_conversational(answer) for answer in answers):
        encoded = _encode_messages(prompt, answers, tokenizer, chat_template_kwargs or {}, special_tokens, ends)
    else:
        encoded = _encode_text(prompt, answers, tokenizer, ends)
    return fit(encoded, max_length, tokenizer.bos_token_id)


def _encode_text(
    prompt: str | None, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, ends: list[bool]
) -> EncodedAnswers:
    head = prompt or ""
    texts = [head + answer for answer in answers]
    given = [head] if prompt is not None else []
    ids = [list(found) for found in tokenizer([*given, *texts])["input_ids"]]
    start, full = (ids[0], ids[1:]) if given else (None, ids)
    eos = tokenizer.eos_token_id
    if eos is not None:
        full = [_with_eos(row, eos, end) for row, end in zip(full, ends, strict=True)]
        if start is not None and len(start) > 1 and start[-1] == eos and not head.endswith(str(tokenizer.eos_token)):
            start = start[:-1]  # the tokenizer ends every text with it
    if start is not None and not start:
        raise ValueError("has a prompt without tokens; give it some text, or leave the column `prompt` out")
    if start is not None and not _common([start, *full]):
        # Prompt and answer merge into one first token: nothing is left to share but the prompt by itself.
        apart = [list(found) for found in tokenizer(list(answers), add_special_tokens=False)["input_ids"]]
        if eos is not None:
            apart = [_with_eos(row, eos, end) for row, end in zip(apart, ends, strict=True)]
        return EncodedAnswers(start, apart)
    return _split(start, full)


def _encode_messages(
    prompt: Any,
    answers: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    template: dict[str, Any],
    special_tokens: SpecialTokens,
    ends: list[bool],
) -> EncodedAnswers:
    if tokenizer.chat_template is None:
        raise ValueError(
            "has messages, but the tokenizer has no chat template; set tokenizer.chat_template, or give plain text"
        )
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    turns = [[{"role": "assistant", "content": a}] if isinstance(a, str) else list(a) for a in answers]
    if prompt is None:  # the messages that all begin with, leaving each at least one
        shared = _common(turns, leave=1)
        before, turns = turns[0][:shared], [turn[shared:] for turn in turns]
    neutralised, full = 0, []
    for turn, end in zip(turns, ends, strict=True):
        encoded = encode_messages([*before, *turn], tokenizer, special_tokens, **template)
        neutralised += encoded.neutralised
        full.append(_until_eos(encoded.ids, tokenizer, end))
    start = None
    if before:
        options = {"add_generation_prompt": before[-1]["role"] != "assistant"}
        start = encode_messages(before, tokenizer, special_tokens, **options, **template).ids
    return _split(start, full)._replace(neutralised=neutralised)


def _split(start: list[int] | None, full: list[list[int]]) -> EncodedAnswers:
    """The tokens in common, up to those of the prompt alone, and the rest of each; no rest is empty."""
    shared = _common(full if start is None else [start, *full])
    shared = min(shared, *(len(row) - 1 for row in full))
    if shared < 1:
        if any(not row for row in full):
            raise ValueError("has an answer without tokens")
        return EncodedAnswers([], full)
    return EncodedAnswers(full[0][:shared], [row[shared:] for row in full])


def _common(rows: Sequence[Sequence[Any]], leave: int = 0) -> int:
    """Entries that all rows begin with; at most what leaves each `leave` of its own."""
    most = min(len(row) for row in rows) - leave
    alike = takewhile(lambda entries: all(e == entries[0] for e in entries), zip(*rows, strict=False))
    return max(min(sum(1 for _ in alike), most), 0)


def _with_eos(ids: list[int], eos: int, wanted: bool) -> list[int]:
    """`ids` ending with EOS once, or without it."""
    while not wanted and ids and ids[-1] == eos:
        ids = ids[:-1]
    return [*ids, eos] if wanted and ids[-1:] != [eos] else ids


def _until_eos(ids: list[int], tokenizer: PreTrainedTokenizerBase, wanted: bool) -> list[int]:
    """Without the white space that a template writes behind the last EOS, and without it where not `wanted`."""
    eos = tokenizer.eos_token_id
    if eos is None or eos not in ids:
        return ids
    last = len(ids) - 1 - ids[::-1].index(eos)
    if str(tokenizer.decode(ids[last + 1 :])).strip():
        return ids
    return ids[: last + 1] if wanted else ids[:last]


def fit(encoded: EncodedAnswers, limit: int | None, bos: int | None) -> EncodedAnswers:
    """Cut to `limit` tokens, prompt and answer together; None: leave.

    An answer keeps at least half of them, or all that the prompt leaves, and its last token; the prompt keeps its end,
    and `bos` in front where it begins with one.
    """
    prompt, answers = encoded.prompt, encoded.answers
    longest = max(len(ids) for ids in answers)
    if limit is None or len(prompt) + longest <= limit:
        return encoded
    room = max(limit - len(prompt), min(longest, limit // 2))
    fitted = [ids if len(ids) <= room else [*ids[: room - 1], ids[-1]] for ids in answers]
    keep = limit - min(longest, room)
    cut = sum(len(ids) > room for ids in answers) + (len(prompt) > keep)
    if len(prompt) > keep:
        first = prompt[:1] if prompt[0] == bos and keep > 1 else []
        prompt = first + prompt[len(prompt) - (keep - len(first)) :]
    return encoded._replace(prompt=prompt, answers=fitted, cut=cut)


def _ranks(row: dict[str, Any], answers: list[list[int]]) -> tuple[float, ...]:
    if "responses" not in row:
        return (0.0, 0.0) if answers[0] == answers[1] else (0.0, 1.0)
    if "ranks" in row:
        ranks = [float(rank) for rank in row["ranks"]]
    else:
        scores = [float(score) for score in row["scores"]]
        ranks = [float(len({s for s in scores if s > score})) for score in scores]
    alike: dict[tuple[int, ...], list[float]] = {}
    for ids, rank in zip(answers, ranks, strict=True):
        alike.setdefault(tuple(ids), []).append(rank)
    # Of the same answer twice none is better: both stand half way between the ranks that they were given.
    return tuple((min(alike[tuple(ids)]) + max(alike[tuple(ids)])) / 2 for ids in answers)


__all__ = [
    "EncodedAnswers",
    "RankedGroup",
    "check_preferences",
    "encode_answers",
    "encode_preference",
    "fit",
    "template_arguments",
]
