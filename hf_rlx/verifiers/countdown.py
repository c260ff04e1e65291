"""Countdown: reach a target from given numbers with + - * / and parentheses. Exact, and nothing is evaluated as code.

The grammar, in full (spaces anywhere but inside a number):

    sum      = product { ("+" | "-") product }
    product  = operand { ("*" | "/") operand }
    operand  = number | "(" sum ")"
    number   = one to nine digits 0-9

So there is no sign (but see `parse_expression`), no power, no `//`, no `2(3)`, no decimal point, no exponent and no
other alphabet's digit: `12` is the number twelve and never a 1 beside a 2. Values are `fractions.Fraction`, so
`8/(3-8/3)` is 24 and a division by zero is a wrong answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hf_rlx.verifiers.answers import after_thinking, last_boxed, last_tag
from hf_rlx.verifiers.text import Completion, column_of, completion_text
from hf_rlx.verifiers.verdict import JudgedRows, Verdict

MAX_LENGTH = 300
"""Characters of an expression; a longer one is wrong without being read."""

MAX_DEPTH = 30
"""Parentheses inside one another."""

_TOKEN = re.compile(r"[ \t]*(?:(?P<number>[0-9]{1,9})(?![0-9])|(?P<mark>[-+*/()]))[ \t]*")
# Other ways to write the four operators, and what surrounds a formula in LaTeX or Markdown.
_TIMES, _MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
_WRITTEN = str.maketrans({_TIMES: "*", "·": "*", "÷": "/", _MINUS: "-", "$": " ", "`": " "})
_LATEX = ((r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), (r"\left", ""), (r"\right", ""))
_RESULT = re.compile(r"[ \t]*-?[0-9]{1,9}[ \t]*")
_LINE = re.compile(r"\banswer[ \t*]*:[ \t*]*(?P<tail>[^\n]*)", re.IGNORECASE)


class ExpressionError(ValueError):
    """The text is no expression of the grammar, is too long or too deep, or divides by zero."""


@dataclass(frozen=True)
class Expression:
    """What an expression says.

    Args:
        value: exact.
        numbers: every number that is written in it, in order.
    """

    value: Fraction
    numbers: tuple[int, ...]


def parse_expression(text: str, *, signs: bool = False) -> Expression:
    """Value and numbers of an expression of this file's grammar.

    Args:
        text: the expression.
        signs: an operand may have one minus before it, as in `-3 + 5`; it is no number of its own.

    Raises:
        ExpressionError: see there; the message says where.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"{len(text)} characters, at most {MAX_LENGTH} are read")
    tokens: list[str] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ExpressionError(f"{text[place : place + 10].strip()!r} is no number, operator or parenthesis")
        tokens.append(match["number"] or match["mark"])
        place = match.end()
    parser = _Parser(tokens, signs)
    value = parser.sum(0)
    if parser.place < len(tokens):
        raise ExpressionError(f"an operator is missing before {parser.next!r}")
    return Expression(value, tuple(int(token) for token in tokens if token.isdigit()))


class _Parser:
    """Recursive descent over tokens; depth is bounded before it is entered."""

    def __init__(self, tokens: list[str], signs: bool) -> None:
        self.tokens = tokens
        self.signs = signs
        self.place = 0

    @property
    def next(self) -> str:  # "" at the end
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1]

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next in ("+", "-"):
            value = value + self.product(depth) if self.take() == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.operand(depth)
        while self.next in ("*", "/"):
            if self.take() == "*":
                value *= self.operand(depth)
                continue
            divisor = self.operand(depth)
            if divisor == 0:
                raise ExpressionError("division by zero")
            value /= divisor
        return value

    def operand(self, depth: int) -> Fraction:
        if self.signs and self.next == "-":
            self.take()
            return -self.unsigned(depth)
        return self.unsigned(depth)

    def unsigned(self, depth: int) -> Fraction:
        if self.next.isdigit():
            return Fraction(int(self.take()))
        if self.next != "(":
            raise ExpressionError(f"a number is missing before {self.next or 'the end'!r}")
        if depth == MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} parentheses inside one another")
        self.take()
        value = self.sum(depth + 1)
        if self.next != ")":
            raise ExpressionError("a parenthesis is not closed")
        self.take()
        return value


def stated_expression(text: str) -> str:
    """The text of the expression that a completion answers with, "" where it has none.

    After the last `</think>`: in the last `<answer>...</answer>`, else in all of it, the last `\\boxed{...}`, else the
    rest of the line after the last `Answer:`, else everything. Other signs of the four operators are rewritten;
    Markdown's `**` around the whole and a full stop at the end are cut off.
    """
    text = after_thinking(text)
    if (inside := last_tag(text)) is not None:
        text = inside
    if (inside := last_boxed(text)) is not None:
        text = inside
    elif lines := list(_LINE.finditer(text)):
        text = lines[-1]["tail"]
    if len(text) > 2 * MAX_LENGTH:
        return text
    for written, plain in _LATEX:
        text = text.replace(written, plain)
    return text.translate(_WRITTEN).strip().removesuffix(".").removeprefix("**").removesuffix("**").strip()


class CountdownVerifier(JudgedRows):
    """Reward function: 1.0 when the completion's expression has the target's value and uses the given numbers.

    For rows of `hf_rlx.data.tasks.countdown_task`; plugs into our trainers and TRL's. None where the row's own columns
    hold None (rows of other tasks).

    Args:
        every_number: each given number must be used exactly once; else each at most once.
        signs: see `parse_expression`.
        numbers_column: dataset column with the given numbers, a list of integers a row.
        target_column: dataset column with the target, an integer a row.
        name: name under which scores are logged.

    >>> CountdownVerifier()(["Make 9."], ["Answer: (1 + 2) * 3"], numbers=[[1, 2, 3]], target=[9])
    [1.0]
    """

    def __init__(
        self,
        *,
        every_number: bool = True,
        signs: bool = False,
        numbers_column: str = "numbers",
        target_column: str = "target",
        name: str = "countdown",
    ) -> None:
        self.every_number = every_number
        self.signs = signs
        self.numbers_column = numbers_column
        self.target_column = target_column
        self.__name__ = name

    def _verdicts(self, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Verdict]:
        n = len(completions)
        numbers = column_of(columns, self.numbers_column, n, self.__name__)
        targets = column_of(columns, self.target_column, n, self.__name__)
        rows = zip(completions, numbers, targets, strict=True)
        return [self.judge(completion_text(c), given, target) for c, given, target in rows]

    def judge(self, completion: str, numbers: list[int] | None, target: int | None) -> Verdict:
        """The verdict on one completion; `= result` may follow the expression and must then be true."""
        if numbers is None or target is None:
            return Verdict("failed", "the row holds no puzzle", excused=True)
        stated, equals, result = stated_expression(completion).partition("=")
        try:
            said = parse_expression(stated, signs=self.signs)
        except ExpressionError as error:
            return Verdict("wrong", str(error))
        used, given = Counter(said.numbers), Counter(int(number) for number in numbers)
        if over := used - given:
            return Verdict("wrong", f"{min(over)} is not given, or not that often")
        if self.every_number and (left := given - used):
            return Verdict("wrong", f"{min(left)} is not used")
        if equals and not (_RESULT.fullmatch(result) and int(result) == said.value):
            return Verdict("wrong", f"{said.value} is said to be {result.strip()[:20]}")
        if said.value != target:
            return Verdict("wrong", f"the value is {said.value}")
        return Verdict("right", "the target")
