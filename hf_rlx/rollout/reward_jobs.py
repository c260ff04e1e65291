"""In which thread or process reward functions run, how long they may take, and what becomes of their faults.

* A sync function runs in a daemon thread of its own, one call at a time in submission order (so that a stateful one is
  reproducible), side by side with the other functions; an isolated one in a worker process behind that thread. With
  a `concurrency` of n there are n of each, and the calls for n prompts run at once.
* Async functions share one event loop, in which the calls of all requests run concurrently.
* Models, and objects with `runs_on_main_thread = True`, run inside `gather` on all requests at once, because they
  compete with the policy for the device.

No fault becomes a 0: a row is scored, abstains, or stops the run by name. Code that holds the interpreter lock (a
runaway regular expression) stops all threads, time limits included: that is what isolation is for.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hf_rlx.rollout.isolation import Crew, Isolated, text_of
from hf_rlx.rollout.reward_loops import GRACE, Answer, Loop
from hf_rlx.rollout.reward_models import RewardCall, RewardError, RewardFunction, RewardTimeoutError, raised_at
from hf_rlx.rollout.seeding import call_seed

logger = logging.getLogger(__name__)

_POLL = 0.1  # seconds between two looks at the event loop
_Run = Callable[[RewardCall], Awaitable[Answer]]  # how to make a call: in which thread, with which time limit


class Reader(Protocol):
    """How to read what functions return."""

    def read(self, call: RewardCall, value: Any) -> list[Any]:
        """One entry per row of the call, None where it abstains; raises RewardError for what is no answer at all."""

    def fault(self, entry: Any, completion: Any) -> tuple[str, str] | None:
        """What is wrong with an entry that is not None, as (kind, text); an entry of the kind "NaN" abstains."""


@dataclass
class _Fault:
    """Rows that a call lost (none where it is only to be told), and the error that says how."""

    rows: Sequence[int]
    kind: str
    error: RewardError


class Job:
    """One function's share of one request (of all requests, on the main thread), and what came of it once `done`.

    Attributes:
        values: an entry per row, None where the function abstained or failed.
        extra: columns from `log_extra`, a value per row. metrics: (name, value) pairs from `log_metric`.
        seed: plain values that random numbers of its calls follow from, if it is isolated; None leaves them.
    """

    def __init__(
        self,
        func: RewardFunction,
        lists: dict[str, list],
        state: Any,
        reader: Reader,
        skip: bool,
        seed: tuple | None = None,
    ) -> None:
        self.func, self.lists, self.state, self.reader, self.skip, self.seed = func, lists, state, reader, skip, seed
        self.started = time.monotonic()  # of the call that runs now
        self.done = threading.Event()
        self.dropped = False
        self.loop: Any = None  # that works on it
        self.future: Any = None  # of that
        self.error: Exception | None = None
        self.values: list[Any] = [None] * len(lists["prompts"])
        self.faults: list[_Fault] = []
        self.extra: dict[str, list] = {}
        self.metrics: list[tuple[str, float]] = []
        self.seconds, self.timeouts, self.deaths = 0.0, 0, 0

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
        seed = None if self.seed is None else call_seed(*self.seed, self.func.name, list(rows))
        call = RewardCall(self.func, self.lists, rows, self.state, seed)
        self.started = time.monotonic()
        value, error = await run(call)
        self.seconds += time.monotonic() - self.started
        self.deaths += call.deaths
        if error is None:
            self._file(call, value)
        elif len(rows) == 1 or isinstance(error, RewardTimeoutError) or getattr(error, "stops_run", False):
            self._lose(rows, error)
        return error

    def _lose(self, rows: Sequence[int], error: BaseException, kind: str = "") -> None:
        """A call for these rows failed: raise the RewardError that says so, or under "skip" let them abstain."""
        told: type[RewardError] = RewardError
        message = f"{self.func.title} raised {type(error).__name__}: {text_of(error)}"
        place = raised_at(error)
        if isinstance(error, RewardError):
            told, message, place = type(error), str(error), ""
            self.timeouts += isinstance(error, RewardTimeoutError)
        if not rows:
            message += "; this was for all completions of the prompt in one call, and for none of them alone"
        message += self.func.where(self.lists, rows[0] if rows else 0)
        fault = told(f"{message}\nraised at {place}" if place else message)
        # KeyboardInterrupt and SystemExit always stop, and so does a verifier that says that it is broken.
        if not self.skip or not isinstance(error, Exception) or getattr(error, "stops_run", False):
            raise fault from error
        fault.__cause__ = error
        self.faults.append(_Fault(rows, kind or type(error).__name__, fault))

    def _file(self, call: RewardCall, value: Any) -> None:
        """Check what a call returned and put it under its rows."""
        for row, entry in zip(call.rows, self.reader.read(call, value), strict=True):
            completion = self.lists["completions"][row]
            kind, text = (entry is not None and self.reader.fault(entry, completion)) or ("", "")
            if kind == "NaN":  # abstains like None, but may be an accident: told once
                fault = RewardError(f"{self.func.title} {text}{self.func.where(self.lists, row)}")
                self.faults.append(_Fault([], kind, fault))
            elif kind:
                self._lose([row], RewardError(f"{self.func.title} {text}"), kind)
            else:
                self.values[row] = entry
        for column, logged in call.extra.items():
            filed = self.extra.setdefault(column, [None] * len(self.values))
            for row, item in zip(call.rows, logged, strict=True):
                filed[row] = item
        self.metrics += call.metrics


class JobPool:
    """Runs reward functions on requests, in the background where they can.

    Args:
        functions: prepared ones, of different names.
        reader: reads what they return.
        timeout: seconds one call may run, from its start; None is no limit. A thread that hangs is abandoned and
            replaced, a coroutine cancelled, a worker process killed. What runs on the main thread is not limited.
        on_error: `"raise"` stops in `gather` with a `RewardError`. `"skip"` lets the offending rows abstain, counts
            them and logs each kind of fault once. A result of wrong length or type always raises.
        max_failures: under "skip", the share of one gather's rows that a function may fail on; more raises. A single
            lost call (a group past its time limit, one row) never does, unless this is 0.
        isolate: run every sync function in a worker process (`Isolated`); others stay where they are, which is logged.
        concurrency: calls of one sync function that may run at once. Above 1 it must bear that, and a stateful one
            sees the prompts in any order.
        seed: run seed and process index. Every call of an isolated function gets its random numbers from it, the
            `global_step` of the state, the function's name, and the request's place since the last gather.

    Raises:
        ValueError: an argument out of range; a function that cannot be sent to a process.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        reader: Reader,
        timeout: float | None,
        on_error: Literal["raise", "skip"],
        max_failures: float,
        isolate: bool,
        seed: tuple[int, int] | None = None,
        concurrency: int = 1,
    ) -> None:
        self.loops: dict[str, Loop] = {}  # first of all, since `__del__` reads them
        self.functions: Sequence[RewardFunction] = ()
        self._jobs: list[list[Job]] = []  # the background jobs of each request
        self.closed = False
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout}")
        if not 0 <= max_failures <= 1:
            raise ValueError(f"max_failures is a share between 0 and 1, got {max_failures}")
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1 call at a time, got {concurrency}")
        self.reader, self.timeout, self.on_error, self.max_failures = reader, timeout, on_error, max_failures
        self.seed = seed
        self._told: set[tuple[str, str]] = set()  # (function, kind of fault) already in the log
        if isolate:
            _isolate(functions, timeout, concurrency)
        self.functions = functions
        for kind in sorted({func.kind for func in functions} - {"main"}):
            self.loops[kind] = Loop(timeout, f"reward-{kind}-loop", concurrency)

    @property
    def pending(self) -> int:
        """Requests since the last gather whose background work is not finished."""
        return sum(not all(job.done.is_set() for job in jobs) for jobs in self._jobs)

    def submit(self, lists: dict[str, list], state: Any) -> None:
        """Start the background functions on the rows of one request."""
        jobs = self._new_jobs(lists, state, ("sync", "async"))
        self._jobs.append(jobs)
        for job in jobs:
            self.loops[job.func.kind].submit(job)

    def gather(self, lists: dict[str, list], state: Any, on_wait: Callable[[], None] | None = None) -> list[Job]:
        """Run the main thread's functions, on all rows submitted (`lists`); wait for the rest; drop the requests.

        Returns:
            The jobs of every function in the order of their rows.

        Raises:
            RewardError: the first fault, in order of requests, then functions; or too many of them.
        """
        rows = len(lists["prompts"])
        background = [job for jobs in self._jobs for job in jobs]
        here = self._new_jobs(lists, state, ("main",)) if rows else []
        failed: dict[str, list[_Fault]] = {}
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
                lost = failed.setdefault(job.func.name, [])
                lost += [fault for fault in job.faults if fault.rows]
                self._check(job.func, lost, rows)
            self._tell(here + background)
            return here + background
        finally:
            self.discard()

    def discard(self) -> None:
        """Drop what was submitted and not gathered, e.g. when generation failed on the way."""
        for job in [job for jobs in self._jobs for job in jobs]:
            job.drop()
        self._jobs = []

    def close(self) -> None:
        """End threads and processes; what is queued is dropped. A call that hangs is left to its daemon thread."""
        self.closed = True
        self.discard()
        for func in self.functions:
            if func.worker is not None:
                func.worker.close()
        while self.loops:
            _, loop = self.loops.popitem()
            loop.loop.call_soon_threadsafe(loop.loop.stop)
            if loop.thread is not threading.current_thread():
                loop.thread.join(GRACE)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the threads are daemons; asyncio is half gone by then
            self.close()

    def _new_jobs(self, lists: dict[str, list], state: Any, kinds: tuple[str, ...]) -> list[Job]:
        skip = self.on_error == "skip"
        seed = self.seed and (*self.seed, getattr(state, "global_step", 0), len(self._jobs))
        return [Job(func, lists, state, self.reader, skip, seed) for func in self.functions if func.kind in kinds]

    def _check(self, func: RewardFunction, lost: list[_Fault], rows: int) -> None:
        """Stop at a function that fails too often: it is broken, and the rest says nothing about the policy."""
        count = sum(len(fault.rows) for fault in lost)
        if count <= self.max_failures * rows or (len(lost) == 1 and self.max_failures > 0):
            return
        first = lost[0].error
        limit = f"more than the share of {self.max_failures:g} that max_reward_failures allows"
        what = f"{func.title} failed on at least {count} of {rows} completions, {limit}; first of all:\n{first}"
        raise type(first)(what) from first.__cause__

    def _give_up_if_blocked(self, job: Job) -> None:
        """An async function that blocks (`time.sleep`, `requests`) keeps its loop from cancelling anything."""
        overdue = time.monotonic() - job.started - GRACE
        if job.func.kind == "sync" or self.timeout is None or overdue < self.timeout:
            return
        if job.loop is self.loops["async"]:
            job.loop.loop.call_soon_threadsafe(job.loop.loop.stop)  # once it is free; later requests get a fresh one
            self.loops["async"] = Loop(self.timeout, job.loop.name)
        job.drop()
        with suppress(StopIteration):
            job.score(self._out_of_time).send(None)

    async def _out_of_time(self, call: RewardCall) -> Answer:
        hint = "an async function blocked the event loop, as time.sleep and requests do"
        return None, RewardTimeoutError(f"{call.func.too_late(self.timeout)}; {hint}")

    def _tell(self, jobs: list[Job]) -> None:
        """Log the first fault of every kind, once."""
        for job in jobs:
            for fault in job.faults:
                name = job.func.name
                if (name, fault.kind) not in self._told:
                    self._told.add((name, fault.kind))
                    logger.warning("%s\n(told once; rewards/%s/abstained and errors count all)", fault.error, name)


