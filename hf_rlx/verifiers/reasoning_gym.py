"""Score completions with the scorer of a reasoning-gym dataset."""

from __future__ import annotations

import json
import re
from typing import Any

from hf_rlx.verifiers.answers import last_tag
from hf_rlx.verifiers.text import Completion, column_of, completion_text

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


class ReasoningGymVerifier:
    """Reward function: the `score_answer` of a reasoning-gym dataset, for rows of `reasoning_gym_task`.

    Args:
        task_name: name under which reasoning-gym registers the dataset.
        graded: pay the package's partial credit as it is. Off by default: several scorers pay 0.01 or more for any
            text at all (countdown does), which a policy learns to collect. Off, a score of exactly 1.0 pays 1.0
            and everything else 0.0, so the mean reward is the accuracy.
        column: dataset column with the entry as JSON text.
        dataset_kwargs: the configuration the task was made with.

    Raises:
        ImportError: when reasoning-gym is not installed; the message names the command.
        ValueError: when the name is unknown.
    """

    def __init__(
        self, task_name: str, *, graded: bool = False, column: str = "metadata", **dataset_kwargs: Any
    ) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError('ReasoningGymVerifier needs reasoning-gym: pip install "hf_rlx[tasks]"') from error

        self._dataset = reasoning_gym.create_dataset(task_name, **dataset_kwargs)
        self.graded = graded
        self.column = column
        self.__name__ = task_name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float]:
        """One score per completion, in 0..1; 1.0 means right.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: plain strings, or message lists whose last assistant message is judged.
            columns: dataset columns, one value per completion; `self.column` must be among them.

        Raises:
            ValueError: when the column is missing or of another length.
        """
        scores = []
        entries = column_of(columns, self.column, len(completions), self.__name__)
        for completion, entry in zip(completions, entries, strict=True):
            answer = final_answer(completion_text(completion))
            score = float(self._dataset.score_answer(answer=answer, entry=json.loads(entry, object_hook=_untagged)))
            scores.append(score if self.graded else float(score == 1.0))
        return scores
