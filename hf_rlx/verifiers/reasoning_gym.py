"""Score completions with the scorer of a reasoning-gym dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_rlx.verifiers.answers import last_tag
from hf_rlx.verifiers.gym_rules import GymScorer
from hf_rlx.verifiers.text import Completion, column_of, completion_text
from hf_rlx.verifiers.verdict import JudgedRows, Verdict

_LINE = re.compile(r"\banswer\s*:[ \t]*", re.IGNORECASE)


def final_answer(text: str) -> str:
    """The answer in a completion, without the thinking before it.

    The last `<answer>...</answer>`; else all that follows the last `Answer:` (grids span several lines); else the
    whole text. Stripped of spaces and of Markdown's `**`.
    """
    if (inside := last_tag(text)) is not None:
        return inside.strip()
    return _LINE.split(text)[-1].strip().strip("*").strip()


def _untagged(value: dict[str, Any]) -> Any:
    """Object hook for JSON that restores tuples and keys which are no text."""
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__items__"}:
        return dict(value["__items__"])
    return value


class ReasoningGymVerifier(JudgedRows):
    """Reward function: the scorer of a reasoning-gym dataset, for rows of `reasoning_gym_task`.

    Scorers are kept from what a model can write, and a few are replaced: see `gym_rules`.

    Args:
        task_name: name under which reasoning-gym registers the dataset.
        graded: pay the package's partial credit as it is. Off by default: several scorers pay 0.01 or more for any
            text at all (countdown does), which a policy learns to collect. Off, a score of exactly 1.0 pays 1.0
            and everything else 0.0, so the mean reward is the accuracy.
        column: dataset column with the entry as JSON text. A row of another task, where it is None, scores None.
        max_failed: share of completions that the scorer cannot judge, over which it counts as broken.
        settings: the configuration the task was made with.

    Raises:
        ImportError: when reasoning-gym is not installed; the message names the command.
        ValueError: when the name is unknown, or its scorer evaluates answers in a way that is not known.

    >>> ReasoningGymVerifier("gcd")(["gcd?"], ["Answer: 4"], metadata=['{"answer": "4"}'])
    [1.0]
    """

    def __init__(
        self,
        task_name: str,
        *,
        graded: bool = False,
        column: str = "metadata",
        max_failed: float = 0.25,
        **settings: Any,
    ) -> None:
        try:
            self._scorer = GymScorer(task_name, settings)
        except ImportError as error:
            raise ImportError('ReasoningGymVerifier needs reasoning-gym: pip install "hf_rlx[tasks]"') from error
        self.graded = graded
        self.column = column
        self.max_failed = max_failed
        self.__name__ = task_name

    def _verdicts(self, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Verdict]:
        entries = column_of(columns, self.column, len(completions), self.__name__)
        rows = zip(completions, entries, strict=True)
        return [self._judge(completion_text(completion), entry) for completion, entry in rows]

    def _judge(self, completion: str, entry: str | None) -> Verdict:
        if entry is None:
            return Verdict("failed", "the row holds no task", excused=True)
        verdict, score = self._scorer.judge(final_answer(completion), json.loads(entry, object_hook=_untagged))
        return replace(verdict, credit=score)
