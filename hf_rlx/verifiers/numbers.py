"""Numeric answers, compared exactly.

`0.1 + 0.2` is not `0.3` in binary floating point, and a tolerance pays for near misses. So both sides become
`fractions.Fraction`, and equal means equal: `3.0` is `3`, `1/2` is `0.5`, `0.333` is not `1/3`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, get_args

from hf_rlx.verifiers.answers import HASH, last_boxed
from hf_rlx.verifiers.text import Completion, column_of, completion_text, gold_column

Extract = Literal["last", "first", "boxed", "hash", "answer_line", "whole"]

MAX_DIGITS = 1000
"""A number with more digits, or a larger exponent, is no answer: exact arithmetic on it would cost too much."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)(?:[eE][+-]?[0-9]+(?![\w]))?"
_NUMBER = re.compile(
    # A sign belongs to the number unless something it could be subtracted from stands right before it: `10-3`.
    # A number does not start inside a word (`x2`) or after the point of another number (`1.2.3`).
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)(?P<sign>(?<![)\]}.])[+-])?"
    rf"(?:(?P<mixed>[0-9]+) (?=[0-9]+ ?/ ?[0-9]))?"
    rf"(?P<top>{_DECIMAL})(?: ?/ ?(?P<bottom>{_DECIMAL}))?"
)
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_ANSWER = re.compile(r"\banswer\b(?:\s+is)?[\s:*=]*(?P<tail>[^\n]*)", re.IGNORECASE)
# Mark-up that changes how a number looks but not what it is. Applied in order.
_CLEAN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        ("\N{MINUS SIGN}", "-"),
        (r"\{,\}", ","),  # LaTeX thousands: 1{,}234
        (r",\\!\s*", ","),  # and 1,\! 234
        (r"\\[,!;: ]", ""),  # LaTeX thin spaces
        (r"\\(?:text|textbf|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}", r" \1"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", ""),  # degrees
        (r"\\([$%])", r"\1"),
        (r"\\[()\[\]]|\*\*|__|`", ""),  # LaTeX delimiters, Markdown emphasis
    )
)
# Beside the one number of an answer (standing at \0) only words and punctuation may remain: `\sqrt{2}`, `2x`, `2^k`
# and `5 - y` hold one number each, and none of them is that number.
_NOT_PLAIN = re.compile(r"[\\{}√π|<>]|[-+*/^]\s*\0|\0\s*[-+*/^]\s*\S|[A-Za-z_]\0|\0_|\0 ?[A-Za-z](?![A-Za-z])")
# `x = 0` and `17 + 25 = 42` state a value, `5x - 7y = 0` and `f(3) = 0` state something else.
_EQUATION = re.compile(r"[A-Za-z]\s*[-+*/^(]|[-+*/^)]\s*[A-Za-z]|[0-9][A-Za-z]")


def _value(match: re.Match[str]) -> Fraction | None:
    """Exact value of a match of `_NUMBER`; None for more than `MAX_DIGITS` digits or a zero denominator."""
    text = match.group()
    if sum(map(str.isdigit, text)) > MAX_DIGITS:
        return None
    if any(int(exponent) > MAX_DIGITS for exponent in re.findall(r"[eE][+-]?([0-9]+)", text)):
        return None
    value = Fraction(match["top"].replace(",", ""))
    if match["bottom"] is not None:
        bottom = Fraction(match["bottom"].replace(",", ""))
        if bottom == 0:
            return None
        value /= bottom
    if match["mixed"] is not None:
        value += int(match["mixed"])
    return -value if match["sign"] == "-" else value


def _fraction_to_slash(match: re.Match[str]) -> str:
    """`\\frac{1}{2}` as `1/2`, with a space before it when it follows a whole number."""
    top, bottom = match[1] or match[2], match[3] or match[4]
    follows_digit = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{' ' if follows_digit else ''}{top}/{bottom}"


def _clean(text: str) -> str:
    for pattern, new in _CLEAN:
        text = pattern.sub(new, text)
    return _LATEX_FRACTION.sub(_fraction_to_slash, text)


