"""House rules of floor 0: what it may import, what it exports, and what its docstrings say."""

import ast
import inspect
from pathlib import Path

import pytest

import hf_rlx.functional as F

FILES = sorted(Path(F.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_imports_nothing_above(path):
    """Standard library, numpy, torch and this package only."""
    tree = ast.parse(path.read_text())
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    allowed = {"math", "collections", "typing", "torch", "numpy"}
    assert all(m.split(".")[0] in allowed or m.startswith("hf_rlx.functional") for m in modules), modules


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 < 80, node.name


def test_exports_exist_and_are_sorted():
    assert all(hasattr(F, name) for name in F.__all__)
    assert len(set(F.__all__)) == len(F.__all__)


FUNCTIONS = [name for name in F.__all__ if inspect.isfunction(getattr(F, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name):
    """Each parameter is named in the docstring (presets may refer to the function they call)."""
    function = getattr(F, name)
    doc = inspect.getdoc(function)
    assert doc
    missing = [p for p in inspect.signature(function).parameters if p not in doc]
    assert not missing, missing
