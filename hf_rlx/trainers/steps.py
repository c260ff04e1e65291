"""Step rewards: where each step of a solution ends, and what it was worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.tokenize import char_to_token
from hf_rlx.functional import step_advantages
from hf_rlx.types import Rollout

Steps = list[tuple[int, float]]
StepReward = Callable[..., Sequence[Steps]]


def score_steps(function: StepReward, rollouts: Sequence[Rollout]) -> list[list[Steps]]:
    """Call a step reward function on every group.

    Returns:
        P lists of K step lists, each step (end in characters, reward).

    Raises:
        ValueError: the function returned another number of lists than completions, or a step outside its text.
    """
    name = getattr(function, "__name__", type(function).__name__)
    result = []
    for rollout in rollouts:
        count = len(rollout.completions)
        columns = {key: [value] * count for key, value in rollout.columns.items()}
        texts = [c.text for c in rollout.completions]
        steps = [list(s) for s in function(prompts=[rollout.prompt] * count, completions=texts, **columns)]
        if len(steps) != count:
            raise ValueError(f"step reward function {name} returned {len(steps)} lists for {count} completions")
        for text, row in zip(texts, steps, strict=True):
            if any(not 0 < end <= len(text) for end, _ in row):
                raise ValueError(f"step reward function {name}: a step ends outside its text: {row}, {text[:80]!r}")
        result.append(steps)
    return result


def token_advantages(
    parts: Sequence[list[Steps]], rollout: Rollout, tokenizer: PreTrainedTokenizerBase, eps: float
) -> Tensor:
    """(K, R) advantages of one group from its step rewards, summed over the step reward functions."""
    longest = max(len(c.token_ids) for c in rollout.completions)
    lengths = torch.tensor([len(c.token_ids) for c in rollout.completions])
    mask = torch.arange(longest)[None] < lengths[:, None]
    total = torch.zeros(mask.shape)
    for steps in parts:
        width = max([len(row) for row in steps] + [1])
        rewards = torch.full((len(steps), width), torch.nan)
        ends = torch.full((len(steps), width), -1, dtype=torch.long)
        for index, (row, completion) in enumerate(zip(steps, rollout.completions, strict=True)):
            if row:
                rewards[index, : len(row)] = torch.tensor([reward for _, reward in row])
                tokens = char_to_token(tokenizer, completion.token_ids, [end for end, _ in row])
                ends[index, : len(row)] = torch.tensor(tokens)
        total += step_advantages(rewards, ends, mask, group_size=len(steps), eps=eps)
    return total
