"""Calculations inside solutions: found where they stand, checked exactly, and what is no calculation left alone."""

from __future__ import annotations

import time

import pytest

from hf_rlx.verifiers import CalculationSteps, check_steps


def told(text: str, **options) -> list[tuple[str, str, str, str]]:
    """(as written, left side, right side, outcome) of every calculation."""
    checks = check_steps(text, **options)
    return [(text[c.start : c.end], c.expression, c.claimed, c.verdict.outcome) for c in checks]


@pytest.mark.parametrize(
    "calculation",
    [
        "3 + 4 = 7",
        "3+4=7",
        "7 = 3 + 4",
        "3 + 4 == 7",
        "12 - 5 * 2 = 2",
        "(12 - 5) * 2 = 14",
        "2(3 + 4) = 14",
        "48/2 = 24",
        "3 x 4 = 12",
        "3 \N{MULTIPLICATION SIGN} 4 = 12",
        "12 \N{DIVISION SIGN} 4 = 3",
        "9 \N{MINUS SIGN} 4 = 5",
        "3 \\times 4 = 12",
        "12 \\div 4 = 3",
        "\\frac{48}{2} = 24",
        "2^5 = 32",
        "2**5 = 32",
        "1,250 + 50 = 1,300",
        "0.1 + 0.2 = 0.3",
        ".5 + .5 = 1",
        "20% of 50 = 10",
        "50 * 20% = 10",
        "5/20 = 25%",
        "2 1/2 + 1/2 = 3",
        "-3 + 5 = 2",
        "$13 * 2 = $26",
    ],
)
def test_right_calculations(calculation: str):
    """Found alone and inside a sentence, at their exact place."""
    for text in (calculation, f"She has {calculation}, so", f"a\n**{calculation}**\nb", f"\\({calculation}\\)"):
        assert [(found, outcome) for found, _, _, outcome in told(text)] == [(calculation, "right")], text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 3 + 4 = 8.", [("3 + 4 = 8", "3 + 4", "8", "wrong")]),
        ("10/3 = 3.33", [("10/3 = 3.33", "10/3", "3.33", "wrong")]),
        ("1/0 = 5", [("1/0 = 5", "1/0", "5", "wrong")]),
        ("9^9^9 = 1", [("9^9^9 = 1", "9^9^9", "1", "wrong")]),
        # chains: one check an equals sign
        ("2*3 = 6 = 12/2", [("2*3 = 6", "2*3", "6", "right"), ("6 = 12/2", "6", "12/2", "right")]),
        ("3 + 4 = 7 + 1 = 8", [("3 + 4 = 7 + 1", "3 + 4", "7 + 1", "wrong"), ("7 + 1 = 8", "7 + 1", "8", "right")]),
        ("x = 3 + 4 = 7", [("3 + 4 = 7", "3 + 4", "7", "right")]),
        # two in a sentence
        ("3 + 4 = 7, 7 * 2 = 15", [("3 + 4 = 7", "3 + 4", "7", "right"), ("7 * 2 = 15", "7 * 2", "15", "wrong")]),
        ("$5-2=3$ and $5-2=4$", [("$5-2=3", "$5-2", "3", "right"), ("$5-2=4", "$5-2", "4", "wrong")]),
        # annotations, and the prose around them
        ("<<48/2=24>>", [("48/2=24", "48/2", "24", "right")]),
        ("16 - 3 = <<16-3=13>>13 eggs", [("16-3=13", "16-3", "13", "right")]),
        (
            "16 - 3 = <<16-3=13>>12 eggs",
            [("16-3=13", "16-3", "13", "right"), ("16 - 3 = <<16-3=13>>12", "16 - 3", "12", "wrong")],
        ),
        ("That is $<<2*3=7>>7", [("2*3=7", "2*3", "7", "wrong")]),
    ],
)
def test_what_is_found(text: str, expected: list):
    assert told(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "2x + 3 = 7",
        "y - 3 = 4",
        "x2 = 3 + 4",
        "12 + x = 15",
        "15 = 12 + x",
        "3 + 4 = 7x",
        "= 3 + 4",
        "3 + 4 =",
        "3 = 3",
        "3 + 4 > 7",
        "7 >= 3 + 4",
        "5! = 120",
        "350, 000 * 2 = 700000",  # the end of a number that is written with a space
        "350 000 * 2 = 700000",
        "no numbers = none",
        "",
    ],
)
def test_what_is_no_calculation(text: str):
    assert told(text) == []


