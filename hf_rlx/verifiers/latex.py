"""Read an answer, written in LaTeX or as plain text, into a tree. Whole or not at all: what is left over is an error.

No mathematics happens here and nothing is evaluated; `exact` and `symbolic` do that on the tree. The time is linear in
the length of the text.

`latex_tree` has the tree, `latex_terms` the lower half of the grammar.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_rlx.verifiers.latex_terms import Terms
from hf_rlx.verifiers.latex_tokens import CONSTANTS, FUNCTIONS, Token, tokenize
from hf_rlx.verifiers.latex_tree import Node, NotReadable
from hf_rlx.verifiers.units import MULTIPLIERS, unit_name

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
_UNIONS = {"\\cup": "union", "\\cap": "inter", "\\setminus": "minus", "\\backslash": "minus"}
_ENDS = {")", "]", "}", "\\}", "\\rangle", "|", "\\rvert", "\\rfloor", "\\rceil", "&", "\\\\", "\\end"}
_MONEY = {"\\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
_SCALES = {**dict.fromkeys("Cc", "celsius"), **dict.fromkeys("Ff", "fahrenheit")}
_ALL_REALS = {"all real numbers", "all reals", "all real values"}


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
class _Parser(Terms):
    """Recursive descent; a method a level of the grammar, from the lists down to sums."""

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
                home = self.side()
                named = home.kind == "sym" and home.text in ("R", "Z", "Q", "N", "C")  # without \mathbb
                return Node("in", "", (sides[0], Node("const", home.text) if named else home))
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
        if node.kind == "mul" and node.parts[0].kind == "deg" and node.parts[1].text in _SCALES:
            node, unit = node.parts[0], node.parts[1].text
        if node.kind == "deg" and unit in ("", *_SCALES):
            node, unit = node.parts[0], _SCALES.get(unit, "degree")
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
            elif found and token.text == "/" and self.kind_after() in ("text", "word", "sym"):
                found += "/"
            elif found.endswith("/") and token.kind == "sym":
                found += token.text
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
