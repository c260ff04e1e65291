"""Arguments that cards have in transformers and TRL, as fields of `RunFacts`."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any

from hf_rlx.cards.facts import RunFacts

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DATASET = ("dataset_name", "dataset")
_RENAMED = {"finetuned_from": "base_model", "tasks": "pipeline_tag", "dataset_tags": "dataset_id"}
_ALONE = "the card names one; write the others into README.md"


def card_facts_of(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of `RunFacts` from the arguments of `create_model_card` and `push_to_hub`, theirs and ours.

    `dataset_name` and `dataset` give `dataset_id` where they are a Hub id, else `dataset`; `dataset_tags` gives
    `dataset_id`, `finetuned_from` gives `base_model` and `tasks` gives `pipeline_tag`. None counts as not given.

    Raises:
        TypeError: a name that a card has no place for; lists those that it has.
        ValueError: several values where the card has one, or one thing under two names.
    """
    known = [field.name for field in dataclasses.fields(RunFacts)]
    taken = [*known, _DATASET[0], *_RENAMED]
    unknown = [name for name, value in given.items() if name not in taken and value is not None]
    if unknown:
        near = difflib.get_close_matches(unknown[0], taken, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise TypeError(
            f"the card has no place for {', '.join(map(repr, unknown))}{hint}; leave it out and add it to "
            f"README.md by hand. Known are {', '.join(taken)}"
        )
    facts: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name not in taken:
            continue
        ours = _RENAMED.get(name, name)
        if name in (*_RENAMED, *_DATASET):
            value = _single(name, value)
        if name in _DATASET and _HUB_ID.fullmatch(value) and not Path(value).exists():
            ours = "dataset_id"
        elif name in _DATASET:
            ours = "dataset"
        if ours == "tags" and isinstance(value, str):
            value = [value]
        if facts.get(ours, value) != value:
            raise ValueError(f"{name}={value!r}, but {ours} is {facts[ours]!r} already; give one of them")
        facts[ours] = value
    if "dataset_id" in facts and "dataset_id" not in given:
        facts.setdefault("dataset", facts["dataset_id"])
    return facts


def _single(name: str, value: Any) -> str:
    """The one text of an argument that may be a list."""
    values = [value] if isinstance(value, str) else list(value)
    if len(values) != 1:
        raise ValueError(f"{name}={value!r}: {_ALONE}")
    return str(values[0])


__all__ = ["card_facts_of"]
