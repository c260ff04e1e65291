"""A reward model on what a policy writes now: its held-out accuracy says little about answers it has not seen the like
of, and those are the ones that the policy will be rewarded for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_rlx.data.pair_encoding import EncodedAnswers, fit
from hf_rlx.data.special_tokens import SpecialTokens
from hf_rlx.models.reward_role import combined
from hf_rlx.models.roles import POLICY, REWARD
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.collect import collect
from hf_rlx.rollout.generate import Generator
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.rollout.scoring import RewardScorer
from hf_rlx.trainers.reward_report import RewardReport, ScoredRow, reward_report


def evaluate_on_policy(
    model: SharedModel,
    prompts: Any,
    verifier: Any,
    *,
    policy: SharedModel | None = None,
    role: str = REWARD,
    tokenizer: Any = None,
    num_generations: int = 4,
    max_completion_length: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    max_rows: int = 64,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens | None = None,
) -> RewardReport:
    """Sample from the policy, let a verifier or a judge rank the answers, and see whether the reward model agrees.

    Args:
        model: with the reward role. policy: who writes, when it is another model of the same tokenizer; None: `model`.
        prompts: texts, message lists, or dataset rows with a `prompt` and columns for the verifier.
        verifier: a reward function `(prompts, completions, **columns) -> list[float | None]`: the better answer gets
            more. Answers without a verdict, or without a token, are left out.
        role: to evaluate; of an ensemble the first member.
        tokenizer: None: that which the role was trained with.
        num_generations: K, answers a prompt. Prompts whose answers are all alike in the verifier's eyes have no pair.
        max_completion_length, temperature, seed: of sampling. max_rows: completions that decode side by side.
        chat_template_kwargs, special_tokens: of the prompts; None: as the role was trained.

    Returns:
        The report, as of held-out rows.

    Raises:
        ValueError: the role cannot score, or K is below 2. RewardError: the verifier failed.
    """
    if num_generations < 2:
        raise ValueError(f"num_generations must be at least 2 for a pair, got {num_generations}")
    reward = model.reward_function(role, tokenizer)  # refuses a role that cannot score; knows the tokenizer
    writer = model if policy is None else policy
    rows = [row if isinstance(row, dict) else {"prompt": row} for row in _listed(prompts)]
    params = SamplingParams(max_completion_length=max_completion_length, temperature=temperature, seed=seed)
    with RewardScorer(verifier) as scorer, torch.no_grad(), writer.as_role(POLICY), writer.rollout_mode():
        rollouts = collect(
            rows,
            Generator(writer, reward.tokenizer, max_rows),
            scorer,
            reward.tokenizer,
            params,
            num_generations,
            chat_template_kwargs=reward.chat_template_kwargs if chat_template_kwargs is None else chat_template_kwargs,
            special_tokens=special_tokens or reward.special_tokens,
        ).rollouts
    scored = []
    for rollout in rollouts:
        judged = [i for i, c in enumerate(rollout.completions) if c.token_ids and not rollout.total[i].isnan()]
        if not judged:
            continue
        group = rollout.group().select(judged)
        answers = [ids.tolist() for ids in group.response_ids]
        read = fit(
            EncodedAnswers(group.prompt_ids.tolist(), answers), reward.max_length, reward.tokenizer.bos_token_id
        )
        found = combined(model, read.groups(), role)
        ranks = [-float(rollout.total[i]) for i in judged]
        lengths = [ids.numel() for ids in group.response_ids]
        scored.append(ScoredRow(found.score.tolist(), lengths, ranks, None, tuple(found.spread.tolist())))
    return reward_report(scored)


def _listed(prompts: Any) -> Sequence[Any]:
    return [prompts[i] for i in range(len(prompts))]
