"""What the mathematical verifier takes for equal: a few answers of each kind, right and wrong ones."""

from __future__ import annotations

import pickle
from decimal import Decimal
from fractions import Fraction

import pytest

from hf_rlx.verifiers import MathVerifier
from hf_rlx.verifiers.verdict import VerifierBrokenError
from hf_rlx.verifiers.workers import Outcome

VERIFIER = MathVerifier()
RIGHT = [
    # fractions and decimals
    ("3/4", r".75"),
    (r"\frac{6}{8}", r"\tfrac34"),
    (r"-\frac{2}{5}", r"\frac{-2}{5}"),
    (r"\frac{2}{9}", r"0.\overline{2}"),
    ("0.35", "0.350"),
    ("7", "7."),
    ("7", "+7.0"),
    ("12", "0012"),
    # other characters
    ("-7", "\N{MINUS SIGN}7"),
    ("7", "\N{FULLWIDTH DIGIT SEVEN}"),
    (r"\sqrt{3}", "√3"),
    ("3\\pi", "3π"),
    ("x^3", "x³"),
    ("3.5", "3½"),
    ("15", "1\N{ZERO WIDTH SPACE}5"),
    # percentages
    ("0.25", r"25\%"),
    (r"25\%", r"\frac14"),
    ("25%", r"25\text{ percent}"),
    # thousands groups
    ("7654321", "7,654,321"),
    ("7654321", r"7{,}654{,}321"),
    ("7654321", r"7\,654\,321"),
    ("7654321", r"7,\!654,\!321"),
    ("65,000.5", "65000.50"),
    # units
    (r"8\text{ kg}", "8"),
    (r"8\text{ kg}", r"8\,\mathrm{kilograms}"),
    ("8", r"8\text{ pears}"),
    (r"9\text{ m}^2", r"9\text{ square meters}"),
    (r"60\text{ mph}", r"60\text{ miles per hour}"),
    (r"\$12", r"12\text{ dollars}"),
    (r"40^\circ", "40 degrees"),
    ("3000000", "3 million"),
    ("6 m", r"6\text{ meters}"),
    # mixed numbers, exponents
    (r"3\frac{1}{4}", "3.25"),
    ("-3 1/4", r"-\frac{13}{4}"),
    (r"2.5\times 10^{-3}", "0.0025"),
    ("3e4", r"3\cdot10^4"),
    ("2^{64}", "18446744073709551616"),
    # intervals and inequalities
    ("(1,4]", r"\left( 1, 4 \right]"),
    ("x>3", r"(3,\infty)"),
    (r"[-2,\infty)", r"x\ge-2"),
    ("0<t<1", "(0,1)"),
    (r"(-\infty,0)\cup(5,\infty)", r"x<0\text{ or }x>5"),
    (r"[\sqrt{12},4]", r"[2\sqrt3,4]"),
    ("3<x", "x>3"),
    ("2y>2x+2", "x+1<y"),
    # sets and lists, in any order
    (r"\{4,5,6\}", r"\{6,4,5\}"),
    ("4, 9", "9 and 4"),
    (r"\pm 7", "7, -7"),
    (r"2\pm\sqrt{5}", r"2-\sqrt5,\ 2+\sqrt5"),
    (r"x=1\text{ or }x=4", "4, 1"),
    # tuples and matrices, in theirs
    (r"(0.5,\pi)", r"\left(\frac12, \pi\right)"),
    ("(3,4)", "(x,y)=(3,4)"),
    (r"\begin{pmatrix}1&0\\0&2\end{pmatrix}", r"\begin{bmatrix} 1 & 0 \\ 0 & 2 \end{bmatrix}"),
    # equations, names
    ("9", "y=9"),
    ("y=9", "9"),
    ("9", "4+5=9"),
    ("y=3x-2", "3x-y-2=0"),
    ("x^2+y^2=9", "9=y^2+x^2"),
    ("f(x)=3x", "3x"),
    # words and options
    (r"\text{(D)}", "D"),
    ("D", r"\textbf{(D)}"),
    (r"\text{No}", "no"),
    ("Tuesday", r"\text{Tuesday}"),
    # algebra
    (r"\frac{1}{\sqrt{5}}", r"\frac{\sqrt5}{5}"),
    (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"),
    (r"\sqrt{1/n}", r"\frac{1}{\sqrt n}"),
    ("(a+b)^2", "a^2+2ab+b^2"),
    (r"\frac{m}{2}", "m/2"),
    (r"\cos 2x", r"1-2\sin^2 x"),
    (r"\log_3 81", "4"),
    ("5-2i", "-2i+5"),
    (r"1-\frac{1}{\mathrm{e}}", "1-e^{-1}"),
    (r"\frac{n!}{(n-1)!}", "n"),
    (r"\mathbb{R}", r"(-\infty,\infty)"),
    # the same as written, though nobody can multiply it out
    ("7^{7^{7^7}}", "7^{7^{7^{7}}}".replace("{7}", "7")),
    # bases, ratios
    ("2013_4", "2013_{4}"),
    ("5:4", "5 : 4"),
]
WRONG = [
    ("1/3", "0.333333"),
    ("0.2", "0.2000001"),
    ("0.2", "0.20000000000000001"),
    (r"\pi", "3.14159265358979"),
    ("10^{-12}", "0"),
    (r"\sqrt{2}", r"\sqrt{2+10^{-900}}"),  # equal to 900 digits
    (r"\frac{\sqrt{2}}{2}", r"-\frac{\sqrt{2}}{2}"),
    ("0.25", "25"),
    (r"25\%", "25"),
    ("25", r"25\%"),
    ("345", "34,5"),
    ("1234", "1.234"),
    ("123", r"1\,23"),
    (r"8\text{ kg}", r"8\text{ g}"),
    (r"9\text{ m}^2", r"9\text{ m}^3"),
    (r"1\text{ m}", r"100\text{ cm}"),  # nothing is converted
    (r"3{:}15\text{ p.m.}", "3:15 am"),
    ("5", "5 million"),
    ("5", r"5\pi"),
    ("5", "5 squared"),
    ("5", "5x"),
    ("(1,4]", "[1,4)"),
    ("x>3", r"[3,\infty)"),
    ("x>3", "y>3"),
    (r"\{4,5\}", "4"),
    (r"\{4,5\}", r"\{4,5,6\}"),
    ("4", "4, 5"),
    ("4", r"4\text{ or }5"),
    ("4", r"4\text{ cats and }5\text{ dogs}"),
    ("2, 1", "x=2, y=1"),
    ("(3,4)", "(4,3)"),
    ("(3,4)", "3,4"),
    (r"\begin{pmatrix}1\\0\end{pmatrix}", r"\begin{pmatrix}1&0\end{pmatrix}"),
    ("3", "2=3"),
    ("3", "b=7=3"),
    ("3", "x=3=4"),
    ("3", "3x=9"),
    ("x=3", "y=3"),
    ("2x-y+5=0", "2x+3y+5=0"),
    ("y=3x-2", "y=3x+2"),
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
    (r"\text{Yes}", r"\text{No}"),
    (r"\text{(A)}", r"\text{(A), (B)}"),
    ("9", r"\text{nine}"),
    ("9", r"\text{it is }9"),
    ("|x|", "x"),
    (r"\ln(ab)", r"\ln a+\ln b"),  # different where both are negative
    ("x", "X"),
    ("5-2i", "5+2i"),
    ("2013_4", "2013_5"),
    ("2013_4", "135"),  # its value, which the question asked to write in base 4
    ("5:4", "4:5"),
    (r"\infty", r"-\infty"),
    ("6", r"\frac{6}{0}"),
    ("6", r"\frac{0}{0}"),
    ("0", ""),
    ("6", r"\int_0^6 dx"),
    ("6", "__import__('os').getpid()"),
    ("6", "6}{"),
    ("10^{30}", "1" + "0" * 29 + "1"),
]


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_equal_answers(gold: str, answer: str):
    assert VERIFIER.judge(f"Hence $\\boxed{{{answer}}}$.", gold).outcome == "right"


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_different_answers(gold: str, answer: str):
    assert VERIFIER.verify(gold, answer).outcome == "wrong"


@pytest.mark.parametrize(
    "gold", ["see figure", "see the figure below", "", None, True, float("nan"), ["4"], "4 +", "$$"]
)
def test_a_gold_answer_that_cannot_be_read_gives_no_verdict(gold: object):
    """Nobody knows what equals it, not even the same text."""
    for answer in ("4", str(gold)):
        verdict = VERIFIER.judge(f"\\boxed{{{answer}}}", gold)
        assert (verdict.outcome, verdict.reward) == ("failed", None)
        assert verdict.reason.startswith("the gold answer cannot be read")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (7, "7"),
        (0.1, "1/10"),
        (1e22, "10^{22}"),
        (Fraction(-2, 3), r"-\frac23"),
        (Decimal("2.50"), "2.5"),
        ("Half of 14 is <<14/2=7>>7.\n#### 7", "7"),
        ("We see that it is $\\boxed{\\frac{7}{2}}$.", "3.5"),
    ],
)
def test_gold_columns(gold: object, answer: str):
    """Numbers mean the decimal they print as; worked solutions end in a box or after ####."""
    assert VERIFIER.verify(gold, answer).reward == 1.0


