"""What an installation gets: everything in wheel and sdist, types, and imports without what is optional."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("hf_rlx", "pyproject.toml", "README.md", "LICENSE")

WITHOUT = """
import importlib, pkgutil, sys

BLOCKED = {"bitsandbytes", "matplotlib", "trackio", "vllm", "reasoning_gym", "gguf", "gmpy2", "wandb", "tensorboard"}
sys.modules |= dict.fromkeys(BLOCKED)  # None: neither found nor importable
import hf_rlx

for name in hf_rlx.__all__:
    getattr(hf_rlx, name)
for module in pkgutil.walk_packages(hf_rlx.__path__, "hf_rlx."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(sorted(name for name in BLOCKED if sys.modules[name] is not None))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with wheel and sdist, built by the backend that pyproject.toml names from a copy of the tree."""
    pytest.importorskip("setuptools", "77", reason="the build backend is not installed")
    folder = tmp_path_factory.mktemp("package")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    compiled = folder / "hf_rlx" / "assets" / "__pycache__"
    compiled.mkdir()
    (compiled / "__init__.cpython-311.pyc").write_bytes(b"")
    script = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "dist"


def wanted() -> set[str]:
    """Every file of the package that is not compiled Python."""
    files = (path for path in (ROOT / "hf_rlx").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_the_wheel_has_every_file_of_the_package(built):
    """Modules, templates, the bundled model, `py.typed`; no tests, and the command is declared."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "hf-rlx = hf_rlx.cli:main" in archive.read(points).decode()
    assert not wanted() - names
    assert "hf_rlx/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/")) or name.endswith(".pyc")]


def test_the_sdist_has_every_file_of_the_package(built):
    """And what a build from it needs: pyproject.toml, README.md, LICENSE."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not (wanted() | {"pyproject.toml", "README.md", "LICENSE"}) - names


def test_everything_imports_without_what_is_optional(tmp_path):
    """With bitsandbytes, matplotlib, trackers, vLLM, reasoning-gym, gguf and gmpy2 out of reach, every module imports
    and every public name is there."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "[]"


def pinned(path: str) -> dict[str, Version]:
    """Name -> version of a file of constraints."""
    lines = [line for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    pairs = [line.lower().replace("_", "-").split("==") for line in lines]
    assert len({name for name, _ in pairs}) == len(pairs)
    return {name: Version(version) for name, version in pairs}


def test_the_lowest_versions_are_those_that_pyproject_declares():
    """Every direct dependency, extras and test tools too, has one minimum, and `tests/lowest.txt` pins it; torch
    alone is pinned where `constraints.txt` has it, above its minimum."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    needs = [Requirement(line) for line in (*project["dependencies"], *extras)]
    minima: dict[str, Version] = {}
    for need in needs:
        if need.name == "hf_rlx":
            continue
        (minimum,) = [one.version for one in need.specifier if one.operator == ">="]
        assert minima.setdefault(need.name.lower().replace("_", "-"), Version(minimum)) == Version(minimum)
    lowest, usual = pinned("tests/lowest.txt"), pinned("constraints.txt")
    assert minima.pop("torch") < lowest["torch"] == usual["torch"]
    assert {name: lowest.get(name) for name in minima} == minima
    assert not [name for name in minima if usual.get(name, minima[name]) < minima[name]]
