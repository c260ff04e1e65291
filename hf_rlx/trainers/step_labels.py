"""Step labels without people: every calculation inside a step is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_rlx.data.steps import split_steps
from hf_rlx.verifiers.steps import check_steps


def label_calculations(
    prompts: Sequence[Any],
    solutions: Sequence[str],
    step_separator: str = "\n",
    *,
    rounding: bool = False,
    unchecked: bool | None = None,
) -> list[dict[str, Any]]:
    """Solutions to rows for `PRMTrainer`: a step is wrong where a calculation in it is.

    A right calculation need not be a right step: such labels say nothing of a step that computes what nobody asked.

    Args:
        prompts: one per solution, text or messages.
        solutions: texts, or message lists whose last message is the solution; split at `step_separator`, blank pieces
            left out.
        rounding: see `check_steps`.
        unchecked: the label of steps that calculate nothing; None: not known, which `PRMTrainer` leaves out.

    Returns:
        Rows with prompt, completions and labels; a solution without a step gives none.

    Raises:
        ValueError: another number of prompts than solutions.

    >>> label_calculations(["?"], ["1 + 1 = 2\\nso 2 * 3 = 7\\nDone."])
    [{'prompt': '?', 'completions': ['1 + 1 = 2', 'so 2 * 3 = 7', 'Done.'], 'labels': [True, False, None]}]
    """
    if len(prompts) != len(solutions):
        raise ValueError(f"{len(prompts)} prompts for {len(solutions)} solutions; give one each")
    rows = []
    for prompt, solution in zip(prompts, solutions, strict=True):
        text = solution if isinstance(solution, str) else solution[-1]["content"]
        steps = [step for step, _ in split_steps(text, step_separator)]
        if steps:
            labels = [_label(step, rounding, unchecked) for step in steps]
            rows.append({"prompt": prompt, "completions": steps, "labels": labels})
    return rows


def _label(step: str, rounding: bool, unchecked: bool | None) -> bool | None:
    checks = check_steps(step, rounding)
    return all(check.verdict.outcome == "right" for check in checks) if checks else unchecked


__all__ = ["label_calculations"]
