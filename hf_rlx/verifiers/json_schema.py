"""JSON read strictly, and the part of JSON Schema (2020-12) that describes answers. No dependency, no network."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

MAX_LENGTH = 200_000
"""Characters of a JSON text; a longer one is refused."""

MAX_DEPTH = 64
"""Objects and arrays inside one another."""

# Possessive, and the end may be missing: linear also where a string is not closed.
_IN_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


class JsonError(ValueError):
    """The text is no JSON that we accept, or the value does not fit the schema; the message says where."""


def read_json(text: str) -> Any:
    """The value of a JSON text (RFC 8259), read strictly.

    Refused, though Python's reader or others take some of it: NaN and Infinity, numbers beyond the range of a double,
    repeated keys (which of them counts is anybody's guess), comments, trailing commas, control characters in strings,
    anything behind the value, more than `MAX_LENGTH` characters or `MAX_DEPTH` levels. Integers are exact, other
    numbers are floats.

    Raises:
        JsonError: for all of that.
    """
    if len(text) > MAX_LENGTH:
        raise JsonError(f"{len(text)} characters, at most {MAX_LENGTH} are read")
    depth = 0
    for mark in re.findall(r"[\[\]{}]", _IN_STRING.sub("", text)):
        depth += 1 if mark in "[{" else -1
        if depth > MAX_DEPTH:
            raise JsonError(f"more than {MAX_DEPTH} levels")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise JsonError(f"no JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise JsonError(f"the key {key[:40]!r} is repeated")
    return found


def _constant(text: str) -> Any:
    raise JsonError(f"{text} is no JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"{text[:20]} is beyond the range of numbers")
    return value


def _integer(text: str) -> int:
    if len(text) > 309:  # beyond a double, and slow to read
        raise JsonError(f"an integer of {len(text)} digits")
    return int(text)


class Schema:
    """A JSON Schema of the part named here; every other key is refused, so that no demand is silently not made.

    - any value: `type` (one or a list), `enum`, `const`, `anyOf`, `oneOf`, `allOf`, `not`, and `$ref` to `#/$defs/...`
      or `#/definitions/...` of the same schema
    - objects: `properties`, `required`, `additionalProperties`, `minProperties`, `maxProperties`
    - arrays: `items`, `prefixItems`, `minItems`, `maxItems`, `uniqueItems`
    - strings: `minLength`, `maxLength`, `pattern` (found anywhere; Python's syntax; `check` takes as long as it takes,
      see `patterns.bounded`)
    - numbers: `minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`, `multipleOf` (decimals exactly: 0.3 is a
      multiple of 0.1)
    - words for people, without effect: `title`, `description`, `default`, `examples`, `$comment`, `$schema`

    As in the standard, a demand on one type says nothing about values of others; 1.0 is an integer; 1 and 1.0 are
    equal, and neither is equal to `true`. A `format` is not checked and so refused; write a `pattern`.

    Args:
        schema: a dictionary, or True (anything) or False (nothing).

    Attributes:
        has_pattern: whether it demands a `pattern` anywhere.

    Raises:
        ValueError: an unknown key, a demand of a wrong type, or a reference to nothing; the message says where.
    """

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        self.schema = schema
        self.has_pattern = False
        self._defined: dict[str, Any] = {}
        if isinstance(schema, dict):
            for home in ("$defs", "definitions"):
                named = schema.get(home, {})
                _demand(isinstance(named, dict), f"#/{home} is no object")
                self._defined |= {f"#/{home}/{name}": part for name, part in named.items()}
        self._examine(schema, "#", top=True)
        for where, part in self._defined.items():
            self._examine(part, where)
        for name in self._defined:
            _demand(name not in self._reached(name), f"{name} refers to itself without end")

    def check(self, value: Any) -> None:
        """Nothing for a value that fits.

        Args:
            value: as `read_json` gives it.

        Raises:
            JsonError: it does not fit; the message says where and why.
        """
        if fault := _Check(self._defined).fault(value, self.schema, "$"):
            raise JsonError(fault)

    def _reached(self, name: str) -> set[str]:
        """Definitions that one demands of the very value it is about."""
        found: set[str] = set()
        waiting = [self._defined[name]]
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict):
                continue
            for key in ("anyOf", "oneOf", "allOf"):
                waiting += schema.get(key, [])
            waiting.append(schema.get("not"))
            if (target := schema.get("$ref")) is not None and target not in found:
                found.add(target)
                waiting.append(self._defined[target])
        return found

    def _examine(self, schema: Any, where: str, top: bool = False) -> None:
        """Raise for what is no schema of ours."""
        if isinstance(schema, bool):
            return
        _demand(isinstance(schema, dict), f"{where} is neither an object nor true or false")
        for key, demand in schema.items():
            here = f"{where}/{key}"
            if top and key in ("$defs", "definitions"):
                continue
            _demand(key in _KEYS, f"{here}: {key!r} is not known here; see hf_rlx.verifiers.json_schema.Schema")
            _demand(_KEYS[key](demand), f"{here} cannot be {demand!r}")
            self.has_pattern |= key == "pattern"
            if key == "$ref":
                _demand(demand in self._defined, f"{here}: {demand!r} is not in $defs")
            elif key in ("items", "additionalProperties", "not"):
                self._examine(demand, here)
            elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
                for index, part in enumerate(demand):
                    self._examine(part, f"{here}/{index}")
            elif key == "properties":
                for name, part in demand.items():
                    self._examine(part, f"{here}/{name}")


class _Check:
    """One value against one schema. What was found about an object or array is kept: branches that lead to the same
    part would else double the work with every level, and the model chooses how many levels there are."""

    def __init__(self, defined: dict[str, Any]) -> None:
        self.defined = defined
        self.known: dict[tuple[int, int], str] = {}

    def fault(self, value: Any, schema: Any, where: str) -> str:
        """Why a value does not fit, "" where it does."""
        if isinstance(schema, bool):
            return "" if schema else f"{where}: nothing fits here"
        if not isinstance(value, dict | list):
            return self._fault(value, schema, where)
        key = (id(value), id(schema))  # both outlive the check
        if key not in self.known:
            self.known[key] = self._fault(value, schema, where)
        return self.known[key]

    def _fault(self, value: Any, schema: dict[str, Any], where: str) -> str:
        return next((f for key, demand in schema.items() if (f := self._unmet(key, demand, value, schema, where))), "")

    def _unmet(self, key: str, demand: Any, value: Any, schema: dict[str, Any], where: str) -> str:
        """Why one demand is not met, "" where it is."""
        if key in _SIMPLE:
            return "" if _SIMPLE[key](value, demand) else f"{where}: does not meet {key} {_short(demand)}"
        if key == "$ref":
            return self.fault(value, self.defined[demand], where)
        if key == "allOf":
            return next((f for part in demand if (f := self.fault(value, part, where))), "")
        if key in ("anyOf", "oneOf"):
            fitting = sum(not self.fault(value, part, where) for part in demand)
            met = fitting == 1 if key == "oneOf" else fitting > 0
            return "" if met else f"{where}: fits {fitting} of {len(demand)} in {key}"
        if key == "not":
            return "" if self.fault(value, demand, where) else f"{where}: fits what it must not"
        parts = _parts(key, demand, value, schema, where)
        return next((f for part in parts if (f := self.fault(*part))), "")


def _parts(key: str, demand: Any, value: Any, schema: dict[str, Any], where: str) -> Iterator[tuple[Any, Any, str]]:
    """(part of the value, its schema, where it stands) for the demands on parts."""
    if isinstance(value, dict) and key in ("properties", "additionalProperties"):
        named = schema.get("properties", {})
        for name, item in value.items():
            if (name in named) == (key == "properties"):
                yield item, demand[name] if key == "properties" else demand, f"{where}.{name[:40]}"
    if isinstance(value, list) and key in ("prefixItems", "items"):
        first = len(schema.get("prefixItems", ()))
        for index, item in enumerate(value):
            if (index < first) == (key == "prefixItems"):
                yield item, demand[index] if key == "prefixItems" else demand, f"{where}[{index}]"


def _demand(met: bool, message: str) -> None:
    if not met:
        raise ValueError(f"JSON schema: {message}")


def _short(demand: Any) -> str:
    text = json.dumps(demand)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return isinstance(value, str)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "number": _is_number,
    "integer": lambda v: _is_number(v) and v == int(v),
}


def _is_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _has_type(value: Any, demand: Any) -> bool:
    return any(_TYPES[name](value) for name in ([demand] if isinstance(demand, str) else demand))


def _canonical(value: Any) -> Any:
    """By which JSON values are equal: numbers by value, true and 1 apart, keys in any order."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return (type(value).__name__, value)
    if isinstance(value, list):
        return ("array", tuple(map(_canonical, value)))
    if isinstance(value, dict):
        return ("object", tuple(sorted((key, _canonical(item)) for key, item in value.items())))
    return ("number", Fraction(value))


def _equal(left: Any, right: Any) -> bool:
    return _canonical(left) == _canonical(right)


def _decimal(value: float) -> Fraction:
    """The decimal that a number prints as."""
    return Fraction(str(value))


# A demand on one type is met by values of the others.
_SIMPLE: dict[str, Callable[[Any, Any], bool]] = {
    "type": _has_type,
    "enum": lambda v, d: any(_equal(v, each) for each in d),
    "const": _equal,
    "required": lambda v, d: not isinstance(v, dict) or all(name in v for name in d),
    "minProperties": lambda v, d: not isinstance(v, dict) or len(v) >= d,
    "maxProperties": lambda v, d: not isinstance(v, dict) or len(v) <= d,
    "minItems": lambda v, d: not isinstance(v, list) or len(v) >= d,
    "maxItems": lambda v, d: not isinstance(v, list) or len(v) <= d,
    "uniqueItems": lambda v, d: not (d and isinstance(v, list)) or len(set(map(_canonical, v))) == len(v),
    "minLength": lambda v, d: not isinstance(v, str) or len(v) >= d,
    "maxLength": lambda v, d: not isinstance(v, str) or len(v) <= d,
    "pattern": lambda v, d: not isinstance(v, str) or re.search(d, v) is not None,
    "minimum": lambda v, d: not _is_number(v) or v >= d,
    "maximum": lambda v, d: not _is_number(v) or v <= d,
    "exclusiveMinimum": lambda v, d: not _is_number(v) or v > d,
    "exclusiveMaximum": lambda v, d: not _is_number(v) or v < d,
    "multipleOf": lambda v, d: not _is_number(v) or (_decimal(v) / _decimal(d)).denominator == 1,
    **dict.fromkeys(("title", "description", "default", "examples", "$comment", "$schema"), lambda v, d: True),
}

# What each key may hold.
_KEYS: dict[str, Callable[[Any], bool]] = {
    "type": _is_types,
    "enum": lambda d: isinstance(d, list) and bool(d),
    "const": lambda d: True,
    "required": lambda d: isinstance(d, list) and all(isinstance(name, str) for name in d),
    "uniqueItems": lambda d: isinstance(d, bool),
    "pattern": _is_pattern,
    "multipleOf": lambda d: _is_number(d) and d > 0,
    "$ref": lambda d: isinstance(d, str),
    "properties": lambda d: isinstance(d, dict),
    "items": lambda d: isinstance(d, dict | bool),
    "additionalProperties": lambda d: isinstance(d, dict | bool),
    "not": lambda d: isinstance(d, dict | bool),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _is_schemas),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"), _is_count),
    **dict.fromkeys(("title", "description", "default", "examples", "$comment", "$schema"), lambda d: True),
}
