"""What a dataset must look like, checked before anything is trained."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_LIKELY = ("question", "query", "instruction", "input", "text", "messages", "conversations", "problem")
_IDS = re.compile(r"id$|(^|_)(ids|mask)$", re.IGNORECASE)  # columns of numbers, which are nobody's text
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
# In a name of several words: what the column has about the text that the other word names.
_ABOUT = {"category", "count", "date", "index", "kind", "label", "language", "len", "length", "level", "logprob"}
_ABOUT |= {
    "logprobs",
    "margin",
    "model",
    "name",
    "rank",
    "rating",
    "score",
    "source",
    "tokens",
    "topic",
    "type",
    "url",
}
_CHARACTERS_A_TOKEN = 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class PromptError(ValueError):
    """A prompt that cannot be used; `prompt` is what the dataset holds."""

    def __init__(self, message: str, prompt: Any) -> None:
        super().__init__(message)
        self.prompt = prompt


def check_prompts(dataset: Any, name: str, max_characters: int | None = None) -> None:
    """Refuse a prompt dataset that could not be trained on.

    Args:
        dataset: a map-style dataset, or None (nothing to check).
        name: of the argument, for messages.
        max_characters: refuse longer prompts; all contents of a conversation together.

    Raises:
        ValueError: no `prompt` column (the message has the columns found and the rename), an empty dataset, or a
            streaming one; a row, by its index: that is no dictionary, without a prompt, with messages that lack a
            role or a content, with half a character (a lone surrogate), with another kind of prompt than the first
            row, or too long.
    """
    if dataset is None:
        return
    check_container(dataset, name)
    first = dataset[0]
    if not isinstance(first, dict):
        fix = '; write [{"prompt": text} for text in texts]' if isinstance(first, str) else ""
        raise ValueError(
            f"{name} must have rows that are dictionaries with a `prompt`, got {type(first).__name__}{fix}"
        )
    _check_columns(list(getattr(dataset, "column_names", None) or first), name)
    kind: str | None = None
    for index, prompt in enumerate(_prompts_of(dataset, name)):
        problem = problem_of(prompt)
        if problem is not None:
            row = about_row(dataset[index])
            raise ValueError(f"{name}: row {index} {problem}; give it text or messages, or drop it{row}")
        this = "plain text" if isinstance(prompt, str) else "messages"
        kind = kind or this
        if this != kind:
            raise ValueError(
                f"{name} mixes both kinds of prompts: row 0 is {kind}, row {index} is {this}. Make them alike, e.g. "
                'write plain text as [{"role": "user", "content": text}]'
            )
        if max_characters is not None and (size := _characters(prompt)) > max_characters:
            raise ValueError(
                f"{name}: row {index} has a prompt of {size:,} characters, which cannot fit the model's context "
                f"({max_characters:,} characters would be too many already). Prompts are never cut; drop long ones: "
                'dataset = dataset.filter(lambda row: len(str(row["prompt"])) < ...)'
            )


def check_all_prompts(train_dataset: Any, eval_dataset: Any, room: int | None = None) -> None:
    """`check_prompts` for the datasets of a trainer.

    Args:
        train_dataset: one, or None.
        eval_dataset: one, several by name, or None.
        room: tokens that a prompt may have. Tokenizing every prompt in advance would take too long, so only prompts
            of more than 20 characters a token are refused here; the rest are measured when they are sampled for.

    Raises:
        ValueError: see `check_prompts`.
    """
    # Without any room it is not the prompts that are too long; a rollout says so.
    most = None if room is None or room < 1 else _CHARACTERS_A_TOKEN * room
    check_prompts(train_dataset, "train_dataset", most)
    for name, dataset in (eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}).items():
        check_prompts(dataset, f"eval_dataset {name}".strip(), most)


def check_container(dataset: Any, name: str) -> None:
    """That it is one dataset of known, positive length."""
    columns = dataset.values() if isinstance(dataset, dict) else ()
    if columns and all(isinstance(value, list) and value and not isinstance(value[0], dict) for value in columns):
        raise ValueError(
            f"{name} is a dictionary of lists, {sorted(map(str, dataset))}; write datasets.Dataset.from_dict(...)"
        )
    if isinstance(dataset, dict):
        raise ValueError(
            f'{name} is a dictionary of {sorted(map(str, dataset))}; pass one of its datasets, e.g. dataset["train"]'
        )
    if isinstance(dataset, str):
        raise ValueError(
            f"{name} is the text {dataset!r}; load it first: datasets.load_dataset({dataset!r}, split=...)"
        )
    if type(dataset).__name__ == "DataFrame":
        library = type(dataset).__module__.partition(".")[0]
        raise ValueError(f"{name} is a table of {library}; write datasets.Dataset.from_{library}(...)")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{name} is a streaming dataset; load it whole, or take its first rows into a Dataset")
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty")


def about_row(row: Any) -> str:
    """Behind what is said of a row by its number, which after a shuffle is no line of a file: the row, shortened, and
    where a text is empty how all such rows are dropped; nothing of what is no row."""
    if not isinstance(row, dict):
        return ""
    shown = ", ".join(f"{key!r}: {_short(value)}" for key, value in itertools.islice(row.items(), 6))
    empty = next((c for c in ("prompt", "chosen", "rejected", "completion", "text") if c in row and not row[c]), None)
    drop = f'; to drop all such rows: dataset = dataset.filter(lambda row: row["{empty}"])' if empty else ""
    return f". The row: {{{shown}{', ...' if len(row) > 6 else ''}}}{drop}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def rename_hint(columns: Sequence[str], missing: Sequence[str], aliases: Mapping[str, Collection[str]]) -> str:
    """How a dataset gets its missing columns, to be put behind a sentence that names them.

    Args:
        columns: that it has. missing: that it lacks. aliases: what each column is called elsewhere.
    """
    if any(column.lower().endswith("input_ids") for column in columns):
        return ". Rows are text or messages here, not token ids: leave out the map that tokenizes"
    found = renames(columns, missing, aliases)
    if found:
        return f". If so: dataset = dataset.rename_columns({found})"
    return f'. If one is there under another name: dataset = dataset.rename_column("that name", "{missing[0]}")'


def renames(
    columns: Sequence[str], missing: Sequence[str], aliases: Mapping[str, Collection[str]], words: bool = True
) -> dict[str, str]:
    """Columns that may be the missing ones under another name, in other letters or misspelt: found -> missing.

    Args: see `rename_hint`; words: also by one of several words, as in `good answer`.
    """
    free = {c.lower(): c for c in columns if c not in aliases and not _IDS.search(c)}
    found: dict[str, str] = {}
    for wanted in missing:
        likely = [free[c] for c in (wanted, *aliases[wanted]) if c in free]
        likely += [free[c] for c in difflib.get_close_matches(wanted, free, n=2, cutoff=0.7)]
        if words:
            likely += [c for c in free.values() if _says(c, (wanted, *aliases[wanted]))]
        new = next((c for c in likely if c not in found), None)
        if new is not None:
            found[new] = wanted
    return found


def _says(column: str, names: Collection[str]) -> bool:
    """Whether one of the words of a column's name is one of `names`, and none says that it is something else."""
    words = {word.lower() for word in _WORD.findall(column)}
    return not words.isdisjoint(names) and words.isdisjoint(_ABOUT)


