"""What a dataset must look like, checked before anything is trained."""

from __future__ import annotations

from typing import Any

_LIKELY = ("question", "query", "instruction", "input", "text", "messages", "problem")


def check_prompts(dataset: Any, name: str) -> None:
    """Refuse a prompt dataset that could not be trained on.

    Args:
        dataset: a map-style dataset, or None (nothing to check).
        name: of the argument, for messages.

    Raises:
        ValueError: no `prompt` column (the message has the columns found and the rename), an empty dataset, or a
            streaming one; a row without a prompt, by its index.
    """
    if dataset is None:
        return
    if isinstance(dataset, dict):
        raise ValueError(
            f'{name} is a dictionary of {sorted(map(str, dataset))}; pass one of its datasets, e.g. dataset["train"]'
        )
    if isinstance(dataset, str):
        raise ValueError(
            f"{name} is the text {dataset!r}; load it first: datasets.load_dataset({dataset!r}, split=...)"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(f"{name} is a streaming dataset; load it whole, or take its first rows into a Dataset")
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty")
    first = dataset[0]
    if not isinstance(first, dict):
        raise ValueError(f"{name} must have rows that are dictionaries with a `prompt`, got {type(first).__name__}")
    columns = list(getattr(dataset, "column_names", None) or first)
    vision = [c for c in ("image", "images") if c in columns]
    if vision:
        raise ValueError(
            f"{name} has the column `{vision[0]}`, but hf_rlx does not carry vision models; use trl.GRPOTrainer for "
            "them (hf_rlx verifiers work there as reward_funcs), or remove the column"
        )
    if "prompt" in columns:
        prompts = dataset["prompt"] if hasattr(dataset, "column_names") else (row["prompt"] for row in dataset)
        for index, prompt in enumerate(prompts):
            if not prompt or not isinstance(prompt, str | list):
                raise ValueError(
                    f"{name}: row {index} has the prompt {prompt!r}; give it text or messages, or drop it"
                )
        return
    likely = next((c for c in _LIKELY if c in columns), columns[0] if columns else "question")
    raise ValueError(
        f"{name} has no column `prompt`; it has {columns}. If `{likely}` is the prompt: "
        f'dataset = dataset.rename_column("{likely}", "prompt")'
    )
