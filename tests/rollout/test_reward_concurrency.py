"""Several calls of one reward function at once: only where asked for, and with the results in place."""

from __future__ import annotations

import os
import threading
import time

import pytest

from hf_rlx.rollout.scoring import RewardScorer
from tests.rollout.test_scoring import NAN, request, same

pytestmark = pytest.mark.timeout(30)
FOUR = [request(completions=(f"{g}", f"{g}5")) for g in "1234"]


def test_by_default_calls_come_one_at_a_time():
    open_calls, most = [0], [0]

    def counts(completions):
        open_calls[0] += 1
        most[0] = max(most[0], open_calls[0])
        time.sleep(0.02)
        open_calls[0] -= 1
        return [float(text) for text in completions]

    with RewardScorer(counts) as scorer:
        for group in FOUR:
            scorer.submit(group)
        same(scorer.gather().rewards[:, 0], [1.0, 15.0, 2.0, 25.0, 3.0, 35.0, 4.0, 45.0])
    assert most == [1]


def test_as_many_as_asked_for_at_once():
    """Nobody passes the barrier before three calls stand at it; the rows come back in order of submission."""
    barrier = threading.Barrier(3, timeout=20)

    def together(completions):
        if completions[0] != "4":
            barrier.wait()
        return [float(text) for text in completions]

    with RewardScorer(together, concurrency=3) as scorer:
        for group in FOUR:
            scorer.submit(group)
        same(scorer.gather().rewards[:, 0], [1.0, 15.0, 2.0, 25.0, 3.0, 35.0, 4.0, 45.0])


def test_a_hung_call_is_replaced_among_several():
    """The first of two threads hangs past its limit; that group abstains, all others are scored, and so is what is
    submitted next."""
    release = threading.Event()

    def hangs(completions):
        if completions[0] == "1":
            release.wait(20)
        return [float(text) for text in completions]

    with RewardScorer(hangs, concurrency=2, timeout=0.3, on_error="skip", max_failures=0.5) as scorer:
        for group in FOUR:
            scorer.submit(group)
        same(scorer.gather().rewards[:, 0], [NAN, NAN, 2.0, 25.0, 3.0, 35.0, 4.0, 45.0])
        for group in FOUR[1:]:
            scorer.submit(group)
        same(scorer.gather().rewards[:, 0], [2.0, 25.0, 3.0, 35.0, 4.0, 45.0])
    release.set()


def slow_pid(completions):
    """The process that scored; long enough that a free worker takes the next call."""
    time.sleep(0.3)
    return [float(os.getpid())] * len(completions)


@pytest.mark.skipif(os.name != "posix", reason="isolation needs process groups")
def test_isolated_functions_get_a_process_each():
    with RewardScorer(slow_pid, concurrency=2, isolate=True) as scorer:
        for group in FOUR:
            scorer.submit(group)
        pids = {int(pid) for pid in scorer.gather().rewards[:, 0].tolist()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_call_at_a_time_is_refused():
    with pytest.raises(ValueError, match="concurrency must be at least 1 call at a time, got 0"):
        RewardScorer(slow_pid, concurrency=0)
