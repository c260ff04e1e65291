"""Reward functions that fail in the middle of training."""

from __future__ import annotations

import logging

import pytest

from hf_rlx.rollout.reward_models import RewardError
from tests.trainers.tools import by_ids, config, scripted


def breaks_on(number_wanted, error):
    def fragile(completions, completion_ids, number, **_):
        if number[0] == number_wanted:
            raise error
        return by_ids(completion_ids, number)

    return fragile


def test_an_exception_names_function_prompt_and_completion(tmp_path):
    trainer = scripted(config(tmp_path, shuffle_dataset=False), reward=breaks_on(2, KeyError("answer")))
    with pytest.raises(RewardError, match=r"'fragile' raised KeyError: 'answer'") as caught:
        trainer.train()
    prompt = list(trainer.tokenizer("2+2=")["input_ids"])
    assert "2+2=" in str(caught.value)
    assert repr(trainer.sampler.generate([prompt], 4, None)[0][0].text) in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_skip_goes_on_and_counts(tmp_path, caplog):
    """The completions abstain; the run goes on, says so once, and counts every one."""
    caplog.set_level(logging.WARNING)
    args = config(tmp_path, on_reward_error="skip", shuffle_dataset=False, max_steps=4)
    trainer = scripted(args, reward=breaks_on(2, KeyError("answer")), count=8)
    trainer.train()
    assert trainer.state.global_step == 4
    logs = trainer.state.log_history
    assert [e["rewards/fragile/errors"] for e in logs[:4]] == [4, 0, 4, 0]
    assert caplog.text.count("raised KeyError") == 1


def test_a_hanging_function_stops_at_its_time_limit(tmp_path):
    import threading

    release = threading.Event()

    def hangs(completions, **_):
        release.wait(20)
        return [0.0] * len(completions)

    trainer = scripted(config(tmp_path, reward_timeout=0.2), reward=hangs)
    try:
        with pytest.raises(RewardError, match=r"hangs.*0\.2"):
            trainer.train()
    finally:
        release.set()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda n: [1.0] * (n - 1), "3"),
        (lambda n: ["good"] * n, "good"),
        (lambda n: [float("inf")] * n, "inf"),
    ],
)
def test_results_that_are_no_rewards_stop_the_run(tmp_path, value, message):
    def odd(completions, **_):
        return value(len(completions))

    with pytest.raises((RewardError, ValueError, TypeError), match=message) as caught:
        scripted(config(tmp_path), reward=odd).train()
    assert "odd" in str(caught.value)


def test_a_function_without_keyword_arguments_is_called_with_what_it_takes(tmp_path):
    """TRL: `unexpected keyword argument 'prompts'`."""

    def bare(completions):
        return [float(len(c)) for c in completions]

    trainer = scripted(config(tmp_path), reward=bare)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/bare/std"] > 0


def test_a_sampler_that_fails_leaves_the_scorer_clean(tmp_path):
    """The next rollout is scored by itself, without what the failed one had submitted."""
    trainer = scripted(config(tmp_path))
    good = trainer.sampler.generate

    def breaks(ids, k, params, on_group, on_step):
        good(ids[:1], k, params, on_group, on_step)
        raise MemoryError("no room")

    trainer.sampler.generate = breaks
    with pytest.raises(MemoryError, match="no room"):
        trainer.train()
    trainer.sampler.generate = good
    trainer.train()
    assert trainer.state.global_step == 1


class _UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no text for you")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_order_to_stop_is_not_an_abstention(tmp_path, error):
    """`on_reward_error="skip"` is for faults of a function; an interrupt that surfaces in one ends the run."""
    trainer = scripted(config(tmp_path, on_reward_error="skip", shuffle_dataset=False), reward=breaks_on(2, error))
    with pytest.raises(RewardError, match=type(error).__name__):
        trainer.train()


def test_an_exception_whose_text_breaks_is_still_named(tmp_path):
    trainer = scripted(config(tmp_path, shuffle_dataset=False), reward=breaks_on(2, _UnreadableError()))
    with pytest.raises(RewardError, match=r"'fragile' raised _UnreadableError: .its message cannot be read"):
        trainer.train()


def test_a_rollout_that_nobody_scores_is_told(tmp_path, caplog):
    """All rows abstain: the loss is 0 and nothing is learned, which must not look like a healthy run."""

    def silent(completions, **_):
        return [None] * len(completions)

    caplog.set_level(logging.WARNING)
    scripted(config(tmp_path), reward=silent).train()
    assert "no completion was scored, every reward function abstained on all of them (silent)" in caplog.text


def test_a_metric_of_the_trainer_cannot_be_overwritten(tmp_path):
    def sly(completions, log_metric, **_):
        log_metric("loss", 5.0)
        return [float(i) for i in range(len(completions))]

    with pytest.raises(ValueError, match="logs the metric 'loss', which is the trainer's own"):
        scripted(config(tmp_path), reward=sly).train()


def test_components_that_cancel_are_told(tmp_path, caplog):
    """Two functions with spread, a sum without: loss and gradient are 0 and the reason is said (trl#3857)."""

    def more(completions, **_):
        return [float(i) for i in range(len(completions))]

    def less(completions, **_):
        return [-float(i) for i in range(len(completions))]

    caplog.set_level(logging.WARNING)
    trainer = scripted(config(tmp_path), reward=[more, less])
    trainer.train()
    assert "the components cancel, and nothing is learned (more, less)" in caplog.text
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0
