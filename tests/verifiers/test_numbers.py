"""The exact numeric verifier: what counts as a number, where the answer stands, and what is never paid for."""

from __future__ import annotations

import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction

import pytest

from hf_rlx.verifiers import NumberVerifier
from hf_rlx.verifiers.numbers import extract_number, gold_number, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" 42\n", 42),
        ("-3", -3),
        ("+3", 3),
        ("\N{MINUS SIGN}3", -3),
        ("007", 7),
        ("3.0", 3),
        (".5", Fraction(1, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1,234", 1234),
        ("1,234,567.25", Fraction(123456725, 100)),
        ("1/2", Fraction(1, 2)),
        ("-6/4", Fraction(-3, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("9" * 1000, int("9" * 1000)),
        # not one number and nothing else
        ("", None),
        (" ", None),
        ("-", None),
        (".", None),
        ("42.", None),
        ("- 3", None),
        ("4 2", None),
        ("42 apples", None),
        ("42=", None),
        ("1,23", None),
        ("1234,567", None),
        ("1.2.3", None),
        ("--3", None),
        ("1/0", None),
        ("1/2/3", None),
        ("0x10", None),
        ("nan", None),
        ("\N{ARABIC-INDIC DIGIT FOUR}\N{ARABIC-INDIC DIGIT TWO}", None),
        ("9" * 1001, None),
        ("1e1001", None),
        ("1e-999999999", None),
    ],
)
def test_parse_number(text: str, value: Fraction | int | None):
    assert parse_number(text) == value
    assert extract_number(text, "whole") == value


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("12 apples and 13 pears", 12, 13),
        ("10-3", 10, 3),  # a difference, not minus three
        ("10 - 3 = 7", 10, 7),
        ("(10)-3", 10, 3),
        ("it fell to -3.", -3, -3),
        ("from 5 to -3 degrees", 5, -3),
        ("$1,234.50!", Fraction(2469, 2), Fraction(2469, 2)),
        ("so x2 becomes 5", 5, 5),
        ("版本是42。", 42, 42),
        ("See 1, 2, 3", 1, 3),
        ("well...42", 42, 42),
        ("half is \\frac{1}{2}", Fraction(1, 2), Fraction(1, 2)),
        ("-\\dfrac12", Fraction(-1, 2), Fraction(-1, 2)),
        ("1\\frac{1}{2}", Fraction(3, 2), Fraction(3, 2)),
        ("1{,}000 and 2\\,000", 1000, 2000),
        ("50%", 50, 50),
        ("no number", None, None),
        ("", None, None),
        ("3 then 1/0", 3, None),
        ("3 then " + "9" * 1001, 3, None),  # no falling back to a number before the refused one
    ],
)
def test_first_and_last(text: str, first: Fraction | int | None, last: Fraction | int | None):
    assert extract_number(text, "first") == first
    assert extract_number(text, "last") == last


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("42", 42),
        ("x = 42", 42),
        ("17 + 25 = 42", 42),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("-\\tfrac{1}{2}", Fraction(-1, 2)),
        ("1{,}234", 1234),
        ("11,\\! 111,\\!100", 11_111_100),
        ("she has 16 - 3 = 13 eggs", 13),
        ("42\\text{ apples}", 42),
        ("12 apples", 12),
        ("12kg", 12),
        ("\\$42", 42),
        ("42\\%", 42),
        ("42^\\circ", 42),
        ("42!", 42),
        # one number inside, but not that number
        ("12 or 13", None),
        ("42, 43", None),
        ("\\sqrt{2}", None),
        ("2x", None),
        ("x/2", None),
        ("\\frac{x}{2}", None),
        ("2^k", None),
        ("5 - y", None),
        ("2\\pi", None),
        ("> 2", None),
        ("52_8", None),
        ("5x - 7y + 4 = 0", None),
        ("f(3) = 0", None),
        ("forty-two", None),
    ],
)
def test_spans_hold_one_plain_number(content: str, value: Fraction | int | None):
    assert extract_number(f"1 and 2 make \\boxed{{{content}}}, not 7", "boxed") == value
    assert extract_number(f"1 and 2 make\n#### {content}\n7", "hash") == value
    assert extract_number(f"1 and 2.\nAnswer: {content}\n7", "answer_line") == value


