"""Tests of code as datasets write them, read into three kinds.

A cell of the column `tests` is one of these, or its JSON text. Keys that are None count as absent, as Arrow adds them:

    [{"call": "add", "args": [1, 2], "kwargs": {}, "expected": 3}, ...]   values, compared outside of the box;
                                                 "Class.method" calls a method of a new instance
    [{"stdin": "1 2\\n", "stdout": "3\\n"}, ...]  a whole program, its whole output compared
    {"inputs": [...], "outputs": [...], "fn_name": "add"}                 the same two as APPS and TACO write them
    ["assert add(1, 2) == 3", ...]               MBPP: statements that call the candidate's functions
    {"asserts": [...], "setup": "import math"}   the same with code that comes before them
    {"test": "def check(candidate): ...", "entry_point": "add", "prompt": "def add(a, b):"}
                                                 HumanEval: "prompt" is what a completion may continue, and where
                                                 the tests find helper functions

Values that tests pass and compare are None, bool, int, float, str, list, tuple, set, dict. They are passed by value,
so a function that changes its arguments in place cannot be tested by them.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n`]*$")
_CODE = re.compile(r"^\s*(?:(?:async )?def |class |import |from \w+ import |print\(|return )", re.MULTILINE)
PYTHON = ("", "python", "py", "python3", "py3", "python2")


@dataclass(frozen=True)
class CallTest:
    """A call of the candidate's function and what it must return."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    expected: Any


@dataclass(frozen=True)
class ProgramTest:
    """What a program is given and what it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class AssertTests:
    """Test code that calls the candidate through stand-ins.

    Attributes:
        setup: code that runs before the stand-ins are made. sources: the tests. stand_ins: names of the candidate's
        functions in them. entry_point: the argument of `check`, "" where there is no `check`.
    """

    setup: str
    sources: tuple[str, ...]
    stand_ins: tuple[str, ...]
    entry_point: str = ""


@dataclass(frozen=True)
class CodeTests:
    """All tests of one row. `prompt` and `entry_point` tell how a completion that continues a prompt is completed."""

    calls: tuple[CallTest, ...] = ()
    programs: tuple[ProgramTest, ...] = ()
    asserts: AssertTests | None = None
    prompt: str = ""
    entry_point: str = ""


def parse_tests(cell: Any) -> CodeTests:
    """Read a cell of the column `tests`.

    Raises:
        ValueError: none of the formats, no test at all, or test code that does not parse.
    """
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        try:
            cell = json.loads(cell)
        except ValueError as error:
            raise ValueError(f"tests that look like JSON and are none: {error}") from error
    if isinstance(cell, str):
        cell = [cell]
    if isinstance(cell, dict):
        return _from_dict({key: value for key, value in cell.items() if value is not None})
    if not isinstance(cell, list | tuple) or not cell:
        raise ValueError(f"tests must be a list with at least one test, or a dict, not {str(cell)[:80]!r}")
    if all(isinstance(item, str) for item in cell):
        return CodeTests(asserts=_asserts(cell, ""))
    calls, programs = [], []
    for item in cell:
        present = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
        if "call" in present and "expected" in item:
            given = present.get("args", []), present.get("kwargs", {})
            calls.append(CallTest(str(present["call"]), list(given[0]), dict(given[1]), item["expected"]))
        elif "stdout" in present:
            programs.append(ProgramTest(str(present.get("stdin", "")), str(present["stdout"])))
        else:
            raise ValueError(f"a test needs 'call' and 'expected', or 'stdin' and 'stdout': {str(item)[:80]!r}")
    return CodeTests(tuple(calls), tuple(programs))


def _from_dict(cell: dict[str, Any]) -> CodeTests:
    if "asserts" in cell:
        sources = [cell["asserts"]] if isinstance(cell["asserts"], str) else list(cell["asserts"])
        setup = cell.get("setup", "")
        return CodeTests(asserts=_asserts(sources, setup if isinstance(setup, str) else "\n".join(setup)))
    if "test" in cell and "entry_point" in cell:
        name, prompt = str(cell["entry_point"]), str(cell.get("prompt", ""))
        setup = _closed(prompt)
        tree = _parse(cell["test"])
        checks = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
        return CodeTests(
            asserts=AssertTests(setup, (cell["test"],), (name,), name if checks else ""),
            prompt=prompt,
            entry_point=name,
        )
    if "inputs" in cell and "outputs" in cell:
        pairs = list(zip(cell["inputs"], cell["outputs"], strict=True))
        if not pairs:
            raise ValueError("no test at all")
        if function := cell.get("fn_name"):
            return CodeTests(calls=tuple(CallTest(str(function), list(a), {}, b) for a, b in pairs))
        return CodeTests(programs=tuple(ProgramTest(str(a), str(b)) for a, b in pairs))
    raise ValueError(f"tests of no known format; the keys are {sorted(cell)}")


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"test code that does not parse: {error}") from error


def _closed(prompt: str) -> str:
    """A prompt as code of its own: a last function that has no body yet, not even a docstring, gets an empty one."""
    try:
        ast.parse(prompt)
        return prompt
    except SyntaxError:
        closed = f"{prompt.rstrip()}\n    pass\n"
        _parse(closed)
        return closed


def _asserts(sources: Sequence[str], setup: str) -> AssertTests:
    """Names that the tests use and neither they, their setup nor Python define are the candidate's."""
    used: set[str] = set()
    made = set(dir(builtins))
    for source in [setup, *sources]:
        for node in ast.walk(_parse(source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, ast.alias):
                made.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                made.add(node.name)
    if not used - made:
        raise ValueError("the tests call no function of the candidate")
    return AssertTests(setup, tuple(sources), tuple(sorted(used - made)))


def extract_code(text: str, tags: Sequence[str] = PYTHON) -> str | None:
    """The program in a completion: its fenced block with one of the tags, or the whole text where there is no fence.

    What stands before the last `</think>` is no answer. A last block that is not closed counts (the model ended),
    and so does code before a single bare fence (the prompt opened it). Two different blocks are refused, None: which
    of them is meant would be the model's choice after the fact.
    """
    text = text.rpartition("</think>")[2].replace("\r\n", "\n")
    blocks: list[str] = []
    opened: str | None = None
    before: list[str] = []
    inside: list[str] = []
    tag, fences = "", 0
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if found and opened is None:
            fences += 1
            opened, tag, inside = found[1], found[2].lower(), []
        elif found and found[1].startswith(opened or "") and not found[2]:
            if tag in tags:
                blocks.append("\n".join(inside) + "\n")
            opened = None
        else:
            (before if opened is None else inside).append(line)
    if opened is not None and tag in tags:
        rest = "\n".join(inside)
        if fences == 1 and not tag and not _CODE.search(rest) and _CODE.search("\n".join(before)):
            return "\n".join(before) + "\n"
        blocks.append(rest + "\n")
    if not fences:
        return text
    return blocks[-1] if blocks and len({block.strip() for block in blocks}) == 1 else None


def complete_program(code: str, tests: CodeTests) -> str:
    """The program to run: the completion itself, or the prompt of the tests followed by it.

    A completion that defines the entry point is put after the prompt as a module of its own would be, so that the
    prompt's imports and helpers are there; a bare body continues the prompt's last function.
    """
    if not tests.prompt or tests.asserts is None:
        return code
    defines = re.search(rf"^(?:async )?def {re.escape(tests.entry_point)}\b", code, re.MULTILINE)
    return f"{tests.asserts.setup.rstrip()}\n\n{code}" if defines else tests.prompt + code
