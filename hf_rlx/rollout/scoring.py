"""Score completions while other groups still generate.

`RewardScorer.submit` takes a finished group and returns at once; `gather` waits for all of them. Meanwhile

* a sync function runs in a daemon thread of its own, one call at a time in submission order (so that a stateful one is
  reproducible), side by side with the other functions;
* async functions share one event loop, in which the calls of all requests run concurrently;
* models, and objects with `runs_on_main_thread = True`, run inside `gather` on all requests at once, because they
  compete with the policy for the device.

The call is TRL's, `f(prompts=, completions=, completion_ids=, <columns>, trainer_state=, log_extra=, log_metric=)`.
No fault becomes a 0: a row is scored, abstains (NaN), or stops the run by name. Code that holds the interpreter lock
(a runaway regular expression) stops all threads, time limits included: it belongs in a process (`hf_rlx.verifiers`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_rlx.functional.statistics import combine_rewards
from hf_rlx.rollout.reward_models import RewardCall, RewardError, RewardFunction, RewardTimeoutError, prepare

logger = logging.getLogger(__name__)

LARGEST_REWARD = 1e30  # beyond it squares overflow float32, and the gradient of the whole group is silently 0
_POLL = 0.1  # seconds between two looks at the event loop
_GRACE = 1.0  # seconds past its limit after which a coroutine that was not cancelled shows that the loop is blocked
_Answer = tuple[Any, BaseException | None]  # what a call returned, or what it raised
_Run = Callable[[RewardCall], Awaitable[_Answer]]  # how to make a call: in which thread, with which time limit


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
        metrics: the mean of each `log_metric`; `rewards/<name>/abstained` and `errors` (rows, rows lost to faults) and
            `seconds` (in calls); `rewards/timeouts` (calls) and `rewards/unscored` (rows without any component).
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


class _Job:
    """One function's share of one request (of all requests, on the main thread), and what came of it once `done`."""

    def __init__(self, func: RewardFunction, lists: dict[str, list], state: Any, skip: bool) -> None:
        self.func, self.lists, self.state, self.skip = func, lists, state, skip
        self.started = time.monotonic()  # of the call that runs now
        self.done = threading.Event()
        self.dropped = False
        self.loop: Any = None  # that works on it
        self.future: Any = None  # of that
        self.error: Exception | None = None
        self.values = [math.nan] * len(lists["prompts"])  # NaN: abstained
        self.faults: list[tuple[Sequence[int], str, RewardError]] = []  # rows lost, kind, error
        self.extra: dict[str, list] = {}
        self.metrics: list[tuple[str, float]] = []
        self.seconds, self.timeouts = 0.0, 0

    def drop(self) -> None:
        """Nobody waits any more: do not start it, and cancel it where that is possible."""
        self.dropped = True
        if self.func.kind == "async":
            self.future.cancel()

    async def score(self, run: _Run) -> None:
        """Make the calls through `run` and file what they return. Suspends only where `run` does."""
        rows = range(len(self.values))
        try:
            error = await self._attempt(run, rows)
            if error is not None and len(rows) > 1 and not isinstance(error, RewardTimeoutError):
                # One at a time, to find the offending ones.
                alone = [await self._attempt(run, [row]) for row in rows]
                if all(own is None for own in alone):  # a passing fault, or the function needs its whole group
                    self._lose([], error)
        except Exception as fault:
            self.error = fault
        self.done.set()

    async def _attempt(self, run: _Run, rows: Sequence[int]) -> BaseException | None:
        call = RewardCall(self.func, self.lists, rows, self.state)
        self.started = time.monotonic()
        value, error = await run(call)
        self.seconds += time.monotonic() - self.started
        if error is None:
            self._file(call, value)
        elif len(rows) == 1 or isinstance(error, RewardTimeoutError):
            self._lose(rows, error)
        return error

    def _lose(self, rows: Sequence[int], error: BaseException, kind: str = "") -> None:
        """A call for these rows failed: raise the RewardError that says so, or under "skip" let them abstain."""
        told: type[RewardError] = RewardError
        message = f"reward function {self.func.name!r} raised {type(error).__name__}: {_message(error)}"
        if isinstance(error, RewardError):
            told, message = type(error), str(error)
            self.timeouts += isinstance(error, RewardTimeoutError)
        if not rows:
            message += "; this was for all completions of the prompt in one call, and for none of them alone"
        fault = told(message + self.func.where(self.lists, rows[0] if rows else 0))
        if not self.skip or not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit always stop
            raise fault from error
        self.faults.append((rows, kind or type(error).__name__, fault))

    def _file(self, call: RewardCall, value: Any) -> None:
        """Check what a call returned and put it under its rows."""
        name = f"reward function {self.func.name!r}"
        for row, number in zip(call.rows, call.read(value), strict=True):
            if number is not None and math.isnan(number):  # abstains like None, but may be an accident: told once
                fault = RewardError(f"{name} returned NaN{self.func.where(self.lists, row)}")
                self.faults.append(([], "NaN", fault))
            elif number is not None and abs(number) > LARGEST_REWARD:
                limit = f"a reward must be finite and at most {LARGEST_REWARD:g} in size"
                self._lose([row], RewardError(f"{name} returned {number}; {limit}"), "out of range")
            elif number is not None:
                self.values[row] = number
        for column, logged in call.extra.items():
            filed = self.extra.setdefault(column, [None] * len(self.values))
            for row, entry in zip(call.rows, logged, strict=True):
                filed[row] = entry
        self.metrics += call.metrics


