"""The role `step_reward`: a process reward model, an adapter and a head read where each step of a solution ends.

Its score is the log-odds that a step is right; sigma of it the probability. What a score depends on is saved with the
role (`Role.facts`), so that it is the same number in another process:

| fact | what |
|---|---|
| step_separator | what stands behind every step; a completion is split there |
| max_length, max_completion_length, chat_template_kwargs | how solutions were tokenized in training |
| special_tokens_in_messages | the same |
| id2label | {"0": "bad", "1": "good"}: the sign of the score |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from hf_rlx.data.special_tokens import SpecialTokens
from hf_rlx.data.steps import encode_steps, split_steps
from hf_rlx.functional import step_aggregate
from hf_rlx.models.reward_role import special_tokens_of, tokenizer_of
from hf_rlx.models.roles import STEP_REWARD
from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel

StepValue = Literal["probability", "log_probability", "log_odds"]
_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "probability": torch.sigmoid,
    "log_probability": torch.nn.functional.logsigmoid,
    "log_odds": lambda x: x,
}


class _Solution(NamedTuple):
    """ids: its tokens. ends: of its steps in tokens. characters: of its steps in its text."""

    ids: list[int]
    ends: tuple[int, ...]
    characters: tuple[int, ...]


class RoleStepReward:
    """A process reward model as a step reward function:
    `PPOTrainer(model=shared, ..., step_reward_funcs=shared.step_reward_function())`.

    A completion's text is split at the separator and tokenized as in training, whatever tokens the policy sampled; a
    step ends, in characters, behind its separator. Steps beyond `max_length` have no score. What is left to the role
    (None below) is read at every call.

    Args:
        shared: the model with the role. role: its name.
        tokenizer: as for `RoleReward`.
        value: what a step is worth: "probability" that it is right; "log_probability", whose sum over steps is that of
            the whole solution and gains nothing from more steps; "log_odds", the score itself.
        max_tokens: of one forward.
        step_separator, max_length, max_completion_length, chat_template_kwargs: None: as in training.
        special_tokens: of messages, as for `RoleReward`.
        name: in logs.

    Raises:
        KeyError: no such role. ValueError: it has no head, an unknown `value`, no tokenizer is to be found.
    """

    runs_on_main_thread = True  # shares device and weights with the policy

    def __init__(
        self,
        shared: SharedModel,
        role: str = STEP_REWARD,
        tokenizer: Any = None,
        *,
        value: StepValue = "probability",
        max_tokens: int | None = 8192,
        step_separator: str | None = None,
        max_length: int | None = None,
        max_completion_length: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        special_tokens: SpecialTokens | None = None,
        name: str | None = None,
    ) -> None:
        if shared._role(role).head is None:
            raise ValueError(f"role {role!r} has no head to score with; train it with PRMTrainer(model=shared, ...)")
        if value not in _VALUES:
            raise ValueError(f"value must be one of {tuple(_VALUES)}, got {value!r}")
        self.shared, self.role, self.value, self.__name__ = shared, role, value, name or role
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer or tokenizer_of(shared)
        self._given: dict[str, Any] = {
            "step_separator": step_separator,
            "max_length": max_length,
            "max_completion_length": max_completion_length,
            "chat_template_kwargs": chat_template_kwargs,
            "special_tokens_in_messages": special_tokens,
        }

    @property
    def special_tokens(self) -> SpecialTokens:
        """What special tokens inside messages become."""
        return special_tokens_of(self.shared, self.role, self._given["special_tokens_in_messages"])

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[list[tuple[int, float]]]:
        """For each completion (text, or messages) its steps: (end in characters, worth); none where it has no step."""
        if not completions:
            return []
        found = self.scores(prompts, completions)
        chances = torch.tensor([score for _, row in found for score in row]).sigmoid()
        if log_metric is not None and len(chances):
            log_metric(f"step_reward_model/{self.__name__}/probability", float(chances.mean()))
        worth = _VALUES[self.value]
        return [
            list(zip(characters, worth(torch.tensor(row)).tolist(), strict=True)) if row else []
            for characters, row in found
        ]

    def solution_scores(
        self,
        prompts: list[Any],
        completions: list[Any],
        how: Literal["min", "prod", "mean", "last"] = "min",
        **_: Any,
    ) -> list[float | None]:
        """One score in [0, 1] per completion from the probabilities of its steps, see `step_aggregate`; None where it
        has no step. A reward function too: `reward_funcs=[steps.solution_scores]`."""
        if not completions:
            return []
        rows = [torch.tensor(row).sigmoid() for _, row in self.scores(prompts, completions)]
        return [float(step_aggregate(row[None].double(), None, how)) if len(row) else None for row in rows]

    solution_scores.runs_on_main_thread = True  # type: ignore[attr-defined]

    def scores(self, prompts: list[Any], completions: list[Any]) -> list[tuple[tuple[int, ...], list[float]]]:
        """For each of N completions where its steps end in characters, and their log-odds; equal prompts in a row are
        forwarded once.

        Raises:
            ValueError: a prompt cannot be tokenized, or a step has no tokens; names the completion.
        """
        groups: list[Group] = []
        solutions: list[_Solution] = []
        for prompt, answers in self._encode(prompts, completions):
            solutions += answers
            read = [answer.ids for answer in answers if answer.ends]
            if read:
                groups.append(Group.from_lists(prompt, read))
        if not groups:
            return [((), []) for _ in solutions]
        ends = [answer.ends for answer in solutions if answer.ends]
        with torch.no_grad():
            flat = iter(self.shared.score(groups, self.role, self.max_tokens, ends).float().tolist())
        return [(answer.characters, [next(flat) for _ in answer.ends]) for answer in solutions]

    def to(self, device: torch.device | str) -> None:
        """Move the model, unless it is quantised or accelerate has placed its parts."""
        placed = getattr(self.shared.causal_lm, "hf_device_map", None) is not None
        if not placed and self.shared.quantization_method is None:
            self.shared.to(device)

    def _encode(
        self, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> Iterator[tuple[list[int], list[_Solution]]]:
        """Runs of equal prompts: the prompt's tokens and its solutions. One that a long solution cut stands alone."""
        separator = self._setting("step_separator") or "\n"
        tokens: list[int] | None = None
        run: list[_Solution] = []
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            text = completion if isinstance(completion, str) else completion[-1]["content"]
            steps = split_steps(text, separator)
            try:
                encoded = encode_steps(
                    prompt,
                    [step for step, _ in steps],
                    self.tokenizer,
                    separator=separator,
                    max_length=self._setting("max_length"),
                    max_completion_length=self._setting("max_completion_length"),
                    chat_template_kwargs=self._setting("chat_template_kwargs"),
                    special_tokens=self.special_tokens,
                )
            except ValueError as error:
                raise ValueError(f"completion {index} {error}") from error
            characters = tuple(end for _, end in steps[: len(encoded.ends)])
            if tokens is not None and encoded.prompt != tokens:
                yield tokens, run
                run = []
            tokens = encoded.prompt
            run.append(_Solution(encoded.ids, encoded.ends, characters))
        if tokens is not None:
            yield tokens, run

    def _setting(self, name: str) -> Any:
        """As given, else what the role was trained with."""
        given = self._given[name]
        return self.shared._role(self.role).facts.get(name) if given is None else given


__all__ = ["RoleStepReward", "StepValue"]