def _check_columns(columns: list[str], name: str) -> None:
    """That `prompt` is among them, and no pictures."""
    vision = [c for c in ("image", "images") if c in columns]
    if vision:
        raise ValueError(
            f"{name} has the column `{vision[0]}`, but hf_rlx does not carry vision models; use trl.GRPOTrainer for "
            "them (hf_rlx verifiers work there as reward_funcs), or remove the column"
        )
    if "prompt" in columns:
        return
    if any(column.lower().endswith("input_ids") for column in columns):
        raise ValueError(
            f"{name} has no column `prompt`; it has {columns}. Prompts are text or messages here, not token ids: "
            "leave out the map that tokenizes"
        )
    alike = [c for c in difflib.get_close_matches("prompt", columns, cutoff=0.75) if not _IDS.search(c)]
    alike += [c for c in columns if "prompt" in c.lower() and not _IDS.search(c)]
    alike += [*renames(columns, ("prompt",), {"prompt": _LIKELY}), *(c for c in columns if not _IDS.search(c))]
    likely = alike[0] if alike else "question"
    raise ValueError(
        f"{name} has no column `prompt`; it has {columns}. If `{likely}` is the prompt: "
        f'dataset = dataset.rename_column("{likely}", "prompt")'
    )


def problem_of(prompt: Any) -> str | None:
    """What is wrong with one prompt, after "row 3 ..."; None: nothing."""
    if isinstance(prompt, dict) and {"role", "content"} <= prompt.keys():
        return "has one message by itself, where a list of messages is expected ([message])"
    if not prompt or not isinstance(prompt, str | list):
        return f"has the prompt {repr(prompt)[:80]}"
    if isinstance(prompt, str):
        return _half_a_character(prompt)
    for place, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"has a list of {type(message).__name__} as prompt, where message {place} should be a dictionary"
        calls = bool(message.get("tool_calls"))  # such a message may be without content
        for key in ("role",) if calls else ("role", "content"):
            if key not in message:
                told = f"has a message {place} without `{key}` (it has {sorted(map(str, message))})"
                renamed = "; ShareGPT's `from` and `value` are `role` and `content` here, `human` is `user` and `gpt` "
                return told + (renamed + "`assistant`" if "from" in message and "value" in message else "")
        role, content = message["role"], message.get("content")
        if not isinstance(role, str) or not role:
            return f"has the role {role!r} in message {place}"
        if isinstance(content, str):
            if half := _half_a_character(role + content):
                return f"{half} in message {place}"
            continue
        if calls and content is None:
            continue
        if not isinstance(content, list) or not content:
            return f"has the content {content!r} in message {place}"
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            return f'has parts in message {place} that are not all {{"type": "text", "text": ...}}'
        if half := _half_a_character("\n".join([role, *(part["text"] for part in content)])):
            return f"{half} in message {place}"
    return None if _characters(prompt) or prompt[-1].get("tool_calls") else "has messages without any text"


