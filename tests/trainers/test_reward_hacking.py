"""Reward hacking and abstentions: what is watched falls while the reward rises, and who gave no score."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from hf_rlx.cards import RunFacts
from hf_rlx.trainers.alerts import Alerts
from hf_rlx.trainers.reward_hacking import MOST, HackingWatch
from tests.trainers.tools import config, scripted

UP, DOWN, FLAT = [0.1, 0.9], [0.8, 0.2], [0.5, 0.5]
NAN = float("nan")


def logs(reward, watched, count=20):
    """Training logs over which both go evenly from the first number to the second, with a ripple of 0.01."""
    for step in range(count):
        share, ripple = step / (count - 1), 0.01 * (-1) ** step
        at = [a + (b - a) * share + ripple for a, b in (reward, watched)]
        yield {"loss": 0.0, "reward": at[0], "rewards/exact/mean": at[1]}


def told(watch, *found):
    return [fall.name for log in found for fall in watch.training(log, ["exact"])]


@pytest.mark.parametrize(
    ("reward", "watched", "alert"),
    [(UP, DOWN, True), (UP, UP, False), (UP, FLAT, False), (DOWN, DOWN, False), (FLAT, DOWN, False)],
)
def test_a_watched_reward_falls_in_training(reward, watched, alert):
    name = "reward hacking: `exact` fell while the reward rose"
    assert set(told(HackingWatch(), *logs(reward, watched))) == ({name} if alert else set())


def test_a_fall_after_a_long_rise_counts():
    """Over all logs the halves are alike; the later half shows it. Also where neighbours have become one."""
    for count in (20, MOST):
        watch = HackingWatch()
        assert not told(watch, *logs([0.1, 0.5], [0.2, 0.8], count))
        assert told(watch, *logs([0.5, 0.9], [0.8, 0.2], count))


def test_few_logs_noise_and_trifles_are_no_fall():
    """Nine logs; a fall within the scatter; one of 1 %."""
    assert not told(HackingWatch(), *logs(UP, DOWN, 9))
    dice = torch.Generator().manual_seed(0)
    noisy = [{**log, "rewards/exact/mean": float(torch.rand((), generator=dice))} for log in logs(UP, FLAT, 200)]
    assert not told(HackingWatch(), *noisy)
    assert not told(HackingWatch(), *logs(UP, [10.0, 9.9]))


def evaluation(reward, exact, half=0.05):
    """Of 64 prompts. The interval of `exact` is that of its deviation: 1.96 * 8 half / 1.96 / sqrt(64) = half."""
    found = {"eval_reward": reward, "eval_reward_low": reward - half, "eval_reward_high": reward + half}
    found |= {"eval_rewards/exact/mean": exact, "eval_rewards/exact/std": 8 * half / 1.96, "eval_reward_n": 64.0}
    return found


def test_held_out_rewards_fall_while_the_trained_one_rises():
    """From 0.6 +- 0.05 to 0.55 the intervals overlap; 0.45 is apart. The held-out reward itself counts too, but not
    where training is not better either."""
    watch = HackingWatch()
    steps = []
    for step, (trained, held_out, exact) in enumerate(
        [(0.3, 0.3, 0.5), (0.5, 0.5, 0.6), (0.6, 0.6, 0.55), (0.8, 0.7, 0.45), (0.6, 0.4, 0.45), (0.9, 0.5, 0.6)]
    ):
        watch.training({"reward": trained}, ["exact"])
        steps.append([fall.name for fall in watch.evaluation(evaluation(held_out, exact), step, ["exact"])])
    exact = "reward hacking: `exact` on held-out rows (eval) fell while the reward in training rose"
    total = "reward hacking: the held-out reward (eval) fell while the reward in training rose"
    assert steps == [[], [], [], [exact], [exact], [total]]
    text = watch.evaluation(evaluation(0.7, 0.3), 9, ["exact"])
    assert text == []  # nothing was trained since


def test_an_evaluation_before_training_is_compared_with_the_first_reward():
    """Nothing was rewarded yet at step 0; the first log says how much the policy got as it was."""
    watch = HackingWatch()
    assert watch.evaluation(evaluation(0.5, 0.5), 0, []) == []  # no rollout yet, so no names
    for trained in (0.5, 0.9):
        watch.training({"reward": trained}, ["exact"])
    (fall,) = watch.evaluation(evaluation(0.6, 0.2), 2, ["exact"])
    assert "fell from 0.5 (step 0) to 0.2 while the reward in training rose from 0.5 to 0.7" in fall.text
    assert "give `exact` a weight" in fall.text


def test_a_function_may_be_called_as_the_total_is():
    """`format_reward` of 0 and 1 has `eval_accuracy/format_reward_n`, which is no held-out set of its own."""
    watch = HackingWatch()
    for step, (trained, share) in enumerate([(0.3, 0.9), (0.5, 0.5)]):
        watch.training({"reward": trained}, [])
        named = {f"eval_accuracy/format_reward{end}": share for end in ("", "_low", "_high")}
        log = {**evaluation(0.5, 0.5), **named, "eval_accuracy/format_reward_n": 64.0}
        assert watch.evaluation(log, step, []) == []


def test_every_held_out_set_is_compared_with_the_training_before_it():
    """Two sets are logged one after the other, and a log of the user's own comes between: both are told of."""
    watch = HackingWatch()
    told = []
    for step, (trained, held_out) in enumerate([(0.3, 0.8), (0.6, 0.4)]):
        watch.training({"reward": trained}, [])
        watch.evaluation({"mine": 1.0}, step, [])
        for name in ("eval_a", "eval_b"):
            log = {key.replace("eval", name, 1): value for key, value in evaluation(held_out, 0.5).items()}
            told += [fall.name for fall in watch.evaluation(log, step, [])]
        watch.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert [name.partition("(")[2][:6] for name in told] == ["eval_a", "eval_b"]


