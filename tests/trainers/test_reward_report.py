"""Numbers of the report, by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hf_rlx.trainers.policy_report import evaluate_on_policy
from hf_rlx.trainers.reward_report import ScoredRow, fit_temperature, reward_report
from tests.trainers.reward_tools import config, shared_model, trainer

PAIR = [0.0, 1.0]


def test_accuracy_ties_and_the_interval():
    """Of four pairs two right, one tied, one wrong: 2.5 / 4. Wilson with p = 0.625, n = 4, z = 1.96: centre
    (0.625 + 0.4802) / 1.9604 = 0.563763, half width 0.5 / 1.9604 x sqrt(...) gives [0.2279, 0.8997]."""
    rows = [
        ScoredRow([2.0, 1.0], [1, 1], PAIR),
        ScoredRow([2.0, 0.0], [1, 1], PAIR),
        ScoredRow([1.0, 1.0], [1, 1], PAIR),
        ScoredRow([0.0, 1.0], [1, 1], PAIR),
        ScoredRow([5.0, 5.0], [1, 1], [0.0, 0.0]),
    ]
    report = reward_report(rows)
    assert (report.n_pairs, report.ties, report.identical) == (4, 1, 1)
    assert report.accuracy == 0.625
    centre = (0.625 + 1.959964**2 / 8) / (1 + 1.959964**2 / 4)
    assert (report.accuracy_low + report.accuracy_high) / 2 == pytest.approx(centre, abs=1e-6)
    assert report.margin == 0.5
    assert report.mean_reward == 1.8
    assert (report.min_reward, report.max_reward) == (0.0, 5.0)


def test_a_printed_report_is_a_small_table():
    """One pair, right by 1: the interval stands beside the accuracy; what is NaN (ece_tempered needs two halves) and
    the reliability table are left out. The repr keeps every field."""
    report = reward_report([ScoredRow([2.0, 1.0], [1, 1], PAIR)])
    lines = str(report).splitlines()
    assert lines[:4] == [
        f"{'n_pairs':24} 1",
        f"{'ties':24} 0",
        f"{'identical':24} 0",
        f"{'accuracy':24} 1.0000 (0.2065 to 1.0000)",
    ]
    assert f"{'margin':24} 1.0000" in lines
    assert "nan" not in str(report)
    assert not any(line.startswith(("reliability", "accuracy_low", "ece_tempered")) for line in lines)
    assert repr(report).startswith("RewardReport(n_pairs=1, ties=0, ")


def test_the_loss_is_a_mean_over_prompts():
    """A list of three with differences 1, 2, 1 counts as much as a pair: (0.251150 + 0.693147) / 2 = 0.472149
    with 0.251150 = (2 x 0.313262 + 0.126928) / 3. A margin of 1 turns a difference of 1 into log 2."""
    rows = [ScoredRow([2.0, 1.0, 0.0], [1, 1, 1], [0.0, 1.0, 2.0]), ScoredRow([0.5, 0.5], [1, 1], PAIR)]
    assert reward_report(rows).loss == pytest.approx(0.472149, abs=1e-6)
    assert reward_report(rows).n_pairs == 4
    assert reward_report([ScoredRow([1.0, 0.0], [1, 1], PAIR, margin=1.0)]).loss == pytest.approx(math.log(2))


def test_lengths_pooled_and_within():
    """Between the prompts long goes with high, within each with low: scores 1, 0, 11, 10 on lengths 1, 2, 11, 12
    correlate at 99 / 101 (deviations -4.5, -5.5, 5.5, 4.5 and -5.5, -4.5, 4.5, 5.5), within at -1."""
    rows = [ScoredRow([1.0, 0.0], [1, 2], PAIR), ScoredRow([11.0, 10.0], [11, 12], PAIR)]
    report = reward_report(rows)
    assert report.length_pearson == pytest.approx(99 / 101)
    assert report.length_spearman == pytest.approx(0.6)
    assert report.length_pearson_within == pytest.approx(-1)
    assert report.length_spearman_within == pytest.approx(-1)


def test_pairs_whose_better_answer_is_shorter():
    """A scorer that likes length is right on the first pair and wrong on the two others."""
    rows = [
        ScoredRow([3.0, 1.0], [3, 1], PAIR),
        ScoredRow([1.0, 2.0], [1, 2], PAIR),
        ScoredRow([1.0, 4.0], [1, 4], PAIR),
        ScoredRow([2.0, 1.0], [2, 2], PAIR),
    ]
    report = reward_report(rows)
    assert report.accuracy == 0.5
    assert (report.accuracy_chosen_shorter, report.n_chosen_shorter) == (0.0, 2)


def test_the_reliability_table():
    """sigma(0.1) = 0.525 and sigma(2) = 0.881: the first and the eighth bin; gaps 0.525 and 0.119 over two pairs."""
    report = reward_report([ScoredRow([0.0, 0.1], [1, 1], PAIR), ScoredRow([2.0, 0.0], [1, 1], PAIR)])
    assert [b.pairs for b in report.reliability] == [1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert report.reliability[7].accuracy == 1.0
    assert report.ece == pytest.approx((0.524979 + 0.119203) / 2, abs=1e-6)
    assert "0.85 to 0.90       1" in report.table()


def test_the_temperature_minimises_the_loss():
    """Three of four pairs right at difference 1: sigma(1 / T) = 3/4, so T = 1 / log 3."""
    assert fit_temperature(torch.tensor([1.0, 1.0, 1.0, -1.0])) == pytest.approx(1 / math.log(3), rel=1e-6)
    assert fit_temperature(torch.tensor([2.0, 2.0, 2.0, -2.0])) == pytest.approx(2 / math.log(3), rel=1e-6)


@pytest.mark.parametrize(("margins", "expected"), [([1.0, 2.0], 0.01), ([-1.0, -2.0], 100.0), ([0.0], 100.0)])
def test_a_temperature_without_a_minimum_stops_at_its_bound(margins, expected):
    assert fit_temperature(torch.tensor(margins)) == expected


def test_tempered_confidence_is_calibrated():
    """Scores ten times too sure, right in three of four: the fitted temperature of one half calibrates the other."""
    rows = [ScoredRow([10.0 if i // 2 % 4 else 0.0, 0.0 if i // 2 % 4 else 10.0], [1, 1], PAIR) for i in range(16)]
    report = reward_report(rows)
    assert report.ece == pytest.approx(0.25, abs=1e-3)
    assert report.ece_tempered < 1e-3
    assert report.temperature == pytest.approx(10 / math.log(3), rel=1e-6)


def test_nothing_to_report():
    report = reward_report([])
    assert report.n_pairs == 0
    assert math.isnan(report.accuracy)
    assert (report.accuracy_low, report.accuracy_high) == (0.0, 1.0)
    assert "accuracy" not in report.metrics()


def test_saved_as_json_and_text(tmp_path):
    report = reward_report([ScoredRow([1.0, 0.0], [1, 1], PAIR)])
    report.save(tmp_path / "sub" / "x")
    facts = json.loads((tmp_path / "sub" / "x.json").read_text())
    assert facts["accuracy"] == 1.0
    assert facts["length_pearson"] is None
    assert facts["reliability"][4] == {
        "low": 0.7,
        "high": 0.75,
        "pairs": 1,
        **{k: facts["reliability"][4][k] for k in ("confidence", "accuracy")},
    }
    assert (tmp_path / "sub" / "x.txt").read_text() == report.table()


# --- on the policy ---------------------------------------------------------------------------------------------------


def by_length(completions, number, **_):
    """Shorter is better; the second prompt's answers have no verdict."""
    return [None if n == 1 else -float(len(text)) for n, text in zip(number, completions, strict=True)]


