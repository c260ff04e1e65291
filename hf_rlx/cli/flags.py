"""Flags of a command out of the fields of a dataclass, and their values out of text and YAML alike.

The fields are read from the source, so that `--help` and a mistyped flag cost no import of torch: configurations are
subclasses of `transformers.TrainingArguments`, which brings it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hf_rlx
from hf_rlx.cli import UsageError

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
_SIMPLE = {"bool", "int", "float", "str"}
_WHOLE = re.compile(r"[+-]?\d[\d_]*")
_UNUSED = ("Not carried", "No effect")  # first words of the help of fields that are there for TRL's sake
_METAVARS = {"bool": "true|false", "int": "N", "float": "X", "str": "TEXT", "list": "X", "dict": "JSON"}


@dataclass(frozen=True)
class Kinds:
    """What a field takes.

    names: of `bool`, `int`, `float`, `str`, `list`, `dict`, `None`. items: of a list's elements; `Any`: as they are.
    """

    names: frozenset[str]
    items: frozenset[str] = frozenset({"str"})

    @classmethod
    def of(cls, annotation: str) -> Kinds:
        """From an annotation as it is written; names that are not known (enumerations, aliases of `Literal`) count
        as text."""
        names: set[str] = set()
        items: set[str] = set()
        _collect(ast.parse(annotation, mode="eval").body, names, items)
        return cls(frozenset(names), frozenset(items or {"str"}))


@dataclass(frozen=True)
class Flag:
    """One flag.

    name: of the field. kinds: what it takes. default: as it is written in the source. text: its help.
    group: heading under which `--help` lists it. metavar: of its value; None: by its kinds.
    """

    name: str
    kinds: Kinds
    default: str
    text: str
    group: str
    metavar: str | None = None

    @property
    def option(self) -> str:
        """`--num-generations`."""
        return "--" + self.name.replace("_", "-")

    def add_to(self, container: Any) -> None:
        """Add the flag to a parser or one of its groups. What is not given is not in the namespace."""
        text = argparse.SUPPRESS
        if not self.text.startswith(_UNUSED):
            shown = "" if self.default in ("None", "", "''") else f" (default: {self.default})"
            text = (self.text + shown).replace("%", "%%")
        first = next((k for k in _METAVARS if k in self.kinds.names), "str")
        options: dict[str, Any] = {"metavar": self.metavar or _METAVARS[first]}
        if "list" in self.kinds.names:
            options |= {"nargs": "+", "action": "extend"}  # `--reward a --reward b` is both
        elif "bool" in self.kinds.names:
            options |= {"nargs": "?", "const": "true"}
        container.add_argument(self.option, dest=self.name, default=argparse.SUPPRESS, help=text, **options)
        if "bool" in self.kinds.names:
            no = f"--no-{self.option[2:]}"
            container.add_argument(
                no,
                dest=self.name,
                action="store_const",
                const="false",
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )

    def read(self, value: Any, where: str) -> Any:
        """The field's value out of words of a command line or a value of a YAML file.

        Args:
            value: text, a list of texts, or what YAML made of it. where: named in errors.

        Raises:
            UsageError: it is not of any kind that the field takes.
        """
        try:
            return _read(value, self.kinds)
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None


def config_flags(where: str, title: str) -> list[Flag]:
    """The fields of a configuration, its own first and then those of each parent.

    Args:
        where: `"module:Class"`; a module of this package. title: heading of the class's own fields.
    """
    found: dict[str, Flag] = {}
    module, _, name = where.partition(":")
    known: str | None = name
    heading = title
    while known is not None:
        node, parent = _class_in(_path_of(module), known)
        for flag in _fields(node, heading):
            found.setdefault(flag.name, flag)
        if parent is None:
            break
        module, known = parent
        heading = _heading(module, known)
        if module == "transformers":
            module = "transformers.training_args"
    return list(found.values())


def dataclass_flags(cls: type, group: str) -> list[Flag]:
    """The fields of a dataclass of this package, whose annotations are texts; `metadata` has `help` and `metavar`."""
    flags = []
    for field in dataclasses.fields(cls):
        default = "" if field.default in (None, dataclasses.MISSING, False, True) else str(field.default)
        meta = field.metadata
        flags.append(Flag(field.name, Kinds.of(str(field.type)), default, meta["help"], group, meta.get("metavar")))
    return flags


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add flags to a parser, under the headings that they name."""
    groups: dict[str, Any] = {}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        flag.add_to(groups[flag.group])


# Reading fields from the source.


def _heading(module: str, name: str) -> str:
    if module.startswith("transformers"):
        return "of transformers.TrainingArguments"
    shared = {"BaseConfig": "of every trainer", "OnlineConfig": "of trainers that sample"}
    return shared.get(name, "of trainers on given answers")


def _path_of(module: str) -> Path:
    """The file of a module, without importing it."""
    top, *rest = module.split(".")
    if top == "hf_rlx":
        root = Path(str(hf_rlx.__file__)).parent
    else:
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"{top} is not installed; run: pip install {top}")
        root = Path(next(iter(spec.submodule_search_locations)))
    return root.joinpath(*rest).with_suffix(".py")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class_in(path: Path, name: str) -> tuple[ast.ClassDef, tuple[str, str] | None]:
    """A class, also where the file only imports it, and (module, name) of its parent."""
    tree = _tree(path)
    imported = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            if not bases:
                return node, None
            here = ".".join(["hf_rlx", *path.with_suffix("").parts[len(Path(str(hf_rlx.__file__)).parent.parts) :]])
            return node, imported.get(bases[0], (here, bases[0]))
    if name not in imported:
        raise LookupError(f"{path} has no class {name}")
    module, real = imported[name]
    return _class_in(_path_of(module), real)


