"""Alerts: said once, with the way out, at the second suspicious log, and not again after a resume."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from hf_rlx.trainers.alerts import Alerts
from tests.trainers.ppo_tools import ppo, ppo_config

FLAT = {"loss": 0.0, "frac_reward_zero_std": 1.0, "reward": 0.25}
FINE = {"loss": 0.1, "frac_reward_zero_std": 0.5, "reward": 0.25}


@pytest.fixture
def warnings(caplog):
    """Messages logged so far."""
    caplog.set_level(logging.WARNING, logger="hf_rlx")
    return lambda: [record.getMessage() for record in caplog.records]


def check(alerts, *logs):
    """Names of the new alerts of each log."""
    return [alerts.check(log, step, 16) for step, log in enumerate(logs, start=1)]


def test_a_constant_reward_is_told_at_the_second_log_and_once(warnings):
    assert check(Alerts(), FLAT, FLAT, FLAT) == [[], ["constant reward"], []]
    assert len(warnings()) == 1
    assert "step 2: constant reward: all completions of a prompt got the same reward" in warnings()[0]
    assert "(mean 0.25)" in warnings()[0]
    assert "log_completions=True" in warnings()[0]


def test_a_log_with_a_signal_starts_the_count_again():
    assert check(Alerts(), FLAT, FINE, FLAT, FLAT) == [[], [], [], ["constant reward"]]
    assert check(Alerts(), FLAT, {"loss": 0.0}, FLAT) == [[], [], ["constant reward"]]  # a log that does not tell
    assert check(Alerts(), FLAT, {**FLAT, "frac_reward_zero_std": float("nan")}, FLAT) == [[], [], []]


def test_everything_truncated(warnings):
    cut = {"loss": 0.1, "completions/clipped_ratio": 1.0}
    nearly = {"loss": 0.1, "completions/clipped_ratio": 0.99}
    assert check(Alerts(), cut, nearly, cut, cut) == [[], [], [], ["everything truncated"]]
    assert "every completion was cut at max_completion_length=16: raise it" in warnings()[0]
    assert "eos_token" in warnings()[0]


def test_far_from_the_reference(warnings):
    assert check(Alerts(), {"kl": 6.0}, {"kl": 7.5}) == [[], ["far from the reference"]]
    assert "is 7.5 nats a token" in warnings()[0]


def test_a_kl_far_below_zero(warnings):
    """trl#351: it is an estimate, so a little below 0 is noise."""
    name = "kl/k1_sequence"
    assert check(Alerts(), {name: -0.9}, {name: -1.5}, {name: -2.5}) == [[], [], ["negative KL"]]
    assert "is -2.5 nats a sequence" in warnings()[0]
    assert "top_k, top_p" in warnings()[0]


def test_special_tokens_in_messages_at_once(warnings):
    name = "prompts/special_tokens_neutralised"
    assert check(Alerts(), {name: 0.0}, {name: 3.0}, {name: 3.0}) == [[], ["special tokens in messages"], []]
    assert "3 special tokens stood inside messages" in warnings()[0]
    assert 'special_tokens_in_messages="allow"' in warnings()[0]


def collected(*rewards):
    """A rollout whose groups have these rewards, a row a completion and a column a function; totals are sums."""
    groups = [torch.tensor(group) for group in rewards]
    rollouts = [SimpleNamespace(rewards=group, total=group.sum(dim=1)) for group in groups]
    return SimpleNamespace(rollouts=rollouts, scores=SimpleNamespace(names=["a", "b"]))