def test_options():
    """Each option changes exactly the verdicts that it is for."""
    assert MathVerifier(bare_percent=True).verify(r"25\%", "25").reward == 1.0
    assert MathVerifier(bare_percent=True).verify("25", r"25\%").reward == 0.0
    assert MathVerifier(units="required").verify(r"8\text{ kg}", "8").reward == 0.0
    assert MathVerifier(units="required").verify("8", r"8\text{ kg}").reward == 0.0
    assert MathVerifier(units="required").verify(r"8\text{ kg}", "8 kilograms").reward == 1.0
    two = MathVerifier(decimals=2)
    # Half a unit of the second decimal is 0.005, and 3.14159 - 3.14 = 0.00159, 3.14159 - 3.13 = 0.01159.
    assert [two.verify(r"\pi", a).reward for a in ("3.14", "3.13", r"\frac{22}{7}")] == [1.0, 0.0, 1.0]
    assert [two.verify("0.5", a).reward for a in ("0.505", "0.5051")] == [1.0, 0.0]
    assert MathVerifier(positive=True).verify(r"\sqrt{x^2}", "x").reward == 1.0
    assert MathVerifier(positive=True).verify(r"\ln(ab)", r"\ln a+\ln b").reward == 1.0


def test_rewards_of_a_batch_and_what_is_logged():
    """Strings and messages; the columns and metrics that trainers show."""
    verifier = MathVerifier()
    extra, metrics = {}, {}
    rewards = verifier(
        prompts=["p"] * 5,
        completions=["\\boxed{2}", [{"role": "assistant", "content": "It is $\\sqrt4$."}], "3", "\\boxed{2}", "?"],
        answer=["2", "2", "2", "see below", "2"],
        level=[1] * 5,
        log_extra=lambda name, values: extra.update({name: values}),
        log_metric=lambda name, value: metrics.update({name: value}),
    )
    assert rewards == [1.0, 1.0, 0.0, None, 0.0]
    assert verifier.unparsable_gold == 1
    assert metrics == {"math/failed": 1.0, "math/unparsable_gold": 1.0}
    reasons = extra["math/reason"]
    assert reasons[:3] == ["equal as written", "equal", "different"]
    assert reasons[3].startswith("the gold answer cannot be read")
    assert reasons[4] == "no answer found"