def _half_a_character(text: str) -> str | None:
    """What is wrong with a text that no tokenizer takes."""
    found = _SURROGATE.search(text)
    return None if found is None else f"holds half a character (the lone surrogate {found[0]!r})"


def _characters(prompt: str | list[dict[str, Any]]) -> int:
    """Characters of a well-formed prompt, all contents together."""
    if isinstance(prompt, str):
        return len(prompt)
    contents = (message.get("content") or "" for message in prompt)
    return sum(len(c) if isinstance(c, str) else sum(len(part["text"]) for part in c) for c in contents)


def _prompts_of(dataset: Any, name: str) -> Iterator[Any]:
    if not hasattr(dataset, "select_columns"):
        for index, row in enumerate(dataset):
            if not isinstance(row, dict):
                raise ValueError(
                    f"{name}: row {index} is a {type(row).__name__}; rows are dictionaries with a `prompt`"
                )
            yield row.get("prompt")
        return
    column = dataset.select_columns(["prompt"])
    for start in range(0, len(column), 1000):  # row by row takes ten times as long
        yield from column[start : start + 1000]["prompt"]


@contextmanager
def naming_rows(dataset: Any, name: str) -> Iterator[None]:
    """Say in a `PromptError` from inside which row of `dataset` it is about.

    Tokenizing a whole dataset in advance would be slow, so some faults show in a rollout only.
    """
    try:
        yield
    except PromptError as error:
        rows = () if dataset is None else enumerate(_prompts_of(dataset, name))
        row = next((index for index, prompt in rows if prompt == error.prompt), None)
        if row is None:
            raise
        raise PromptError(f"{name}: row {row}: {error}", error.prompt) from error
