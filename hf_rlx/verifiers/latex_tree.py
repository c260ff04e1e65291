"""The tree of an answer, and the cursor that reads one from tokens.

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

from hf_rlx.verifiers.latex_tokens import Token


class Node(NamedTuple):
    """One part of an answer, see the table above."""

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()


class NotReadable(ValueError):  # noqa: N818 - it is an answer's property, not a fault of ours
    """The text is no answer that this grammar knows."""


@dataclass
class Cursor:
    """A place among tokens."""

    tokens: list[Token]
    at: int = 0

    @property
    def token(self) -> Token | None:
        """The token here; None at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def sees(self, *texts: str) -> bool:
        """Whether the token here is one of these, and not inside `\\text`."""
        token = self.token
        return token is not None and token.kind != "text" and token.text in texts

    def take(self, *texts: str) -> bool:
        """Step over the token here if it is one of these; whether it was."""
        found = self.sees(*texts)
        self.at += found
        return found

    def need(self, *texts: str) -> str:
        """Step over the token here, which must be one of these.

        Raises:
            NotReadable: it is none of them.
        """
        if not self.sees(*texts):
            self.fail()
        self.at += 1
        return self.tokens[self.at - 1].text

    def fail(self) -> NoReturn:
        """Raises: NotReadable, always."""
        token = self.token
        raise NotReadable("it ends too early" if token is None else f"unexpected {token.text[:20]!r}")

    def kind_after(self) -> str:
        """Kind of the token after this one; "" at the end."""
        return self.tokens[self.at + 1].kind if self.at + 1 < len(self.tokens) else ""
