"""Step rewards: where each step of a solution ends, and what it was worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.tokenize import char_to_token
from hf_rlx.functional import step_advantages
from hf_rlx.rollout.collect import score_request
from hf_rlx.rollout.reward_models import RewardCall, RewardError, RewardFunction
from hf_rlx.rollout.scoring import LARGEST_REWARD, lay_out
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.types import Rollout

Steps = list[tuple[int, float]]
StepReward = Callable[..., Sequence[Steps]]


class StepRewardError(RewardError, ValueError):
    """A step reward function failed or returned what is no list of steps; the message names function, prompt and
    completion. Where the function raised, its exception is the `__cause__`."""


def score_steps(
    function: StepReward, rollouts: Sequence[Rollout], store: MetricStore | None = None, trainer_state: Any = None
) -> list[list[Steps]]:
    """Call a step reward function on every group, with the arguments that reward functions get.

    Args:
        function: `(prompts, completions, **columns) -> K lists of steps`; it may be async. Completions are messages
            where the prompt is.
        rollouts: P groups.
        store: gets `rewards/<name>/mean` over all steps, `steps/<name>/mean` a completion, and what the function logs
            with `log_metric`.
        trainer_state: passed to the function.

    Returns:
        P lists of K step lists, each step (end in characters, reward).

    Raises:
        StepRewardError: the function raised; or returned another number of lists than completions, something else
            than (end, reward) pairs, a step that ends outside its text, or a reward that is not finite.
    """
    name = str(getattr(function, "__name__", type(function).__name__))
    prepared = RewardFunction(name, function, "sync")
    result = []
    for rollout in rollouts:
        lists = lay_out([score_request(rollout.prompt, rollout.completions, rollout.columns)])
        call = RewardCall(prepared, lists, range(len(rollout.completions)), trainer_state)
        value, error = call.run()
        if error is not None:
            what = f"step reward function {name} raised {type(error).__name__}: {error}"
            raise StepRewardError(what + prepared.where(lists, 0)) from error
        steps = _read(value, rollout, prepared, lists)
        result.append(steps)
        if store is not None:
            rewards = [reward for row in steps for _, reward in row]
            store.add(f"rewards/{name}/mean", sum(rewards) / max(len(rewards), 1), len(rewards))
            store.add(f"steps/{name}/mean", len(rewards) / len(steps), len(steps))
            for metric, number in call.metrics:
                store.add(metric, number)
    return result


def _read(value: Any, rollout: Rollout, function: RewardFunction, lists: dict[str, list]) -> list[Steps]:
    """K lists of (int, float) from what the function returned for one group."""

    def wrong(what: str, index: int) -> StepRewardError:
        return StepRewardError(f"step reward function {function.name} {what}{function.where(lists, index)}")

    count = len(rollout.completions)
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise wrong(f"returned {type(value).__name__}; expected {count} lists of (end, reward) pairs", 0)
    if len(value) != count:
        raise wrong(f"returned {len(value)} lists for {count} completions", 0)
    result = []
    for index, (row, completion) in enumerate(zip(value, rollout.completions, strict=True)):
        if isinstance(row, str | bytes) or not isinstance(row, Sequence):
            raise wrong(f"returned {row!r} for a completion; expected a list of (end, reward) pairs", index)
        steps: Steps = []
        for step in row:
            if not isinstance(step, Sequence) or len(step) != 2:
                raise wrong(f"returned the step {step!r}; expected a pair (end in characters, reward)", index)
            end, reward = (x.item() if hasattr(x, "item") and getattr(x, "ndim", 0) == 0 else x for x in step)
            if not isinstance(end, Integral) or isinstance(end, bool) or not isinstance(reward, Real):
                raise wrong(f"returned the step {step!r}; expected (int, float): end in characters, reward", index)
            end, reward = int(end), float(reward)
            if not 0 < end <= len(completion.text):
                raise wrong(f": a step ends outside its text: {end} of {len(completion.text)} characters", index)
            if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
                raise wrong(f"returned the step {step!r}; a reward must be finite, at most {LARGEST_REWARD:g}", index)
            steps.append((end, reward))
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