def _only_number(span: str) -> Fraction | None:
    """The number of a span that states exactly one, with words around it at most; `x = 42` counts as 42.

    Two numbers are no answer: `12 or 13` must not be paid for either.
    """
    left, _, span = _clean(span).rpartition("=")
    span = span.replace("$", " ").strip(" *_\t\n")
    matches = list(_NUMBER.finditer(span))
    if len(matches) != 1 or _EQUATION.search(left):
        return None
    match = matches[0]
    if _NOT_PLAIN.search(f"{span[: match.start()]}\0{span[match.end() :]}"):
        return None
    return _value(match)


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else, spaces at its ends aside.

    Understands a sign, decimals, thousands groups (`1,234`), an exponent (`1e3`), fractions (`1/2`) and mixed
    numbers (`1 1/2`). Returns None for everything else, and for numbers of more than `MAX_DIGITS` digits.
    """
    match = _NUMBER.fullmatch(text.strip().replace("\N{MINUS SIGN}", "-"))
    return None if match is None else _value(match)


def extract_number(text: str, extract: Extract = "last") -> Fraction | None:
    """The number a completion answers with, or None when it answers with none.

    Args:
        text: the completion.
        extract: where the answer stands, as in `NumberVerifier`.
    """
    if extract == "whole":
        return parse_number(text)
    if extract in ("last", "first"):
        matches = list(_NUMBER.finditer(_clean(text)))
        return _value(matches[0 if extract == "first" else -1]) if matches else None
    if extract == "boxed":
        span = last_boxed(text)
        return None if span is None else _only_number(span)
    found = list((HASH if extract == "hash" else _ANSWER).finditer(text))
    if not found:
        return None
    tail = found[-1]["tail"]
    if "\\boxed{" in tail:
        return extract_number(tail, "boxed")
    return _only_number(re.split(r"[.!?;](?:\s|$)", _clean(tail), maxsplit=1)[0])


def gold_number(gold: Any) -> Fraction | None:
    """The number in a dataset's answer column; None when the cell holds no single number.

    Text may be a bare number or end in `#### 42` as GSM8K's does. A float means the decimal it prints as: 0.1 is
    1/10, not the nearest binary fraction.
    """
    if isinstance(gold, bool) or gold is None:
        return None
    if isinstance(gold, str):
        return parse_number(gold.rpartition("####")[2])
    if isinstance(gold, int | Fraction):
        return Fraction(gold)
    if isinstance(gold, Decimal):
        return Fraction(gold) if gold.is_finite() else None
    return parse_number(str(gold))  # Python and NumPy numbers; "nan" and "inf" are no numbers


class NumberVerifier:
    """Reward function: 1.0 when a completion answers with exactly the number of the answer column, else 0.0.

    Plugs into `reward_funcs` of our trainers and of TRL's. Nothing but the extracted number counts.

    Args:
        extract: where the answer stands in the completion.

            - `"last"`, `"first"`: the last or first number anywhere; lenient, so right only for short answers.
            - `"whole"`: the stripped completion must be the number and nothing else.
            - `"boxed"`: the last `\\boxed{...}`.
            - `"hash"`: after the last `####`, to the end of the line.
            - `"answer_line"`: after the last `answer:` or `answer is`, to the end of the sentence.

            In the last three the span may add words (`42 apples`, `x = 42`), but must hold one number only.
        column: dataset column with the right answers: numbers, or text as `gold_number` reads it. None: `answer`, or
            `solution` where there is no `answer`.

    Attributes:
        unparsable_gold: rows so far whose answer column held no number. They score None ("does not apply"), so a
            broken row neither rewards nor punishes.

    Raises:
        ValueError: for an unknown `extract`.

    >>> NumberVerifier("hash")(["6 * 7?", "6 * 7?"], ["#### 42", "#### 41"], answer=[42, 42])
    [1.0, 0.0]
    """

    def __init__(self, extract: Extract = "last", column: str | None = None) -> None:
        if extract not in get_args(Extract):
            raise ValueError(f"extract must be one of {list(get_args(Extract))}, not {extract!r}.")
        self.extract: Extract = extract
        self.column = column
        self.unparsable_gold = 0
        self.__name__ = f"number_{extract}"

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float | None]:
        """One score per completion: 1.0, 0.0, or None where the row's own answer is no number.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: plain strings, or message lists whose last assistant message is judged.
            columns: dataset columns, one value per completion; the one with the answers must be among them.

        Raises:
            ValueError: when the answer column is missing or of another length.
        """
        scores: list[float | None] = []
        answers = column_of(columns, gold_column(columns, self.column), len(completions), self.__name__)
        for completion, answer in zip(completions, answers, strict=True):
            gold = gold_number(answer)
            if gold is None:
                self.unparsable_gold += 1
                scores.append(None)
            else:
                scores.append(float(extract_number(completion_text(completion), self.extract) == gold))
        return scores
