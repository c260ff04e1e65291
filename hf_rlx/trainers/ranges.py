"""What numbers a configuration's fields may hold, checked when it is built and named by field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """`low` <= value <= `high`, finite; `integer`: whole numbers only; `above`: low itself is excluded."""

    low: float
    high: float = math.inf
    integer: bool = False
    above: bool = False

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, or None."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"must be a number, got {type(value).__name__} {value!r}"
        if self.integer and value != int(value):
            return f"must be a whole number, got {value!r}"
        inside = (value > self.low if self.above else value >= self.low) and value <= self.high
        if math.isfinite(value) and inside:
            return None
        if math.isinf(self.high):
            return f"must be finite and {'above' if self.above else 'at least'} {self.low:g}, got {value!r}"
        return f"must be {'above' if self.above else 'at least'} {self.low:g} and at most {self.high:g}, got {value!r}"


_COUNT, _SHARE, _POSITIVE = Range(1, integer=True), Range(0, 1), Range(0, above=True)
_NOT_NEGATIVE = Range(0)

# Without them there is nothing to run, unless None is the default; other fields may be None.
_NEEDED = ("num_generations", "max_completion_length", "learning_rate", "beta")

RANGES: dict[str, Range] = {
    "learning_rate": _NOT_NEGATIVE,
    "per_device_train_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "max_tokens_per_forward": _COUNT,
    "max_tokens_per_update": _COUNT,
    "max_skipped_steps": Range(0, integer=True),
    "num_generations": _COUNT,
    "num_generations_eval": _COUNT,
    "generation_batch_size": _COUNT,
    "steps_per_generation": _COUNT,
    "num_iterations": _COUNT,
    "max_rollout_rows": _COUNT,
    "max_completion_length": _COUNT,
    "temperature": _NOT_NEGATIVE,
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0, integer=True),
    "min_p": _SHARE,
    "repetition_penalty": _POSITIVE,
    "eval_temperature": _NOT_NEGATIVE,
    "reward_timeout": _POSITIVE,
    "reward_concurrency": _COUNT,
    "soft_overlong_cache": Range(0, integer=True),
    "dynamic_sampling_rounds": Range(1, 15, integer=True),
    "beta": _NOT_NEGATIVE,
    "kl_target": _POSITIVE,
    "kl_horizon": _POSITIVE,
    "ref_model_mixup_alpha": _SHARE,
    "ref_model_sync_steps": _COUNT,
    "vllm_importance_sampling_clip_max": _POSITIVE,
    "vllm_importance_sampling_clip_min": _NOT_NEGATIVE,
    "advantage_eps": _NOT_NEGATIVE,
    "epsilon": _NOT_NEGATIVE,
    "epsilon_high": _NOT_NEGATIVE,
    "delta": _POSITIVE,
    "entropy_coef": Range(-math.inf),
    "gamma": _SHARE,
    "lam": _SHARE,
    "cliprange": _NOT_NEGATIVE,
    "cliprange_high": _NOT_NEGATIVE,
    "dual_clip": Range(1, above=True),
    "cliprange_value": _POSITIVE,
    "vf_coef": _NOT_NEGATIVE,
    "missing_eos_penalty": _NOT_NEGATIVE,
    "reward_clip": _POSITIVE,
    "target_kl": _POSITIVE,
    "critic_learning_rate": _NOT_NEGATIVE,
    "critic_warmup_steps": Range(0, integer=True),
    "num_mini_batches": _COUNT,
    "total_episodes": _COUNT,
}


def check_ranges(config: Any) -> None:
    """Refuse a field outside its range.

    Raises:
        ValueError: names the field, the value and what it may be.
    """
    for name, allowed in RANGES.items():
        if not hasattr(config, name):
            continue
        value = getattr(config, name)
        spec = type(config).__dataclass_fields__.get(name)
        if value is None and (name not in _NEEDED or (spec is not None and spec.default is None)):
            continue
        problem = allowed.problem(value)
        if problem is not None:
            raise ValueError(f"{name} {problem}")
        if allowed.integer and isinstance(value, float):
            setattr(config, name, int(value))
    weights = getattr(config, "reward_weights", None)
    if weights is not None:
        listed = isinstance(weights, list | tuple)
        if not listed or not all(isinstance(w, int | float) and abs(w) <= 1e30 for w in weights):
            raise ValueError(f"reward_weights must be a list of finite numbers, got {weights!r}")
        if not any(weights):
            raise ValueError("reward_weights are all 0: nothing could be learned")
    stops = getattr(config, "stop_strings", None)
    if stops is not None and (isinstance(stops, str) or not all(isinstance(s, str) for s in stops)):
        raise ValueError(f"stop_strings must be a list of strings, got {stops!r}; for one string write [{stops!r}]")
