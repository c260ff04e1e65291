"""Step reward functions: what they get, what they may return, what is logged."""

from __future__ import annotations

import math

import pytest
import torch

from hf_rlx.rollout.reward_models import RewardError
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.trainers.steps import StepRewardError, score_steps
from hf_rlx.types import Completion, Rollout


def rollout(prompt="1+1=", texts=("abc", "abcd")):
    return Rollout(prompt, str(prompt), [1], [Completion([5, 6], [0.0, 0.0], True, t) for t in texts], {"answer": "2"})


def test_arguments_are_those_of_reward_functions():
    """Only what the signature takes; columns K times."""
    seen = {}

    def steps(prompts, completions, completion_ids, answer, trainer_state):
        seen.update(p=prompts, c=completions, i=completion_ids, a=answer, s=trainer_state)
        return [[], [(4, 1)]]

    assert score_steps(steps, [rollout()], trainer_state="state") == [[[], [(4, 1.0)]]]
    assert seen == {"p": ["1+1="] * 2, "c": ["abc", "abcd"], "i": [[5, 6]] * 2, "a": ["2", "2"], "s": "state"}


def test_conversations_are_messages():
    """Ends still count characters of the text."""
    messages = [{"role": "user", "content": "1+1="}]

    def steps(prompts, completions, **_):
        assert prompts == [messages, messages]
        assert completions[1] == [{"role": "assistant", "content": "abcd"}]
        return [[(len(c[0]["content"]), 1.0)] for c in completions]

    assert score_steps(steps, [rollout(messages)]) == [[[(3, 1.0)], [(4, 1.0)]]]


def test_numbers_of_numpy_and_torch_and_async_functions():
    async def steps(completions, **_):
        return [[(torch.tensor(3), torch.tensor(0.5))], [[4, True]]]

    assert score_steps(steps, [rollout()]) == [[[(3, 0.5)], [(4, 1.0)]]]


def test_what_is_logged():
    """Rewards 1, 3, 5 over three steps; 3 steps in 4 completions; a group without any step changes no mean."""
    store = MetricStore()
    answers = iter([[[(1, 1.0), (3, 3.0)], [(4, 5.0)]], [[], []]])

    def steps(completions, log_metric, **_):
        log_metric("mine", 2.0)
        return next(answers)

    score_steps(steps, [rollout(), rollout()], store)
    assert store.flush() == {"rewards/steps/mean": 3.0, "steps/steps/mean": 0.75, "mine": 2.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned NoneType; expected 2 lists"),
        ([[]], "returned 1 lists for 2 completions"),
        ([[], 1.0], "returned 1.0 for a completion"),
        ([[], [1.0]], "returned the step 1.0; expected a pair"),
        ([[], [(1, 2, 3)]], r"returned the step \(1, 2, 3\); expected a pair"),
        ([[], [(1.0, 1.0)]], r"returned the step \(1.0, 1.0\); expected \(int, float\)"),
        ([[], [(1, "good")]], r"expected \(int, float\)"),
        ([[], [(1, None)]], r"expected \(int, float\)"),
        ([[], [(5, 1.0)]], "a step ends outside its text: 5 of 4 characters"),
        ([[], [(0, 1.0)]], "a step ends outside its text: 0 of 4 characters"),
        ([[], [(1, math.nan)]], "a reward must be finite"),
        ([[], [(1, -math.inf)]], "a reward must be finite"),
    ],
)
def test_wrong_answers_name_function_prompt_and_completion(value, message):
    def judge(completions, **_):
        return value

    with pytest.raises(StepRewardError, match=rf"step reward function judge .*{message}") as caught:
        score_steps(judge, [rollout()])
    assert "prompt: '1+1='" in str(caught.value)
    assert "completion at index" in str(caught.value)
    shown = "'abc'" if "lists" in message else "'abcd'"  # the first completion where the whole answer is wrong
    assert f": {shown}" in str(caught.value)
    assert isinstance(caught.value, RewardError)
    assert isinstance(caught.value, ValueError)


def test_an_exception_is_named_and_kept():
    def judge(completions, **_):
        raise KeyError("x")

    with pytest.raises(StepRewardError, match=r"judge raised KeyError: 'x'\nprompt: '1\+1='\ncompletion") as caught:
        score_steps(judge, [rollout()])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_parameter_that_nothing_gives_is_named():
    def judge(completions, anwser):
        return []

    with pytest.raises(RewardError, match=r"requires the parameter 'anwser'.*did you mean 'answer'"):
        score_steps(judge, [rollout()])