def collected(*rewards):
    """A rollout of two functions: a row a completion, a column a function."""
    rollout = SimpleNamespace(rewards=torch.tensor(rewards), total=torch.tensor(rewards).nansum(dim=1))
    return SimpleNamespace(rollouts=[rollout], scores=SimpleNamespace(names=["proxy", "exact"]))


def test_the_alert_is_told_once_and_not_again_after_a_resume(caplog):
    """Watched are functions of weight 0; the state is JSON."""
    state = SimpleNamespace(is_world_process_zero=True, global_step=7)
    for weights, expected in (([1.0, 0.0], 1), ([1.0, 0.5], 0), (None, 0)):
        caplog.clear()
        args, alerts = SimpleNamespace(max_completion_length=8, reward_weights=weights), Alerts()
        alerts.rollout(collected([0.0, 1.0], [1.0, 0.0]), 1)
        for place, log in enumerate(logs(UP, DOWN)):
            if place == 11:
                kept = json.loads(json.dumps(alerts.state_dict()))
                alerts = Alerts()
                alerts.load_state_dict(kept)
                alerts.rollout(collected([0.0, 1.0], [1.0, 0.0]), 1)
            with caplog.at_level(logging.WARNING):
                alerts.on_log(args, state, None, logs=log)
        messages = [m for m in caplog.messages if "reward hacking: `exact`, which has no weight, fell from" in m]
        assert len(messages) == expected


def test_a_watched_reward_cancels_nothing():
    """`proxy` is flat and `exact`, of weight 0, is not: a constant reward, no cancelling."""
    rollout = SimpleNamespace(rewards=torch.tensor([[1.0, 0.0], [1.0, 1.0]]), total=torch.tensor([1.0, 1.0]))
    flat = SimpleNamespace(rollouts=[rollout], scores=SimpleNamespace(names=["proxy", "exact"]))
    for weights, told in (([1.0, 0.0], []), ([1.0, 1.0], ["cancelled"]), (None, ["cancelled"])):
        alerts = Alerts()
        alerts.on_train_begin(SimpleNamespace(reward_weights=weights), SimpleNamespace(global_step=0), None)
        alerts.rollout(flat, 1)
        assert alerts.told == told


def test_abstentions_are_summed_up(caplog):
    """None and NaN of `exact`: three of four completions in two rollouts, of `proxy` none; a run that goes on counts
    on, another one anew."""
    start, later = SimpleNamespace(is_world_process_zero=True, global_step=0), SimpleNamespace(global_step=2)
    alerts = Alerts()
    alerts.on_train_begin(None, start, None)
    alerts.rollout(collected([0.0, NAN], [1.0, NAN]), 1)
    resumed = Alerts()
    resumed.load_state_dict(json.loads(json.dumps(alerts.state_dict())))
    resumed.on_train_begin(None, later, None)
    resumed.rollout(collected([0.0, 1.0], [2.0, NAN]), 2)
    with caplog.at_level(logging.WARNING):
        resumed.on_train_end(None, start, None)
    assert caplog.messages == ["completions without a score (None, NaN, or a fault), left out: exact 3 of 4 (75.0%)"]
    assert resumed.abstained == {"exact": (3, 4)}
    resumed.on_train_begin(None, start, None)
    assert resumed.abstained == {}


def test_a_run_tells_and_its_card_too(tmp_path, caplog):
    """16 completions a step, `never` scores none."""

    def length(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    def never(completion_ids, **_):
        return [None] * len(completion_ids)

    trainer = scripted(config(tmp_path, max_steps=2), [length, never])
    with caplog.at_level(logging.WARNING):
        trainer.train()
    trainer.save_model()
    assert "left out: never 32 of 32 (100.0%)" in caplog.text
    assert RunFacts.load(tmp_path).abstained == {"never": (32, 32)}
    assert "- Without a score by `never`: 32 of 32 completions (100.0%)\n" in (tmp_path / "README.md").read_text()


def test_another_run_begins_anew():
    """What was told of an earlier run is told again; where a run goes on, it is not."""
    alerts = Alerts()
    alerts.told.append("constant reward")
    alerts.on_train_begin(None, SimpleNamespace(global_step=3), None)
    assert alerts.told == ["constant reward"]
    alerts.on_train_begin(None, SimpleNamespace(global_step=0), None)
    assert alerts.told == []


def test_a_finished_run_that_is_resumed_keeps_its_card(tmp_path):
    """Alerts and abstentions stand in it still: nothing was trained since."""

    def sometimes(completions, **_):
        return [None if place % 4 == 0 else 0.5 for place, _ in enumerate(completions)]

    fields = {"max_steps": 6, "save_strategy": "steps", "save_steps": 6, "logging_steps": 1}
    cards = []
    for resume in (None, True):
        trainer = scripted(config(tmp_path, **fields), reward=sometimes)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(tmp_path))
        cards.append((tmp_path / "README.md").read_text(encoding="utf-8"))
    for card in cards:
        assert "Without a score by `sometimes`: 24 of 96 completions (25.0%)" in card
        assert "constant reward" in card
