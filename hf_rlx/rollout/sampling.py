"""One sampling step: logits in, tokens and their clean log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    Args:
        max_completion_length: tokens at most, EOS included.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches p; 1 keeps all.
        min_p: keep tokens at least `min_p` times as probable as the most probable one.
        repetition_penalty: divide positive and multiply negative logits of tokens seen in prompt or completion.
        stop_strings: end a completion with the token that completes one of these.
        seed: same seed, prompts and weights: same tokens.

    Raises:
        ValueError: a value outside its range.
    """

    max_completion_length: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = field(default=())
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "max_completion_length must be at least 1": self.max_completion_length >= 1,
            "temperature must be at least 0": self.temperature >= 0,
            "top_k must be at least 0 (0 keeps all tokens)": self.top_k >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "min_p must be in [0, 1]": self.min_p is None or 0 <= self.min_p <= 1,
            "repetition_penalty must be positive": self.repetition_penalty > 0,
            "stop strings must not be empty": all(self.stop_strings),
        }
        for message, fine in checks.items():
            if not fine:
                raise ValueError(f"{message}: {self}")

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from a distribution other than softmax(logits / temperature)."""
        return bool(self.top_k or self.top_p < 1 or self.min_p or self.repetition_penalty != 1)


def sample_step(logits: Tensor, uniform: Tensor, params: SamplingParams, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: (n, V) raw logits.
        uniform: (n,) numbers in [0, 1), one per row: the only randomness.
        params: sampling settings.
        seen: (n, V) bool, True on tokens that the repetition penalty falls on; None without a penalty.

    Returns:
        tokens (n,), and their log-probs (n,) in nats under softmax(logits / temperature), *before* penalty and
        filters: what a trainer's clean forward at the same temperature gives (trl#2358). Greedy: temperature 1.

    Raises:
        FloatingPointError: NaN or +inf among a row's logits, or nothing but -inf. No token follows from them, and
            searching a NaN distribution would silently give the last one of the vocabulary.
    """
    clean = logits.float() / (params.temperature or 1.0)
    log_norm = torch.logsumexp(clean, dim=-1, keepdim=True)
    if not torch.isfinite(log_norm).all():
        bad = int((~torch.isfinite(log_norm)).sum())
        raise FloatingPointError(
            f"the model's logits are NaN or infinite in {bad} of {len(log_norm)} rows ({logits.dtype}). Either the "
            "weights have diverged (look at loss and grad_norm of the last steps; lower learning_rate), or fp16 "
            "overflows in this model (use bf16 or float32)"
        )
    penalised = logits.float()
    if seen is not None:
        scaled = torch.where(
            penalised > 0, penalised / params.repetition_penalty, penalised * params.repetition_penalty
        )
        penalised = torch.where(seen, scaled, penalised)
    if params.temperature == 0:
        tokens = penalised.argmax(dim=-1)
    else:
        if not params.filters:
            probs = torch.exp(clean - log_norm)
        else:
            probs = filtered_probs(penalised / params.temperature, params)
        tokens = _invert(probs, uniform)
    return tokens, (clean.gather(-1, tokens[:, None]) - log_norm)[:, 0]


def filtered_probs(scores: Tensor, params: SamplingParams) -> Tensor:
    """(n, V) tempered scores -> probabilities after top-k, top-p and min-p, in transformers' order."""
    if params.top_k and params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    if params.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        # Keep a token while the mass *before* it is below p: the most probable one always stays.
        dropped = (ordered.cumsum(-1) - ordered) >= params.top_p
        probs = probs.masked_fill(dropped.scatter(-1, order, dropped), 0.0)
    if params.min_p:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds uniform * total; an index of mass 0 is never returned."""
    cumulative = probs.cumsum(-1)
    point = uniform.to(probs.device, probs.dtype)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, point, right=True)[:, 0]
    # Rounding can put the point on the total itself: then the last token with mass is meant.
    past_end = tokens >= probs.shape[-1]
    if past_end.any():
        last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
        tokens = torch.where(past_end, last, tokens)
    return tokens


def uniforms(seed: int, prompt_index: int, num_generations: int, length: int) -> Tensor:
    """(K, length) numbers in [0, 1) that depend on seed and prompt only: which other prompts run beside it, and
    when their rows finish, changes nothing."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + prompt_index * 7_919 + 12_345) % (2**63))
    return torch.rand(num_generations, length, generator=generator)


_OPTIONS = {  # transformers' and vLLM's names -> ours
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "stop_strings": "stop_strings",
    "stop": "stop_strings",
}


def only_of_the_engine(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """What of `generation_kwargs` `from_generation_kwargs` does not translate: options of another engine alone."""
    return {name: value for name, value in (kwargs or {}).items() if name not in (*_OPTIONS, "do_sample")}


def from_generation_kwargs(kwargs: dict[str, Any] | None, others: bool = False) -> dict[str, Any]:
    """TRL's `generation_kwargs` in our names.

    Args:
        kwargs: the user's.
        others: leave out what the built-in generator does not have, for another engine (`only_of_the_engine`).

    Raises:
        ValueError: an option that the built-in generator does not have; it names those that it has.
    """
    unknown = only_of_the_engine(kwargs)
    if unknown and not others:
        raise ValueError(
            f"generation_kwargs: the built-in generator has no option {next(iter(unknown))!r}; it has "
            f"{', '.join(sorted([*_OPTIONS, 'do_sample']))}. With use_vllm=True the options are vLLM's"
        )
    result: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        if name not in _OPTIONS:
            continue
        if _OPTIONS[name] == "stop_strings":
            value = (value,) if isinstance(value, str) else tuple(value)
        result[_OPTIONS[name]] = value
    if kwargs and kwargs.get("do_sample") is False:
        result["temperature"] = 0.0
    return result
