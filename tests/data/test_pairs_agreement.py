"""Agreement of annotators, against figures from the literature and from the definitions."""

from __future__ import annotations

import math

import pytest

from hf_rlx.data.pairs import agreement, cohen_kappa, fleiss_kappa, krippendorff_alpha, percent_agreement


def test_percent_agreement_is_of_pairs_of_annotators():
    """Units (a, a, b): 1 of 3 pairs; (a, a, -): 1 of 1; (b, -, -): none. Mean (1/3 + 1) / 2 = 2/3."""
    table = [["a", "a", "b"], ["a", "a", None], ["b", None, None]]
    assert percent_agreement(table) == pytest.approx(2 / 3)


def test_cohen_kappa():
    """20 both yes, 5 yes-no, 10 no-yes, 15 both no: p = 35/50, e = 25/50 * 30/50 + 25/50 * 20/50 = 0.5; 0.2 / 0.5."""
    first = ["yes"] * 25 + ["no"] * 25
    second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    assert cohen_kappa(first, second) == pytest.approx(0.4)
    assert cohen_kappa(second, first) == pytest.approx(0.4)
    assert cohen_kappa("ab", "ab") == 1.0


def test_fleiss_kappa():
    """Fleiss' kind of table (10 units, 14 annotators, 5 names): observed 0.378, chance 0.213, kappa 0.210."""
    counts = [
        (0, 0, 0, 0, 14),
        (0, 2, 6, 4, 2),
        (0, 0, 3, 5, 6),
        (0, 3, 9, 2, 0),
        (2, 2, 8, 1, 1),
        (7, 7, 0, 0, 0),
        (3, 2, 6, 3, 0),
        (2, 5, 3, 2, 2),
        (6, 5, 2, 1, 0),
        (0, 2, 2, 3, 7),
    ]
    table = [[name for name, n in enumerate(row) for _ in range(n)] for row in counts]
    assert fleiss_kappa(table) == pytest.approx(0.210, abs=5e-4)


# Krippendorff 2011, 4 observers and 12 units; the last unit has one judgement and does not count.
OBSERVERS = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
    (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
)


@pytest.mark.parametrize(("level", "alpha"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)])
def test_krippendorff_alpha_of_the_paper(level, alpha):
    table = list(zip(*OBSERVERS, strict=True))
    assert krippendorff_alpha(table, level) == pytest.approx(alpha, abs=5e-4)


@pytest.mark.parametrize(("level", "alpha"), [("nominal", 0.4), ("ordinal", 5 / 6), ("interval", 8 / 11)])
def test_krippendorff_alpha_by_hand(level, alpha):
    """Units (1, 2) and (3, 3); ordered pairs of the four values 1, 2, 3, 3.

    Observed 2 d(1, 2) / 4, d = 1 at each level (mean ranks 1, 2, 3.5, 3.5): 0.5.
    Expected over 12 pairs: nominal 10/12, interval 2 (1 + 4 + 4 + 1 + 1) / 12 = 22/12, ordinal
    2 (1 + 2.5^2 + 2.5^2 + 1.5^2 + 1.5^2) / 12 = 3.
    """
    assert krippendorff_alpha([(1, 2), (3, 3)], level) == pytest.approx(alpha)


def test_where_all_say_one_thing_nothing_is_defined():
    table = [["a", "a"], ["a", "a"]]
    found = agreement(table)
    assert found.percent == 1.0
    assert all(math.isnan(value) for value in (found.cohen, found.fleiss, found.krippendorff))
    assert math.isnan(agreement([]).percent)
    assert math.isnan(percent_agreement([["a", None]]))


def test_what_can_be_said_of_a_table_is_said():
    """Two annotators have Cohen's, gaps leave no Fleiss' of three, and every table has Krippendorff's."""
    two = agreement([["a", "a"], ["a", "b"], ["b", None]])
    assert (two.annotators, two.units, two.percent) == (2, 2, 0.5)
    assert two.cohen == 0.0  # of two units: p = 1/2, e = 1 * 1/2
    three = agreement([["a", "a", "b"], ["a", "a", None]])
    assert (three.cohen, three.fleiss) == (None, None)
    assert agreement([["a", "a", "b"], ["a", "b", "b"]]).fleiss == pytest.approx(-1 / 3)
    # (p - e) / (1 - e) of p = 1/3, e = 1/2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: agreement([["a", "b"], ["a"]]), "unit 1 has 1 columns and unit 0 has 2"),
        (lambda: agreement([["a"], ["b"]]), "needs the judgements of two annotators"),
        (lambda: krippendorff_alpha([[1, 2]], "ratio"), "level is one of nominal, ordinal, interval, got 'ratio'"),
        (lambda: krippendorff_alpha([["a", "b"]], "interval"), "needs numbers, got 'a'; use level='nominal'"),
        (lambda: cohen_kappa("ab", "a"), "judge the same units, got 2 and 1"),
        (lambda: cohen_kappa(["a", None], ["a", "b"]), "takes no missing judgements"),
        (lambda: fleiss_kappa([["a", "b"], ["a", None]]), "unit 1 has 1 judgements.*use krippendorff_alpha"),
    ],
)
def test_bad_tables_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
