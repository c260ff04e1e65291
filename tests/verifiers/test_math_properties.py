"""Properties of equality: respelling a number changes nothing, changing it changes the verdict."""

from __future__ import annotations

from fractions import Fraction

import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_rlx.verifiers import MathVerifier

VERIFIER = MathVerifier()
STRICT = MathVerifier(units="required")
SMALL = settings(max_examples=150, derandomize=True, deadline=None, database=None)
FEW = settings(max_examples=25, derandomize=True, deadline=None, database=None)
FRACTIONS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=1000)
DECIMALS = st.decimals(min_value=-(10**6), max_value=10**6, places=4)


def equal(gold: str, answer: str) -> bool:
    """Whether the answer in a box is right."""
    return VERIFIER.judge(f"So $\\boxed{{{answer}}}$.", gold).reward == 1.0


def spellings(value: Fraction) -> list[str]:
    """Ways to write a fraction that mean the same."""
    top, bottom, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    found = [
        f"{value.numerator}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{value.numerator}}}{{{bottom}}}",
        rf"{sign}\frac{{{7 * top}}}{{{7 * bottom}}}",
        rf"\left({sign}\frac{{{top}}}{{{bottom}}}\right)",
        rf"x = {sign}\frac{{{top}}}{{{bottom}}}",
        rf"\frac{{{100 * value.numerator}}}{{{bottom}}}\%",
        f"\N{MINUS SIGN}{top}/{bottom}" if sign else f"+{top}/{bottom}",
    ]
    whole, rest = divmod(top, bottom)
    if whole and rest:
        found.append(rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}")
    if bottom == 1:
        found += [
            f"{value.numerator}",
            f"{value.numerator}.0",
            f"{value.numerator:,}",
            rf"{value.numerator}\text{{ cats}}",
        ]
        found += [f"{value.numerator:,}".replace(",", "{,}"), f"{value.numerator:,}".replace(",", r"\,")]
    return found


@SMALL
@given(FRACTIONS, st.data())
def test_spellings_of_a_fraction_are_equal(value: Fraction, data):
    gold, answer = (data.draw(st.sampled_from(spellings(value))) for _ in range(2))
    # A bare number is right where 8 cats are asked for and the other way round; what is left over is the same value.
    assert equal(gold, answer)


@SMALL
@given(FRACTIONS, FRACTIONS, st.data())
def test_other_fractions_are_different(value: Fraction, other: Fraction, data):
    answer = data.draw(st.sampled_from(spellings(other)))
    assert equal(spellings(value)[0], answer) == (value == other)


@SMALL
@given(DECIMALS, st.integers(1, 12))
def test_a_decimal_is_equal_to_its_fraction_only(value, places: int):
    fraction = Fraction(value)
    gold = f"{value:f}"
    assert equal(gold, rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}")
    assert equal(gold, gold + "0" * (places - 1))
    assert not equal(gold, gold + "0" * (places - 1) + "1")
    assert not equal(gold, gold.replace("-", "") if value < 0 else f"-{gold}") or value == 0


@SMALL
@given(st.integers(-(10**40), 10**40), st.integers(-3, 3))
def test_large_integers(value: int, off: int):
    assert equal(str(value), f"{value + off:,}") == (off == 0)


@SMALL
@given(st.lists(FRACTIONS, min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_sets_have_no_order_and_tuples_have_one(values: list[Fraction], random):
    shuffled = random.sample(values, len(values))
    one, other = (", ".join(f"{v.numerator}/{v.denominator}" for v in vs) for vs in (values, shuffled))
    assert equal(rf"\{{{one}\}}", rf"\{{{other}\}}")
    assert equal(f"({one})", f"({other})") == (values == shuffled)
    assert not equal(rf"\{{{one}\}}", rf"\{{{one.rpartition(', ')[0]}\}}")


PLENTY = r"""
    8 7.5 15/2 25\% 1/4 8\text{kg} 8\text{g} x=8 8=x y=8 (1,2) [1,2] 1<x<2 2>x>1 \{1,2\} 2,1 \pm1 -1,1 x>1
    (1,\infty) x\ge1 \text{A} A (A) a 2:1 1:2 10_2 10_3 1=2 x+1=9 x-8=0 2x=16 \frac{0}{0} no yes \infty y=2x
    2x-y=0 2x \begin{pmatrix}1&2\end{pmatrix} \begin{pmatrix}1\\2\end{pmatrix}
"""
EXPRESSIONS = st.sampled_from(PLENTY.split())


@settings(SMALL, max_examples=400)
@given(EXPRESSIONS, EXPRESSIONS)
def test_strict_equality_is_symmetric_and_reflexive(one: str, other: str):
    """Both read; a chain that contradicts itself (1=2) equals nothing but the same text."""
    assert STRICT.verify(one, one).reward == 1.0
    assert STRICT.verify(one, other).reward == STRICT.verify(other, one).reward


@FEW
@given(st.integers(2, 60), st.integers(2, 9))
def test_roots(n: int, k: int):
    """sqrt(k^2 n) = k sqrt(n), and one more under the root is another number."""
    assert equal(rf"\sqrt{{{k * k * n}}}", rf"{k}\sqrt{{{n}}}")
    assert not equal(rf"\sqrt{{{k * k * n + 1}}}", rf"{k}\sqrt{{{n}}}")


@FEW
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=4), st.integers(-3, 3))
def test_polynomials(coefficients: list[int], off: int):
    """Horner's form and the sum of powers, with one coefficient changed by `off`."""
    horner = "0"
    for c in coefficients:
        horner = f"x({horner})+({c})"
    degrees = range(len(coefficients) - 1, -1, -1)
    powers = "+".join(f"({c + off * (d == 1)})x^{{{d}}}" for c, d in zip(coefficients, degrees, strict=True))
    assert equal(horner, powers) == (off == 0)
