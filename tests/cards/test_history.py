"""What the log of a run says, by literal logs."""

from __future__ import annotations

from hf_rlx.cards.facts import Course, Measure, Score
from hf_rlx.cards.history import LONGEST_CURVE, course, curve, held_out, score_pair, seconds

GRPO = [
    {"eval_accuracy/f": 0.25, "eval_accuracy/f_low": 0.1, "eval_accuracy/f_high": 0.5, "eval_accuracy/f_n": 8.0}
    | {"eval_reward": 0.3, "eval_rewards/f/mean": 0.25, "eval_rewards/g/mean": 0.05, "step": 0},
    {"loss": 0.0, "reward": 0.5, "kl": 0.0, "completions/mean_length": 9.0, "step": 1},
    {"loss": 0.1, "reward": 0.75, "kl": 0.25, "completions/mean_length": 7.0, "value/explained_variance": 0.5}
    | {"step": 2},
    {"eval_accuracy/f": 0.5, "eval_accuracy/f_low": 0.25, "eval_accuracy/f_high": 0.75, "eval_accuracy/f_n": 8.0}
    | {"eval_reward": 0.6, "eval_rewards/f/mean": 0.5, "eval_rewards/g/mean": 0.1, "step": 2},
    {"train_runtime": 12.5, "train_loss": 0.05, "step": 2},
]


def test_a_reward_of_right_and_wrong_has_an_interval():
    table = held_out(GRPO, ["f", "g"])
    assert table.scores == [
        Measure("accuracy by `f`", 0.25, 0.5, (0.1, 0.5), (0.25, 0.75), 8, "accuracy"),
    ]
    assert table.measures == [
        Measure("mean total reward", 0.3, 0.6, metric="reward"),
        Measure("mean of `g`", 0.05, 0.1),  # of `f` the mean is the accuracy, which is there
    ]
    assert table.step == 2
    assert score_pair(table.scores[0]) == (Score(0.25, 8, 0.1, 0.5), Score(0.5, 8, 0.25, 0.75))


def test_every_reward_keeps_its_interval():
    """That of the mean where it is logged, of 0 and 1 Wilson's; no such line is an accuracy on the Hub."""
    logs = [
        {**log, "eval_rewards/g/mean_low": 0.0, "eval_rewards/g/mean_high": 0.25, "eval_rewards/g/mean_n": 4.0}
        if "eval_reward" in log
        else log
        for log in GRPO
    ]
    assert held_out(logs, ["f", "g"], verdicts=()).measures == [
        Measure("mean total reward", 0.3, 0.6, metric="reward"),
        Measure("mean of `f`", 0.25, 0.5, (0.1, 0.5), (0.25, 0.75), 8),
        Measure("mean of `g`", 0.05, 0.1, (0.0, 0.25), (0.0, 0.25), 4),
    ]


def test_of_a_single_reward_the_mean_is_the_accuracy_and_left_out():
    assert [m.name for m in held_out(GRPO, ["f"]).measures] == []


def test_a_graded_reward_has_a_mean_even_where_it_gave_0_and_1_only():
    """It is logged as an accuracy all the same."""
    table = held_out(GRPO, ["f"], verdicts=())
    assert (table.scores, table.measures) == ([], [Measure("mean reward", 0.3, 0.6, metric="reward")])
    assert "accuracy" not in curve(GRPO, ["f"], verdicts=())[0]
    assert held_out(GRPO, ["f"], verdicts=["f"]) == held_out(GRPO, ["f"])


def test_the_best_step_counts_where_its_weights_are_kept():
    logs = [*GRPO[:4], {**GRPO[3], "eval_accuracy/f": 0.125, "step": 3}]
    assert held_out(logs, ["f"]).scores[0].after == 0.125
    table = held_out(logs, ["f"], best_step=2)
    assert (table.scores[0].before, table.scores[0].after, table.step) == (0.25, 0.5, 2)


def test_before_is_known_of_step_0_only():
    table = held_out(GRPO[1:], ["f"])
    assert (table.scores[0].before, table.scores[0].after) == (None, 0.5)
    assert score_pair(table.scores[0])[0] is None
    table = held_out(GRPO[:1], ["f"])
    assert (table.scores[0].before, table.scores[0].after, table.step) == (0.25, None, None)
    assert held_out([], ["f"]) == ([], [], None)