def test_the_column_is_answer_or_solution():
    assert MathVerifier()(prompts=["p"], completions=["4"], solution=["4"]) == [1.0]
    assert MathVerifier()(prompts=["p"], completions=["4"], solution=["5"], answer=["4"]) == [1.0]
    assert MathVerifier(column="gold")(prompts=["p"], completions=["4"], gold=["4"], answer=["5"]) == [1.0]
    with pytest.raises(ValueError, match=r"math reads the column 'answer'; the columns passed are \['x'\]"):
        MathVerifier()(prompts=["p"], completions=["4"], x=["4"])


def test_rows_without_gold_do_not_stop_a_run_and_our_own_failures_do(monkeypatch):
    """A whole group of one broken row is the data's fault; a worker that dies each time is ours."""
    verifier = MathVerifier()
    assert verifier(prompts=["p"] * 8, completions=["4"] * 8, answer=["see figure"] * 8) == [None] * 8
    lost = Outcome(lost="broken", how="gone")
    monkeypatch.setattr("hf_rlx.verifiers.workers.WorkerPool.run", lambda self, job, timeout: lost)
    one = verifier(prompts=["p"] * 8, completions=["\\boxed{\\sqrt7}"] + ["4"] * 7, answer=["\\sqrt5"] + ["4"] * 7)
    assert one == [None] + [1.0] * 7
    with pytest.raises(VerifierBrokenError, match="math could not judge 8 of 8"):
        verifier(prompts=["p"] * 8, completions=["\\boxed{\\sqrt7}"] * 8, answer=["\\sqrt5"] * 8)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="extract must be one of"):
        MathVerifier("middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="units must be"):
        MathVerifier(units="some")
    with pytest.raises(ValueError, match="timeout must be positive"):
        MathVerifier(timeout=0)


def test_it_can_be_sent_to_another_process():
    copy = pickle.loads(pickle.dumps(MathVerifier("boxed", decimals=1)))
    assert copy.verify(r"\sqrt{2}", "1.4").reward == 1.0
