"""The house rules, read from the source by AST: floors, sizes, who may do what, what is documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_rlx"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# A floor imports only floors below it, and packages on one floor do not import one another.
FLOORS = [
    {"types", "assets", "secrets"},
    {"hub"},
    {"functional", "data", "cards"},  # a reward role reads texts, a pushed model has a card: models stand above both
    {"models", "verifiers", "persistence"},
    {"rollout", "preflight"},
    {"trainers", "feedback", "search"},
    {"callbacks", "report", "selfcheck", "checkup", "estimate"},
    {"demo", "pipeline"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}

WITHOUT_TORCH = ("verifiers", "cards", "data/tasks", "secrets.py")
TRL_IN = {"rollout/vllm.py"}
SWITCHING = {"set_adapter", "set_adapters", "disable_adapter", "disable_adapter_layers", "enable_adapter_layers"}
SWITCHES_IN = {"models/shared.py"}
FREEZES_IN = {
    "models/shared.py",
    # The frozen whole-model copy is no part of the shared model: nobody restores its flags.
    "models/reference.py",
}
LINES_A_FILE, LINES_A_FUNCTION = 420, 80  # the house's 400, with a little room
RULES = pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())


def name_of(path: Path) -> str:
    """`rollout/vllm.py` for hf_rlx/rollout/vllm.py."""
    return path.relative_to(PACKAGE).as_posix()


def home_of(path: Path) -> str:
    """First part of the name, without suffix: the package, or the module at the root."""
    return name_of(path).split("/")[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = str(node.module)
            if module == "hf_rlx":  # `from hf_rlx import x`: x is a part
                yield from ((node.lineno, f"hf_rlx.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, methods and nested ones included."""
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


# --- floors ----------------------------------------------------------------------------------------------------------


def test_every_part_has_a_floor():
    homes = {home_of(path) for path in FILES} - {"__init__"}
    assert homes <= LEVEL.keys(), homes - LEVEL.keys()


@RULES
def test_imports_go_down(path):
    """`hf_rlx/__init__.py` names every floor: it is the roof."""
    home = home_of(path)
    if home == "__init__":
        return
    wrong = []
    for line, module in imports(TREES[path]):
        parts = module.split(".")
        if parts[0] != "hf_rlx" or len(parts) == 1:
            continue
        target = parts[1]
        assert target in LEVEL, f"{name_of(path)}:{line} imports {module} through the roof; name the part"
        if target != home and LEVEL[target] >= LEVEL[home]:
            wrong.append(f"{name_of(path)}:{line} ({home}) imports {module}")
    assert not wrong, wrong


@RULES
def test_some_parts_know_no_torch(path):
    """Verifiers, cards and tasks run where torch is not: strings and facts in, scores and Markdown out."""
    if not name_of(path).startswith(WITHOUT_TORCH):
        return
    for line, module in imports(TREES[path]):
        parts = module.split(".")
        assert parts[0] not in ("torch", "transformers", "peft", "accelerate"), f"{name_of(path)}:{line} {module}"
        if parts[0] == "hf_rlx":
            inside = "/".join(parts[1:])
            assert f"{inside}.py".startswith(WITHOUT_TORCH) or parts[1] == "assets", f"{name_of(path)}:{line} {module}"


def test_the_package_is_quick_to_import():
    """`import hf_rlx` loads no heavy library, and the verifiers load no torch."""
    code = (
        "import sys, hf_rlx\n"
        "heavy = {'torch', 'transformers', 'trl', 'peft', 'datasets', 'bitsandbytes'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "import hf_rlx.verifiers\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


@RULES
def test_trl_is_imported_in_one_file(path):
    found = [line for line, module in imports(TREES[path]) if module.split(".")[0] == "trl"]
    assert not found or name_of(path) in TRL_IN, f"{name_of(path)}:{found}"


# --- sizes -----------------------------------------------------------------------------------------------------------


@RULES
def test_files_are_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES_A_FILE, f"{name_of(path)} has {lines} lines"


@RULES
def test_functions_are_short(path):
    long = [
        f"{name_of(path)}:{f.lineno} {f.name} has {size} lines"
        for f in functions(TREES[path])
        if (size := int(f.end_lineno or 0) - f.lineno + 1) > LINES_A_FUNCTION
    ]
    assert not long, long


# --- who may do what -------------------------------------------------------------------------------------------------


@RULES
def test_adapters_are_switched_in_one_file(path):
    found = [
        f"{name_of(path)}:{n.lineno} {n.attr}"
        for n in ast.walk(TREES[path])
        if isinstance(n, ast.Attribute) and n.attr in SWITCHING
    ]
    assert not found or name_of(path) in SWITCHES_IN, found


@RULES
def test_requires_grad_is_touched_in_one_file(path):
    found = []
    for node in ast.walk(TREES[path]):
        called = isinstance(node, ast.Attribute) and node.attr == "requires_grad_"
        assigned = isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Store)
        if called or assigned:
            found.append(f"{name_of(path)}:{node.lineno}")
    assert not found or name_of(path) in FREEZES_IN, found


def classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """Every class of the package by name."""
    return {n.name: (p, n) for p, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}


def base_names(node: ast.ClassDef) -> list[str]:
    """Plain names of the bases, generics stripped."""
    plain = (b.value if isinstance(b, ast.Subscript) else b for b in node.bases)
    return [b.id if isinstance(b, ast.Name) else b.attr for b in plain if isinstance(b, ast.Name | ast.Attribute)]


def test_inheritance_is_shallow():
    """grpo, ppo -> online -> base: at most two storeys on top of `BaseTrainer`, and one base class each."""
    known = classes()

    def storeys(name: str) -> int | None:
        if name == "BaseTrainer":
            return 0
        if name not in known:
            return None
        heights = [h + 1 for b in base_names(known[name][1]) if (h := storeys(b)) is not None]
        return max(heights, default=None)

    heights = {name: storeys(name) for name in known}
    assert heights["GRPOTrainer"] == 2
    assert not {name: h for name, h in heights.items() if h is not None and h > 2}
    trainers = [name for name, h in heights.items() if h]
    assert all(len(known[name][1].bases) == 1 for name in trainers)


def test_there_are_no_mixins():
    found = [n for n, (_, c) in classes().items() if any("mixin" in b.lower() for b in [n, *base_names(c)])]
    assert not found, found


# --- configurations --------------------------------------------------------------------------------------------------


def config_fields() -> list[tuple[str, str, str]]:
    """(configuration, field, help text) of every `name: type = described(default, help)` in trainers."""
    found = []
    for name, (path, node) in classes().items():
        if not name_of(path).startswith("trainers/") or not name.endswith("Config"):
            continue
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Call):
                text = "".join(ast.literal_eval(a) for a in item.value.args[1:2])
                found.append((name, item.target.id, text))  # type: ignore[union-attr]
    return found


INHERITED = {f.name for f in fields(TrainingArguments)}  # transformers reads those


def test_every_field_is_described():
    assert len(config_fields()) > 80
    assert not [f"{c}.{f}" for c, f, text in config_fields() if len(text) < 10]


def test_every_field_is_read():
    """As an attribute somewhere in the package. Fields that say "Not carried" are refused (a test in parity says
    so); those that say "No effect" are accepted because they cannot change a result."""
    read = {n.attr for tree in TREES.values() for n in ast.walk(tree) if _reads(n)}
    unread = [
        f"{c}.{field}"
        for c, field, text in config_fields()
        if field not in read and field not in INHERITED and not text.startswith(("Not carried", "No effect"))
    ]
    assert not unread, unread
    ignored = {field for _, field, text in config_fields() if text.startswith("No effect")}
    assert ignored == {
        "cache_implementation",
        "dataset_num_proc",
        "pad_to_multiple_of",
        "padding_free",
        "padding_value",
    }


def _reads(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)


# --- words -----------------------------------------------------------------------------------------------------------


@RULES
def test_public_things_are_documented(path):
    """Functions, classes and methods without a leading underscore; nested functions are nobody's interface."""
    nodes: list[tuple[str, ast.AST]] = []
    for node in TREES[path].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
            nodes.append((node.name, node))
            if isinstance(node, ast.ClassDef):
                nodes += [
                    (f"{node.name}.{m.name}", m)
                    for m in node.body
                    if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and m.name[0] != "_"
                ]
    silent = [f"{name_of(path)}: {name}" for name, n in nodes if not ast.get_docstring(n)]  # type: ignore[arg-type]
    assert not silent, silent


@RULES
def test_no_fault_is_swallowed(path):
    """No `except Exception: pass`, by any name of it."""
    broad = {None, "Exception", "BaseException"}
    found = []
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.ExceptHandler):
            continue
        name = node.type.id if isinstance(node.type, ast.Name) else (None if node.type is None else "other")
        if name in broad and all(isinstance(s, ast.Pass | ast.Continue) or _is_ellipsis(s) for s in node.body):
            found.append(f"{name_of(path)}:{node.lineno}")
    assert not found, found


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def tracked() -> list[Path]:
    """Text files under version control; without git, those of the package."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return FILES
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def text_of(path: Path) -> str:
    """Empty for binary files."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_nothing_is_left_to_do_and_no_machine_is_named():
    # Written apart so that this file does not find itself.
    unfinished = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
    machine = re.compile("|".join(["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/[a-z]"]))
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if unfinished.search(line) or machine.search(line)
    ]
    assert not found, found
