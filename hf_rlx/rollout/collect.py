"""Sampling and scoring together: a finished group goes to the scorers while others still generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.formats import PromptError
from hf_rlx.data.special_tokens import SpecialTokens
from hf_rlx.data.tokenize import EncodedPrompt, encode_prompt
from hf_rlx.rollout.generate import OnGroup, OnStep
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.rollout.scoring import RewardScorer, ScoreRequest, ScoreResult
from hf_rlx.types import Completion, Rollout


class Sampler(Protocol):
    """What samples completions: the built-in `Generator` or `VllmGenerator`."""

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        num_generations: int,
        params: SamplingParams,
        on_group: OnGroup | None = None,
        on_step: OnStep | None = None,
    ) -> list[list[Completion]]:
        """Sample K completions for every prompt."""


def is_collective(sampler: Sampler) -> bool:
    """Whether all processes sample together (vLLM): they call it equally often, so they must also fail together in
    every single rollout."""
    return bool(getattr(sampler, "collective", False))


def mark_weights(sampler: Sampler, version: int) -> None:
    """Tell a sampler that has a copy of the weights (vLLM) by which number they go now."""
    if hasattr(sampler, "version"):
        sampler.version = version


class _Progress:
    """The bar of one rollout: completions done and tokens a second, then how many prompts wait for rewards."""

    def __init__(self, total: int, description: str, disable: bool) -> None:
        # Not `disable=False`: TQDM_DISABLE shall count.
        hidden = {"disable": True} if disable else {}
        self.bar = tqdm(total=total, desc=description, unit="completion", leave=False, **hidden)
        self.start = self.shown = time.perf_counter()
        self.tokens = 0

    def step(self, sampled: int) -> None:
        """So many tokens were sampled."""
        self.tokens += sampled
        rate = self.tokens / max(time.perf_counter() - self.start, 1e-9)
        self.bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self.bar.update(0)

    def waiting(self, pending: int, always: bool = False) -> None:
        """So many prompts are not scored yet; shown once a second."""
        now = time.perf_counter()
        if always or now - self.shown >= 1.0:
            self.shown = now
            self.bar.set_postfix_str(f"{pending} prompts wait for rewards, {now - self.start:.0f} s")


@dataclass
class Collected:
    """Rollouts with their rewards, and what collecting them cost.

    rollouts: P of them, in the order of the rows. scores: what the scorers said, rows in the same order.
    generation_seconds, waiting_seconds: time spent generating, and then waiting for scorers that were not done.
    tokens: sampled. neutralised: special tokens inside messages that became plain text.
    """

    rollouts: list[Rollout]
    scores: ScoreResult
    generation_seconds: float
    waiting_seconds: float
    tokens: int
    neutralised: int = 0


def collect(
    rows: Sequence[dict[str, Any]],
    sampler: Sampler,
    scorer: RewardScorer,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    num_generations: int,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens = "split",
    max_prompt_tokens: int | None = None,
    progress: bool = False,
    description: str = "rollout",
    poll: Callable[[], None] | None = None,
) -> Collected:
    """Sample `num_generations` completions for every dataset row and score them meanwhile.

    Args:
        rows: dataset rows; `prompt` is text or messages, every other column goes to the reward functions.
        sampler, scorer, tokenizer, params: the parts.
        chat_template_kwargs: for the template; a row's own `chat_template_kwargs` column wins.
        special_tokens: what becomes of special tokens inside messages, see `encode_messages`.
        max_prompt_tokens: refuse longer prompts.
        progress: show a bar: completions done, tokens a second; then once a second how many prompts wait for rewards.
        poll: called after every decoding step and while scorers are waited for; may raise to end the rollout.

    Raises:
        PromptError: a prompt is malformed or longer than `max_prompt_tokens`.
        RewardError: from the reward functions, see `RewardScorer`.
    """
    prompts = encode_rows(rows, tokenizer, chat_template_kwargs or {}, special_tokens)
    check_lengths(rows, prompts, max_prompt_tokens, params)
    poll = poll or (lambda: None)
    submitted: list[int] = []
    shown = _Progress(len(rows) * num_generations, description, disable=not progress)
    with shown.bar:

        def on_group(index: int, completions: list[Completion]) -> None:
            submitted.append(index)
            scorer.submit(score_request(rows[index]["prompt"], completions, rows[index]))
            shown.bar.update(len(completions))

        def on_step(sampled: int) -> None:
            shown.step(sampled)
            poll()

        def on_wait() -> None:
            shown.waiting(scorer.pending)
            poll()

        try:
            sampled = sampler.generate([p.ids for p in prompts], num_generations, params, on_group, on_step)
        except BaseException:
            scorer.discard()
            raise
        generated = time.perf_counter()
        shown.waiting(scorer.pending, always=True)
        scores = scorer.gather(on_wait)
        scores = _in_order(scores, submitted, num_generations)
    finished = time.perf_counter()
    rollouts = []
    for index, (row, prompt, completions) in enumerate(zip(rows, prompts, sampled, strict=True)):
        span = slice(index * num_generations, (index + 1) * num_generations)
        rollouts.append(
            Rollout(
                prompt=row["prompt"],
                prompt_text=prompt.text,
                prompt_ids=prompt.ids,
                completions=completions,
                columns={k: v for k, v in row.items() if k != "prompt"},
                rewards=scores.rewards[span],
                total=scores.total[span],
            )
        )
    neutralised = sum(p.neutralised for p in prompts)
    return Collected(rollouts, scores, generated - shown.start, finished - generated, shown.tokens, neutralised)


def encode_rows(
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    kwargs: dict[str, Any],
    special_tokens: SpecialTokens,
) -> list[EncodedPrompt]:
    """The prompts of dataset rows, a row's own `chat_template_kwargs` above `kwargs`; raises `PromptError`."""
    return [
        encode_prompt(row["prompt"], tokenizer, {**kwargs, **(row.get("chat_template_kwargs") or {})}, special_tokens)
        for row in rows
    ]


