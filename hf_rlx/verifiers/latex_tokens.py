"""Tokens of an answer: numbers with their thousands groups, letters, words, LaTeX commands."""

# ruff: noqa: RUF001 - characters that look like others are what this file is about

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from hf_rlx.verifiers.units import PLAIN_UNITS


class Token(NamedTuple):
    """One token.

    Args:
        kind: "num", "sym" (one letter, Greek included), "word" (letters that are no product), "text" (inside
            `\\text`), "op" (all else, commands included).
        text: what stands there.
        spaced: a space stands before it.
        roman: of "text": from `\\mathrm` and its like, where a single letter is a variable.
    """

    kind: str
    text: str
    spaced: bool
    roman: bool = False


FUNCTIONS = {
    **{name: name for name in ["sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp", "log"]},
    **{"ln": "ln", "lg": "log", "max": "max", "min": "min", "gcd": "gcd", "lcm": "lcm", "sqrt": "root", "abs": "abs"},
    **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "asin": "asin", "acos": "acos", "atan": "atan"},
    **{"floor": "floor", "ceil": "ceil", "binom": "binom"},
}
CONSTANTS = {
    **{"pi": "pi", "infty": "inf", "infinity": "inf", "inf": "inf", "imath": "i"},
    **{"emptyset": "empty", "varnothing": "empty", "Reals": "R", "Integers": "Z", "Rationals": "Q"},
    **{"Naturals": "N", "Complexes": "C"},
}
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_GREEK = set(_GREEK_NAMES.split())
_SHORT_WORDS = {"yes", "no", "odd"}
_NEEDS_BRACKET = {"max", "min", "gcd", "lcm", "abs", "exp", "floor", "ceil", "binom"}  # `5 min` is a time

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{EM DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}﹣－", "-"),
        **dict.fromkeys("×⋅·∙", "*"),
        **dict.fromkeys("\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}\N{FIGURE SPACE}", "~"),
        **dict.fromkeys("\N{ZERO WIDTH SPACE}\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{WORD JOINER}\ufeff", ""),
        **dict.fromkeys("’‘′", "'"),
        **{"÷": "/", "⁄": "/", "∕": "/", "º": "°", "˚": "°", "√": "\\sqrt ", "∞": "\\infty ", "π": "\\pi "},
        **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∈": "\\in ", "∪": "\\cup "},
        **{"∩": "\\cap ", "∖": "\\setminus ", "∅": "\\emptyset ", "ℝ": "\\Reals ", "ℤ": "\\Integers "},
        **{
            "ℚ": "\\Rationals ",
            "ℕ": "\\Naturals ",
            "ℂ": "\\Complexes ",
            "∠": "\\angle ",
            "…": "...",
            "％": "\\%",
            "﹪": "\\%",
        },
        **{"θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ", "φ": "\\phi "},
        **{"∠": "\\angle "},
        **{
            c: f"\\frac{{{top}}}{{{bottom}}}"
            for c, (top, bottom) in {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4)}.items()
        },
        **{
            c: f"\\frac{{{top}}}{{{bottom}}}"
            for c, (top, bottom) in {"¾": (3, 4), "⅕": (1, 5), "⅛": (1, 8), "⅜": (3, 8)}.items()
        },
    }
)
_HALF = r"([apAP])\.\s?[mM](?:\.|(?![A-Za-z]))"
_ORDINAL = r"(?:st|nd|rd|th|\\(?:text|mathrm|mbox)\s*\{\s*(?:st|nd|rd|th)\s*\})"
# Mark-up that changes how an answer looks but not what it says. Applied in order.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        ("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", "super"),
        ("[₀₁₂₃₄₅₆₇₈₉]+", "sub"),
        # Thousands groups that LaTeX spells out: 1{,}234  1,\!234  1\,234  1~234
        (r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,\s*\\!\s*|\\[,;: ]\s*|~)\d{3})+(?!\d)", "joined"),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|nolimits|phantom\{[^{}]*\})(?![A-Za-z])", ""),
        (r"\{:\}", ":"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z]))|~", " "),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\lvert|\\rvert|\\vert(?![A-Za-z])", "|"),
        (r"\\(?:mathbb|mathbf|bf|Bbb)\s*\{?\s*R\s*\}?(?![A-Za-z])", r"\\Reals "),
        (r"\\mathbb\s*\{?\s*Z\s*\}?", r"\\Integers "),
        (r"\\mathbb\s*\{?\s*Q\s*\}?", r"\\Rationals "),
        (r"\\mathbb\s*\{?\s*N\s*\}?", r"\\Naturals "),
        (r"\\mathbb\s*\{?\s*C\s*\}?", r"\\Complexes "),
        (r"\\(?:text|mathrm|mbox)\s*\{\s*(?:percent|per cent|pct|percentage)\s*\}", r"\\%"),
        (r"(?<=[\d} ])\s*\b(?:percent|per cent|pct)\b", r"\\%"),
        (r"\\(?:text|textbf|textrm|mbox)\s*\{\s*(-?[\d.,/]*\d)\s*([^{}]*)\}", r" \1 \\text{\2}"),
        (r"\\text\s*\{\s*(-?)\s*infinity\s*\}", r"\1\\infty "),
        (rf"(?<=\d)\s*(?:\\text\s*\{{\s*{_HALF}\s*\}}|{_HALF})", r" \\text{\1\2m}"),
        (rf"(?<=\d)(?:{_ORDINAL}|\^{_ORDINAL}|\^\{{{_ORDINAL}\}})(?![A-Za-z]|\s*\d)", ""),
        (r"\\[()\[\]]|\*\*|`|(?<!\\)\$", " "),
    )
)
_ROOT_OF = re.compile(r"√\s*(\d+(?:\.\d+)?)")
_DOUBLED = re.compile(r"\\(?=\\[A-Za-z])")  # escaped once too often; in a matrix it ends a row
_TEXT = r"\\(?P<command>text(?:bf|it|rm|sf|normal)?|mbox|mathrm|mathbf|mathit|operatorname|boldsymbol|rm|bf)\s*"
_TOKEN = re.compile(
    r"(?P<space>\s+)"
    rf"|{_TEXT}\{{(?P<content>[^{{}}]*)\}}"
    r"|(?P<grouped>\d{1,3}(?:,\d{3})+(?![\d,]*\d)(?:\.\d+)?)"
    r"|(?P<spread>\d{1,3}(?: \d{3})+(?! ?[\d/.]))"
    r"|(?P<recurring>\d+\.\d*)\\(?:overline|bar|dot)\s*\{(?P<period>\d+)\}"
    r"|(?P<hex>(?=[0-9A-F]{2})[0-9A-F]{0,40}[A-F][0-9A-F]{0,40}(?=_(?:1[26](?!\d)|\{1[26]\})))"
    r"|(?P<num>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\d.A-Za-z]))?)"
    r"|(?P<command2>\\[A-Za-z]+|\\[{}|%$\\#&])"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<two><=|>=|!=)"
    r"|(?P<other>.)",
    re.DOTALL,
)