def test_a_reward_model_on_fresh_samples_of_the_policy(tmp_path):
    """The pairs are those of the verifier's different verdicts, and the scores those of the scoring function."""
    rewards = trainer(config(tmp_path, max_steps=2))
    rewards.train()
    shared = rewards.shared
    prompts = [{"prompt": f"{i}+1=", "number": i} for i in range(4)]
    options = {"num_generations": 3, "max_completion_length": 6, "seed": 4}
    report = evaluate_on_policy(shared, prompts, by_length, **options)
    again = evaluate_on_policy(shared, prompts, by_length, **options)
    assert report.metrics() == again.metrics()
    assert 0 < report.n_pairs <= 9
    assert report.min_reward < report.mean_reward < report.max_reward
    other = evaluate_on_policy(shared, ["1+1="] * 2, lambda completions, **_: [0.0] * len(completions), **options)
    assert other.n_pairs == 0


def test_fresh_samples_are_scored_as_rewards_are(tmp_path):
    """Cut to the length that the role was trained with, as its reward function does."""
    shared = shared_model()
    trainer(config(tmp_path, max_length=6), shared)
    raw = shared.reward_function()
    scores = []

    def verifier(prompts, completions, completion_ids, **_):
        scores.extend(raw(prompts, completions, completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    report = evaluate_on_policy(shared, ["1+2+3+4="], verifier, num_generations=4, max_completion_length=6)
    assert report.mean_reward == pytest.approx(sum(scores) / 4, abs=1e-5)


def test_the_judge_s_order_is_what_counts(tmp_path):
    """A verifier that asks the reward role itself is agreed with entirely; its opposite never."""
    shared = shared_model()
    trainer(config(tmp_path), shared)
    raw = shared.reward_function()
    options = {"num_generations": 4, "max_completion_length": 5}
    prompts = ["1+1=", "2+2="]
    assert evaluate_on_policy(shared, prompts, raw, **options).accuracy == 1.0

    def opposite(prompts, completions, completion_ids, **_):
        return [-score for score in raw(prompts, completions, completion_ids)]

    assert evaluate_on_policy(shared, prompts, opposite, **options).accuracy == 0.0


def test_bad_calls_are_named():
    shared = shared_model()
    with pytest.raises(KeyError, match="no role 'reward'"):
        evaluate_on_policy(shared, ["a"], by_length)
    shared.add_role("reward")
    with pytest.raises(ValueError, match="num_generations must be at least 2"):
        evaluate_on_policy(shared, ["a"], by_length, num_generations=1)
