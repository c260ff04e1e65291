"""The exact value of an answer: rational numbers, evaluated in bounded time. Nothing is rounded."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from hf_rlx.verifiers.latex_tree import Node

MAX_DIGITS = 1000
"""More digits than this, in any intermediate result, is no answer."""
MAX_FACTORIAL = 1000
MAX_EXPONENT = 10_000  # of a variable
_BITS = int(MAX_DIGITS * math.log2(10)) + 1
_NUMBER = re.compile(r"(?P<whole>\d*)(?:\.(?P<decimals>\d*)(?:\((?P<period>\d+)\))?)?(?:[eE](?P<exponent>[+-]?\d+))?")


class TooLarge(ValueError):  # noqa: N818 - a property of the answer
    """A number in the answer has more than `MAX_DIGITS` digits, or it divides by zero."""


def number(digits: str) -> Fraction:
    """`12.5`, `1e-3` and `0.1(6)` (recurring) as a fraction.

    Raises:
        TooLarge: more than `MAX_DIGITS` digits, exponent included.
    """
    match = _NUMBER.fullmatch(digits)
    if match is None:
        raise ValueError(f"{digits!r} is no number")
    if len(digits) > MAX_DIGITS or abs(int(match["exponent"] or 0)) > MAX_DIGITS:
        raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
    whole, decimals, period = match["whole"] or "0", match["decimals"] or "", match["period"]
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    if period:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
    return value * Fraction(10) ** int(match["exponent"] or 0)


def exact(node: Node) -> Fraction | None:
    """The value, or None where it is not rational arithmetic (variables, roots, functions, pi).

    Raises:
        TooLarge: see there. Raised wherever it occurs, so that nobody evaluates such a thing elsewhere.
    """
    parts = [exact(part) for part in node.parts]
    if node.kind == "num":
        return number(node.text)
    known = [value for value in parts if value is not None]
    if node.kind == "pow" and parts[1] is not None:
        _check_power(parts[0], parts[1])
    if node.kind == "fact" and known and (known[0] > MAX_FACTORIAL or known[0] < 0 or known[0].denominator > 1):
        raise TooLarge(f"a factorial of more than {MAX_FACTORIAL}")
    if node.kind == "call" and node.text == "binom" and any(abs(value) > MAX_FACTORIAL for value in known):
        raise TooLarge(f"a binomial of more than {MAX_FACTORIAL}")
    if node.kind == "div" and parts[1] == 0:
        raise TooLarge("a division by zero")
    if len(known) < len(parts) or not parts:
        return None
    value = _value(node, known)
    if value is not None and max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
    return value


def _value(node: Node, known: list[Fraction]) -> Fraction | None:
    kind, first = node.kind, known[0]
    if kind == "neg":
        return -first
    if kind == "add":
        return sum(known[1:], first)
    if kind == "mul":
        return first * known[1]
    if kind == "div":
        return first / known[1]
    if kind == "mixed":
        return first + known[1] / known[2]
    if kind == "pct":
        return first / 100
    if kind == "abs":
        return abs(first)
    if kind == "pow" and known[1].denominator == 1:
        return first ** int(known[1])
    if kind == "fact":
        return Fraction(math.factorial(int(first)))
    if kind == "call":
        return _called(node.text, known)
    return None


def _called(name: str, known: list[Fraction]) -> Fraction | None:
    if name in ("floor", "ceil"):
        return Fraction(math.floor(known[0]) if name == "floor" else math.ceil(known[0]))
    if name in ("max", "min"):
        return max(known) if name == "max" else min(known)
    whole = all(value.denominator == 1 and value >= 0 for value in known)
    if name in ("gcd", "lcm") and whole:
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*map(int, known)))
    if name == "binom" and whole:
        return Fraction(math.comb(int(known[0]), int(known[1])))
    if name == "root" and known[1] == 2 and known[0] >= 0:
        top, bottom = math.isqrt(known[0].numerator), math.isqrt(known[0].denominator)
        root = Fraction(top, bottom)
        return root if root * root == known[0] else None
    return None


def _check_power(base: Fraction | None, exponent: Fraction) -> None:
    """Refuse powers too large to write down; of a variable, too large to multiply out."""
    if base is None:
        if abs(exponent) > MAX_EXPONENT:
            raise TooLarge(f"an exponent of more than {MAX_EXPONENT}")
        return
    if base == 0 and exponent < 0:
        raise TooLarge("a division by zero")
    size = math.log2(max(abs(base.numerator), base.denominator))  # 0, or 1 and more
    if size and (abs(exponent) > _BITS or size * abs(exponent) > _BITS):
        raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