def check_lengths(
    rows: Sequence[dict[str, Any]], prompts: list[EncodedPrompt], most: int | None, params: SamplingParams
) -> None:
    """Refuse prompts of more than `most` tokens (None: any number) by a `PromptError`."""
    for row, prompt in zip(rows, prompts, strict=True):
        if most is not None and len(prompt.ids) > most:
            context = most + params.max_completion_length
            raise PromptError(
                f"a prompt of {len(prompt.ids)} tokens leaves no room for {params.max_completion_length} new ones in "
                f"the model's context; shorten it or lower max_completion_length (both together at most {context}): "
                f"{prompt.text[:80]!r}...",
                row["prompt"],
            )


def score_request(prompt: Any, completions: list[Completion], columns: dict[str, Any]) -> ScoreRequest:
    """What reward functions get of one group: completions as messages where the prompt is messages; of `columns` all
    but those that an argument of theirs stands for."""
    texts: list[Any] = [c.text for c in completions]
    if not isinstance(prompt, str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {k: v for k, v in columns.items() if k not in ("prompt", "completion", "completion_ids")}
    return ScoreRequest(prompt, texts, [c.token_ids for c in completions], columns)


def _in_order(scores: ScoreResult, submitted: list[int], num_generations: int) -> ScoreResult:
    """Groups were submitted as they finished; put their rows back into prompt order."""
    place = {prompt: position for position, prompt in enumerate(submitted)}
    order = [place[prompt] * num_generations + k for prompt in range(len(submitted)) for k in range(num_generations)]
    return ScoreResult(
        rewards=scores.rewards[order],
        total=scores.total[order],
        names=scores.names,
        extra={name: [values[i] for i in order] for name, values in scores.extra.items()},
        metrics=scores.metrics,
    )
