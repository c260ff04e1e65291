"""The lower half of the grammar of answers: products, powers, functions, brackets."""

from __future__ import annotations

from dataclasses import dataclass

from hf_rlx.verifiers.latex_tokens import CONSTANTS, FUNCTIONS, Token
from hf_rlx.verifiers.latex_tree import Cursor, Node, NotReadable

_TIMES = {"*", "\\cdot", "\\times", "\\ast"}
_OVER = {"/", "\\div"}
_CLOSERS = {"(": ")]", "[": ")]", "\\langle": ["\\rangle"]}
_PAIRS = {"|": ("|", "abs"), "\\lvert": ("\\rvert", "abs"), "\\lfloor": ("\\rfloor", "floor")}
_PAIRS |= {"\\lceil": ("\\rceil", "ceil")}
_FIGURES = {"\\angle", "\\triangle"}
_DECORATED = {"\\overline", "\\bar", "\\vec", "\\hat", "\\tilde", "\\overrightarrow"}


@dataclass
class Terms(Cursor):
    """What can stand in a product. `latex` knows what can stand around one."""

    def items(self) -> Node:
        """See `latex`."""
        raise NotImplementedError

    def value(self) -> Node:
        """See `latex`."""
        raise NotImplementedError

    def sum(self) -> Node:
        """See `latex`."""
        raise NotImplementedError

    # products and powers

    def product(self) -> Node:
        """Factors with or without signs between, from left to right."""
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
        """Whether a factor without a sign before it can start with this token."""
        if token.kind == "text":
            return token.roman and len(token.text) == 1 and self.at > 0 and not self.ends_after_text()
        if token.kind == "word":
            return token.text in FUNCTIONS or token.text in CONSTANTS
        if token.kind in ("num", "sym"):
            return True
        starts = {"(", "[", "\\{", "{", "\\frac", "\\binom", "\\sqrt", "\\begin", *_DECORATED, *_FIGURES} | (
            _PAIRS.keys() - {"|"}
        )
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
        if token.kind == "num" and left.kind == "fact":
            return Node("mul", "", (left, self.power()))
        if token.kind == "num":
            if not whole or not token.spaced:
                raise NotReadable("two numbers side by side")
            right = self.power()
            if not (self.sees("/") and right.kind == "num"):
                raise NotReadable("two numbers side by side")
            self.at += 1
            bottom = self.power()
            if bottom.kind == "pct":
                return Node("pct", "", (self.mixed(left, Node("div", "", (right, *bottom.parts))),))
            return self.mixed(left, Node("div", "", (right, bottom)))
        right = self.power()
        if whole and right.kind == "pct" and right.parts[0].kind == "div":  # the sign belongs to both
            return Node("pct", "", (self.mixed(left, right.parts[0]),))
        if whole and right.kind == "div" and all(p.kind == "num" for p in right.parts):
            return self.mixed(left, right)
        return Node("mul", "", (left, right))

    def mixed(self, whole: Node, part: Node) -> Node:
        """Whole number and proper fraction."""
        top, bottom = (p.text for p in part.parts)
        if not (top.isdigit() and bottom.isdigit()) or not 0 < int(top) < int(bottom):
            raise NotReadable("neither a mixed number nor clearly a product")
        return Node("mixed", "", (whole, *part.parts))

    def power(self) -> Node:
        """A factor with everything that stands behind it: powers, `!`, `%`, degrees, primes."""
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
        """Step over `{\\circ}` if it is here; whether it was."""
        texts = [t.text for t in self.tokens[self.at : self.at + 3]]
        found = texts == ["{", "\\circ", "}"]
        self.at += 3 * found
        return found

    def exponent(self) -> Node:
        """What follows `^`; without braces powers group from the right."""
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
        """A number, a variable, a constant, a function with its arguments, or something in brackets."""
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
        """What starts with this bracket or command."""
        if opener in ("(", "[", "\\langle"):
            return self.group(opener)
        if opener == "{":
            self.need("{")
            inner = self.items()
            self.need("}")
            several = inner.kind == "list" and inner.text == ","  # a set whose braces are not escaped
            return Node("set", "", inner.parts) if several else inner
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
        if opener in _FIGURES:
            self.at += 1
            return Node("sym", f"{opener} {self.points()}")
        self.fail()

    def points(self) -> str:
        """The capital letters that name a figure."""
        found = ""
        while (token := self.token) is not None and token.kind in ("sym", "word") and token.text.isupper():
            found += token.text
            self.at += 1
        return found or self.fail()

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
        """A variable with the index that follows, if one does."""
        return Node("sym", f"{name}_{self.raw()}") if self.take("_") else Node("sym", name)

    def subscripted_number(self, digits: str) -> Node:
        """A number, or one in the base that follows."""
        if not self.take("_"):
            return Node("num", digits)
        base = self.raw().strip().lower()
        return Node("base", f"{digits}_{base}")

    def root(self) -> Node:
        """Degree and radicand after `\\sqrt`."""
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
        """A group, or the product of numbers, variables and powers that follows."""
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
        """A set: its elements, or a variable and its condition."""
        self.need("\\{")
        if self.take("\\}"):
            return Node("const", "empty")
        if self.kind_after() == "op" and self.tokens[self.at + 1].text in (":", "\\colon") and self.token is not None:
            return self.such()
        inner = self.items()
        if self.take("\\mid", "|", ":"):
            return self.condition(inner)
        self.need("\\}")
        if inner.kind == "ratio" and len(inner.parts) == 2:
            return Node("such", "", inner.parts)
        return Node("set", "", inner.parts if inner.kind == "list" else (inner,))

    def such(self) -> Node:
        """`x : condition}`."""
        name = self.primary()
        self.need(":", "\\colon")
        return self.condition(name)

    def condition(self, name: Node) -> Node:
        """`x > 2, x < 5}`, all of which hold."""
        found = self.items()
        self.need("\\}")
        if found.kind == "list" and found.text == ",":
            found = found._replace(text="and")
        return Node("such", "", (name, found))

    def matrix(self) -> Node:
        """A matrix environment."""
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
