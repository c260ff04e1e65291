"""What a task is, and what its makers share."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from typing import Any

from datasets import Dataset


@dataclass(frozen=True)
class Task:
    """Prompts with checkable answers, split so that no held-out prompt is trained on.

    Attributes:
        name: short identifier, e.g. `"arithmetic"`; safe in a file name or a metric name.
        train: rows with the columns `prompt` and `answer`, plus whatever the task's verifier reads.
        test: held-out rows with the same columns; shares no prompt with `train`.
        max_completion_length: tokens a correct completion needs at most, with room to spare.
        description: one sentence for people, used in logs and model cards.
    """

    name: str
    train: Dataset
    test: Dataset
    max_completion_length: int
    description: str

    def __post_init__(self) -> None:
        for split, rows in (("train", self.train), ("test", self.test)):
            missing = {"prompt", "answer"} - set(rows.column_names)
            if missing:
                raise ValueError(
                    f"Task {self.name!r}: the {split} split has the columns {rows.column_names} "
                    f"but lacks {sorted(missing)}."
                )
        trained = {_prompt_key(prompt) for prompt in self.train["prompt"]}
        shared = sum(_prompt_key(prompt) in trained for prompt in self.test["prompt"])
        if shared:
            raise ValueError(f"Task {self.name!r}: {shared} held-out prompts also stand in the training split.")


def _prompt_key(prompt: Any) -> str:
    """Text by which two prompts count as the same one; works for strings and for message lists."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def prompt_of(instruction: str, question: str, conversational: bool) -> str | list[dict[str, str]]:
    """One user turn, as messages or as text that ends where the completion starts."""
    text = f"{instruction}\n\n{question}"
    return [{"role": "user", "content": text}] if conversational else text + "\n"


def is_held_out(key: str) -> bool:
    """The side of a problem, the same for every seed: about one key in ten is held out.

    Args:
        key: text that all ways to write one problem share.
    """
    return zlib.crc32(key.encode()) % 10 == 0


def split_rows(
    rows: list[dict[str, Any]], n_train: int, n_test: int, seed: int, source: str
) -> tuple[Dataset, Dataset]:
    """Shuffled rows as a training and a held-out set.

    Args:
        rows: all different.
        n_train, n_test: rows of each set.
        seed: of the shuffle.
        source: named in errors.

    Raises:
        ValueError: fewer rows than that, or none asked for.
    """
    if n_train < 1 or n_test < 1:
        raise ValueError(f"n_train and n_test must be at least 1, not {n_train} and {n_test}.")
    if len(rows) < n_train + n_test:
        raise ValueError(f"{source} has {len(rows)} different questions; {n_train} + {n_test} were asked for.")
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows[:n_train]), Dataset.from_list(rows[n_train : n_train + n_test])