@pytest.mark.parametrize(
    ("text", "extract", "value"),
    [
        ("\\boxed{1} no, \\boxed{2}", "boxed", 2),
        ("\\boxed{2", "boxed", None),
        ("2", "boxed", None),
        ("\\boxed{{2}}", "boxed", None),
        ("#### 1\n#### 2", "hash", 2),
        ("## 2", "hash", None),
        ("####\n2", "hash", None),
        ("\\boxed{}", "boxed", None),
        ("Answer:", "answer_line", None),
        ("The answer is 42.", "answer_line", 42),
        ("The answer is -42. I checked 3 times.", "answer_line", -42),
        ("**Final Answer:** 42", "answer_line", 42),
        ("**Answer: 42**", "answer_line", 42),
        ("Answer:\n42", "answer_line", 42),
        ("ANSWER = 3.50 dollars", "answer_line", Fraction(7, 2)),
        ("The answer is $\\boxed{42}$", "answer_line", 42),
        ("answer: 1\nAnswer: 2", "answer_line", 2),
        ("The answers vary: 42", "answer_line", None),
        ("42", "answer_line", None),
    ],
)
def test_where_the_answer_stands(text: str, extract, value: Fraction | int | None):
    assert extract_number(text, extract) == value


@pytest.mark.parametrize(
    ("gold", "value"),
    [
        (42, 42),
        (51.0, 51),
        (0.1, Fraction(1, 10)),
        (1e22, 10**22),
        ("42", 42),
        ("1,000", 1000),
        ("first 3, then 4\n#### 7", 7),
        (Fraction(1, 3), Fraction(1, 3)),
        (Decimal("0.5"), Fraction(1, 2)),
        (Decimal("NaN"), None),
        (float("nan"), None),
        (float("inf"), None),
        (True, None),
        (None, None),
        ("none of these", None),
        ("3 or 4", None),
        ([1], None),
    ],
)
def test_gold_number(gold: object, value: Fraction | int | None):
    assert gold_number(gold) == value


def test_scores_are_exact():
    verify = NumberVerifier("whole")
    pairs = [("3.0", "3"), ("1/2", "0.5"), ("0.333", "1/3"), ("1,234", 1234), ("0.30000000000000004", 0.3)]
    scores = verify(prompts=["p"] * 5, completions=[c for c, _ in pairs], answer=[a for _, a in pairs])
    assert scores == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert all(isinstance(score, float) for score in scores)


def test_no_answer_scores_zero_and_broken_gold_abstains():
    verify = NumberVerifier()
    scores = verify(prompts=["p"] * 4, completions=["", "none", "7", "7"], answer=["7", "7", "?", None])
    assert scores == [0.0, 0.0, None, None]
    assert verify.unparsable_gold == 2


def test_messages_are_judged_by_the_last_assistant_turn():
    completions = [
        [
            {"role": "assistant", "content": "41"},
            {"role": "tool", "content": "9"},
            {"role": "assistant", "content": "42"},
        ],
        [{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}],
        [{"role": "assistant", "content": None}],
        [],
    ]
    assert NumberVerifier("whole")(prompts=[[]] * 4, completions=completions, answer=[42] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_other_column_extra_columns_and_name():
    verify = NumberVerifier("hash", column="gold")
    assert verify.__name__ == "number_hash"
    assert verify(prompts=["p"], completions=["#### 5"], gold=["5"], answer=["6"], trainer_state=None) == [1.0]


def test_errors_name_the_column():
    verify = NumberVerifier(column="gold")
    with pytest.raises(ValueError, match=r"reads the column 'gold'; the columns passed are \['answer'\]"):
        verify(prompts=["p"], completions=["5"], answer=["5"])
    with pytest.raises(ValueError, match="2 completions but 1 values"):
        verify(prompts=["p"] * 2, completions=["5"] * 2, gold=["5"])
    with pytest.raises(ValueError, match="extract must be one of"):
        NumberVerifier("middle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="text or a list of messages"):
        verify(prompts=["p"], completions=[5], gold=["5"])  # type: ignore[list-item]


@pytest.mark.parametrize("extract", ["last", "first", "boxed", "hash", "answer_line", "whole"])
def test_hostile_lengths_are_quick(extract):
    hostile = [
        "9" * 200_000,
        "1," * 100_000,
        "\\boxed{" * 30_000,
        "1/" * 100_000,
        "-" * 200_000,
        "\\frac1" * 30_000,
        "answer " * 30_000,
        "answer" + " " * 100_000,
        "#### " * 30_000,
        "1 " * 100_000,
        "\\text{" * 30_000,
    ]
    start = time.perf_counter()
    for text in hostile:
        extract_number(text, extract)
    assert time.perf_counter() - start < 5.0


def test_verifiers_do_not_import_torch():
    code = "import sys, hf_rlx.verifiers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