def test_pairs_a_reward_model_and_steps():
    """All three log an accuracy with its interval, over pairs, pairs and steps."""
    pairs = {"eval_rewards/accuracies": 0.75, "eval_rewards/accuracies_low": 0.5, "eval_rewards/accuracies_high": 0.9}
    pairs |= {"eval_n_pairs": 16.0, "eval_rewards/margins": 0.5, "eval_logps/chosen_change": -2.0, "step": 4}
    table = held_out([pairs])
    assert table.scores == [
        Measure("accuracy of the implicit reward", None, 0.75, None, (0.5, 0.9), 16, "accuracy"),
    ]
    assert [(m.name, m.after) for m in table.measures] == [
        ("margin of the implicit rewards", 0.5),
        ("change of the log-prob of chosen answers, nats", -2.0),
    ]
    reward = {"eval_accuracy": 0.75, "eval_accuracy_low": 0.5, "eval_accuracy_high": 0.9, "eval_n_pairs": 16.0}
    reward |= {"eval_ece": 0.125, "eval_length_pearson": -0.5, "step": 4}
    table = held_out([reward])
    assert (table.scores[0].name, table.scores[0].n) == ("pairwise accuracy", 16)
    assert [(m.name, m.after, m.n) for m in table.measures] == [
        ("expected calibration error", 0.125, 16),
        ("correlation of score and length", -0.5, 16),
    ]
    steps = {**reward, "eval_n_steps": 40.0, "eval_accuracy_majority": 0.7, "eval_accuracy_good": 0.9}
    steps["eval_accuracy_bad"] = 0.4
    del steps["eval_n_pairs"]
    assert [(m.name, m.after) for m in held_out([steps]).measures[:3]] == [
        ("accuracy of always saying the more frequent label", 0.7),
        ("accuracy on good steps", 0.9),
        ("accuracy on bad steps", 0.4),
    ]
    assert (held_out([steps]).scores[0].name, held_out([steps]).scores[0].n) == ("accuracy over steps", 40)


def test_several_held_out_sets():
    logs = [{"eval_easy_loss": 1.0, "step": 0}, {"eval_hard_loss": 2.0, "step": 0}, {"eval_easy_loss": 0.5, "step": 9}]
    assert held_out(logs, dataset="easy").measures == [Measure("loss, nats", 1.0, 0.5, dataset="easy")]
    assert held_out(logs, dataset="hard").measures == [Measure("loss, nats", 2.0, None, dataset="hard")]


def test_course_is_the_first_and_the_last_training_log():
    """Of each metric by itself; NaN and evaluations do not count."""
    logs = [*GRPO, {"loss": 0.2, "reward": float("nan"), "kl": 0.5, "step": 3}]
    assert course(logs) == [
        Course("reward", 0.5, 1, 0.75, 2),
        Course("KL to the reference, nats a token", 0.0, 1, 0.5, 3),
        Course("length, tokens", 9.0, 1, 7.0, 2),
        Course("explained variance of the critic", 0.5, 2, 0.5, 2),
        Course("loss", 0.0, 1, 0.2, 3),
    ]


def test_curve_has_a_row_a_step():
    assert curve(GRPO, ["g", "f"]) == [
        {"step": 0.0, "eval_reward": 0.3, "accuracy": 0.25, "low": 0.1, "high": 0.5},
        {"step": 1.0, "reward": 0.5, "kl": 0.0, "length": 9.0, "loss": 0.0},
        {"step": 2.0, "reward": 0.75, "kl": 0.25, "length": 7.0, "explained_variance": 0.5, "loss": 0.1}
        | {"eval_reward": 0.6, "accuracy": 0.5, "low": 0.25, "high": 0.75},
    ]
    pairs = [{"loss": 0.7, "rewards/margins": 0.1, "logps/chosen": -9.0, "logps/rejected": -8.0, "step": 1}]
    assert curve(pairs) == [{"step": 1.0, "loss": 0.7, "margin": 0.1, "chosen": -9.0, "rejected": -8.0}]


def test_a_long_run_is_thinned_and_keeps_its_evaluations():
    logs = [{"loss": 0.0, "reward": 1.0, "step": step} for step in range(1, 5001)]
    logs += [{"eval_reward": 1.0, "step": step} for step in (3, 7)]
    rows = curve(logs)
    assert LONGEST_CURVE <= len(rows) <= LONGEST_CURVE + 3
    assert {1, 3, 7, 5000} <= {row["step"] for row in rows}


def test_seconds_are_those_of_the_end():
    assert seconds(GRPO) == 12.5
    assert seconds(GRPO[:-1]) is None
