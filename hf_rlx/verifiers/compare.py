"""When two answers say the same: the rules about units, names, lists, tuples, intervals and relations.

The rules are symmetric in gold and answer, except that an answer may leave out what is only said beside the value (its
unit, the name of the variable). What the rules cannot decide, whether two expressions are equal, they ask `Algebra`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Protocol

from hf_rlx.verifiers.exact import exact
from hf_rlx.verifiers.latex_tree import Node

MAX_ITEMS = 30
"""Longer lists are refused, unless they are equal as written: comparing them takes quadratic time."""


@dataclass(frozen=True)
class Rules:
    """What counts as equal.

    Args:
        units: "optional": either side may leave its unit out. "required": both have the same one, or none.
        bare_percent: 50 is right where 50% is asked for (and the other way round never).
        decimals: None compares exactly; n accepts what is off by at most half a unit of the n-th decimal.
        positive: variables stand for positive numbers, so sqrt(x^2) is x.
    """

    units: Literal["optional", "required"] = "optional"
    bare_percent: bool = False
    decimals: int | None = None
    positive: bool = False


class Algebra(Protocol):
    """What needs more than rational arithmetic."""

    def equal(self, gold: Node, answer: Node) -> bool:
        """Whether two expressions are equal."""

    def equation(self, gold: Node, answer: Node) -> bool:
        """Whether two equations have the same solutions, by being multiples of one another."""

    def same_set(self, gold: Node, answer: Node) -> bool:
        """Whether intervals, inequalities, finite sets and unions of them hold the same numbers."""


class NeedsAlgebra(Exception):  # noqa: N818 - control flow: the worker has to be asked
    """Raised by `ExactOnly` where rational arithmetic does not decide."""


class ExactOnly:
    """The algebra of this process: rational numbers only."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def equal(self, gold: Node, answer: Node) -> bool:
        """See `Algebra`. Raises: NeedsAlgebra."""
        left, right = exact(gold), exact(answer)
        if left is None or right is None:
            raise NeedsAlgebra
        return close(left, right, self.rules)

    def equation(self, gold: Node, answer: Node) -> bool:
        """Raises: NeedsAlgebra."""
        raise NeedsAlgebra

    same_set = equation


def close(left: Fraction, right: Fraction, rules: Rules) -> bool:
    """Equal, or as near as the rules allow."""
    if rules.decimals is None:
        return left == right
    return abs(left - right) <= Fraction(1, 2 * 10**rules.decimals)


def agree(gold: Node, answer: Node, rules: Rules, algebra: Algebra) -> bool:
    """Whether the answer says what gold says."""
    if gold == answer:
        return True
    gold, answer, same_unit = _without_units(gold, answer, rules)
    if not same_unit:
        return False
    if "text" in (gold.kind, answer.kind):
        return _same_words(gold, answer)

    def again(left: Node, right: Node) -> bool:
        return agree(left, right, rules, algebra)

    if _is_statement(gold) or _is_statement(answer):
        return _same_statement(gold, answer, again, algebra)
    if _is_plural(gold) or _is_plural(answer):
        return _same_items(gold, answer, again, algebra)
    kinds = {gold.kind, answer.kind}
    if any(map(_is_set, (gold, answer))):
        known = all(_is_set(n) or n.kind in ("group", "set") for n in (gold, answer))
        return known and algebra.same_set(gold, answer)
    if kinds & {"group", "matrix", "ratio"}:
        same_shape = len(kinds) == 1 and gold.text == answer.text and len(gold.parts) == len(answer.parts)
        return same_shape and all(map(again, gold.parts, answer.parts))
    if "base" in kinds:
        return len(kinds) == 1 and gold.text.lstrip("0") == answer.text.lstrip("0")
    if gold.kind == "pct" and answer.kind != "pct" and rules.bare_percent and again(gold.parts[0], answer):
        return True
    return algebra.equal(gold, answer)


def _without_units(gold: Node, answer: Node, rules: Rules) -> tuple[Node, Node, bool]:
    """Both values, and whether their units go together."""
    # Without mark-up `10 m` looks like ten times m; the other side shows what is meant.
    gold, answer = _as_unit(gold, answer), _as_unit(answer, gold)
    units = [n.text if n.kind == "unit" else "" for n in (gold, answer)]
    values = [n.parts[0] if n.kind == "unit" else n for n in (gold, answer)]
    bare = [value.kind for value, unit in zip(values, units, strict=True) if not unit]
    same = units[0] == units[1] or (rules.units == "optional" and "" in units and "pct" not in bare)  # 50% is no $0.50
    return values[0], values[1], same


def _as_unit(node: Node, other: Node) -> Node:
    if other.kind == "unit" and node.kind == "mul" and node.parts[1] == Node("sym", other.text):
        return Node("unit", other.text, node.parts[:1])
    if other.kind == "unit" and node.kind == "div" and node.parts[0].kind == "mul":  # 12 m/s
        value, unit = node.parts[0].parts
        if unit.kind == node.parts[1].kind == "sym" and other.text == f"{unit.text}/{node.parts[1].text}":
            return Node("unit", other.text, (value,))
    return node


def _same_words(gold: Node, answer: Node) -> bool:
    left, right = _words(gold), _words(answer)
    if left is None or right is None:
        return False
    return left == right if len(left) == 1 else left.casefold() == right.casefold()


