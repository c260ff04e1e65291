"""Push and load with the real clients against a stand-in Hub. Each case of `cases_*.py` is a test here; they run in
one process that starts with another environment (`run.py`)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.hub.run import CASES
from tests.hub.server import READER, WRITER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first one waits for all
ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    f"{path.stem}::{node.name}"
    for path in CASES
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(what pytest printed, case -> failures or None, the folder that everything was written in)."""
    scratch = tmp_path_factory.mktemp("hub")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "PYTEST_"))}
    report = scratch / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "tests.hub.run", str(report), str(scratch)],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert report.is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, str | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
        faults = [f.text or "" for f in case if f.tag in ("failure", "error")]
        found[name] = "\n".join(filter(None, [found.get(name), *faults])) or None
    return done.stdout + done.stderr, found, scratch


@pytest.mark.parametrize("name", NAMES)
def test_case(outcome, name):
    _, found, _ = outcome
    assert name in found, "it was not run"
    assert found[name] is None, found[name][-6000:]


def test_no_token_is_left_anywhere(outcome):
    """Neither in what the runs wrote (saved models, checkpoints, cards, logs, caches of downloads), nor in what they
    printed and logged."""
    printed, _, scratch = outcome
    tokens = (WRITER, READER)
    assert not [token[:6] for token in tokens if token in printed]
    files = [path for path in scratch.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) > 10
    assert not [str(path) for path in files if any(token.encode() in path.read_bytes() for token in tokens)]
