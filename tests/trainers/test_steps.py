"""Step reward functions: what they get, what they may return, which of their faults stop the run, what is logged."""

from __future__ import annotations

import logging
import math
import os
import time

import pytest
import torch

from hf_rlx.rollout.reward_models import RewardError, RewardTimeoutError
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.trainers.steps import StepScorer
from hf_rlx.types import Completion, Rollout

pytestmark = pytest.mark.timeout(30)


def rollout(prompt="1+1=", texts=("abc", "abcd")):
    return Rollout(prompt, str(prompt), [1], [Completion([5, 6], [0.0, 0.0], True, t) for t in texts], {"answer": "2"})


def scored(functions, *rollouts, store=None, state=None, **options):
    scorer = StepScorer(functions, **options)
    try:
        return scorer.score(rollouts or [rollout()], store, state)
    finally:
        scorer.close()


def test_arguments_are_those_of_reward_functions():
    """Only what the signature takes; columns K times."""
    seen = {}

    def steps(prompts, completions, completion_ids, answer, trainer_state):
        seen.update(p=prompts, c=completions, i=completion_ids, a=answer, s=trainer_state)
        return [[], [(4, 1)]]

    assert scored(steps, state="state").steps == [[[[], [(4, 1.0)]]]]
    assert seen == {"p": ["1+1="] * 2, "c": ["abc", "abcd"], "i": [[5, 6]] * 2, "a": ["2", "2"], "s": "state"}


def test_conversations_are_messages():
    """Ends still count characters of the text."""
    messages = [{"role": "user", "content": "1+1="}]

    def steps(prompts, completions, **_):
        assert prompts == [messages, messages]
        assert completions[1] == [{"role": "assistant", "content": "abcd"}]
        return [[(len(c[0]["content"]), 1.0)] for c in completions]

    assert scored(steps, rollout(messages)).steps == [[[[(3, 1.0)], [(4, 1.0)]]]]


def test_numbers_of_numpy_and_torch_and_async_functions_and_none():
    async def steps(completions, **_):
        return [[(torch.tensor(3), torch.tensor(0.5))], [[4, True]], None]

    assert scored(steps, rollout(texts=("abc", "abcd", "x"))).steps == [[[[(3, 0.5)], [(4, 1.0)], []]]]


def test_groups_of_different_sizes_and_several_functions_stay_in_order():
    def first(completions, **_):
        return [[(len(text), 1.0)] for text in completions]

    def second(completions, **_):
        return [[(1, float(len(text)))] for text in completions]

    result = scored([first, second], rollout(texts=("a", "bb", "ccc")), rollout(texts=("dddd",)))
    assert result.steps == [
        [[[(1, 1.0)], [(2, 1.0)], [(3, 1.0)]], [[(4, 1.0)]]],
        [[[(1, 1.0)], [(1, 2.0)], [(1, 3.0)]], [[(1, 4.0)]]],
    ]


def test_what_is_logged():
    """Rewards 1, 3, 5 over three steps, in four completions; a fifth abstained."""
    store = MetricStore()
    answers = iter([[[(1, 1.0), (3, 3.0)], [(4, 5.0)], None], [[], []]])

    def steps(completions, log_metric, log_extra, **_):
        log_metric("mine", 2.0)
        log_extra("size", [len(text) for text in completions])
        return next(answers)

    result = scored(steps, rollout(texts=("abc", "abcd", "a")), rollout(), store=store)
    logs = store.flush()
    assert logs.pop("rewards/steps/seconds") >= 0
    assert logs == {
        "rewards/steps/mean": 3.0,
        "steps/steps/mean": 3 / 4,
        "mine": 2.0,
        "rewards/steps/abstained": 1.0,
        "rewards/steps/errors": 0.0,
        "rewards/timeouts": 0.0,
    }
    assert result.extra == {"size": [3, 4, 1, 3, 4]}


def test_same_names_are_kept_apart():
    def judge(completions, **_):
        return [[(1, 1.0)]] * len(completions)

    store = MetricStore()
    scorer = StepScorer([judge, judge], taken=["judge", "other"])
    scorer.score([rollout()], store)
    scorer.close()
    assert scorer.names == ["judge_2", "judge_3"]
    assert {"rewards/judge_2/mean", "rewards/judge_3/mean"} < store.flush().keys()


