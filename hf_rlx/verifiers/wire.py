"""Values that leave a box: a closed vocabulary in JSON, decoded under limits of our own and compared outside.

None, bool, int, float, str, list, tuple, set and dict, by exact type. Whatever else a line holds is an answer that
cannot be right: `ProtocolError`, never another exception.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

DEPTH, DIGITS, SIZE = 40, 1300, 1 << 20
HASHED = 3000
"""Large integers, floats and tuples in the sets and dicts of one value: such can be chosen to collide, and then each
costs a walk past all others. Texts and small integers cannot."""


class ProtocolError(Exception):
    """The box said something that an honest one does not say, or a value over the limits."""


def _refuse(text: str) -> NoReturn:
    raise ProtocolError(f"{text[:40]!r} is no value")


def _integer(text: str) -> int:
    return int(text) if len(text) <= DIGITS else _refuse(text)


def _real(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


class _Builder:
    """Turns parsed JSON into Python values, counting what it makes."""

    def __init__(self) -> None:
        self.hashed = 0

    def build(self, value: Any, depth: int = 0) -> Any:
        if depth > DEPTH:
            raise ProtocolError("nested too deeply")
        if isinstance(value, list):
            return [self.build(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise ProtocolError("not one of the known types")
        ((key, body),) = value.items()
        if key == "f" and body in ("inf", "-inf"):
            return float(body)
        if key not in ("t", "s", "d") or not isinstance(body, list):
            raise ProtocolError("not one of the known types")
        items = [self.build(item, depth + 1) for item in body]
        if key == "t":
            return tuple(items)
        try:
            names = items if key == "s" else [name for name, _ in items]
            self.hashed += sum(map(_may_collide, names))
            if self.hashed > HASHED:
                raise ProtocolError("too many numbers in sets or dicts")
            return set(items) if key == "s" else {name: item for name, item in items}  # noqa: C416
        except (TypeError, ValueError) as error:  # unhashable, or no pairs
            raise ProtocolError("a set or dict that cannot be") from error


def _may_collide(value: Any) -> bool:
    return not (isinstance(value, str) or (isinstance(value, int) and value.bit_length() <= 60))


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of a box as a dict of undecoded JSON values.

    Raises:
        ProtocolError: anything but a JSON object within the limits.
    """
    if len(line) > SIZE:
        raise ProtocolError("more than a mebibyte")
    try:
        message = json.loads(line, parse_int=_integer, parse_float=_real, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("not a line of JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("not a JSON object")
    return message


def decode(value: Any) -> Any:
    """The Python value that a `"v"` or an argument of a line stands for.

    Raises:
        ProtocolError: outside of the vocabulary or its limits.
    """
    return _Builder().build(value)


def equal(value: Any, expected: Any, tolerance: float | None = None, depth: int = 0) -> bool:
    """Is a decoded value what was expected? By Python's own `==` on builtins, with two differences: True is not 1,
    and with a tolerance floats may differ by that much, absolutely or relatively. NaN equals nothing.

    Args:
        value: from `decode`.
        expected: of the same types.
        tolerance: None compares exactly; never applied inside of sets and dict keys, nor to integers.
    """
    if depth > DEPTH:
        return False
    kinds = type(value), type(expected)
    if all(kind in (int, float) for kind in kinds):
        if tolerance is not None and float in kinds:
            try:
                return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
            except OverflowError:  # an integer beyond all floats
                return False
        return value == expected
    if kinds[0] is not kinds[1]:
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(expected) and all(
            equal(a, b, tolerance, depth + 1) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(
            equal(value[key], expected[key], tolerance, depth + 1) for key in value
        )
    return value == expected


_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


def same_text(printed: str, expected: str, tolerance: float | None = None) -> bool:
    """Is a program's whole output what was expected? Line by line, spaces at the ends of lines and empty lines at the
    end aside; the number of lines counts. With a tolerance, words that are numbers may differ by that much, except
    where both are integers.
    """
    lines, wanted = _lines(printed), _lines(expected)
    if tolerance is None or lines == wanted:
        return lines == wanted
    return len(lines) == len(wanted) and all(
        _same_words(a.split(), b.split(), tolerance) for a, b in zip(lines, wanted, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]


def _same_words(words: Sequence[str], wanted: Sequence[str], tolerance: float) -> bool:
    return len(words) == len(wanted) and all(_same_word(a, b, tolerance) for a, b in zip(words, wanted, strict=True))


def _same_word(word: str, wanted: str, tolerance: float) -> bool:
    if word == wanted:
        return True
    if not word.isascii() or "_" in word:  # Python alone takes these for numbers
        return False
    try:
        if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(wanted):
            return int(word) == int(wanted)
        return math.isclose(float(word), float(wanted), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