def _rewritten(match: re.Match[str], how: str) -> str:
    text = match.group()
    if how == "super":
        return "^{" + "".join(_SUPERSCRIPTS[c] for c in text) + "}"
    if how == "sub":
        return "_{" + "".join(_SUBSCRIPTS[c] for c in text) + "}"
    return re.sub(r"\D", "", text)


def normalise(text: str) -> str:
    """The answer without mark-up: dollars, spacing and sizing commands, look-alike characters."""
    text = _ROOT_OF.sub(r"\\sqrt{\1}", text).translate(_CHARACTERS)
    if "matrix" not in text:
        text = _DOUBLED.sub("", text)
    for pattern, new in _REWRITES:
        if new in ("super", "sub", "joined"):
            text = pattern.sub(lambda match, how=new: _rewritten(match, how), text)  # type: ignore[misc]
        else:
            text = pattern.sub(new, text)
    text = unicodedata.normalize("NFKC", text).strip()
    while text and text[-1] in ".,;" and not text.endswith(("..", "\\,", "\\;")):
        text = text[:-1].rstrip()
    return text.removeprefix("=").lstrip()


def tokenize(text: str) -> list[Token]:
    """Tokens of a text that `normalise` has been through."""
    found: list[Token] = []
    brackets: list[str] = []
    spaced = False
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None  # the last alternative takes any character
        kind = str(match.lastgroup)
        value = match.group()
        if kind in ("grouped", "spread") and brackets and brackets[-1] != "{":
            value = re.match(r"\d+", value).group()  # type: ignore[union-attr]  # in brackets a comma separates
            kind = "num"
        position += len(value)
        if kind == "space":
            spaced = True
            continue
        if kind == "content":
            found += _text_tokens(match["command"], match["content"], spaced)
        elif kind in ("grouped", "spread"):
            found.append(Token("num", re.sub("[, ]", "", value), spaced))
        elif kind == "period":
            found.append(Token("num", f"{match['recurring']}({match['period']})", spaced))
        elif kind in ("num", "hex"):
            found.append(Token("num", value, spaced))
        elif kind == "letters":
            found += _letters(value, found, spaced, text[position:])
        else:
            found.append(Token("sym", value, spaced) if value[1:] in _GREEK else Token("op", value, spaced))
            if value in ("(", "[", "{", "\\{"):
                brackets.append(value)
            elif value in (")", "]", "}", "\\}") and brackets:
                brackets.pop()
        spaced = False
    return found


def _text_tokens(command: str, content: str, spaced: bool) -> list[Token]:
    """A token a word; of roman commands with more than letters inside, the tokens of what is inside."""
    roman = not command.startswith(("text", "mbox"))
    if roman and (content.strip() in FUNCTIONS or not re.fullmatch(r"[A-Za-z\s]*", content)):
        return tokenize(content.strip())
    return [Token("text", word, spaced, roman) for word in content.split()]


def _letters(run: str, before: list[Token], spaced: bool, rest: str) -> list[Token]:
    """One word, or one symbol a letter."""
    after_number = bool(before) and (before[-1].kind in ("num", "text", "word") or before[-1].text in ("}", "/"))
    if run in FUNCTIONS and (run not in _NEEDS_BRACKET or rest.lstrip().startswith(("(", "{"))):
        return [Token("word", run, spaced)]
    if run in CONSTANTS or run.lower() in ("and", "or"):
        return [Token("word", run, spaced)]
    if len(run) > 1 and after_number and run in PLAIN_UNITS:
        return [Token("text", run, spaced)]
    if len(run) >= 4 or (len(run) > 1 and run[0].isupper()) or run in _SHORT_WORDS:
        return [Token("word", run, spaced)]
    return [Token("sym", letter, spaced and index == 0) for index, letter in enumerate(run)]
