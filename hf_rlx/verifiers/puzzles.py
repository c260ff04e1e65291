"""Puzzles by name: our own exact ones, and any task of reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_rlx.verifiers.countdown import CountdownVerifier
from hf_rlx.verifiers.nim import NimVerifier
from hf_rlx.verifiers.reasoning_gym import ReasoningGymVerifier
from hf_rlx.verifiers.text import Completion

OWN: dict[str, Callable[..., Any]] = {"countdown": CountdownVerifier, "nim": NimVerifier}
"""Names that mean a verifier of this package; reasoning-gym's task of the same name is `reasoning_gym/<name>`."""


class PuzzleVerifier:
    """Reward function for rows of `hf_rlx.data.tasks.puzzle_task(name)`: 1.0 for a right solution, else 0.0.

    Args:
        name: `"countdown"` and `"nim"` are this package's (`CountdownVerifier`, `NimVerifier`); every other name is a
            task of reasoning-gym (`ReasoningGymVerifier`), and `"reasoning_gym/countdown"` is that package's.
        graded: pay partial credit, where the puzzle has any.
        options: as the verifier takes them: its own arguments, or for reasoning-gym the configuration of the task.

    Raises:
        ImportError: reasoning-gym is needed and not installed; the message names the command.
        ValueError: the name is unknown, or `graded` is asked of a puzzle that is right or wrong only.
        TypeError: an option that the verifier does not have.

    >>> PuzzleVerifier("countdown")(["Make 3."], ["1 + 2"], numbers=[[1, 2]], target=[3])
    [1.0]
    """

    def __init__(self, name: str, *, graded: bool = False, **options: Any) -> None:
        self.name = name
        if name == "countdown":
            if graded:
                raise ValueError("countdown is right or wrong: it has no partial credit")
            self.verifier = OWN[name](**options)
        elif name in OWN:
            self.verifier = OWN[name](graded=graded, **options)
        else:
            self.verifier = ReasoningGymVerifier(name.removeprefix("reasoning_gym/"), graded=graded, **options)
        self.__name__ = self.verifier.__name__

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float | None]:
        """One reward a completion, in 0..1, or None where there is no verdict; see the verifier of the name.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: plain strings, or message lists.
            columns: dataset columns, one value per completion, and what trainers pass for logging.

        Raises:
            ValueError: a column that the verifier reads is missing or of another length.
        """
        return list(self.verifier(prompts, completions, **columns))