class _Loop:
    """An event loop in a daemon thread, for the async functions or for the sync ones with a thread each."""

    def __init__(self, timeout: float | None, name: str) -> None:
        self.timeout, self.name = timeout, name
        self.loop = asyncio.new_event_loop()
        self._turns: dict[str, asyncio.Lock] = {}  # first come first served, per sync function
        self._inboxes: dict[str, queue.SimpleQueue] = {}  # of the threads of sync functions
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def submit(self, job: _Job) -> None:
        job.loop, job.future = self, asyncio.run_coroutine_threadsafe(self._score(job), self.loop)

    def _work(self) -> None:
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_GRACE))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        for inbox in self._inboxes.values():
            inbox.put(None)

    async def _score(self, job: _Job) -> None:
        turn = self._turns.setdefault(job.func.name, asyncio.Lock())
        async with turn if job.func.kind == "sync" else nullcontext():
            if not job.dropped:
                await job.score(self._call)

    async def _call(self, call: RewardCall) -> _Answer:
        name, is_sync, answer = call.func.name, call.func.kind == "sync", Future[_Answer]()
        if is_sync:
            if name not in self._inboxes:
                inbox = self._inboxes[name] = queue.SimpleQueue()
                threading.Thread(target=_make_calls, args=(inbox,), name=f"reward-{name}", daemon=True).start()
            self._inboxes[name].put((call, answer))
        future = asyncio.wrap_future(answer) if is_sync else asyncio.ensure_future(call.run_async())
        try:
            done, _ = await asyncio.wait({future}, timeout=self.timeout)
        finally:
            future.cancel()  # of no effect once it is done
        if done:
            return future.result()
        if is_sync:  # the thread hangs: the next call gets a fresh one
            self._inboxes.pop(name).put(None)
        return None, call.func.too_late(self.timeout)


