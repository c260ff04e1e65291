"""The examples, run as a reader runs them: a fresh process, offline, from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, folder: Path, *arguments: str) -> str:
    """Standard output of `python examples/<script>`; fails with the end of its errors."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def numbers(pattern: str, text: str) -> tuple[float, ...]:
    """The groups of the only match of `pattern`, as numbers."""
    found = re.findall(pattern, text)
    assert len(found) == 1, text[-1000:]
    return tuple(float(x) for x in (found[0] if isinstance(found[0], tuple) else (found[0],)))


def test_a_trl_script_runs_after_changing_the_import(tmp_path):
    """Fifteen steps: the reward of the last three is above that of the first three; every step prints its line."""
    out = run("migrate_from_trl.py", tmp_path, "--max_steps", "15", "--output_dir", str(tmp_path / "run"))
    first, last = numbers(r"completion: ([\d.]+) in the first steps, ([\d.]+) in the last", out)
    assert last > first + 0.1
    assert len(re.findall(r"step +\d+  reward", out)) == 15


def test_the_import_is_the_only_change():
    """Nothing else in the script is ours: what it imports from hf_rlx are TRL's two names, and every field of the
    configuration is a field of TRL's."""
    text = (ROOT / "examples" / "migrate_from_trl.py").read_text(encoding="utf-8")
    ours, theirs = (re.search(rf"^{p} import (.*)$", text, re.M) for p in ("from hf_rlx", "# from trl"))
    assert ours.group(1) == theirs.group(1)
    import trl

    block = text[text.index("args=GRPOConfig(") : text.index("train_dataset=dataset")]
    fields = set(re.findall(r"^ +(\w+)=", block, re.M)) - {"args"}
    assert len(fields) > 5
    assert fields <= trl.GRPOConfig.__dataclass_fields__.keys()


def test_the_one_file_loop_learns(tmp_path):
    """Twelve steps lift the sampled accuracy on held-out problems from under a half by at least a tenth."""
    out = run("loops/grpo.py", tmp_path, "--steps", "12")
    (before,) = numbers(r"held-out accuracy before: ([\d.]+)", out)
    (after,) = numbers(r"held-out accuracy after: ([\d.]+)", out)
    assert after > before + 0.1
    assert numbers(r"step   0  right [\d.]+  groups kept (\d+)/16", out)[0] > 8


def test_the_loop_is_readable():
    """About a hundred lines below its docstring, opening with how it departs from the paper, and without a Trainer."""
    text = (ROOT / "examples" / "loops" / "grpo.py").read_text(encoding="utf-8")
    docstring, code = text.split('"""', 2)[1:]
    assert "departs from the paper" in docstring
    assert len(code.splitlines()) <= 120
    assert "trainers" not in code
    assert "Trainer(" not in code