def test_a_wrong_verdict_names_the_true_value():
    assert [c.verdict.reason for c in check_steps("3 + 4 = 8, 1/3 = 0.3, 1/4 = 0.2")] == [
        "it is 7",
        "it is 1/3",
        "it is 0.25",
    ]


def test_rounding():
    """To the digits that are written: 10/3 = 3.333..., so 3.33 and 3.3 are right, 3.34 is not; 2/3 is 66.67 %."""
    text = (
        "10/3 = 3.33, 10/3 = 3.3, 10/3 = 3.34, 2/3 = 0.67, 2/3 = 0.66, 2/3 = 66.67%, 4.2 + 9.45 = 13.649999999999999"
    )
    outcomes = [c.verdict.outcome for c in check_steps(text, rounding=True)]
    assert outcomes == ["right", "right", "wrong", "right", "wrong", "right", "right"]
    assert [c.verdict.outcome for c in check_steps(text)] == ["wrong"] * 7


def test_hostile_texts_are_quick():
    hostile = [
        "1+" * 20_000,
        "(" * 20_000,
        "=" * 20_000,
        "1=" * 20_000,
        "<<" * 20_000,
        "1x" * 20_000,
        "\\frac{" * 20_000,
    ]
    hostile += ["1+1=" * 2_000, "9" * 20_000 + "+1=2", "1 " * 20_000, "$" * 20_000, "9^9^9^9^9=1", "1,000" * 5_000]
    start = time.perf_counter()
    for text in hostile:
        check_steps(text)
    assert time.perf_counter() - start < 10


def test_step_rewards():
    """(end in characters, reward): "3+4=7" ends at 5, "2*3=5" at 12; messages are judged by their last turn."""
    extra = {}
    steps = CalculationSteps(1.0, -0.5)
    completions = ["3+4=7; 2*3=5", [{"role": "assistant", "content": "so 1+1=2"}], "nothing"]
    rows = steps(
        prompts=["p"] * 3, completions=completions, log_extra=lambda name, values: extra.update({name: values})
    )
    assert steps.__name__ == "calculations"
    assert rows == [[(5, 1.0), (12, -0.5)], [(8, 1.0)], []]
    assert extra == {"calculations/first_wrong": ["2*3=5", "", ""]}


def test_trainers_take_them():
    """As step reward function of the scorer that `GRPOTrainer` uses."""
    from hf_rlx.trainers.steps import StepScorer
    from hf_rlx.types import Completion, Rollout

    texts = ["3+4=7; 2*3=5", "nothing"]
    rollout = Rollout("p", "p", [1], [Completion([5, 6], [0.0, 0.0], True, text) for text in texts])
    scorer = StepScorer(CalculationSteps())
    scores = scorer.score([rollout])
    scorer.close()
    assert scores.steps == [[[[(5, 1.0), (12, 0.0)], []]]]
    assert scores.extra == {"calculations/first_wrong": ["2*3=5", ""]}


@pytest.mark.parametrize("side", ["9^9^9^9", "99^999", "1/0"])
def test_what_is_too_large_to_work_out_is_wrong(side: str):
    """In prose and in an annotation; said in both it is one step."""
    for text in (f"{side} = 4", f"<<{side}=4>>", f"{side} = <<{side}=4>>4"):
        assert [check.verdict.outcome for check in check_steps(text)] == ["wrong"], text