class RewardScorer(AbstractContextManager):
    """Scores groups in the background with one or several reward functions; a context manager.

    Args:
        reward_funcs: one, or a list of: callables, async callables, sequence classifiers, or strings that name a
            function (`"package.module:function"`) or a model; see `reward_models.prepare`.
        names: for errors and logs, one per function; a repeated one gets the suffix `_2`.
        weights: F floats for the total; 1 by default.
        timeout: seconds one call may run, from its start; None is no limit. A thread that hangs is abandoned and
            replaced, a coroutine is cancelled. What runs on the main thread is not limited.
        on_error: `"raise"` stops in `gather` with a `RewardError`. `"skip"` lets the offending completions abstain,
            counts them and logs each kind of fault once. A result of wrong length or type always raises.
        reward_processing_classes: tokenizers of the models, one per function, None for the others.
        trainer_state: passed to the functions; the attribute may be replaced at any time.
        model_init_kwargs: passed to `from_pretrained` for models named by a string.
        device: where reward models are moved to; None leaves them where they are.

    Raises:
        ValueError, ImportError: as `prepare`; or weights of another length.
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        names: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        reward_processing_classes: Any = None,
        trainer_state: Any = None,
        model_init_kwargs: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._loops: dict[str, _Loop] = {}  # first of all, since `__del__` reads them
        self._jobs: list[list[_Job]] = []  # the background jobs of each request
        self._closed = False
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout}")
        self.functions = prepare(reward_funcs, names, reward_processing_classes, model_init_kwargs, device)
        self.names = [func.name for func in self.functions]
        if weights is not None and len(weights) != len(self.names):
            raise ValueError(f"{len(weights)} weights for {len(self.names)} reward functions: {self.names}")
        self.weights = torch.tensor([1.0] * len(self.names) if weights is None else list(weights), dtype=torch.float64)
        self.timeout, self.on_error, self.trainer_state = timeout, on_error, trainer_state
        self._requests: list[ScoreRequest] = []
        self._told: set[tuple[str, str]] = set()  # (function, kind of fault) already in the log
        for kind in sorted({func.kind for func in self.functions} - {"main"}):
            self._loops[kind] = _Loop(timeout, f"reward-{kind}-loop")

    @property
    def pending(self) -> int:
        """Requests since the last gather whose background work is not finished (for a progress bar)."""
        return sum(not all(job.done.is_set() for job in jobs) for jobs in self._jobs)

    def submit(self, request: ScoreRequest) -> int:
        """Start scoring a group and return at once: its index among the requests since the last gather.

        Raises:
            ValueError: no completion, or another number of `completion_ids`. RuntimeError: the scorer is closed.
        """
        if self._closed:
            raise RuntimeError("this RewardScorer is closed")
        counts = len(request.completions), len(request.completion_ids)
        if counts[0] == 0 or counts[0] != counts[1]:
            raise ValueError(f"a request has K >= 1 completions and K completion_ids, got {counts[0]}, {counts[1]}")
        jobs = self._new_jobs([request], ("sync", "async"))
        self._requests.append(request)
        self._jobs.append(jobs)
        for job in jobs:
            self._loops[job.func.kind].submit(job)
        return len(self._requests) - 1

    def gather(self, on_wait: Callable[[], None] | None = None) -> ScoreResult:
        """Score what runs here, wait for the rest, and return the scores of all requests submitted.

        The requests are cleared in any case: after an error or Ctrl-C the scorer takes new ones.

        Args:
            on_wait: called about ten times a second while it waits, e.g. to show `pending`.

        Raises:
            RewardError: the first fault, in order of requests, then functions; `RewardTimeoutError` for a time limit.
        """
        if self._closed:
            raise RuntimeError("this RewardScorer is closed")
        background = [job for jobs in self._jobs for job in jobs]
        here = self._new_jobs(self._requests, ("main",)) if self._requests else []
        try:
            for job in here:
                with suppress(StopIteration):  # nothing suspends, so a single step runs to the end
                    job.score(RewardCall.run_here).send(None)
            for job in here + background:
                while not job.done.wait(_POLL):
                    self._give_up_if_blocked(job)
                    if on_wait is not None:
                        on_wait()
                if job.error is not None:
                    raise job.error
            return self._merge(here + background)
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop what was submitted and not gathered, e.g. when generation failed on the way."""
        for job in [job for jobs in self._jobs for job in jobs]:
            job.drop()
        self._requests, self._jobs = [], []

    def close(self) -> None:
        """End the threads; what is still queued is dropped. A call that hangs is left to its daemon thread."""
        self._closed = True
        self.discard()
        while self._loops:
            _, loop = self._loops.popitem()
            loop.loop.call_soon_threadsafe(loop.loop.stop)
            if loop.thread is not threading.current_thread():
                loop.thread.join(_GRACE)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the threads are daemons; asyncio is half gone by then
            self.close()

    def _new_jobs(self, requests: Sequence[ScoreRequest], kinds: tuple[str, ...]) -> list[_Job]:
        lists, skip = lay_out(requests), self.on_error == "skip"
        return [_Job(func, lists, self.trainer_state, skip) for func in self.functions if func.kind in kinds]

    def _give_up_if_blocked(self, job: _Job) -> None:
        """An async function that blocks (`time.sleep`, `requests`) keeps its loop from cancelling anything."""
        overdue = time.monotonic() - job.started - _GRACE
        if job.func.kind == "sync" or self.timeout is None or overdue < self.timeout:
            return
        if job.loop is self._loops["async"]:
            job.loop.loop.call_soon_threadsafe(job.loop.loop.stop)  # once it is free; later requests get a fresh one
            self._loops["async"] = _Loop(self.timeout, job.loop.name)
        job.drop()
        with suppress(StopIteration):
            job.score(self._out_of_time).send(None)

    async def _out_of_time(self, call: RewardCall) -> _Answer:
        hint = "an async function blocked the event loop, as time.sleep and requests do"
        return None, RewardTimeoutError(f"{call.func.too_late(self.timeout)}; {hint}")

    def _merge(self, jobs: list[_Job]) -> ScoreResult:
        """The result, from jobs that stand in the order of their rows."""
        columns: list[list[float]] = []
        extra: dict[str, list] = {}
        logged: dict[str, list[float]] = {}
        metrics = {"rewards/timeouts": float(sum(job.timeouts for job in jobs))}
        for name in self.names:
            mine = [job for job in jobs if job.func.name == name]
            columns.append([value for job in mine for value in job.values])
            for column in dict.fromkeys(column for job in mine for column in job.extra):
                key = f"{name}/{column}" if column in extra else column
                extra[key] = [x for job in mine for x in job.extra.get(column, [None] * len(job.values))]
            for metric, value in [entry for job in mine for entry in job.metrics]:
                logged.setdefault(metric, []).append(value)
            faults = [fault for job in mine for fault in job.faults]
            for kind, told in {kind: told for _, kind, told in reversed(faults)}.items():
                if (name, kind) not in self._told:
                    self._told.add((name, kind))
                    logger.warning("%s\n(told once; rewards/%s/abstained and errors count all)", told, name)
            metrics[f"rewards/{name}/abstained"] = float(sum(map(math.isnan, columns[-1])))
            metrics[f"rewards/{name}/errors"] = float(sum(len(rows) for rows, _, _ in faults))
            metrics[f"rewards/{name}/seconds"] = sum(job.seconds for job in mine)
        rewards = torch.tensor(columns, dtype=torch.float64).T
        total = combine_rewards(rewards, self.weights).total
        metrics["rewards/unscored"] = float(total.isnan().sum())
        metrics.update({metric: sum(values) / len(values) for metric, values in logged.items()})
        return ScoreResult(rewards.float(), total.float(), list(self.names), extra, metrics)


def _message(error: BaseException) -> str:
    """The text of somebody else's exception, whose `__str__` may be broken itself."""
    try:
        return str(error)
    except Exception:
        return "(its message cannot be read)"


def _make_calls(inbox: queue.SimpleQueue[Any]) -> None:
    while (item := inbox.get()) is not None:
        call, answer = item
        if answer.set_running_or_notify_cancel():
            answer.set_result(call.run())
        del item, call, answer  # an idle worker keeps nothing alive