def logged_by(functions: Sequence[RewardFunction], jobs: Sequence[Job]) -> tuple[dict[str, list], dict[str, float]]:
    """What functions logged and what their calls cost, from jobs that stand in the order of their rows.

    Returns:
        Columns from `log_extra`, a value per row, None where nothing was logged; if two functions log one, that of
        the later is called `"<function>/<column>"`. And metrics: for each function `rewards/<name>/abstained` and
        `errors` (rows, rows lost to faults), `seconds` (in calls), and if it is isolated `infra` (workers that died);
        `rewards/timeouts` (calls); the mean of each `log_metric`.
    """
    extra: dict[str, list] = {}
    logged: dict[str, list[float]] = {}
    metrics = {"rewards/timeouts": float(sum(job.timeouts for job in jobs))}
    for func in functions:
        mine = [job for job in jobs if job.func.name == func.name]
        for column in dict.fromkeys(column for job in mine for column in job.extra):
            key = f"{func.name}/{column}" if column in extra else column
            extra[key] = [x for job in mine for x in job.extra.get(column, [None] * len(job.values))]
        for metric, value in [entry for job in mine for entry in job.metrics]:
            logged.setdefault(metric, []).append(value)
        metrics[f"rewards/{func.name}/abstained"] = float(sum(v is None for job in mine for v in job.values))
        metrics[f"rewards/{func.name}/errors"] = float(sum(len(f.rows) for job in mine for f in job.faults))
        metrics[f"rewards/{func.name}/seconds"] = sum(job.seconds for job in mine)
        if func.worker is not None:
            metrics[f"rewards/{func.name}/infra"] = float(sum(job.deaths for job in mine))
    return extra, metrics | {metric: sum(values) / len(values) for metric, values in logged.items()}


def _isolate(functions: Sequence[RewardFunction], timeout: float | None, concurrency: int) -> None:
    for func in functions:
        if func.kind == "sync":
            workers = [Isolated(func.call, func.name, timeout) for _ in range(concurrency)]
            func.worker = workers[0] if concurrency == 1 else Crew(workers)
    here = [func.name for func in functions if func.worker is None]
    if here:
        logger.warning("isolate_rewards: %s run in this process, being models or async", ", ".join(here))
