"""Read an answer, written in LaTeX or as plain text, into a tree. Whole or not at all: what is left over is an error.

No mathematics happens here and nothing is evaluated; `exact` and `symbolic` do that on the tree. The time is linear in
the length of the text.

    kind      text             parts
    num       digits           -                      "12.5", exponents and recurring decimals included
    sym       its name         -                      a variable, also `x_1` and `f'`
    const     pi e i inf R Z Q N C empty              -
    neg add mul div pow mixed fact pct deg abs        operands, in order
    call      sin, sqrt, ...   arguments              `log` and `root` have two, the base or degree last
    base      digits           -                      "1011_2"
    unit      cm, m/s, ...     the value
    text      words            -
    rel       "= < <= ..."     sides                  one operator fewer than sides
    list      "," or "or"/"and"  items                no brackets around them
    pm        -                a, b                   a plus or minus b
    group     "()" "[)" ...    items                  an interval or a tuple: which, only the other side can tell
    set       -                items
    such      -                variable, condition    {x | x > 2}
    union inter minus          sets
    in        -                variable, set
    ratio     -                sides                  2:3, also times of day
    matrix    columns          entries, row by row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from hf_rlx.verifiers.latex_tokens import CONSTANTS, FUNCTIONS, Token, tokenize
from hf_rlx.verifiers.units import MULTIPLIERS, unit_name


class Node(NamedTuple):
    """One part of an answer, see the table above."""

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()


class NotReadable(ValueError):  # noqa: N818 - it is an answer's property, not a fault of ours
    """The text is no answer that this grammar knows."""


RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    **dict.fromkeys(["\\le", "\\leq", "\\leqslant", "<="], "<="),
    **dict.fromkeys(["\\ge", "\\geq", "\\geqslant", ">="], ">="),
    **dict.fromkeys(["\\ne", "\\neq", "!="], "!="),
    **dict.fromkeys(["\\lt"], "<"),
    **dict.fromkeys(["\\gt"], ">"),
}
_TIMES = {"*", "\\cdot", "\\times", "\\ast"}
_OVER = {"/", "\\div"}
_UNIONS = {"\\cup": "union", "\\cap": "inter", "\\setminus": "minus", "\\backslash": "minus"}
_CLOSERS = {"(": ")]", "[": ")]", "\\langle": ["\\rangle"]}
_ENDS = {")", "]", "}", "\\}", "\\rangle", "|", "\\rvert", "\\rfloor", "\\rceil", "&", "\\\\", "\\end"}
_PAIRS = {"|": ("|", "abs"), "\\lvert": ("\\rvert", "abs"), "\\lfloor": ("\\rfloor", "floor")}
_PAIRS |= {"\\lceil": ("\\rceil", "ceil")}
_MONEY = {"\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
_ALL_REALS = {"all real numbers", "all reals", "all real values"}
_DECORATED = {"\\overline", "\\bar", "\\vec", "\\hat", "\\tilde", "\\overrightarrow"}


def read(text: str) -> Node:
    """The tree of an answer.

    Raises:
        NotReadable: it is none, or something is left over.
    """
    parser = _Parser(tokenize(text))
    if not parser.tokens:
        raise NotReadable("empty")
    node = parser.items()
    if parser.token is not None:
        parser.fail()
    return node


def has_number(node: Node) -> bool:
    """Whether there is a digit anywhere in it."""
    return node.kind == "num" or any(map(has_number, node.parts))


@dataclass
class _Parser:
    """Recursive descent; a method a level of the grammar, from the lists down to single tokens."""

    tokens: list[Token]
    at: int = 0

    @property
    def token(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def sees(self, *texts: str) -> bool:
        token = self.token
        return token is not None and token.kind != "text" and token.text in texts

    def take(self, *texts: str) -> bool:
        found = self.sees(*texts)
        self.at += found
        return found

    def need(self, *texts: str) -> str:
        if not self.sees(*texts):
            self.fail()
        self.at += 1
        return self.tokens[self.at - 1].text

    def fail(self) -> NoReturn:
        token = self.token
        raise NotReadable("it ends too early" if token is None else f"unexpected {token.text[:20]!r}")

    # lists and relations

    def separator(self) -> str:
        """The separator here, taken: "," or "or" or "and"; "" where there is none."""
        found = ""
        while (token := self.token) is not None:
            word = token.text.strip().lower() if token.kind in ("word", "text") else token.text
            if word in ("or", "and", "\\lor", "\\land", "\\vee", "\\wedge"):
                found = {"\\lor": "or", "\\vee": "or", "\\land": "and", "\\wedge": "and"}.get(word, word)
            elif word in (",", ";") and token.kind == "op" and not found:
                found = ","
            else:
                break
            self.at += 1
        return found

    def items(self) -> Node:
        """Items up to the end or a closing bracket; a single one stands for itself."""
        found = [self.item()]
        joined = set()
        while sep := self.separator():
            joined.add(sep)
            found.append(self.item())
        if len(found) == 1:
            return found[0]
        words = joined - {","}
        if len(words) > 1:
            raise NotReadable("both 'and' and 'or'")
        return Node("list", words.pop() if words else ",", tuple(found))

    def item(self) -> Node:
        """A value, a relation, a ratio or words."""
        sides, operators = [self.side()], []
        while (token := self.token) is not None:
            if token.text in RELATIONS and token.kind == "op":
                self.at += 1
                operators.append(RELATIONS[token.text])
                sides.append(self.side())
            elif self.sees("\\approx") and token.kind == "op":  # a rounded value after the exact one
                self.at += 1
                self.side()
                break
            elif self.take("\\in"):
                if operators:
                    self.fail()
                return Node("in", "", (sides[0], self.side()))
            elif self.sees(":") and not operators:
                while self.take(":"):
                    sides.append(self.side())
                return self.clock(Node("ratio", "", tuple(sides)))
            else:
                break
        return Node("rel", " ".join(operators), tuple(sides)) if operators else sides[0]

    def clock(self, ratio: Node) -> Node:
        """A time of day carries its unit on the last part: `3:30 pm` as (3:30) pm."""
        last = ratio.parts[-1]
        if last.kind != "unit":
            return ratio
        return Node("unit", last.text, (Node("ratio", "", (*ratio.parts[:-1], *last.parts)),))

    def side(self) -> Node:
        """Sets joined, or a sum with a unit, or words."""
        if words := self.words():
            return words
        left = self.value()
        while self.sees(*_UNIONS):
            kind = _UNIONS[self.need(*_UNIONS)]
            left = Node(kind, "", (left, self.value()))
        return left

    def words(self) -> Node | None:
        """Words that are the whole side: an answer in words, or the name of what is stated."""
        start, found = self.at, []
        while (token := self.token) is not None and token.kind in ("text", "word") and not self.joins(token):
            if token.kind == "word" and (token.text in FUNCTIONS or token.text in CONSTANTS):
                break
            found.append(token.text)
            self.at += 1
            while found and self.sees(".", "-", "'") and self.kind_after() in ("text", "word", ""):
                found.append(self.need(".", "-", "'"))
        # A roman letter is a variable or a constant, an upright `\text{B}` is an option.
        single = self.at == start + 1 and self.tokens[start].kind == "text" and self.tokens[start].roman
        if found and not single and (self.at_end() or self.sees(*RELATIONS, "\\approx")):
            text = " ".join("".join(f" {w}" for w in found).split())
            return Node("const", "R") if text.lower() in _ALL_REALS else Node("text", text)
        self.at = start
        return None

    def joins(self, token: Token) -> bool:
        return token.text.strip().lower() in ("and", "or")

    def kind_after(self) -> str:
        return self.tokens[self.at + 1].kind if self.at + 1 < len(self.tokens) else ""

    def at_end(self) -> bool:
        token = self.token
        if token is None or token.kind in ("text", "word"):
            return token is None or self.joins(token)
        return token.text in _ENDS or token.text in (",", ";", ":", "\\lor", "\\land", "\\vee", "\\wedge", "\\mid")

    # sums with units

    def value(self) -> Node:
        """A sum, with money before it or a unit behind it."""
        negative = False
        if self.sees("-") and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].text in _MONEY:
            negative = self.take("-")
        money = _MONEY[self.need(*_MONEY)] if self.sees(*_MONEY) else ""
        node = self.sum()
        node = Node("neg", "", (node,)) if negative else node
        if (token := self.token) is not None and token.text in MULTIPLIERS:
            self.at += 1
            node = Node("mul", "", (node, Node("num", str(MULTIPLIERS[token.text]))))
        unit = self.unit(node)
        if node.kind == "deg" and not unit:
            node, unit = node.parts[0], "degree"
        if money and unit not in ("", money):
            raise NotReadable("two units")
        if unit or money:
            return Node("unit", unit or money, (node,))
        return node

    def unit(self, value: Node) -> str:
        """The unit behind a value, canonical; "" for none or one that says nothing (`units`)."""
        found = ""
        while (token := self.token) is not None:
            if token.kind in ("text", "word") and not self.joins(token):
                found += f" {token.text}"
            elif found and token.text == "^":
                self.at += 1
                found += f"^{self.exponent_digits()}"
                continue
            elif found and token.text == "/" and self.kind_after() in ("text", "word"):
                found += "/"
            elif found and token.text == "." and self.kind_after() in ("text", "word", ""):
                found += "."
            elif not found and token.text in _MONEY:
                found = _MONEY[token.text]
            else:
                break
            self.at += 1
        if not found.strip():
            return ""
        name = unit_name(found)
        if name is None or not (has_number(value) or self.tokens[self.at - 1].kind == "text"):
            raise NotReadable(f"{found.strip()[:30]!r} is no unit")
        return name

    def exponent_digits(self) -> str:
        braced = self.take("{")
        sign = "-" if self.take("-") else ""
        token = self.token
        if token is None or token.kind != "num":
            self.fail()
        self.at += 1
        if braced:
            self.need("}")
        return sign + token.text

    def sum(self) -> Node:
        """Terms with signs; one plus-minus at most, which stands for two values."""
        if self.take("\\pm"):
            return Node("pm", "", (Node("num", "0"), self.product()))
        terms = [self.signed()]
        while self.sees("+", "-", "\\pm"):
            sign = self.need("+", "-", "\\pm")
            if sign == "\\pm":
                left = terms[0] if len(terms) == 1 else Node("add", "", tuple(terms))
                return Node("pm", "", (left, self.product()))
            term = self.product()
            terms.append(term if sign == "+" else Node("neg", "", (term,)))
        return terms[0] if len(terms) == 1 else Node("add", "", tuple(terms))

    def signed(self) -> Node:
        if self.take("-"):
            return Node("neg", "", (self.signed(),))
        if self.take("+"):
            return self.signed()
        return self.product()

    # products and powers

    def product(self) -> Node:
        left = self.power()
        slashed = False
        while (token := self.token) is not None:
            if token.text in _TIMES and token.kind == "op":
                self.at += 1
                left, slashed = Node("mul", "", (left, self.factor())), False
            elif token.text in _OVER and token.kind == "op":
                self.at += 1
                bottom = self.factor()
                slashed = left.kind != "num" or bottom.kind != "num"
                left = Node("div", "", (left, bottom))
            elif self.starts_factor(token):
                if slashed:
                    raise NotReadable("a/bc can be read in two ways")
                left = self.beside(left)
            else:
                break
        return left

    def factor(self) -> Node:
        """What follows a multiplication or division sign; `2 * -3` has a sign of its own."""
        if self.take("-"):
            return Node("neg", "", (self.factor(),))
        return self.power()

    def starts_factor(self, token: Token) -> bool:
        if token.kind == "text":
            return token.roman and len(token.text) == 1 and self.at > 0 and not self.ends_after_text()
        if token.kind == "word":
            return token.text in FUNCTIONS or token.text in CONSTANTS
        if token.kind in ("num", "sym"):
            return True
        starts = {"(", "[", "\\{", "{", "\\frac", "\\binom", "\\sqrt", "\\begin", *_DECORATED} | (_PAIRS.keys() - {"|"})
        return token.text in starts or token.text[1:] in FUNCTIONS or token.text[1:] in CONSTANTS

    def ends_after_text(self) -> bool:
        """A roman letter at the end of a value is its unit, except the constants."""
        token = self.token
        return token is not None and token.text not in ("e", "i", "\\pi")

    def beside(self, left: Node) -> Node:
        """Two factors without a sign between: a product, or a mixed number."""
        token = self.token
        assert token is not None
        whole = left.kind == "num" and left.text.isdigit()
        if token.kind == "num":
            if not whole or not token.spaced:
                raise NotReadable("two numbers side by side")
            right = self.power()
            if not (self.sees("/") and right.kind == "num"):
                raise NotReadable("two numbers side by side")
            self.at += 1
            return self.mixed(left, Node("div", "", (right, self.power())))
        right = self.power()
        if whole and right.kind == "div" and all(p.kind == "num" for p in right.parts):
            return self.mixed(left, right)
        return Node("mul", "", (left, right))

    def mixed(self, whole: Node, part: Node) -> Node:
        top, bottom = (p.text for p in part.parts)
        if not (top.isdigit() and bottom.isdigit()) or not 0 < int(top) < int(bottom):
            raise NotReadable("neither a mixed number nor clearly a product")
        return Node("mixed", "", (whole, *part.parts))

    def power(self) -> Node:
        node = self.primary()
        while True:
            if self.take("!"):
                if self.sees("!"):
                    raise NotReadable("double factorial")
                node = Node("fact", "", (node,))
            elif self.take("\\%", "%"):
                node = Node("pct", "", (node,))
            elif self.take("\\degree", "°"):
                node = Node("deg", "", (node,))
            elif self.take("'") or self.take("\\prime"):
                if node.kind != "sym":
                    self.fail()
                node = Node("sym", node.text + "'")
            elif self.take("^"):
                if self.take("\\circ") or self.circle():
                    node = Node("deg", "", (node,))
                elif self.take("\\prime"):
                    node = Node("sym", node.text + "'") if node.kind == "sym" else self.fail()
                else:
                    return Node("pow", "", (node, self.exponent()))  # a^b^c without braces is an error
            else:
                return node

    def circle(self) -> bool:
        texts = [t.text for t in self.tokens[self.at : self.at + 3]]
        found = texts == ["{", "\\circ", "}"]
        self.at += 3 * found
        return found

    def exponent(self) -> Node:
        if self.take("-"):
            return Node("neg", "", (self.exponent(),))
        if self.sees("{"):
            return self.braced()
        node = self.primary()
        return Node("pow", "", (node, self.exponent())) if self.take("^") else node

    def braced(self) -> Node:
        """`{sum}`."""
        self.need("{")
        node = self.value()
        self.need("}")
        return node

    def argument(self) -> Node:
        """What a LaTeX command takes: a group in braces, or the single character that follows."""
        if self.sees("{"):
            return self.braced()
        token = self.token
        if token is not None and token.kind == "num" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.at] = Token("num", token.text[1:], False)
            return Node("num", token.text[0])
        return self.primary()

    def primary(self) -> Node:
        token = self.token
        if token is None:
            self.fail()
        if token.kind == "num":
            self.at += 1
            return self.subscripted_number(token.text)
        if token.kind == "sym" or (token.kind == "text" and token.roman and len(token.text) == 1):
            self.at += 1
            if token.text in ("e", "i") and not self.sees("_"):
                return Node("const", token.text)
            return self.subscripted(token.text)
        name = token.text.removeprefix("\\") if token.kind in ("word", "op") else ""
        name = "" if token.text in ("\\sqrt", "\\binom") else name
        if name in CONSTANTS:
            self.at += 1
            return Node("const", CONSTANTS[name])
        if name in FUNCTIONS:
            self.at += 1
            return self.call(FUNCTIONS[name])
        if token.kind != "op":
            self.fail()
        return self.bracketed(token.text)

    def bracketed(self, opener: str) -> Node:
        if opener in ("(", "[", "\\langle"):
            return self.group(opener)
        if opener == "{":
            return self.braced()
        if opener == "\\{":
            return self.braces()
        if opener in _PAIRS:
            self.at += 1
            closer, kind = _PAIRS[opener]
            inner = self.sum()
            self.need(closer)
            return Node("abs", "", (inner,)) if kind == "abs" else Node("call", kind, (inner,))
        if opener in ("\\frac", "\\binom"):
            self.at += 1
            pair = (self.argument(), self.argument())
            return Node("div", "", pair) if opener == "\\frac" else Node("call", "binom", pair)
        if opener == "\\sqrt":
            self.at += 1
            return self.root()
        if opener == "\\begin":
            return self.matrix()
        if opener in _DECORATED:
            self.at += 1
            return Node("sym", f"{opener} {self.raw()}")
        self.fail()

    def raw(self) -> str:
        """The text of a group in braces that holds letters and digits only."""
        if not self.take("{"):
            token = self.token
            if token is None or token.kind not in ("sym", "num"):
                self.fail()
            self.at += 1
            return token.text
        found = []
        while not self.take("}"):
            token = self.token
            if token is None or token.kind == "op":
                self.fail()
            found.append(token.text)
            self.at += 1
        return "".join(found)

    def subscripted(self, name: str) -> Node:
        return Node("sym", f"{name}_{self.raw()}") if self.take("_") else Node("sym", name)

    def subscripted_number(self, digits: str) -> Node:
        if not self.take("_"):
            return Node("num", digits)
        base = self.raw().strip().lower()
        return Node("base", f"{digits}_{base}")

    def root(self) -> Node:
        degree = Node("num", "2")
        if self.take("["):
            degree = self.sum()
            self.need("]")
        token = self.token
        if token is not None and token.kind == "num" and len(token.text) > 1:
            raise NotReadable("a root without braces over several digits")
        return Node("call", "root", (self.argument(), degree))

    def call(self, name: str) -> Node:
        """A function's arguments: a group, or the product that follows (`\\sin 2x`)."""
        power = base = None
        if self.take("^"):
            power = self.exponent()
        if name == "log" and self.take("_"):
            base = self.argument()
        if name == "root":
            return Node("call", "root", (self.one_argument(), Node("num", "2")))
        if self.sees("(") and name in ("max", "min", "gcd", "lcm"):
            inner = self.group("(", keep=True)
            return Node("call", name, inner.parts)
        argument = self.one_argument()
        inverse = {"sin": "asin", "cos": "acos", "tan": "atan"}
        if power == Node("neg", "", (Node("num", "1"),)):
            if name not in inverse:
                raise NotReadable("f^{-1}")
            name, power = inverse[name], None
        node = Node("call", name, (argument, base) if base is not None else (argument,))
        return Node("pow", "", (node, power)) if power is not None else node

    def one_argument(self) -> Node:
        if self.sees("("):
            return self.group("(")
        if self.sees("{"):
            return self.braced()
        node = self.power()
        while (token := self.token) is not None and (token.kind in ("num", "sym") or token.text in ("\\pi", "pi")):
            node = self.beside(node)
        return node

    # brackets

    def group(self, opener: str, keep: bool = False) -> Node:
        """Brackets around one value are that value; around several, an interval or a tuple."""
        self.need(opener)
        inner = self.items()
        closer = self.need(*_CLOSERS[opener])
        brackets = "()" if opener == "\\langle" else opener + closer
        if inner.kind == "list" and inner.text == ",":
            return Node("group", brackets, inner.parts)
        if keep:
            return Node("group", brackets, (inner,))
        if brackets not in ("()", "[]"):
            raise NotReadable("brackets that do not match")
        return inner

    def braces(self) -> Node:
        self.need("\\{")
        if self.take("\\}"):
            return Node("const", "empty")
        inner = self.items()
        if self.take("\\mid", "|", ":"):
            condition = self.items()
            self.need("\\}")
            return Node("such", "", (inner, condition))
        self.need("\\}")
        if inner.kind == "ratio" and len(inner.parts) == 2:
            return Node("such", "", inner.parts)
        return Node("set", "", inner.parts if inner.kind == "list" else (inner,))

    def matrix(self) -> Node:
        self.need("\\begin")
        name = self.raw()
        if name not in ("pmatrix", "bmatrix", "matrix"):
            raise NotReadable(f"the environment {name!r}")
        rows: list[list[Node]] = [[]]
        while not self.sees("\\end"):
            rows[-1].append(self.sum())
            if self.take("\\\\"):
                rows.append([])
            elif not self.take("&") and not self.sees("\\end"):
                self.fail()
        self.need("\\end")
        if self.raw() != name:
            self.fail()
        rows = rows if rows[-1] else rows[:-1]
        width = len(rows[0]) if rows else 0
        if not width or any(len(row) != width for row in rows):
            raise NotReadable("a matrix with ragged rows")
        return Node("matrix", str(width), tuple(entry for row in rows for entry in row))
