"""`hf-rlx verify`: the confusion table, the disagreements, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_rlx.cli import main
from hf_rlx.selfcheck import VERIFIERS, read_rows, self_check, with_gold

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"
ROWS = [
    {"completion": "\\boxed{4}", "gold": "4", "expected": True},
    {"prediction": "\\boxed{5}", "answer": "4", "right": False},
    {"completion": "\\boxed{5}", "gold": "4", "label": True},  # the file is wrong
    {"completion": "\\boxed{4}", "gold": "see figure", "expected": 1},  # no verdict
    {"completion": [{"role": "assistant", "content": "4"}], "gold": "4", "expected": "either"},
]


def jsonl(path: Path, rows: list[dict]) -> str:
    """The rows as a file; its name."""
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return str(path)


def test_table_and_disagreements(tmp_path: Path, capsys):
    """Two of the four rows that have an expected verdict agree."""
    file = jsonl(tmp_path / "cases.jsonl", ROWS)
    assert main(["verify", file]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:5] == [
        "expected        right     wrong      open",
        "is right            1         0         1",
        "is wrong            1         1         0",
        "is failed           1         0         0",
        "agreement  2 of 4 (50.00 %)",
    ]
    assert "line 3: expected right, wrong (different)" in printed
    assert "line 4: expected right, failed (the gold answer cannot be read" in printed
    assert "slowest:" in printed
    assert main(["verify", file, "--strict"]) == 1
    assert main(["verify", file, "--show", "1"]) == 0
    assert "1 more disagreements; --show 2 lists all" in capsys.readouterr().out
    assert main(["verify", jsonl(tmp_path / "good.jsonl", ROWS[:2]), "--strict"]) == 0


def test_the_number_verifier_and_where_the_answer_stands(tmp_path: Path, capsys):
    file = jsonl(tmp_path / "cases.jsonl", [{"completion": "#### 4 and 5", "gold": 5, "expected": True}])
    assert main(["verify", file, "--verifier", "number", "--strict"]) == 0  # the last number
    assert main(["verify", file, "--verifier", "number", "--extract", "hash", "--strict"]) == 1


def test_gold_from_another_file(tmp_path: Path):
    rows = read_rows(Path(jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2?", "completion": "A: 4", "label": True}])))
    gold = tmp_path / "b.jsonl"
    jsonl(gold, [{"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}])
    report = self_check(with_gold(rows, gold, "prompt=question"), VERIFIERS["math"]())
    assert not report.disagreements
    with pytest.raises(ValueError, match="row 1 has no partner"):
        with_gold([{"prompt": "3+3?"}], gold, "prompt=question")
    with pytest.raises(ValueError, match="rows without the field 'prompt'"):
        with_gold(rows, gold, "prompt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n', "row 1 has none of the fields completion"),
        ("[1]\n", ":1 is no JSON object"),
        ("{\n", ":1 is no JSON"),
    ],
)
def test_bad_files(content: str, message: str, tmp_path: Path, capsys):
    (tmp_path / "bad.jsonl").write_text(content)
    assert main(["verify", str(tmp_path / "bad.jsonl")]) == 2
    assert message in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "missing.jsonl")]) == 2


@pytest.mark.skipif(not SHARED.exists(), reason="the collected answers lie beside the checkout, not in it")
def test_real_model_answers():
    """1,642 solutions of four models with their labels: none is judged otherwise."""
    rows = with_gold(read_rows(SHARED / "real_model_outcomes.jsonl"), SHARED / "test.jsonl", "prompt=question")
    report = self_check(rows, VERIFIERS["math"]())
    assert len(report.items) == 1642
    assert report.disagreements == []
