"""Score completions while other groups still generate.

`RewardScorer.submit` takes a finished group and returns at once; `gather` waits for all of them. Where the functions
run meanwhile, and what becomes of their faults, is said in `reward_jobs.py`.

The call is TRL's, `f(prompts=, completions=, completion_ids=, <columns>, trainer_state=, log_extra=, log_metric=)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_rlx.functional.statistics import combine_rewards
from hf_rlx.rollout.reward_jobs import Job, JobPool, logged_by
from hf_rlx.rollout.reward_models import Numbers, RewardError, prepare


@dataclass(frozen=True)
class ScoreRequest:
    """One group to score: one prompt, K completions.

    Attributes:
        prompt: plain text or messages, as the dataset has it.
        completions: K texts, or K message lists when the prompt is one.
        completion_ids: K lists of token ids.
        columns: the prompt's other dataset columns, one value each, which functions get K times. One that is named
            like an argument (`completions`, `trainer_state`, ...) is hidden by it.
    """

    prompt: str | list[dict]
    completions: Sequence[str | list[dict]]
    completion_ids: list[list[int]]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScoreResult:
    """The scores of all requests since the last gather: N rows, in submission order.

    Attributes:
        rewards: (N, F) float32, a column per function; NaN where it abstained.
        total: (N,) float32, weighted sum over the components present; NaN where there is none.
        names: the F function names.
        extra: columns from `log_extra`, N values each, None where nothing was logged. If two functions log one, that
            of the later is called `"<function>/<column>"`.
        metrics: the mean of each `log_metric`; `rewards/<name>/abstained` and `errors` (rows, rows lost to faults),
            `seconds` (in calls) and `infra` (dead workers); `rewards/timeouts` (calls) and `rewards/unscored` (rows
            without any component).
    """

    rewards: Tensor
    total: Tensor
    names: list[str]
    extra: dict[str, list]
    metrics: dict[str, float]


def lay_out(requests: Sequence[ScoreRequest]) -> dict[str, list]:
    """The N rows of some requests as the lists that functions get; an argument hides a column of its name."""
    owners = [request for request in requests for _ in request.completions]
    keys = dict.fromkeys(key for request in requests for key in request.columns)
    columns = {key: [r.columns.get(key) for r in owners] for key in keys if key not in ("prompt", "completion")}
    return columns | {
        "prompts": [request.prompt for request in owners],
        "completions": [completion for request in requests for completion in request.completions],
        "completion_ids": [ids for request in requests for ids in request.completion_ids],
    }


class RewardScorer(AbstractContextManager):
    """Scores groups in the background with one or several reward functions; a context manager.

    Args:
        reward_funcs: one, or a list of: callables, async callables, sequence classifiers, or strings that name a
            function (`"package.module:function"`) or a model; see `reward_models.prepare`.
        names: for errors and logs, one per function; a repeated one gets the suffix `_2`.
        weights: F floats for the total; 1 by default.
        timeout, on_error, max_failures, isolate, seed, concurrency: see `JobPool`.
        max_unscored: rollouts in a row without any score after which `note_rollout` raises; None is no limit.
        reward_processing_classes: tokenizers of the models, one per function, None for the others.
        trainer_state: passed to the functions; the attribute may be replaced at any time. Isolated ones get a copy of
            its plain parts (`isolation.plain_state`).
        model_init_kwargs: passed to `from_pretrained` for models named by a string.
        device: where reward models are moved to; None leaves them where they are.

    Raises:
        ValueError, ImportError: as `prepare` and `JobPool`; or weights of another length.
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        names: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        max_failures: float = 0.25,
        max_unscored: int | None = 3,
        isolate: bool = False,
        seed: tuple[int, int] | None = None,
        concurrency: int = 1,
        reward_processing_classes: Any = None,
        trainer_state: Any = None,
        model_init_kwargs: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.functions = prepare(reward_funcs, names, reward_processing_classes, model_init_kwargs, device)
        self.names = [func.name for func in self.functions]
        if weights is not None and len(weights) != len(self.names):
            raise ValueError(
                f"reward_weights has {len(weights)} weights for {len(self.names)} reward functions: {self.names}; "
                "give one each, in their order"
            )
        self.weights = torch.tensor([1.0] * len(self.names) if weights is None else list(weights), dtype=torch.float64)
        self.trainer_state, self.max_unscored = trainer_state, max_unscored
        self.unscored = 0  # rollouts in a row without any score
        self._requests: list[ScoreRequest] = []
        self._pool = JobPool(self.functions, Numbers(), timeout, on_error, max_failures, isolate, seed, concurrency)

    @property
    def pending(self) -> int:
        """Requests since the last gather whose background work is not finished (for a progress bar)."""
        return self._pool.pending

    def submit(self, request: ScoreRequest) -> int:
        """Start scoring a group and return at once: its index among the requests since the last gather.

        Raises:
            ValueError: no completion, or another number of `completion_ids`. RuntimeError: the scorer is closed.
        """
        if self._pool.closed:
            raise RuntimeError("this RewardScorer is closed")
        counts = len(request.completions), len(request.completion_ids)
        if counts[0] == 0 or counts[0] != counts[1]:
            raise ValueError(f"a request has K >= 1 completions and K completion_ids, got {counts[0]}, {counts[1]}")
        self._pool.submit(lay_out([request]), self.trainer_state)
        self._requests.append(request)
        return len(self._requests) - 1

    def gather(self, on_wait: Callable[[], None] | None = None) -> ScoreResult:
        """Score what runs here, wait for the rest, and return the scores of all requests submitted.

        The requests are cleared in any case: after an error or Ctrl-C the scorer takes new ones.

        Args:
            on_wait: called about ten times a second while it waits, e.g. to show `pending`.

        Raises:
            RewardError: the first fault, in order of requests, then functions; `RewardTimeoutError` for a time limit,
                `RewardWorkerError` for a dead worker process; or more faults than allowed.
        """
        if self._pool.closed:
            raise RuntimeError("this RewardScorer is closed")
        lists, self._requests = lay_out(self._requests), []
        return self._merge(self._pool.gather(lists, self.trainer_state, on_wait))

    def note_rollout(self, total: Tensor) -> None:
        """Count rollouts in a row of whose rows `total` (N,) none was scored; a scored one starts the count anew.

        Raises:
            RewardError: `max_unscored` of them: the run learns nothing.
        """
        if not total.numel():
            return
        self.unscored = self.unscored + 1 if bool(total.isnan().all()) else 0
        if self.max_unscored is not None and self.unscored >= self.max_unscored:
            self.unscored = 0  # a run that goes on from here starts the count anew
            raise RewardError(
                f"no completion of {self.max_unscored} rollouts in a row was scored: every reward function abstained "
                f"or failed on all of them ({', '.join(self.names)}), so nothing is learned. Do they find the dataset "
                "columns that they need? max_unscored_rollouts=None lets the run go on"
            )

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside the block reward functions that learn from what they score (running moments) leave that alone: for
        evaluation. Those have a context manager `frozen()` of their own."""
        with ExitStack() as stack:
            for func in self.functions:
                if hasattr(func.call, "frozen"):
                    stack.enter_context(func.call.frozen())
            yield

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values."""
        return {"unscored": self.unscored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.unscored = int(state["unscored"])

    def discard(self) -> None:
        """Drop what was submitted and not gathered, e.g. when generation failed on the way."""
        self._pool.discard()
        self._requests = []

    def close(self) -> None:
        """End threads and processes; what is queued is dropped. A call that hangs is left to its daemon thread."""
        self._pool.close()
        self._requests = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def _merge(self, jobs: list[Job]) -> ScoreResult:
        """The result, from jobs that stand in the order of their rows."""
        columns = [
            [math.nan if value is None else value for job in jobs if job.func.name == name for value in job.values]
            for name in self.names
        ]
        extra, metrics = logged_by(self.functions, jobs)
        rewards = torch.tensor(columns, dtype=torch.float64).T
        total = combine_rewards(rewards, self.weights).total
        metrics["rewards/unscored"] = float(total.isnan().sum())
        return ScoreResult(rewards.float(), total.float(), list(self.names), extra, metrics)