def _fields(node: ast.ClassDef, group: str) -> list[Flag]:
    flags = []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = ast.unparse(item.annotation)
        if annotation.startswith("ClassVar") or item.target.id.startswith("_"):
            continue
        default, text, settable = _default_and_help(item.value)
        if settable:
            text = " ".join(text.split())
            flags.append(Flag(item.target.id, Kinds.of(annotation), default, text, group))
    return flags


def _default_and_help(value: ast.expr | None) -> tuple[str, str, bool]:
    """The default as it is written, the help text, and whether the constructor takes the field."""
    if not isinstance(value, ast.Call):
        return ("" if value is None else ast.unparse(value)), "", True
    if ast.unparse(value.func) == "described":
        return ast.unparse(value.args[0]), str(_constant(value.args[1])), True
    given = {keyword.arg: keyword.value for keyword in value.keywords}
    default = ast.unparse(given["default"]) if "default" in given else ""
    text = ""
    if isinstance(given.get("metadata"), ast.Dict):
        table: Any = given["metadata"]
        pairs = zip(table.keys, table.values, strict=True)
        text = next((str(_constant(v)) for k, v in pairs if _constant(k) == "help"), "")
    return default, text, "init" not in given or _constant(given["init"]) is not False


def _constant(node: ast.expr) -> Any:
    """A literal's value; of anything else (a formatted text) its source."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _collect(node: ast.expr, names: set[str], items: set[str]) -> None:
    """Kinds of an annotation's syntax tree, and those of its lists' elements."""
    if isinstance(node, ast.BinOp):
        _collect(node.left, names, items)
        _collect(node.right, names, items)
    elif isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value).rpartition(".")[2]
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer == "Literal":
            names |= {type(ast.literal_eval(choice)).__name__ for choice in inner}
        elif outer in ("Optional", "Union"):
            for part in inner:
                _collect(part, names, items)
            names |= {"None"} if outer == "Optional" else set()
        elif outer in ("list", "List", "Sequence", "tuple"):
            names.add("list")
            _collect(inner[0], items, set())
        else:
            names.add("dict" if outer in ("dict", "Dict", "Mapping") else "str")
    elif isinstance(node, ast.Constant):  # None, or a text that stands for a type
        names.add("None" if node.value is None else "str")
    else:
        name = ast.unparse(node)
        names.add(name if name in (*_SIMPLE, "dict", "list", "Any") else "str")


# Values.


def _read(value: Any, kinds: Kinds) -> Any:
    names = kinds.names
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and "list" in names:
        value = value[0]  # one word on the command line
    if value is None or (isinstance(value, str) and value.lower() in _NONE and not names & {"str", "dict"}):
        if "None" in names:
            return None
        raise ValueError(f"{_wanted(names)} is wanted, not null")
    if isinstance(value, str) and value[:1] in "[{" and names & {"list", "dict"}:
        value = _json(value, names)
    if isinstance(value, list):
        if "list" not in names:
            raise ValueError(f"{_wanted(names)} is wanted, not a list")
        return [_scalar(item, kinds.items) for item in value]
    if isinstance(value, dict) and "Any" in kinds.items:
        return [value]
    if isinstance(value, dict):
        if "dict" not in names:
            raise ValueError(f"{_wanted(names)} is wanted, not a section")
        return value
    if "list" in names and not ("str" in names and isinstance(value, str)):
        numbers = kinds.items <= {"int", "float"}
        parts = value.split(",") if isinstance(value, str) and numbers else [value]
        return [_scalar(part, kinds.items) for part in parts]
    return _scalar(value, names)


def _json(text: str, names: frozenset[str]) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if "str" in names:
            return text
        raise ValueError(f"{text!r} is no JSON: {error}") from None


def _scalar(value: Any, names: frozenset[str]) -> Any:
    """A text, number or truth value as the first of the kinds that it can be."""
    if "Any" in names:
        return value
    word = value.strip().lower() if isinstance(value, str) else None
    if "bool" in names:
        if isinstance(value, bool):
            return value
        if word in (*_TRUE, *_FALSE):
            return word in _TRUE
        if value in (0, 1) and "int" not in names:
            return bool(value)
    if isinstance(value, bool):
        # YAML reads `save_strategy: no` as a truth value.
        if "str" in names:
            return "yes" if value else "no"
        raise ValueError(f"{_wanted(names)} is wanted, got {str(value).lower()}")
    number = _number(value)
    if number is not None and "int" in names and float(number).is_integer():
        return int(number)
    if number is not None and "float" in names:
        return float(number)
    if "str" in names and isinstance(value, str | int | float):
        return value if isinstance(value, str) else str(value)
    raise ValueError(f"{_wanted(names)} is wanted, got {value!r}")


def _number(value: Any) -> int | float | None:
    """A number, also as text such as `1e-5`, which YAML takes for one."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        return None
    if _WHOLE.fullmatch(value.strip()):
        return int(value)
    try:
        return float(value)
    except ValueError:
        return None


def _wanted(names: frozenset[str]) -> str:
    """The kinds in words."""
    words = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "str": "a text",
        "list": "a list",
        "dict": "a section (or JSON)",
    }
    return " or ".join(text for name, text in words.items() if name in names) or "nothing"