def _words(node: Node) -> str | None:
    """Words without the brackets of an option: `(B)`, `B` and `B.` are one answer."""
    if node.kind in ("text", "sym"):
        return node.text.strip().strip("().").strip()
    return None


# statements: x = 5, x in S


def _is_statement(node: Node) -> bool:
    return node.kind == "in" or (node.kind == "rel" and set(node.text.split()) == {"="})


def _stated(node: Node) -> tuple[Node | None, Sequence[Node]]:
    """(what a statement is about, the values it gives); None where no side is a mere name."""
    if node.kind == "in":
        return node.parts[0], node.parts[1:]
    names = [part for part in node.parts if _is_name(part)]
    values = [part for part in node.parts if not _is_name(part)]
    if len(names) > 1 and values and not any(map(_has_variable, values)):  # a = b = 5
        return names[0], values
    if _is_name(node.parts[0]):
        return node.parts[0], node.parts[1:]
    if _is_name(node.parts[-1]):
        return node.parts[-1], node.parts[:-1]
    return None, node.parts


def _is_name(node: Node) -> bool:
    """A variable, a word, `f(x)`, or `(x, y)`."""
    if node.kind in ("mul", "group"):
        return all(part.kind == "sym" for part in node.parts)
    return node.kind in ("sym", "text")


def _has_variable(node: Node) -> bool:
    return node.kind in ("sym", "text") or any(map(_has_variable, node.parts))


def _same_statement(gold: Node, answer: Node, again: Callable[[Node, Node], bool], algebra: Algebra) -> bool:
    if not _is_statement(gold):
        return all(again(gold, value) for value in _stated(answer)[1])  # so 1 = 2 and a = 3 = 5 never pass
    name, values = _stated(gold)
    numbers = [value for value in values if exact(value) is not None]
    if not all(again(numbers[0], value) for value in numbers):
        return False  # a = 3 = 5 is no answer to compare with
    if not _is_statement(answer):
        return (name is not None or len(numbers) == len(values)) and again(values[-1], answer)
    other, claimed = _stated(answer)
    if name is not None and name == other:
        return all(again(values[-1], value) for value in claimed)
    two_sided = gold.kind == answer.kind == "rel" and len(gold.parts) == len(answer.parts) == 2
    return two_sided and algebra.equation(gold, answer)


def _unindexed(name: Node | None) -> Node | None:
    """`x_1` and `x_2` are both x."""
    return name._replace(text=name.text.partition("_")[0]) if name is not None and name.kind == "sym" else name


# several values


_ARITHMETIC = {"neg", "add", "mul", "div", "pow", "call", "abs", "pct", "deg", "fact"}


def _is_plural(node: Node) -> bool:
    return node.kind in ("list", "set") or _signs(node) == 1


def _signs(node: Node) -> int:
    """How many plus-minus signs an expression holds."""
    if node.kind == "pm":
        return 1 + sum(map(_signs, node.parts))
    return sum(map(_signs, node.parts)) if node.kind in _ARITHMETIC else 0


def _both(node: Node) -> list[Node]:
    """The two values of an expression with one plus-minus sign; with more, which go together is anybody's guess."""
    if _signs(node) != 1:
        return [node]
    if node.kind == "pm":
        left, right = node.parts
        below = Node("neg", "", (right,))
        if left == Node("num", "0"):
            return [right, below]
        return [Node("add", "", (left, right)), Node("add", "", (left, below))]
    choices = itertools.product(*map(_both, node.parts))
    return [node._replace(parts=parts) for parts in choices]


def _is_set(node: Node) -> bool:
    """A set that is no plain list of its elements."""
    if node.kind == "const":
        return node.text in ("R", "Z", "Q", "N", "C", "empty")
    if node.kind == "list":
        return node.text != "," and all(map(_is_set, node.parts))
    return node.kind in ("such", "union", "inter", "minus") or (node.kind == "rel" and not _is_statement(node))


def items(node: Node) -> list[Node]:
    """The values of a list or set, in no order; a single value is a list of one."""
    if node.kind in ("list", "set"):
        return [value for part in node.parts for value in _both(part)]
    return _both(node)


def _same_items(gold: Node, answer: Node, again: Callable[[Node, Node], bool], algebra: Algebra) -> bool:
    """As sets: every value of one side is among the other's."""
    if _is_set(gold) or _is_set(answer):
        known = all(_is_set(n) or n.kind in ("group", "set") for n in (gold, answer))
        if known and algebra.same_set(gold, answer):
            return True
        if not (gold.kind == answer.kind == "list"):
            return False
    for one, many in ((gold, answer), (answer, gold)):
        if many.kind == "list" and not _is_plural(one) and not any(map(_is_statement, many.parts)):
            return False  # `5, 5` is no 5; where a comma is the decimal point it is 5.5
    left, right = items(gold), items(answer)
    if max(len(left), len(right)) > MAX_ITEMS:
        return False
    names = [{_unindexed(_stated(n)[0]) for n in side if _is_statement(n)} for side in (left, right)]
    if len(names[0]) != len(names[1]) and max(map(len, names)) > 1:
        return False  # x = 1, y = 2 says more than {1, 2}, and than x = 1
    return all(any(again(g, a) for a in right) for g in left) and all(any(again(g, a) for g in left) for a in right)
