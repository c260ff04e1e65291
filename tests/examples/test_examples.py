"""The examples, run as a reader runs them: a fresh process, offline, from another folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", ["grpo", "dpo", "ppo"])
def test_the_loop_is_readable(name):
    """About a hundred lines below its docstring, opening with how it departs from the paper, and without a Trainer."""
    text = (ROOT / "examples" / "loops" / f"{name}.py").read_text(encoding="utf-8")
    docstring, code = text.split('"""', 2)[1:]
    assert "departs from the paper" in docstring
    assert len(code.splitlines()) <= 120
    assert "trainers" not in code
    assert "Trainer(" not in code


def test_the_dpo_loop_learns(tmp_path):
    """Twenty steps lift the sampled held-out accuracy by at least a tenth; at the first step the policy is its
    reference: the loss is ln 2 = 0.6931, the margin 0 and every pair a tie (1/2)."""
    out = run("loops/dpo.py", tmp_path, "--steps", "20")
    (before,) = numbers(r"held-out accuracy before: ([\d.]+)", out)
    (after,) = numbers(r"held-out accuracy after: ([\d.]+)", out)
    assert after > before + 0.1
    assert re.search(r"step +0  loss 0\.6931  accuracy 0\.500  margin [+-]0\.000", out)


def test_the_ppo_loop_learns(tmp_path):
    """Fifteen steps lift the sampled held-out accuracy by at least a tenth; the critic starts at 0, which explains
    nothing of the returns."""
    out = run("loops/ppo.py", tmp_path, "--steps", "15")
    (before,) = numbers(r"held-out accuracy before: ([\d.]+)", out)
    (after,) = numbers(r"held-out accuracy after: ([\d.]+)", out)
    assert after > before + 0.1
    assert re.search(r"step +0  .*explained [+-]0\.000", out)


def test_four_losses_on_pairs_are_compared(tmp_path):
    """The bundled model on twelve made-up pairs of six questions, two of them held out: a row of the table for the
    model before training and for each loss, a plot, a card, the adapters. Without the file: what it should be."""
    rows = [
        {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + j)} for i in range(6) for j in (1, 10)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sizes = ("--model", "tiny", "--losses", "dpo,orpo", "--train", "8", "--held-out", "4", "--looks", "1")
    out = run("03_preference_gsm8k.py", tmp_path, "--pairs", str(path), "--output", "out", *sizes)
    assert re.search(r"8 pairs to train on, 4 held out", out)
    assert re.search(r"^\| before training \|.*\n\| DPO \| [\d.]+ \|.*\n\| ORPO \| [\d.]+ \|", out, re.M)
    for name in ("README.md", "training.png", "table.md", "dpo/adapter_model.safetensors", "orpo/log.jsonl"):
        assert (tmp_path / "out" / name).is_file(), name
    script = str(ROOT / "examples" / "03_preference_gsm8k.py")
    done = subprocess.run(
        [sys.executable, script, "--pairs", "none.jsonl"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "--pairs none.jsonl does not exist; it is a JSONL file with prompt, chosen and rejected" in done.stderr


def test_the_rule_of_thumb_is_tested_at_equal_tokens(tmp_path):
    """Two arms of 4,000 tokens: both spend the budget and overrun it by less than a step and a rollout."""
    sizes = ("--budget", "4000", "--problems", "64", "--validation", "8", "--questions", "16", "--seeds", "1")
    out = run("04_dpo_then_grpo.py", tmp_path, "--arms", "dpo+grpo,iterative", *sizes, "--output", "out")
    for name in ("iterative DPO", "DPO, GRPO"):
        (row,) = re.findall(rf"^\| {name} \|.*$", out, re.M)
        sampled, trained = (int(cell.replace(",", "")) for cell in row.split("|")[5:7])
        assert 4000 <= sampled + trained < 4000 + 2 * 3000
    assert (tmp_path / "out" / "arms.json").is_file()


def test_the_benchmark_of_preference_losses_runs(tmp_path):
    """Ours alone, on the bundled model: a line for the loss and its share of the floor."""
    sizes = ("--model", "tiny", "--steps", "1", "--prompt", "10", "--answer", "10", "--threads", "1")
    out = run("benchmarks/preference.py", tmp_path, "--sides", "ours", "--losses", "simpo", *sizes)
    assert re.search(r"^SimPO, ours +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+$", out, re.M)
    assert re.search(r"floor [\d.]+ s for \d+ unique tokens, \d+ of answers \(\d+%\)", out)
