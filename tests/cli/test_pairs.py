"""`hf-rlx pairs`, run in this process."""

from __future__ import annotations

import json

import pytest

from hf_rlx.cli import main
from hf_rlx.data.pairs import read_rows, write_rows

OUTCOMES = [
    {"prompt": "p", "completion": "aaa", "label": True},
    {"prompt": "p", "completion": "b", "label": False},
    {"prompt": "q", "completion": "c", "label": True},
]


@pytest.fixture
def file(tmp_path):
    return write_rows(OUTCOMES, tmp_path / "outcomes.jsonl")


def test_outcomes_to_pairs(file, tmp_path, capsys):
    out = tmp_path / "pairs.jsonl"
    assert main(["pairs", str(file), "--out", str(out), "--report"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "3 rows (outcomes) -> 1 pair"
    assert "  1 left out: fewer than two scored responses (rows 2)" in printed
    assert "length: chosen is the longer answer in 100.0% of 1 pair (1 longer, 0 shorter, 0 equal)" in printed
    assert printed[-1] == f"rows: {out}"
    assert read_rows(out) == [
        {"prompt": "p", "chosen": "aaa", "rejected": "b", "score_chosen": 1.0, "score_rejected": 0.0}
    ]


def test_without_out_nothing_is_written(file, tmp_path, capsys):
    assert main(["pairs", str(file)]) == 0
    assert capsys.readouterr().out.endswith("nothing written; --out FILE writes the rows\n")
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]


def test_options_reach_their_functions(tmp_path, capsys):
    """Of 5, 3, 1 a margin of 2 leaves one pair; a repeated row goes; the form is messages."""
    rows = [{"prompt": "q", "responses": ["a", "b", "c"], "scores": [5, 3, 1]}] * 2
    file, out, report = write_rows(rows, tmp_path / "x.json"), tmp_path / "y.parquet", tmp_path / "report.json"
    options = ["--from", "scores", "--strategy", "all", "--margin", "2", "--dedupe", "--format", "messages"]
    assert main(["pairs", str(file), *options, "--out", str(out), "--report", str(report)]) == 0
    assert "  1 left out: duplicate of an earlier row (pairs 1)" in capsys.readouterr().out
    (pair,) = read_rows(out)
    assert pair["chosen"] == [{"role": "assistant", "content": "a"}]
    assert json.loads(report.read_text(encoding="utf-8"))["rows_out"] == 1


def test_tokens_are_counted(file, capsys):
    """The bundled tokenizer has a token a character: 3 against 1."""
    assert main(["pairs", str(file), "--tokenizer", "tiny"]) == 0
    assert "+2.0 characters on average, +2.0 tokens" in capsys.readouterr().out


def test_columns_are_renamed_before_cells_are_read(tmp_path, capsys):
    """`good` holds 42 and 7, which are texts under the name of `chosen`; a column that nobody names stays."""
    file, out = tmp_path / "mine.csv", tmp_path / "pairs.jsonl"
    file.write_text("question,good,bad,margin\n40+2=,42,43,1\n3+4=,7,8,2\n", encoding="utf-8")
    words = ["--columns", "prompt=question", "chosen=good,rejected=bad", "--out", str(out)]
    assert main(["pairs", str(file), *words]) == 0
    assert capsys.readouterr().out.startswith("2 rows (pairs) -> 2 pairs")
    assert read_rows(out)[0] == {"prompt": "40+2=", "chosen": "42", "rejected": "43", "margin": 1}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["chosen=god"], "mine.jsonl has no column 'god'; did you mean 'good'?"),
        (["chosen=good"], "mine.jsonl has a column 'chosen' already"),
        (["good"], "--columns takes new=old, not 'good'"),
    ],
)
def test_columns_that_cannot_be_renamed(tmp_path, capsys, columns, message):
    file = write_rows([{"prompt": "p", "good": "a", "chosen": "b", "rejected": "c"}], tmp_path / "mine.jsonl")
    with pytest.raises(SystemExit) as caught:
        main(["pairs", str(file), "--columns", *columns])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.jsonl"], "missing.jsonl does not exist"),
        (["FILE", "--from", "judge"], "row 0 has no two responses"),
        (["FILE", "--margin", "-1"], "margin must be a number of at least 0"),
        (["FILE", "--margin", "3", "--out", "x.jsonl"], "no rows are left to write"),
        (["FILE", "--out", "x.txt"], "x.txt ends with '.txt'"),
    ],
)
def test_errors_are_one_line(file, words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["pairs", *[str(file) if word == "FILE" else word for word in words]]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("hf-rlx pairs: error: ")
    assert message in printed
    assert printed.count("\n") == 1


def test_a_table_with_semicolons_says_how_to_write_it_anew(tmp_path, capsys):
    """The line it names does so, and an answer `None` stays one."""
    file = tmp_path / "rows.csv"
    file.write_text("prompt;chosen;rejected\na;1,5;None\n", encoding="utf-8")
    assert main(["pairs", str(file)]) == 1
    told = capsys.readouterr().err
    assert "has ';' between its cells, not commas; write it anew: import pandas" in told
    line = told.partition("write it anew: ")[2].strip().replace("new.csv", str(tmp_path / "new.csv"))
    exec(line)
    assert (tmp_path / "new.csv").read_text(encoding="utf-8") == 'prompt,chosen,rejected\na,"1,5",None\n'
    assert main(["pairs", str(tmp_path / "new.csv")]) == 0


@pytest.mark.parametrize(
    "words",
    [["--strategy", "best"], ["--keep-duplicates"], ["--balance", "--strategy", "ranked"], ["--margin", "x"]],
)
def test_a_wrong_command_line_is_two(file, words):
    with pytest.raises(SystemExit) as caught:
        main(["pairs", str(file), *words])
    assert caught.value.code == 2
