"""How many faults a reward function may have, what all of them have lost, and what a function may do to its arguments.

The default request is prompt "2+2=" with completions "a", "b", "c", "d" and column `answer="4"`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

import pytest
import torch

from hf_rlx.rollout.reward_models import RewardError, RewardTimeoutError
from hf_rlx.rollout.scoring import RewardScorer, ScoreRequest
from tests.rollout.test_scoring import NAN, request, same, score

pytestmark = pytest.mark.timeout(30)
SIXTEEN = [request(completions=(f"{g}a", f"{g}b", f"{g}c", f"{g}d")) for g in "0123"]


def breaks_on(*texts, error=None):
    def fragile(completions, **kwargs):
        for text in completions:
            if text in texts:
                raise error or LookupError(f"no entry for {text}")
        return [1.0] * len(completions)

    return fragile


# --- the limit -------------------------------------------------------------------------------------------------------


def test_one_bad_sample_in_sixteen_does_not_stop(caplog):
    with caplog.at_level(logging.WARNING):
        result = score(breaks_on("1c"), *SIXTEEN, on_error="skip")
    same(result.rewards[:, 0], [1.0] * 6 + [NAN] + [1.0] * 9)
    assert result.metrics["rewards/fragile/errors"] == 1
    assert caplog.text.count("no entry for 1c") == 1


def test_a_quarter_is_allowed_and_more_is_not():
    """4 of 16 are a share of 0.25, which is not more than 0.25; 5 are."""
    four = ("0a", "1b", "2c", "3d")
    assert score(breaks_on(*four), *SIXTEEN, on_error="skip").metrics["rewards/fragile/errors"] == 4
    message = (
        r"(?s)^reward function 'fragile' failed on at least 5 of 16 completions, more than the share of 0.25 that "
        r"max_reward_failures allows; first of all:\nreward function 'fragile' raised LookupError: no entry for 0a\n"
        r"prompt: '2\+2='\ncompletion at index 0 of 4: '0a'\n"
        r"raised at \S*test_reward_jobs\.py:\d+, in fragile$"
    )
    with pytest.raises(RewardError, match=message) as caught:
        score(breaks_on(*four, "3a"), *SIXTEEN, on_error="skip")
    assert isinstance(caught.value.__cause__, LookupError)
    result = score(breaks_on(*four, "3a"), *SIXTEEN, on_error="skip", max_failures=0.5)
    assert result.metrics["rewards/fragile/errors"] == 5


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_always_raises_stops_the_first_rollout_with_its_own_error(is_async):
    def broken(completions, **kwargs):
        raise KeyError("answer")

    async def async_broken(completions, **kwargs):
        raise KeyError("answer")

    for requests in (SIXTEEN, SIXTEEN[:1]):
        with pytest.raises(RewardError, match=r"broken' raised KeyError: 'answer'") as caught:
            score(async_broken if is_async else broken, *requests, on_error="skip")
        assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [math.inf, -1e38])
def test_values_out_of_range_count_for_the_limit(value):
    def reward(completions, **kwargs):
        return [value] * len(completions)

    with pytest.raises(
        RewardError, match=r"failed on at least 8 of 16 .*(?s:.)*returned (inf|-1e\+38); a reward must"
    ):
        score(reward, *SIXTEEN, on_error="skip")


def test_none_and_nan_are_no_failures():
    def reward(completions, **kwargs):
        return [None, NAN] * (len(completions) // 2)

    result = score(reward, *SIXTEEN, on_error="skip", max_failures=0.0)
    assert result.metrics["rewards/reward/abstained"] == 16
    assert result.metrics["rewards/reward/errors"] == 0


def test_every_function_has_a_limit_of_its_own():
    """Three of sixteen each: 3/16 < 1/4, though together they lost six."""
    first, second = breaks_on("0a", "0b", "0c"), breaks_on("1a", "1b", "1c")
    result = score([first, second], *SIXTEEN, names=["first", "second"], on_error="skip")
    assert [result.metrics[f"rewards/{name}/errors"] for name in ("first", "second")] == [3, 3]


def test_a_single_lost_call_does_not_stop_unless_nothing_is_allowed():
    """One group in a rollout, past its time limit: 4 of 4, but one call says little about the function."""

    async def slow(completions, **kwargs):
        await asyncio.sleep(20)

    result = score(slow, request(), timeout=0.1, on_error="skip")
    assert result.metrics["rewards/slow/errors"] == 4
    assert result.metrics["rewards/timeouts"] == 1
    for requests, limit in (([request()], 0.0), ([request(), request()], 0.25)):
        with pytest.raises(RewardTimeoutError, match=r"failed on at least 4 of 4|failed on at least 8 of 8"):
            score(slow, *requests, timeout=0.1, on_error="skip", max_failures=limit)


def test_a_function_that_always_hangs_stops_before_all_have_hung():
    """Sixteen completions in four calls: after the second, 8/16 are lost. Four calls would take 2 s."""

    def hangs(completions, **kwargs):
        time.sleep(1.5)
        return [0.0] * len(completions)

    start = time.monotonic()
    with pytest.raises(RewardTimeoutError, match="failed on at least 8 of 16"):
        score(hangs, *SIXTEEN, timeout=0.5, on_error="skip")
    assert time.monotonic() - start < 1.9


def test_the_scorer_goes_on_after_it_stopped():
    fragile = breaks_on("a")
    with RewardScorer(fragile, on_error="skip", max_failures=0.0) as scorer:
        scorer.submit(request())
        with pytest.raises(RewardError):
            scorer.gather()
        scorer.submit(request(completions=("x",)))
        same(scorer.gather().total, [1.0])


def test_a_limit_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match="max_failures is a share between 0 and 1, got 25"):
        RewardScorer(breaks_on(), max_failures=25)


# --- nothing scored --------------------------------------------------------------------------------------------------


def scorer_of(**options):
    return RewardScorer([breaks_on("a"), breaks_on("b")], names=["first", "second"], **options)


def test_rollouts_without_any_score_stop_at_the_third_in_a_row():
    none, some = torch.full((4,), NAN), torch.tensor([NAN, 0.0])
    with scorer_of() as scorer:
        for total in (none, none, some, none, none, torch.zeros(0)):
            scorer.note_rollout(total)
        assert scorer.state_dict() == {"unscored": 2}
        with pytest.raises(RewardError, match=r"no completion of 3 rollouts in a row .* \(first, second\)"):
            scorer.note_rollout(none)
        assert scorer.state_dict() == {"unscored": 0}


def test_the_count_is_kept_by_a_checkpoint_and_can_be_switched_off():
    none = torch.full((4,), NAN)
    with scorer_of() as before, scorer_of() as after, scorer_of(max_unscored=None) as patient:
        before.note_rollout(none)
        before.note_rollout(none)
        after.load_state_dict(before.state_dict())
        with pytest.raises(RewardError, match="3 rollouts in a row"):
            after.note_rollout(none)
        for _ in range(9):
            patient.note_rollout(none)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_nested_columns_may_be_changed():
    """At every depth, by every function, also in the calls that follow a fault; the dataset's row stays as it is."""
    tests = {"cases": [{"in": [1, 2], "out": "3"}]}

    def vandal(completions, tests, **kwargs):
        tests[0]["cases"][0]["in"].clear()
        tests[-1]["cases"].append("junk")
        if len(completions) > 1:
            raise ValueError("one at a time")
        return [0.0]

    def reads(completions, tests, **kwargs):
        assert len({id(t["cases"][0]["in"]) for t in tests}) == len(completions)
        return [float(sum(t["cases"][0]["in"]) + len(t["cases"])) for t in tests]

    for funcs in ([vandal, reads], [reads, vandal]):
        result = score(funcs, ScoreRequest("p", ["a", "b"], [[1], [2]], {"tests": tests}), on_error="skip")
        same(result.rewards[:, result.names.index("reads")], [4.0, 4.0])
    assert tests == {"cases": [{"in": [1, 2], "out": "3"}]}


# --- overlap ---------------------------------------------------------------------------------------------------------


def test_sync_and_async_functions_score_while_others_generate():
    """0.2 s a completion, four of them: 0.8 s in the sync one's thread, 0.2 s in the event loop. A sampler that takes
    0.2 s a completion takes 0.8 s; the last one is scored after it: about 1 s in all, 2.4 s one after the other."""

    def slow(completions, **kwargs):
        time.sleep(0.2 * len(completions))
        return [1.0] * len(completions)

    async def slow_too(completions, **kwargs):
        await asyncio.sleep(0.2 * len(completions))
        return [2.0] * len(completions)

    with RewardScorer([slow, slow_too]) as scorer:
        start = time.monotonic()
        for text in "abcd":
            time.sleep(0.2)
            scorer.submit(request(completions=(text,)))
        same(scorer.gather().rewards, [[1.0, 2.0]] * 4)
        assert time.monotonic() - start < 1.6
