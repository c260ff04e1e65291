"""Reward functions that fail in the middle of training."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pyarrow.parquet as pq
import pytest

from hf_rlx.rollout.reward_models import RewardError
from tests.trainers.tools import by_ids, config, digest, scripted

pytestmark = pytest.mark.timeout(60)


def breaks_on(number_wanted, error):
    def fragile(completions, completion_ids, number, **_):
        if number[0] == number_wanted:
            raise error
        return by_ids(completion_ids, number)

    return fragile


def test_an_exception_names_function_prompt_and_completion(tmp_path):
    args = config(tmp_path, on_reward_error="raise", shuffle_dataset=False)
    trainer = scripted(args, reward=breaks_on(2, KeyError("answer")))
    with pytest.raises(RewardError, match=r"'fragile' raised KeyError: 'answer'") as caught:
        trainer.train()
    prompt = list(trainer.tokenizer("2+2=")["input_ids"])
    assert "2+2=" in str(caught.value)
    assert repr(trainer.sampler.generate([prompt], 4, None)[0][0].text) in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_fault_here_and_there_is_counted_and_the_run_goes_on(tmp_path, caplog):
    """The completions abstain; the run says so once, and counts every one. Four of sixteen are allowed."""
    caplog.set_level(logging.WARNING)
    args = config(tmp_path, shuffle_dataset=False, max_steps=4)
    trainer = scripted(args, reward=breaks_on(2, KeyError("answer")), count=8)
    trainer.train()
    assert trainer.state.global_step == 4
    logs = trainer.state.log_history
    assert [e["rewards/fragile/errors"] for e in logs[:4]] == [4, 0, 4, 0]
    assert caplog.text.count("raised KeyError") == 1


def test_a_function_that_always_fails_stops_the_first_rollout(tmp_path):
    def broken(completions, **_):
        raise KeyError("answer")

    trainer = scripted(config(tmp_path, max_steps=3), reward=broken)
    with pytest.raises(RewardError, match=r"'broken' failed on at least 8 of 16(?s:.*)KeyError: 'answer'") as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, KeyError)
    assert trainer.state.global_step == 0


def test_a_hang_costs_its_group_and_the_run_ends_in_time(tmp_path):
    """The third call sleeps, as if a service did not answer."""
    release, calls = threading.Event(), []

    def hangs(completions, completion_ids, number, **_):
        calls.append(len(completions))
        if len(calls) == 3:
            release.wait(20)
        return by_ids(completion_ids, number)

    trainer = scripted(config(tmp_path, reward_timeout=0.3, max_steps=2), reward=hangs)
    start = time.monotonic()
    try:
        trainer.train()
    finally:
        release.set()
    assert time.monotonic() - start < 15
    logs = trainer.state.log_history
    assert [entry["rewards/timeouts"] for entry in logs[:2]] == [1, 0]
    assert [entry["rewards/hangs/errors"] for entry in logs[:2]] == [4, 0]
    assert trainer.state.global_step == 2


def test_a_function_that_always_hangs_stops_at_its_time_limit(tmp_path):
    release = threading.Event()

    def hangs(completions, **_):
        release.wait(20)
        return [0.0] * len(completions)

    trainer = scripted(config(tmp_path, reward_timeout=0.2), reward=hangs)
    start = time.monotonic()
    try:
        with pytest.raises(RewardError, match=r"hangs.*0\.2"):
            trainer.train()
    finally:
        release.set()
    assert time.monotonic() - start < 15


def weights(trainer):
    return digest((name, parameter.cpu()) for name, parameter in trainer.shared.trainable_parameters())


def test_a_killed_worker_changes_nothing(tmp_path):
    """SIGKILL in the middle of the third call: counted as `infra`; the weights are those of an undisturbed run and of
    one without a worker."""
    mark = tmp_path / "mark"

    def dies(completion_ids, number, **_):
        if number[0] == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    seen = {}
    for name, isolate in (("disturbed", True), ("undisturbed", True), ("inside", False)):
        args = config(tmp_path / name, isolate_rewards=isolate, shuffle_dataset=False, max_steps=2)
        trainer = scripted(args, reward=dies)
        trainer.train()
        seen[name] = weights(trainer)
        deaths = [entry.get("rewards/dies/infra") for entry in trainer.state.log_history[:2]]
        assert deaths == {"disturbed": [1, 0], "undisturbed": [0, 0], "inside": [None, None]}[name]
        trainer.scorer.close()
    assert len(set(seen.values())) == 1


def test_a_worker_that_holds_its_interpreter_lock_is_killed(tmp_path):
    """No thread could end this one. One call of a second; the rest is scored."""

    def computes(completions, number, **_):
        if number[0] == 1:
            9**9**9
        return [float(row) for row in range(len(completions))]

    args = config(tmp_path, isolate_rewards=True, reward_timeout=0.5, shuffle_dataset=False)
    trainer = scripted(args, reward=computes)
    start = time.monotonic()
    trainer.train()
    trainer.scorer.close()
    assert time.monotonic() - start < 15
    log = trainer.state.log_history[0]
    assert (log["rewards/timeouts"], log["rewards/computes/errors"], log["rewards/unscored"]) == (1, 4, 4)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda n: [1.0] * (n - 1), "'odd' returned 3 rewards; expected 4"),
        (lambda n: [1.0, "1.0"] + [1.0] * (n - 2), r"'odd' returned '1.0' of type str(?s:.*)index 1 of 4"),
        (lambda n: [float("inf")] * n, "'odd' returned inf; a reward must be finite"),
        (lambda n: [1e38] * n, r"'odd' returned 1e\+38; a reward must be finite"),
    ],
)
def test_results_that_are_no_rewards_stop_the_run(tmp_path, value, message, on_error):
    def odd(completions, **_):
        return value(len(completions))

    trainer = scripted(config(tmp_path, on_reward_error=on_error), reward=odd)
    with pytest.raises(RewardError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(("value", "errors"), [(float("nan"), 0), (float("inf"), 1), (1e38, 1)])
def test_one_value_that_is_no_reward_costs_one_completion(tmp_path, caplog, value, errors):
    """NaN abstains like None; an infinite or huge one is refused. Both are named once, and never reach the group."""

    def odd(completions, number, **_):
        rewards = [float(row) for row in range(len(completions))]
        return rewards if number[0] != 1 else [value, *rewards[1:]]

    caplog.set_level(logging.WARNING)
    trainer = scripted(config(tmp_path, shuffle_dataset=False), reward=odd)
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["rewards/odd/abstained"], log["rewards/odd/errors"]) == (1, errors)
    assert log["rewards/odd/mean"] == pytest.approx((4 * 6 - 0) / 15)  # 0 + 1 + 2 + 3 four times, less one 0
    assert caplog.text.count("reward function 'odd' returned") == 1
    assert "completion at index 0 of 4" in caplog.text


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
    trainer = scripted(config(tmp_path, shuffle_dataset=False), reward=breaks_on(2, error))
    with pytest.raises(RewardError, match=type(error).__name__):
        trainer.train()


def test_an_exception_whose_text_breaks_is_still_named(tmp_path):
    args = config(tmp_path, on_reward_error="raise", shuffle_dataset=False)
    trainer = scripted(args, reward=breaks_on(2, _UnreadableError()))
    with pytest.raises(RewardError, match=r"'fragile' raised _UnreadableError: .its message cannot be read"):
        trainer.train()


def silent(completions, **_):
    return [None] * len(completions)


def test_a_rollout_that_nobody_scores_is_told_and_teaches_nothing(tmp_path, caplog):
    """All rows abstain: the loss is 0, which must not look like a healthy run."""
    caplog.set_level(logging.WARNING)
    trainer = scripted(config(tmp_path, max_steps=2), reward=silent)
    before = weights(trainer)
    trainer.train()
    assert "no completion was scored, every reward function abstained on all of them (silent)" in caplog.text
    assert [entry["rewards/unscored"] for entry in trainer.state.log_history[:2]] == [16, 16]
    assert weights(trainer) == before


def test_three_rollouts_in_a_row_that_nobody_scores_stop_the_run(tmp_path):
    trainer = scripted(config(tmp_path, max_steps=5), reward=silent)
    with pytest.raises(RewardError, match=r"no completion of 3 rollouts in a row was scored.*\(silent\)"):
        trainer.train()
    assert trainer.state.global_step == 2
    patient = scripted(config(tmp_path, max_steps=5, max_unscored_rollouts=None), reward=silent)
    patient.train()
    assert patient.state.global_step == 5


def test_steps_are_a_signal_of_their_own(tmp_path):
    """Whole answers that nobody scores do not stop a run that learns from steps."""

    def steps(completions, **_):
        return [[(1, float(row))] if text else [] for row, text in enumerate(completions)]

    trainer = scripted(config(tmp_path, max_steps=4), reward=silent, step_reward_funcs=[steps])
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("isolate", [False, True])
def test_step_reward_functions_have_the_same_limits(tmp_path, isolate):
    """Time limit, abstention and count as for whole answers; what they log is in the table of completions."""

    def reward(completion_ids, log_extra, **_):
        return [float(len(ids)) for ids in completion_ids]

    def judge(completions, number, log_extra, **_):
        if number[0] == 1:
            time.sleep(3)
        log_extra("judged", list(completions))
        return [[(1, float(row))] if text else [] for row, text in enumerate(completions)]

    fields = {"reward_timeout": 0.5, "isolate_rewards": isolate, "shuffle_dataset": False, "log_completions": True}
    trainer = scripted(config(tmp_path, **fields), reward=reward, step_reward_funcs=[judge])
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["rewards/judge/errors"], log["rewards/timeouts"], log["rewards/reward/errors"]) == (4, 1, 0)
    (path,) = (tmp_path / "completions").glob("train_*.parquet")
    table = pq.read_table(path).to_pydict()
    assert table["judged"] == [text if row // 4 != 1 else None for row, text in enumerate(table["completion"])]

    def broken(completions, **_):
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"step reward function 'broken' failed on at least 8 of 16"):
        scripted(config(tmp_path), step_reward_funcs=[broken]).train()


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


def test_a_broken_verifier_stops_the_run_under_skip(tmp_path):
    """An error with `stops_run` says that no reward can be trusted: the limit on failures does not apply."""

    class BrokenError(RuntimeError):
        stops_run = True

    def reward(completions, **_):
        raise BrokenError("the canary passed")

    trainer = scripted(config(tmp_path, on_reward_error="skip", max_reward_failures=1.0), reward)
    with pytest.raises(RewardError, match="the canary passed"):
        trainer.train()
