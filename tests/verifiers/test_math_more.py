"""Verdicts on more ways to write an answer, each beyond doubt. Read as (gold, answer); the comments say why."""

from __future__ import annotations

import pytest

from hf_rlx.verifiers import MathVerifier
from hf_rlx.verifiers.symbolic import _FRACTIONS

EQUAL = [
    (r"\frac{2}{3}", r"66\frac{2}{3}\%"),  # the sign belongs to the whole mixed number
    (r"66\frac{2}{3}\%", "2/3"),
    ("66 2/3%", "2/3"),
    ("3:30 PM", "3:30 p.m."),
    ("3:30 p.m.", r"3:30\text{ p.m.}"),
    ("5", r"5^{\text{th}}"),
    ("5^{th}", "5"),
    ("5", "5th"),
    ("FF_{16}", "FF_{16}"),
    (r"\infty", r"\text{infinity}"),
    (r"\frac{10!}{7!3!}", "120"),  # a factorial ends where its sign stands
    (r"\angle ABC", r"\angle ABC"),
    (r"\angle ABC = 60^\circ", "60"),
    (r"\{x: x>2\}", r"(2,\infty)"),
    ("1,2", "x_1=2, x_2=1"),
    ("red", r"\text{red}"),
    ("√16", "4"),  # the sign spans the number, unlike \\sqrt16
    (r"12\text{ m/s}", "12 m/s"),
    (r"20^\circ\text{C}", "20"),
    (r"12\text{ km/h}", "12 km/h"),
    ("60", r"m\angle A = 60^\circ"),
    ("60", "∠A = 60°"),
    (r"98.6^\circ F", r"98.6^\circ\text{F}"),
    ("B", "B)"),
    ("B", r"\text{(B) }12"),
    ("B", r"\text{Option B}"),
    (r"\textbf{(B)}\ 12", "B"),
    (r"\textbf{(B)}\ 12", "12"),
    (r"\textbf{(B)}\ 12", "(B) 12"),
    ("12", "(B) 12"),
    (r"\textbf{(B)}\ \frac{1}{2}", "0.5"),
]
DIFFERENT = [
    (r"\frac{2}{3}", r"67\frac{2}{3}\%"),
    ("x=1, y=1", "1"),  # a value for each of two unknowns
    ("x=1, y=1", "x=1"),
    ("5,5", "5"),
    ("5", "5,5"),  # 5.5 where a comma is the decimal point
    ("3:30 a.m.", "3:30 p.m."),
    ("15", "1^{th} 5"),
    ("FF_{16}", "255"),
    ("FF_{16}", "FE_{16}"),
    (r"\infty", r"\text{-infinity}"),
    (r"\angle ABC", r"\angle ACB"),
    ("1,2", "x=1, y=2"),
    ("red", r"\text{der}"),
    (r"12\text{ m/s}", "12 m/h"),
    (r"20^\circ\text{C}", r"20^\circ\text{F}"),
    ("5", r"\text{The answer is }5"),  # a box holds the answer and no sentence
    ("5", r"\text{The answer is not }5"),
    ("B", "B) or C)"),
    ("B", "(B) is wrong"),
    ("B", "(C) 12"),
    ("B", "b"),
    ("x+1", "X+1"),
    ("ab", r"\text{AB}"),
    (r"\$0.50", r"50\%"),
    (r"\textbf{(B)}\ 12", "(C) 12"),
    (r"\textbf{(B)}\ 12", "(B) 13"),
    (r"\textbf{(B)}\ 12", "13"),
    ("12", "(B) 13"),
    *(
        ("5", rf"5\text{{ {word}}}")
        for word in ["tenths", "sixths", "hundredths", "thousandths", "tens", "hundreds", "thousands"]
    ),
    *(
        ("5", rf"5\text{{ {word}}}")
        for word in ["millions", "lakh", "crore", "gross", "score", "kilo", "ppm", "k", "bn", "x10"]
    ),
    *(("5", rf"5\text{{ {words}}}") for words in ("below zero", "out of 6", "per cent", "per-cent", "for 3")),
]
DIFFERENT += [
    ("red", "der"),  # letters of a word in another order are another word
    ("cat", "act"),
    ("5", "1=2=5"),
    ("a=3=5", "5"),
    ("1=2", "2"),
    ("a=3=5", "a=b=5"),
    ("{1331,1728}", "1728"),
    ("5", "{5,6}"),
    ("5", "a=b=5=6"),
    ("5", "==5"),
    ("[1,1]", r"\{1\}"),
    ("1", r"\frac{1\pm2}{1\pm2}"),  # which signs go together is not said
    ("(1,2)", r"(\pm1, 2)"),
    ("2", r"\pm2"),
    (r"(2,\infty)", r"\{x\in\mathbb{Z} \mid x>2\}"),
    ("9^{9^9}", "9^{9^{8}}"),
    ("42", r"42\text{ forty-three}"),
    ("42", r"42\text{ doubled}"),
    # equal at every point that is always tried
    ("x", "x+" + "".join(f"({q}x-({p}))" for p, q in _FRACTIONS)),
]
EQUAL += [
    ("5", "a = b = 5"),
    ("5", "=5"),
    (r"A=\frac12 bh=12", "12"),
    (r"3\pm\sqrt5", r"\frac{6\pm\sqrt{20}}{2}"),
    (r"\{3,-1\}", r"\frac{2\pm4}{2}"),
    (r"\frac{-b\pm\sqrt{b^2-4ac}}{2a}", r"-\frac{b}{2a}\pm\frac{\sqrt{b^2-4ac}}{2a}"),
    ("9^{9^{9}}", "9^{9^9}"),
    (r"\{x : x\in R, x>2\}", r"(2,\infty)"),
    (r"(2,\infty)", r"\{x\in\mathbb{R} \mid x>2\}"),
    ("xyz", "zyx"),
    ("zyx", "xyz"),
    ("{1331,1728}", "1728, 1331"),  # braces that are not escaped
    (r"\{1331,1728\}", "{1728, 1331}"),
    ("{5}", "5"),
    ("abc", "cba"),
    ("Paris", "PARIS"),
]
COMPLETIONS = [
    ("72", '{"answer": 72}', True),
    ("72", '{"reason": "6 * 12", "answer": "72"}', True),
    ("72", r'{"answer": "$\\boxed{72}$"}', True),
    ("72", '{"answer": 71, "answer": 72}', False),
    ("72", '{"answer": [71, 72]}', False),
    ("72", '{"answer": 71, "other": 72}', False),
    ("A", "Answer: A. Paris B. London", False),  # all options
    ("A", "Answer: A. Paris or B. London", False),
    *(("C", f"Answer: {both}", False) for both in ("C; D", "C. D.", "C? D?", "C! D!", "C. D. A. B.")),
    ("C", "Answer: C. I think so.", True),
    ("C", "C) 5", True),
    ("5", "C) 5", True),
    ("42", "The answer is 42? 43? 44?", False),
    ("42", "The answer is 42. 43. 44.", False),
    ("42", "Answer: 42. 5 apples are left.", True),
    ("42", "Answer: $42$ maybe $43$", False),
    ("A", "Answer: A. Paris is the capital.", True),
    ("A", "Answer: A. It is not B. Since it rains there.", True),
    ("72", "I think the answer is 71. No wait, the answer is 72.", True),
    ("71", "I think the answer is 71. No wait, the answer is 72.", False),
    ("72", "The answer is 72, which is what the answer is said to be.", True),
    ("40", "The answer is 40 because 20+20=40.", True),
    ("20", "The answer is 40 because 20+20=40.", False),
    ("40", "The answer is 40, which is less than 50.", True),
    ("B", "Answer: B) 12", True),
    ("B", "The correct option is (B).", True),
    ("C", "The correct option is (B), not C.", False),
    ("6", "5, 6", False),  # two numbers side by side are two answers
    ("44", "40 41 42 43 44", False),
    ("30", "On day 5, 30 birds came.", True),
    ("0", "We get 10 000", False),
    ("2", "He came in 2nd", False),  # an ordinal behind no mark may count anything
    ("2", "The answer is 2nd", True),
    ("12", "The answer is 12 because it divides 60, or 13 because it does not.", False),
    ("100", "Answer: none of 100", False),
    *(("72", f"It is {bound} 72.", False) for bound in ("more than", "at least", "below", "up to", "not", "nearly")),
    ("72", "It is about 72.", True),
    ("A", "(A)", True),  # an answer that is nothing else
    ("A", "**A**", True),
    ("A", "not A", False),
    ("red", "Red.", True),
]


@pytest.fixture(scope="module")
def verifier() -> MathVerifier:
    return MathVerifier()


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str, verifier: MathVerifier):
    found = verifier.judge(rf"So it is $\boxed{{{answer}}}$.", gold)
    assert found.outcome == "right", found.reason


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold: str, answer: str, verifier: MathVerifier):
    found = verifier.judge(rf"So it is $\boxed{{{answer}}}$.", gold)
    assert found.outcome == "wrong", found.reason


@pytest.mark.parametrize(("gold", "completion", "right"), COMPLETIONS)
def test_completions(gold: str, completion: str, right: bool, verifier: MathVerifier):
    assert verifier.judge(completion, gold).outcome == ("right" if right else "wrong")
