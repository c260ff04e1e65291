"""Algebra on answers with SymPy. Runs in the worker processes of `workers` only: any call may take for ever.

Two expressions are equal when they are the same real function: at every real point tried, both have the same value or
neither has one. A few digits decide nearly every wrong answer; a right one agrees to hundreds of digits at points of
both signs and many sizes, or its difference to gold expands to zero. That is as sure as SymPy's `simplify`, which may
not find a proof, or not end.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from sympy import Expr, Rational, S, Set, Symbol

from hf_rlx.verifiers.compare import Rules, agree, close
from hf_rlx.verifiers.exact import exact
from hf_rlx.verifiers.latex import read
from hf_rlx.verifiers.latex_tokens import normalise
from hf_rlx.verifiers.latex_tree import Node

_DIGITS = 50  # of the samples
_REAL = Rational(1, 10**30)  # a relative imaginary part below this is none
# Both signs, small and large, no two with a simple relation. The next variable's value stands three places on, so all
# four pairs of signs occur.
_FRACTIONS = [(17, 11), (-13, 7), (5, 23), (307, 3), (-19, 29), (-211, 5), (8, 9), (-31, 4), (-20011, 7), (10007, 3)]
_POINTS = [Rational(p, q) for p, q in _FRACTIONS]
_WHOLE = [sympy.Integer(n) for n in (2, 3, 7, 10, 12, 5)]
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(sympy, name) for name in ["sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"]},
    **{name: getattr(sympy, name) for name in ["asin", "acos", "atan", "exp", "floor"]},
    "ln": sympy.log,
    "log": lambda x, base=10: sympy.log(x, base),
    "ceil": sympy.ceiling,
    "binom": sympy.binomial,
    "max": sympy.Max,
    "min": sympy.Min,
    "gcd": sympy.gcd,
    "lcm": sympy.lcm,
    "abs": sympy.Abs,
}
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}
_SETS = {"R": S.Reals, "Z": S.Integers, "Q": S.Rationals, "N": S.Naturals, "C": S.Complexes, "empty": S.EmptySet}


class Sympy:
    """`compare.Algebra` with SymPy.

    Raises (every method): ValueError, and what SymPy raises, for what has no value as an expression or set.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def equal(self, gold: Node, answer: Node) -> bool:
        """See `Algebra`."""
        left, right = exact(gold), exact(answer)
        if left is not None and right is not None:
            return close(left, right, self.rules)
        return self.same(self.expression(gold), self.expression(answer))

    def equation(self, gold: Node, answer: Node) -> bool:
        """See `Algebra`. What both sides differ by may be multiplied by a number other than zero."""
        left, right = ((self.expression(n.parts[0]) - self.expression(n.parts[1])) for n in (gold, answer))
        if left.free_symbols != right.free_symbols:
            return False
        return self.factor(*(sympy.numer(sympy.together(d)) for d in (left, right))) is not None

    def same_set(self, gold: Node, answer: Node) -> bool:
        """See `Algebra`."""
        names = [_variables(n) for n in (gold, answer)]
        if len(names[0] | names[1]) > 1:  # several variables: no set of numbers, so the same inequality
            return names[0] == names[1] and self.same_inequality(gold, answer)
        return self.equal_sets(self.set_of(gold), self.set_of(answer))

    # expressions

    def expression(self, node: Node) -> Expr:
        """The node as a SymPy expression of real (or positive) variables."""
        kind, parts = node.kind, node.parts
        if kind == "num":
            value = exact(node)
            assert value is not None
            return Rational(value.numerator, value.denominator)
        if kind == "sym":
            return Symbol(node.text, positive=True) if self.rules.positive else Symbol(node.text, real=True)
        if kind == "const" and node.text in _CONSTANTS:
            return _CONSTANTS[node.text]
        values = [self.expression(part) for part in parts]
        if kind == "call" and node.text == "root":
            return _root(*values)
        if kind == "call":
            return _FUNCTIONS[node.text](*values)
        return self.operation(kind, values)

    def operation(self, kind: str, values: list[Any]) -> Expr:
        """Arithmetic."""
        if not values:
            raise ValueError(f"{kind} is no expression")
        first = values[0]
        if kind == "neg":
            return -first
        if kind == "add":
            return sympy.Add(*values)
        if kind == "mul":
            return sympy.Mul(*values)
        if kind == "div":
            return first / values[1]
        if kind == "pow":
            return first ** values[1]
        if kind == "mixed":
            return first + values[1] / values[2]
        if kind == "pct":
            return first / 100
        if kind == "deg":
            return first * sympy.pi / 180
        if kind == "fact":
            return sympy.factorial(first)
        if kind == "abs":
            return sympy.Abs(first)
        raise ValueError(f"{kind} is no expression")

    def same(self, left: Expr, right: Expr) -> bool:
        """Equal as real functions; as complex numbers where i occurs."""
        if left == right:
            return not left.has(sympy.nan, sympy.zoo)
        if any(x.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) for x in (left, right)):
            return False
        if self.rules.decimals is not None and not (left.free_symbols | right.free_symbols):
            return bool(abs(sympy.N(left - right, _DIGITS)) <= Rational(1, 2 * 10**self.rules.decimals))
        if not self.samples_agree(left, right, _DIGITS):
            return False
        return sympy.expand(left - right) == 0 or self.samples_agree(left, right, _deciding_digits(left, right))

    def samples_agree(self, left: Expr, right: Expr, digits: int) -> bool:
        """Whether both have the same value or none at every point tried, to this many digits."""
        symbols = sorted(left.free_symbols | right.free_symbols, key=str)
        points = [p for p in _POINTS if p > 0 or not self.rules.positive]
        # One that depends on both, so that nobody can write a polynomial which vanishes at all of them.
        points.append(Rational(zlib.crc32(f"{left}={right}".encode()) % 9973 + 98, 97))
        agreed = self.agree_at(points, symbols, left, right, digits)
        if agreed is None:  # powers of -1 and the like have values at whole numbers only
            agreed = self.agree_at(_WHOLE, symbols, left, right, digits)
        return agreed is True

    def agree_at(
        self, points: list[Rational], symbols: list[Symbol], left: Expr, right: Expr, digits: int
    ) -> bool | None:
        """See `samples_agree`; None where neither has a value anywhere."""
        complex_valued = left.has(sympy.I) or right.has(sympy.I) or not symbols
        compared = False
        for shift in range(len(points) if symbols else 1):
            place = {s: points[(shift + 3 * n) % len(points)] for n, s in enumerate(symbols)}
            values = [sympy.N(x.subs(place), digits) for x in (left, right)]
            defined = [_is_number(v) and (complex_valued or _is_real(v)) for v in values]
            if defined[0] != defined[1]:
                return False
            if not all(defined):
                continue
            size = max([abs(v) for v in values] + [S.One])
            if abs(values[0] - values[1]) > size * Rational(1, 10 ** (digits - 20)):
                return False
            compared = True
        return True if compared else None

    def factor(self, left: Expr, right: Expr) -> Expr | None:
        """The number c with left = c * right, other than zero; None where there is none."""
        if left == 0 or right == 0:
            return None
        ratio = sympy.cancel(left / right)
        ratio = ratio if not ratio.free_symbols else sympy.simplify(ratio)
        return None if ratio.free_symbols or ratio.is_zero or not ratio.is_finite else ratio

    # sets

    def same_inequality(self, gold: Node, answer: Node) -> bool:
        """Of several variables: a positive multiple of one another, with the same sign between."""
        sides = []
        for node in (gold, answer):
            if node.kind != "rel" or len(node.parts) != 2:
                return False
            low, high = (self.expression(p) for p in node.parts)
            if node.text in (">", ">="):
                low, high = high, low
            sides.append((node.text.replace(">", "<"), high - low))
        if sides[0][0] != sides[1][0]:
            return False
        factor = self.factor(sides[0][1], sides[1][1])
        return factor is not None and bool(factor.is_positive or sides[0][0] == "!=")

    def set_of(self, node: Node) -> Set:
        """The real numbers that an interval, a finite set or an inequality describes."""
        kind, parts = node.kind, node.parts
        if kind == "const" and node.text in _SETS:
            return _SETS[node.text]
        if kind == "group" and len(parts) == 2:
            start, end = (self.expression(p) for p in parts)
            return sympy.Interval(start, end, node.text[0] == "(", node.text[1] == ")")
        if kind == "set":
            return sympy.FiniteSet(*(self.expression(p) for p in parts))
        if kind in ("union", "inter", "minus"):
            left, right = (self.set_of(p) for p in parts)
            return {"union": sympy.Union, "inter": sympy.Intersection, "minus": sympy.Complement}[kind](left, right)
        if kind == "list" and node.text != ",":
            sets = [self.set_of(p) for p in parts]
            return sympy.Union(*sets) if node.text == "or" else sympy.Intersection(*sets)
        if kind == "such" and parts[0].kind == "in":
            return sympy.Intersection(*map(self.set_of, parts))
        if kind in ("such", "in"):
            return self.set_of(parts[1])
        if kind == "rel":
            signs = node.text.split()
            pairs = itertools.pairwise(parts)
            return sympy.Intersection(*(self.solutions(s, a, b) for s, (a, b) in zip(signs, pairs, strict=True)))
        raise ValueError(f"{kind} is no set")

    def solutions(self, sign: str, left: Node, right: Node) -> Set:
        """Real solutions of one relation in one variable."""
        low, high = self.expression(left), self.expression(right)
        if not (low - high).free_symbols:
            raise ValueError("a relation without a variable")
        variable = next(iter((low - high).free_symbols))
        if sign == "=":
            return sympy.solveset(low - high, variable, S.Reals)
        if sign == "!=":
            return sympy.Complement(S.Reals, sympy.solveset(low - high, variable, S.Reals))
        relation = {"<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge}[sign](low, high)
        return sympy.solve_univariate_inequality(relation, variable, relational=False)

    def equal_sets(self, left: Set, right: Set) -> bool:
        """The same numbers; ends are compared as expressions."""
        if left == right:
            return True
        if isinstance(left, sympy.Interval) and isinstance(right, sympy.Interval):
            same_ends = left.left_open == right.left_open and left.right_open == right.right_open
            return bool(same_ends) and self.same(left.start, right.start) and self.same(left.end, right.end)
        if isinstance(left, sympy.FiniteSet) and isinstance(right, sympy.FiniteSet):
            pairs = zip(sorted(left, key=sympy.N), sorted(right, key=sympy.N), strict=False)
            return len(left) == len(right) and all(self.same(a, b) for a, b in pairs)
        if isinstance(left, sympy.Union) and isinstance(right, sympy.Union):
            pairs = zip(*(sorted(u.args, key=lambda s: sympy.N(s.inf)) for u in (left, right)), strict=False)
            return len(left.args) == len(right.args) and all(self.equal_sets(a, b) for a, b in pairs)
        return left.symmetric_difference(right) == S.EmptySet


def _root(value: Expr, degree: Expr) -> Expr:
    """The real root of a negative number where the degree is odd."""
    if degree.is_Integer and degree % 2 and value.is_negative:
        return -((-value) ** (1 / degree))
    return value ** (1 / degree)


def _deciding_digits(left: Expr, right: Expr) -> int:
    """More digits than two expressions of such numbers can have in common without being equal."""
    sizes = [max(abs(n.p), n.q).bit_length() * math.log10(2) for n in (left.atoms(Rational) | right.atoms(Rational))]
    return min(3000, 2 * _DIGITS + 3 * int(sum(sizes)))


def _is_number(value: Any) -> bool:
    return bool(value.is_number) and not value.has(sympy.nan, sympy.zoo, sympy.oo) and value.is_finite is not False


def _is_real(value: Any) -> bool:
    imaginary = sympy.im(value)
    return bool(abs(imaginary) <= _REAL * (1 + abs(value)))


def _variables(node: Node) -> set[str]:
    own = {node.text} if node.kind == "sym" else set()
    return own.union(*map(_variables, node.parts))


def _node(packed: Sequence[Any]) -> Node:
    return Node(packed[0], packed[1], tuple(_node(part) for part in packed[2]))


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What a worker does with a job of `math`: `gold` and `answer` as nested lists, `rules` as a dictionary.

    Returns:
        `{"equal": bool}`, with a `"reason"` where the answer cannot be compared, or `{"gold": reason}` where gold
        cannot.
    """
    rules = Rules(**job["rules"])
    gold, answer = _node(job["gold"]), _node(job["answer"])
    algebra = Sympy(rules)
    try:
        return {"equal": agree(gold, answer, rules, algebra)}
    except MemoryError:
        return {"equal": False, "reason": "over the memory limit"}
    except Exception as error:
        reason = _told(error)
    try:
        _readable(gold, algebra)
    except Exception as error:
        return {"gold": _told(error)}
    return {"equal": False, "reason": f"cannot be compared ({reason})"}


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"


def _readable(node: Node, algebra: Sympy) -> None:
    """Raises what SymPy raises for parts that have no value."""
    if node.kind in ("list", "set", "group", "matrix", "ratio", "rel", "in", "unit", "pm"):
        for part in node.parts:
            _readable(part, algebra)
    elif node.kind in ("union", "inter", "minus", "such") or (node.kind == "const" and node.text in _SETS):
        algebra.set_of(node)
    elif node.kind not in ("text", "base"):
        algebra.expression(node)


# (gold, answer, equal): what a sound worker says; it also loads what SymPy loads late, before the first fork.
KNOWN = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    (r"(x+1)^2", "x^2+2x+1", True),
    ("x-1", "1-x", False),
    (r"\sin 2x", r"2\sin x\cos x", True),
    (r"\ln 8", r"3\ln 2", True),
    (r"\pi", "3.14159265358979", False),
    ("x>2", r"(2,\infty)", True),
    ("x<1 or x>3", r"(-\infty,1)\cup(3,\infty)", True),
    ("y=2x+1", "2x-y+1=0", True),
    ("y=2x+1", "2x-y-1=0", False),
]


def warm() -> None:
    """Judge the known pairs.

    Raises:
        AssertionError: a verdict is wrong, so this SymPy must not judge anything.
    """
    rules = Rules()
    for gold, answer, equal in KNOWN:
        if agree(read(normalise(gold)), read(normalise(answer)), rules, Sympy(rules)) is not equal:
            raise AssertionError(f"{gold!r} and {answer!r} should compare as {'equal' if equal else 'different'}")
