"""The report of a process reward model, by hand."""

from __future__ import annotations

import json
import math

import pytest

from hf_rlx.trainers.prm_report import ScoredSteps, step_report

NAN = math.nan


def odds(*chances):
    """Log-odds of probabilities."""
    return [math.log(p / (1 - p)) for p in chances]


def test_known_scores_are_aggregated():
    """compute-optimal-tts#1: [.9, .1, .9] has min .1, last .9; a correct solution above it in three of the four."""
    wrong = ScoredSteps(odds(0.9, 0.1, 0.9), [1, 0, 1])
    right = ScoredSteps(odds(0.8, 0.8), [1, 1])  # min .8, product .64, mean .8, last .8
    report = step_report([wrong, right])
    assert (report.auc_min, report.auc_prod, report.auc_mean, report.auc_last) == (1, 1, 1, 0)
    assert report.mean_probability == pytest.approx(3.5 / 5)
    assert (report.n_solutions, report.n_steps, report.n_good, report.n_bad) == (2, 5, 4, 1)
    assert (report.accuracy, report.accuracy_good, report.accuracy_bad) == (1, 1, 1)


def test_steps_are_told_apart_at_one_half():
    """Right, wrong, undecided: 1 + 0 + 1/2 of three; -log of .8, .3 and .5."""
    report = step_report([ScoredSteps(odds(0.8, 0.7), [1, 0]), ScoredSteps([0.0], [1])])
    assert report.accuracy == pytest.approx(0.5)
    assert report.accuracy_good == pytest.approx(0.75)
    assert report.accuracy_bad == 0
    assert report.loss == pytest.approx(-(math.log(0.8) + math.log(0.3) + math.log(0.5)) / 3)
    assert report.accuracy_low < 0.5 < report.accuracy_high


def test_accuracy_has_a_yardstick():
    """Three good steps and one bad: always saying good gets 3/4, as this model does, and no bad step right; of bad
    steps alone always saying bad gets all."""
    report = step_report([ScoredSteps(odds(0.9, 0.8, 0.7, 0.6), [1, 1, 1, 0])])
    assert (report.accuracy, report.accuracy_majority) == (0.75, 0.75)
    assert (report.accuracy_good, report.accuracy_bad) == (1.0, 0.0)
    assert step_report([ScoredSteps(odds(0.9), [0])]).accuracy_majority == 1.0
    assert math.isnan(step_report([]).accuracy_majority)


def test_the_first_error():
    """Four erroneous solutions: found, found too early, too late, not at all: 1/4. Three correct ones, one of them
    called wrong: 2/3. Harmonic mean 2 * 1/4 * 2/3 / (11/12) = 4/11."""
    rows = [
        ScoredSteps(odds(0.9, 0.2, 0.9), [1, 0, 1]),
        ScoredSteps(odds(0.2, 0.2), [1, 0]),
        ScoredSteps(odds(0.9, 0.9, 0.2), [1, 0, 0]),
        ScoredSteps(odds(0.9, 0.9), [0, 0]),
        ScoredSteps(odds(0.9), [1]),
        ScoredSteps(odds(0.9, 0.6), [1, 1]),
        ScoredSteps(odds(0.9, 0.4), [1, 1]),
    ]
    report = step_report(rows)
    assert (report.n_erroneous, report.n_correct) == (4, 3)
    assert report.error_accuracy == pytest.approx(1 / 4)
    assert report.correct_accuracy == pytest.approx(2 / 3)
    assert report.first_error_f1 == pytest.approx(4 / 11)


@pytest.mark.parametrize(
    ("labels", "whole", "expected"),
    [
        ([1, 1], True, -1),
        ([1, 0], True, 1),
        ([0, 1], True, 0),
        ([1, NAN, 0], True, None),  # the unknown one may be the first
        ([1, 0, NAN], True, 1),
        ([1, 1], False, None),  # what was cut off may be wrong
        ([1, 0], False, 1),
        ([0.5, 1], True, 0),  # not above one half
        ([0.6, 1], True, -1),
    ],
)
def test_where_a_solution_goes_wrong(labels, whole, expected):
    assert ScoredSteps([0.0] * len(labels), labels, whole).first_error == expected


def test_the_calibration_of_a_probability():
    """Ten steps said to be right with .97, nine of them right; one said to be wrong with .97, rightly: the bin of .97
    holds eleven, ten right. Error |10/11 - .97|."""
    rows = [ScoredSteps(odds(0.97), [1])] * 9 + [ScoredSteps(odds(0.97), [0]), ScoredSteps(odds(0.03), [0])]
    report = step_report(rows)
    assert report.ece == pytest.approx(0.97 - 10 / 11)
    assert report.reliability[-1].pairs == 11
    assert report.reliability[-1].accuracy == pytest.approx(10 / 11)


def test_the_length_of_solutions():
    """The more steps, the lower the minimum: -1 by rank."""
    rows = [ScoredSteps(odds(*[0.9] * n, 0.8 / n), [1] * (n + 1)) for n in (1, 2, 4)]
    assert step_report(rows).length_spearman == pytest.approx(-1)
    assert step_report(rows).length_pearson < -0.8


def test_soft_labels_count_by_their_side():
    report = step_report([ScoredSteps(odds(0.7, 0.3), [0.75, 0.25])])
    assert report.accuracy == 1
    assert report.loss == pytest.approx(-(0.75 * math.log(0.7) + 0.25 * math.log(0.3)))


def test_nothing_to_report():
    """No solution, no step that was not cut off, no label."""
    for rows in ([], [ScoredSteps([], [])], [ScoredSteps([1.0], [NAN])]):
        report = step_report(rows)
        assert report.n_steps == 0
        assert math.isnan(report.accuracy)
        assert math.isnan(report.first_error_f1)
        assert "accuracy" not in report.metrics()
        assert report.metrics()["n_steps"] == 0


def test_saved_as_json_and_text(tmp_path):
    report = step_report([ScoredSteps(odds(0.8, 0.7), [1, 0])])
    report.save(tmp_path / "reports" / "eval")
    facts = json.loads((tmp_path / "reports" / "eval.json").read_text())
    assert facts["accuracy"] == 0.5
    assert facts["correct_accuracy"] is None  # there is none
    assert len(facts["reliability"]) == 10
    text = (tmp_path / "reports" / "eval.txt").read_text()
    assert "first_error_f1" in text
    assert text.splitlines()[-1].startswith("0.95 to 1.00")
