"""Score completions while other groups still generate.

`RewardScorer.submit` takes one finished group and returns at once; `gather` waits for all of them. In between

* a sync reward function runs in a daemon thread of its own: it sees its calls one at a time in submission order
  (so a stateful function is reproducible), while different functions run side by side;
* async reward functions share one event loop, where the calls of all requests run concurrently;
* reward models, and any object with the attribute `runs_on_main_thread = True`, run inside `gather`, on all requests at
  once, because they compete with the policy for the device.

The call is TRL's: `f(prompts=, completions=, completion_ids=, <columns>, trainer_state=, log_extra=, log_metric=)`, cut
down to what the signature accepts. No fault becomes a 0: a row is scored, abstains (NaN), or stops the run by name.

A thread cannot be killed, and code that holds the interpreter lock (a runaway regular expression) stops every thread,
the clock of the time limit included. Text that could do this belongs in a process: see `hf_rlx.verifiers`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_rlx.rollout.reward_models import RewardError, RewardFunction, RewardTimeoutError, prepare

__all__ = ["RewardError", "RewardScorer", "RewardTimeoutError", "ScoreRequest", "ScoreResult"]

logger = logging.getLogger(__name__)

LARGEST_REWARD = 1e30  # beyond it squares overflow float32 and the group's gradient is silently 0
_BLOCKED_LOOP_GRACE = 1.0  # seconds past the limit after which an event loop that cannot cancel counts as blocked
_OWN_COLUMNS = {"prompt", "completion", "completion_ids"}  # as in TRL, the arguments replace these columns


@dataclass(frozen=True)
class ScoreRequest:
    """One group to score: one prompt, K completions.

    Attributes:
        prompt: plain text or messages, as the dataset has it.
        completions: K; texts, or message lists when the prompt is one.
        completion_ids: K lists of token ids.
        columns: the prompt's other dataset columns, one value each; functions get each as a list of K. A column named
            like an argument (`completions`, `trainer_state`, ...) is hidden by the argument.
    """

    prompt: str | list[dict]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScoreResult:
    """The scores of all requests since the last gather; N rows, in submission order.

    Attributes:
        rewards: (N, F) float32, one column per function; NaN where the function abstained.
        total: (N,) float32, weighted sum over the components present; NaN where there is none.
        names: F function names.
        extra: columns from `log_extra`, N values each, None where nothing was logged. Where two functions log the
            same column, the later one's is called `"<function>/<column>"`.
        metrics: the mean of each `log_metric` name; `rewards/<name>/abstained` (rows), `rewards/<name>/errors` (rows
            lost to a fault), `rewards/<name>/seconds` (spent in its calls), `rewards/timeouts` (calls),
            `rewards/unscored` (rows without any component).
    """

    rewards: Tensor
    total: Tensor
    names: list[str]
    extra: dict[str, list]
    metrics: dict[str, float]


@dataclass
class _Reply:
    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


class _Call:
    """One call of a reward function on some rows of a batch, with what it logs."""

    def __init__(self, func: RewardFunction, batch: _Batch, rows: Sequence[int]) -> None:
        self.func, self.rows = func, rows
        self.extra: dict[str, list] = {}
        self.metrics: list[tuple[str, float]] = []
        given = batch.arguments(rows) | {"log_extra": self._log_extra, "log_metric": self._log_metric}
        self.args, self.kwargs = func.bind(given)

    def _log_extra(self, column: str, values: Iterable[Any]) -> None:
        self.extra.setdefault(column, []).extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))

    def run(self) -> _Reply:
        """Call in this thread. An exception is an answer too: an error that ended the thread would be lost."""
        start = time.perf_counter()
        reply = _Reply()
        try:
            reply.value = self.func.call(*self.args, **self.kwargs)
            if inspect.iscoroutine(reply.value):  # a plain function that returns an async one's call
                reply.value = asyncio.run(reply.value)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # the user's Ctrl-C during a reward model
            reply.error = error
        reply.seconds = time.perf_counter() - start
        return reply

    async def run_async(self) -> _Reply:
        start = time.perf_counter()
        reply = _Reply()
        try:
            reply.value = await self.func.call(*self.args, **self.kwargs)
        except BaseException as error:  # SystemExit, too, would end the event loop
            reply.error = error
        reply.seconds = time.perf_counter() - start
        return reply


class _Batch:
    """The rows of one or several requests, laid out as lists."""

    def __init__(self, requests: list[ScoreRequest], trainer_state: Any) -> None:
        counts = [len(request.completions) for request in requests]
        self.size = sum(counts)
        self.trainer_state = trainer_state
        self.prompts = [r.prompt for r, n in zip(requests, counts, strict=True) for _ in range(n)]
        self.completions = [completion for r in requests for completion in r.completions]
        self.completion_ids = [ids for r in requests for ids in r.completion_ids]
        keys = dict.fromkeys(key for r in requests for key in r.columns if key not in _OWN_COLUMNS)
        self.columns = {
            key: [r.columns.get(key) for r, n in zip(requests, counts, strict=True) for _ in range(n)] for key in keys
        }

    def arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """Keyword arguments for these rows; fresh lists, so that a function may change what it gets."""
        columns = {key: [values[i] for i in rows] for key, values in self.columns.items()}
        return columns | {
            "prompts": [_copied(self.prompts[i]) for i in rows],
            "completions": [_copied(self.completions[i]) for i in rows],
            "completion_ids": [list(self.completion_ids[i]) for i in rows],
            "trainer_state": self.trainer_state,
        }

    def where(self, row: int) -> str:
        """Names one row in an error message."""
        return (
            f"prompt: {_shortened(self.prompts[row])}\n"
            f"completion {row} of {self.size}: {_shortened(self.completions[row])}"
        )


@dataclass
class _Outcome:
    """What one function made of one batch."""

    values: list[float]
    faults: list[tuple[list[int], str, RewardError]] = field(default_factory=list)  # rows lost, kind, error
    nan_rows: list[int] = field(default_factory=list)
    extra: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    timeouts: int = 0
    error: BaseException | None = None


def _score_steps(func: RewardFunction, batch: _Batch, skip: bool) -> Generator[_Call, _Reply, _Outcome]:
    """Score one batch with one function: yields the calls to make, is sent the replies, returns the outcome.

    A generator, because threads, event loop and main thread make the same calls in different ways. When the call for
    all rows raises, each row is called by itself, to find the offending ones.
    """
    out = _Outcome([math.nan] * batch.size)
    rows = list(range(batch.size))
    for group in ([rows], [[row] for row in rows]):
        for chosen in group:
            call = _Call(func, batch, chosen)
            reply = yield call
            out.seconds += reply.seconds
            if reply.error is None:
                _take(out, call, reply.value, batch, skip)
                continue
            if isinstance(reply.error, RewardTimeoutError):
                out.timeouts += 1
                fault: RewardError = RewardTimeoutError(f"{reply.error}\n{batch.where(chosen[0])}")
            elif len(chosen) > 1:
                first_error = reply.error  # not yet clear whose
                break
            else:
                fault = RewardError(f"{_raised(func, reply.error)}\n{batch.where(chosen[0])}")
            if not skip:
                raise fault from reply.error
            out.faults.append((chosen, type(reply.error).__name__, fault))
        else:
            if len(group) > 1 and not out.faults:  # every row scores by itself: transient, or needs its group
                fault = RewardError(
                    f"{_raised(func, first_error)}, for {batch.size} completions together but for none of them "
                    f"alone\n{batch.where(0)}"
                )
                if not skip:
                    raise fault from first_error
                out.faults.append(([], type(first_error).__name__, fault))
            return out
    raise AssertionError("unreachable: the pass over single rows always returns")


def _take(out: _Outcome, call: _Call, value: Any, batch: _Batch, skip: bool) -> None:
    """Check what a call returned and file it under its rows; raises RewardError naming what is wrong."""
    name, expected = call.func.name, len(call.rows)
    scalar = isinstance(value, Tensor | np.ndarray) and value.ndim == 0
    if isinstance(value, str | bytes | Mapping | AbstractSet) or not hasattr(value, "__len__") or scalar:
        got = f"{value!r:.100} of type {type(value).__name__}"
        raise RewardError(f"reward function {name!r} returned {got}; expected a list of {expected} numbers")
    values = value.detach().cpu().tolist() if isinstance(value, Tensor) else list(value)
    if len(values) != expected:
        raise RewardError(f"reward function {name!r} returned {len(values)} rewards; expected {expected}")
    for column, logged in call.extra.items():
        if len(logged) != expected:
            raise RewardError(
                f"reward function {name!r} logged {len(logged)} values for {column!r}; expected {expected}"
            )
    for row, item in zip(call.rows, values, strict=True):
        number = _as_float(item)
        if number is None:
            raise RewardError(
                f"reward function {name!r} returned {item!r:.100} of type {type(item).__name__} at index {row}; "
                f"expected a number or None\n{batch.where(row)}"
            )
        if math.isnan(number):
            if item is not None:
                out.nan_rows.append(row)
        elif abs(number) > LARGEST_REWARD:
            fault = RewardError(
                f"reward function {name!r} returned {number} at index {row}; rewards must be finite and within "
                f"{LARGEST_REWARD:g}\n{batch.where(row)}"
            )
            if not skip:
                raise fault
            out.faults.append(([row], "value out of range", fault))
        else:
            out.values[row] = number
    for column, logged in call.extra.items():
        filed = out.extra.setdefault(column, [None] * batch.size)
        for row, entry in zip(call.rows, logged, strict=True):
            filed[row] = entry
    out.metrics += call.metrics


def _as_float(item: Any) -> float | None:
    """A number as float (None as NaN), or None for what is no number."""
    if item is None:
        return math.nan
    if isinstance(item, np.generic) or (isinstance(item, Tensor | np.ndarray) and item.ndim == 0):
        item = item.item()
    if not isinstance(item, numbers.Real):
        return None
    try:
        return float(item)
    except OverflowError:
        return math.inf


def _raised(func: RewardFunction, error: BaseException) -> str:
    return f"reward function {func.name!r} raised {type(error).__name__}: {error}"


def _copied(text: Any) -> Any:
    return [dict(m) if isinstance(m, dict) else m for m in text] if isinstance(text, list) else text


def _shortened(text: Any, limit: int = 200) -> str:
    if isinstance(text, list):
        text = " | ".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in text)
    half = limit // 2
    return repr(text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}")
