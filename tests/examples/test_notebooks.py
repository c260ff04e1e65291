"""The notebooks, cell after cell as a notebook runs them, on the bundled model with two steps a trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> list[str]:
    """The code cells; lines for IPython alone are left out."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return ["\n".join(line for line in source.splitlines() if not line.startswith("%")) for source in sources]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path):
    """Without a GPU it takes the bundled model; what it saves can be loaded."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_RLX_NOTEBOOK_STEPS": "2",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code_of(path))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.glob("runs/*/adapter_config.json"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_output(path):
    """No output, no execution count, and the installation first: also what removes the torchao that PEFT refuses."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert "%pip install" in "".join(code[0]["source"])
    assert "uninstall -qy torchao" in "".join(code[0]["source"])
    assert "CUDA_VISIBLE_DEVICES" in "".join(code[1]["source"]).split("import torch")[0]
