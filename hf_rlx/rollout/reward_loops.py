"""The event loops and threads in which reward functions run in the background."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from hf_rlx.rollout.reward_models import RewardCall

if TYPE_CHECKING:
    from hf_rlx.rollout.reward_jobs import Job

Answer = tuple[Any, BaseException | None]  # what a call returned, or what it raised
GRACE = 1.0  # seconds past its limit after which a coroutine that was not cancelled shows that the loop is blocked


class Loop:
    """An event loop in a daemon thread, for the async functions or for the sync ones with threads of their own.

    Args:
        timeout: seconds one call may run; None is no limit.
        name: of the thread.
        concurrency: calls of one sync function that may run at once.
    """

    def __init__(self, timeout: float | None, name: str, concurrency: int = 1) -> None:
        self.timeout, self.name, self.concurrency = timeout, name, concurrency
        self.loop = asyncio.new_event_loop()
        self._turns: dict[str, asyncio.Semaphore] = {}  # first come first served, per sync function
        self._inboxes: dict[str, queue.SimpleQueue] = {}  # of the threads of sync functions
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def submit(self, job: Job) -> None:
        """Score a job in the background."""
        job.loop, job.future = self, asyncio.run_coroutine_threadsafe(self._score(job), self.loop)

    def _work(self) -> None:
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        for inbox in self._inboxes.values():
            self._dismiss(inbox)

    async def _score(self, job: Job) -> None:
        turn = self._turns.setdefault(job.func.name, asyncio.Semaphore(self.concurrency))
        async with turn if job.func.kind == "sync" else nullcontext():
            if not job.dropped:
                await job.score(self._call)

    async def _call(self, call: RewardCall) -> Answer:
        name, is_sync, answer = call.func.name, call.func.kind == "sync", Future[Answer]()
        if is_sync:
            if name not in self._inboxes:
                inbox = self._inboxes[name] = queue.SimpleQueue()
                for _ in range(self.concurrency):
                    threading.Thread(target=_make_calls, args=(inbox,), name=f"reward-{name}", daemon=True).start()
            self._inboxes[name].put((call, answer))
        future = asyncio.wrap_future(answer) if is_sync else asyncio.ensure_future(call.run_async())
        limit = self.timeout if call.func.worker is None else None  # a worker is killed by its own limit
        try:
            done, _ = await asyncio.wait({future}, timeout=limit)
        finally:
            future.cancel()  # of no effect once it is done
        if done:
            return future.result()
        if is_sync and name in self._inboxes:  # the thread hangs: the next call gets a fresh one
            self._dismiss(self._inboxes.pop(name))
        return None, call.func.too_late(self.timeout)

    def _dismiss(self, inbox: queue.SimpleQueue[Any]) -> None:
        for _ in range(self.concurrency):
            inbox.put(None)


def _make_calls(inbox: queue.SimpleQueue[Any]) -> None:
    while (item := inbox.get()) is not None:
        call, answer = item
        if answer.set_running_or_notify_cancel():
            answer.set_result(call.run())
        del item, call, answer  # an idle worker keeps nothing alive