NAN = float("nan")
CANCEL, UNSCORED = [[0.0, 1.0], [1.0, 0.0]], [[NAN, NAN], [NAN, NAN]]
EQUAL, SIGNAL = [[1.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]


def test_rollouts_are_told_with_their_reason_once(warnings):
    alerts = Alerts()
    for rollout in (collected(CANCEL), collected(CANCEL), collected(UNSCORED), collected(SIGNAL, CANCEL)):
        alerts.rollout(rollout, 3)
    assert len(warnings()) == 2
    assert "step 3: single reward functions tell the completions of a prompt apart" in warnings()[0]
    assert "step 3: no completion was scored" in warnings()[1]


def test_nothing_is_told_twice_under_two_names(warnings):
    """Components that cancel look like a constant reward in the log; equal rewards have no other reason."""
    alerts = Alerts()
    for _ in range(3):
        alerts.rollout(collected(CANCEL), 1)
        assert alerts.check(FLAT, 1, 16) == []
    assert len(warnings()) == 1
    for expected in ([], ["constant reward"]):
        alerts.rollout(collected(EQUAL), 1)
        assert alerts.check(FLAT, 1, 16) == expected


def test_the_state_is_json_and_goes_on():
    first = Alerts()
    first.rollout(collected(UNSCORED), 1)
    check(first, {"completions/clipped_ratio": 1.0}, FLAT)
    second = Alerts()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert second.told == ["unscored"]
    assert check(second, {"completions/clipped_ratio": 1.0}) == [["everything truncated"]]
    third = Alerts()
    third.load_state_dict(second.state_dict())
    assert check(third, {"completions/clipped_ratio": 1.0}) == [[]]


def test_only_training_logs_of_the_main_process_count():
    alerts, args = Alerts(), SimpleNamespace(max_completion_length=16)
    evaluation = {"eval_loss": 0.0, "frac_reward_zero_std": 1.0}
    for main, logs in ((True, evaluation), (False, FLAT), (True, None)):
        state = SimpleNamespace(is_world_process_zero=main, global_step=1)
        for _ in range(3):
            alerts.on_log(args, state, None, logs=logs)
    assert alerts.state_dict()["in_a_row"] == {}
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    for _ in range(2):
        alerts.on_log(args, state, None, logs=FLAT)
    assert alerts.told == ["constant reward"]


# --- collapse --------------------------------------------------------------------------------------------------------


def said(*texts, first=0):
    """Rollouts of prompts that differ, each with these completions (a list of texts a prompt)."""
    return [
        SimpleNamespace(prompt_text=f"prompt {index}", completions=[SimpleNamespace(text=text) for text in row])
        for index, row in enumerate(texts, start=first)
    ]


def test_the_same_text_whatever_the_prompt_is_a_collapse(warnings):
    """trl#204: told once, with what was said and the way out."""
    alerts = Alerts()
    assert not alerts.texts(said(*[["Thank you!"] * 4] * 7), 1)  # too few prompts to say
    assert alerts.texts(said(["Thank you!"] * 4, first=7), 2)
    assert not alerts.texts(said(*[["Thank you!"]] * 8), 3)
    assert len(warnings()) == 1
    assert "step 2: collapse: 100 % of the completions to the last 8 prompts are the same" in warnings()[0]
    assert "'Thank you!'" in warnings()[0]
    assert "raise beta" in warnings()[0]
    assert "learning_rate" in warnings()[0]


def test_the_kl_is_told_with_a_collapse(warnings):
    alerts = Alerts()
    alerts.check({"loss": 0.1, "kl": 0.75}, 1, 16)
    assert alerts.texts(said(*[[""]] * 8), 2)  # nothing at all is a text too
    assert "the last KL was 0.75 nats a token" in warnings()[0]


def test_what_is_no_collapse(warnings):
    """A random policy; two answers, as to yes-no questions; one prompt that has one answer; the same prompts again;
    completions of a prompt that are alike, but not those of another."""
    assert not Alerts().texts(said(*[[f"{i} {j}" for j in range(4)] for i in range(32)]), 1)
    assert not Alerts().texts(said(*[["yes"] * 3 + ["no"]] * 20), 1)
    assert not Alerts().texts(said(*[[f"answer {i}"] * 4 for i in range(32)]), 1)
    alerts = Alerts()
    for step in range(40):
        assert not alerts.texts(said(["same"] * 8), step)
    assert not warnings()


def test_a_collapse_is_seen_after_better_days():
    """Only the last prompts count: 32 that differ, then 32 with one text."""
    alerts = Alerts()
    assert not alerts.texts(said(*[[f"{i}"] for i in range(32)]), 1)
    assert not alerts.texts(said(*[["x"]] * 16, first=32), 2)
    assert alerts.texts(said(*[["x"]] * 16, first=48), 3)


def test_a_resumed_run_remembers_the_texts():
    alerts, resumed = Alerts(), Alerts()
    alerts.texts(said(*[["x"]] * 7), 1)
    alerts.check({"loss": 0.1, "kl": 2.0}, 1, 16)
    resumed.load_state_dict(json.loads(json.dumps(alerts.state_dict())))
    assert resumed.state_dict() == alerts.state_dict()
    assert resumed.texts(said(["x"], first=7), 2)
    resumed.load_state_dict({"told": [], "in_a_row": {}, "explained": False})  # of a checkpoint without texts
    assert not resumed.texts(said(["x"], first=7), 3)


def test_a_kl_that_keeps_rising(warnings):
    """Five rises in a row above 1 nat a token; below that, or with one fall, none."""
    logs = [{"kl": 0.9 + 0.2 * step} for step in range(6)]
    assert check(Alerts(), *logs) == [[], [], [], [], [], ["rising KL"]]
    assert "has risen for five logs in a row and is 1.9 nats a token" in warnings()[0]
    assert "kl_target" in warnings()[0]
    assert not any(check(Alerts(), *[{"kl": 0.01 * step} for step in range(20)]))
    assert not any(check(Alerts(), *[{"kl": 1 + 0.1 * (step % 4)} for step in range(20)]))


def test_a_constant_policy_is_told_by_its_trainer(tmp_path, warnings):
    """PPO on a policy that says one text whatever it is asked; and not on one that says others."""
    for same in (True, False):
        texts = [[69, 70, 2] if same else [69 + i, 70, 2] for i in range(16)]
        ppo(ppo_config(tmp_path / str(same)), lambda completions, **_: [1.0] * len(completions), texts=texts).train()
        assert ("collapse: 100 %" in " ".join(warnings())) is True
        if same:
            assert sum("collapse" in told for told in warnings()) == 1
    assert sum("collapse" in told for told in warnings()) == 1
