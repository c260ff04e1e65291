"""Step rewards: where each step of a solution ends, and what it was worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.tokenize import char_to_token
from hf_rlx.functional import step_advantages
from hf_rlx.rollout.collect import score_request
from hf_rlx.rollout.reward_jobs import Job, JobPool, logged_by
from hf_rlx.rollout.reward_models import RewardCall, as_float, fault_of, prepare
from hf_rlx.rollout.scoring import lay_out
from hf_rlx.rollout.signatures import check_signatures
from hf_rlx.trainers.dynamic_sampling import COUNTS
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.trainers.observe import RESERVED
from hf_rlx.trainers.processes import raise_together
from hf_rlx.types import Rollout

if TYPE_CHECKING:
    from hf_rlx.trainers.online import OnlineTrainer

Steps = list[tuple[int, float]]
StepReward = Callable[..., Sequence[Steps]]


@dataclass
class StepScores:
    """What step reward functions said about P groups.

    Attributes:
        steps: for each of F functions P lists of K step lists, each step (end in characters, reward); a completion on
            which a function abstained or failed has no steps.
        extra: columns from `log_extra`, P x K values each, see `logged_by`.
    """

    steps: list[list[list[Steps]]]
    extra: dict[str, list]

    @property
    def found(self) -> bool:
        """Whether there is any step."""
        return any(row for groups in self.steps for group in groups for row in group)

    def add_columns(self, extra: dict[str, list]) -> None:
        """Put the columns beside those of reward functions; one whose name is taken is called `steps/<column>`."""
        for name, values in self.extra.items():
            extra[f"steps/{name}" if name in extra else name] = values


class StepScorer:
    """Scores the steps of completions with functions that are called, limited and checked like reward functions.

    Args:
        functions: one, or a list (it may be empty) of `(prompts, completions, **columns) -> K lists of steps`; they
            may be async. Completions are messages where the prompt is.
        timeout, on_error, max_failures, isolate, seed, concurrency: see `JobPool`.
        taken: names of other reward functions; one that is among them gets the suffix `_2`.

    Raises:
        ValueError: as `prepare` and `JobPool`.
    """

    def __init__(
        self,
        functions: Any,
        *,
        timeout: float | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        max_failures: float = 0.25,
        isolate: bool = False,
        seed: tuple[int, int] | None = None,
        concurrency: int = 1,
        taken: Sequence[str] = (),
    ) -> None:
        none = isinstance(functions, list | tuple) and not functions
        self.functions = [] if none else prepare(functions, noun="step reward function", taken=taken)
        self.names = [function.name for function in self.functions]
        self._pool = JobPool(self.functions, _StepLists(), timeout, on_error, max_failures, isolate, seed, concurrency)

    def score(
        self, rollouts: Sequence[Rollout], store: MetricStore | None = None, trainer_state: Any = None
    ) -> StepScores:
        """Call every function on every group. Every process must call it: what stops one stops all.

        Args:
            rollouts: P groups of K completions.
            store: gets `rewards/<name>/mean` over all steps, `steps/<name>/mean` a completion, and the metrics of
                `logged_by`.
            trainer_state: passed to the functions.

        Raises:
            RewardError: a function failed (on too many completions, under "skip"); or returned another number of lists
                than completions, or something else than (end, reward) pairs. ValueError: a function logs a metric that
                is the trainer's own.
        """
        requests = [score_request(rollout.prompt, rollout.completions, rollout.columns) for rollout in rollouts]
        jobs: list[Job] = []
        fault: Exception | None = None
        try:
            for request in requests:
                self._pool.submit(lay_out([request]), trainer_state)
            jobs = self._pool.gather(lay_out(requests), trainer_state)
        except Exception as error:
            fault = error
        raise_together(fault)
        extra, metrics = logged_by(self.functions, jobs)
        result = []
        for name in self.names:
            rows = [steps for job in jobs if job.func.name == name for steps in job.values]
            if store is not None:
                scored = [steps for steps in rows if steps is not None]
                rewards = [reward for steps in scored for _, reward in steps]
                store.add(f"rewards/{name}/mean", sum(rewards) / max(len(rewards), 1), len(rewards))
                store.add(f"steps/{name}/mean", len(rewards) / max(len(scored), 1), len(scored))
            one_by_one = iter(rows)
            result.append([[next(one_by_one) or [] for _ in rollout.completions] for rollout in rollouts])
        if store is not None:
            _record(store, metrics)
        return StepScores(result, extra)

    def close(self) -> None:
        """End threads and processes."""
        self._pool.close()


class _StepLists:
    """What step reward functions return: (end in characters, reward) pairs, a list of them per completion."""

    def read(self, call: RewardCall, value: Any) -> list[Steps | None]:
        """K lists of (int, float), None where the function abstained."""
        result: list[Steps | None] = []
        for index, row in enumerate(call.entries(value, "step lists")):
            if row is not None and (isinstance(row, str | bytes) or not isinstance(row, Sequence)):
                raise call.wrong(f"returned {row!r} for a completion; expected a list of (end, reward) pairs", index)
            result.append(None if row is None else [self._step(call, step, index) for step in row])
        return result

    def fault(self, entry: Steps, completion: Any) -> tuple[str, str] | None:
        """The first step that ends outside its text, or whose reward is none."""
        size = len(completion if isinstance(completion, str) else completion[-1]["content"])
        for end, reward in entry:
            if not 0 < end <= size:
                return "outside", f"returned a step that ends outside its text: {end} of {size} characters"
            if fault := fault_of(reward, f"returned the step {(end, reward)!r}"):
                return fault
        return None

    def _step(self, call: RewardCall, step: Any, index: int) -> tuple[int, float]:
        if isinstance(step, str | bytes) or not isinstance(step, Sequence) or len(step) != 2:
            raise call.wrong(f"returned the step {step!r}; expected a pair (end in characters, reward)", index)
        end, reward = (x.item() if hasattr(x, "item") and getattr(x, "ndim", 0) == 0 else x for x in step)
        if not isinstance(end, Integral) or isinstance(end, bool) or not isinstance(reward, Real):
            raise call.wrong(f"returned the step {step!r}; expected (int, float): end in characters, reward", index)
        return int(end), as_float(reward)


def _record(store: MetricStore, metrics: dict[str, float]) -> None:
    for name, number in metrics.items():
        if name in RESERVED:
            raise ValueError(f"a step reward function logs the metric {name!r}, which is the trainer's own; rename it")
        store.add(name, number, reduce="sum" if name.rsplit("/", 1)[-1] in COUNTS else "mean")


def step_scorer_of(trainer: OnlineTrainer, functions: Any) -> StepScorer:
    """Scores steps for `trainer` with `functions` (None: none), under its reward functions' limits."""
    check_signatures(functions, [("train_dataset", trainer.train_dataset)], "step reward function")
    args = trainer.args
    return StepScorer(
        functions or [],
        timeout=args.reward_timeout,
        on_error=args.on_reward_error,
        max_failures=args.max_reward_failures,
        isolate=args.isolate_rewards,
        concurrency=args.reward_concurrency,
        seed=(args.seed, args.process_index),
        taken=trainer.scorer.names,
    )


def token_rewards(parts: Sequence[list[Steps]], rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(K, R) rewards of one group, each step's at the token that ends it, summed over the step reward functions."""
    longest = max(len(c.token_ids) for c in rollout.completions)
    total = torch.zeros(len(rollout.completions), longest)
    for steps in parts:
        for index, (row, completion) in enumerate(zip(steps, rollout.completions, strict=True)):
            ends = char_to_token(tokenizer, completion.token_ids, [end for end, _ in row]) if row else []
            for token, (_, reward) in zip(ends, row, strict=True):
                total[index, token] += reward
    return total


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