def test_a_metric_of_the_trainer_cannot_be_overwritten():
    def sly(completions, log_metric, **_):
        log_metric("loss", 5.0)
        return [[]] * len(completions)

    with pytest.raises(ValueError, match="logs the metric 'loss', which is the trainer's own"):
        scored(sly, store=MetricStore())


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None of type NoneType; expected a list of 2 step lists"),
        ([[]], "returned 1 step lists; expected 2"),
        ([[], 1.0], "returned 1.0 for a completion"),
        ([[], "good"], "returned 'good' for a completion"),
        ([[], [1.0]], "returned the step 1.0; expected a pair"),
        ([[], ["ab"]], "returned the step 'ab'; expected a pair"),
        ([[], [(1, 2, 3)]], r"returned the step \(1, 2, 3\); expected a pair"),
        ([[], [(1.0, 1.0)]], r"returned the step \(1.0, 1.0\); expected \(int, float\)"),
        ([[], [(1, "good")]], r"expected \(int, float\)"),
        ([[], [(1, None)]], r"expected \(int, float\)"),
    ],
)
def test_answers_of_the_wrong_form_always_stop(value, message, on_error):
    def judge(completions, **_):
        return value

    with pytest.raises(RewardError, match=rf"step reward function 'judge' .*{message}") as caught:
        scored(judge, on_error=on_error)
    assert "prompt: '1+1='" in str(caught.value)
    shown = "'abc'" if "list" in message else "'abcd'"  # the first completion where the whole answer is wrong
    assert f"completion at index {0 if shown == repr('abc') else 1} of 2: {shown}" in str(caught.value)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((5, 1.0), "a step that ends outside its text: 5 of 4 characters"),
        ((0, 1.0), "a step that ends outside its text: 0 of 4 characters"),
        ((1, -math.inf), r"the step \(1, -inf\); a reward must be finite"),
        ((1, 1e38), r"the step \(1, 1e\+38\); a reward must be finite"),
        ((1, 10**400), r"the step \(1, inf\); a reward must be finite"),
    ],
)
def test_steps_that_are_none_lose_their_completion_or_stop(step, message):
    """One of five completions is below the limit of a quarter, all of five are above it."""

    def judge(completions, **_):
        return [[(1, 1.0), step] if text == "abcd" else [(1, 1.0)] for text in completions]

    with pytest.raises(RewardError, match=f"step reward function 'judge' returned {message}"):
        scored(judge)
    result = scored(judge, rollout(texts=("a", "b", "abcd", "c", "d")), on_error="skip")
    assert result.steps == [[[[(1, 1.0)], [(1, 1.0)], [], [(1, 1.0)], [(1, 1.0)]]]]
    with pytest.raises(RewardError, match=f"(?s)'judge' failed on at least 5 of 5 .*{message}"):
        scored(judge, rollout(texts=["abcd"] * 5), on_error="skip")


def test_nan_abstains_and_is_told(caplog):
    def judge(completions, **_):
        return [[(1, 1.0), (2, math.nan)], [(1, 1.0)]]

    store = MetricStore()
    with caplog.at_level(logging.WARNING):
        assert scored(judge, store=store).steps == [[[[], [(1, 1.0)]]]]
    logs = store.flush()
    assert (logs["rewards/judge/abstained"], logs["rewards/judge/errors"]) == (1.0, 0.0)
    assert "'judge' returned the step (2, nan)" in caplog.text


def test_an_exception_is_named_and_kept():
    def judge(completions, **_):
        raise KeyError("x")

    for on_error in ("raise", "skip"):
        with pytest.raises(RewardError, match=r"'judge' raised KeyError: 'x'\nprompt: '1\+1='\ncompletion") as caught:
            scored(judge, on_error=on_error)
        assert isinstance(caught.value.__cause__, KeyError)


def test_skip_loses_only_the_offending_completion():
    def judge(completions, **_):
        if "bad" in completions:
            raise KeyError("x")
        return [[(1, 1.0)]] * len(completions)

    store = MetricStore()
    result = scored(judge, rollout(texts=("a", "bad", "c", "d")), rollout(), store=store, on_error="skip")
    assert result.steps == [[[[(1, 1.0)], [], [(1, 1.0)], [(1, 1.0)]], [[(1, 1.0)], [(1, 1.0)]]]]
    assert store.flush()["rewards/judge/errors"] == 1


@pytest.mark.parametrize("isolate", [False, True])
def test_a_time_limit_holds(isolate):
    """0.5 s for the group that hangs; one lost call does not stop."""

    def judge(completions, **_):
        if completions[0] == "hang":
            time.sleep(3)
        return [[(1, float(os.getpid()))]] * len(completions)

    start, groups = time.monotonic(), [rollout(texts=("hang",)), rollout(texts=("a",))]
    (steps,) = scored(judge, *groups, timeout=0.5, on_error="skip", isolate=isolate).steps
    assert time.monotonic() - start < 2.9
    assert steps[0] == [[]]
    assert (steps[1][0][0][1] != os.getpid()) == isolate
    with pytest.raises(RewardTimeoutError, match=r"step reward function 'judge' did not return within 0.5 s"):
        scored(judge, *groups, timeout=0.5, isolate=isolate)


def test_a_parameter_that_nothing_gives_is_named():
    def judge(completions, anwser):
        return []

    with pytest.raises(RewardError, match=r"requires the parameter 'anwser'.*did you mean 'answer'"):
        scored(judge, on_error="skip")
