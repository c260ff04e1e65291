"""Rows of a run: files, tasks, held-out sides, renamed columns."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, DatasetDict

from hf_rlx.cli import UsageError, main
from hf_rlx.cli.data import held_out_splits, load_data, located, read_rows_of
from hf_rlx.cli.options import defaults, options_of


def load(kind="prompts", **options):
    return load_data(defaults(options), kind, 0)


def test_a_csv_file_keeps_text_as_text(tmp_path):
    """The answer `007` is text; a margin a number, missing where its cell is empty; messages are lists; a quoted cell
    may hold commas and lines."""
    file = tmp_path / "pairs.csv"
    file.write_text(
        "prompt,chosen,rejected,margin,talk\n"
        '"1+1, or\nwhat?",2,007,1.5,"[{""role"": ""user"", ""content"": ""a""}]"\n'
        'b,3,4,,"[{""role"": ""user"", ""content"": ""b""}]"\n',
        encoding="utf-8",
    )
    rows = list(load("pairs", dataset=str(file)).train)
    assert rows[0] == {
        "prompt": "1+1, or\nwhat?",
        "chosen": "2",
        "rejected": "007",
        "margin": 1.5,
        "talk": [{"role": "user", "content": "a"}],
    }
    assert rows[1]["margin"] is None


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_a_csv_file_of_a_spreadsheet(tmp_path, sign, caplog):
    """Another sign between the cells is recognised by the header, which lacks the comma, and is told; a comma inside a
    cell separates nothing then, and a header of one column has no sign at all."""
    file = tmp_path / "rows.csv"
    file.write_text(f"prompt{sign}answer\n1,5+1={sign}2,5\n", encoding="utf-8")
    with caplog.at_level("INFO", "hf_rlx"):
        assert list(load(dataset=str(file)).train) == [{"prompt": "1,5+1=", "answer": "2,5"}]
    assert f"lie between {'tabs' if sign == chr(9) else repr(sign)}" in caplog.text
    file.write_text("prompt\na;b\n", encoding="utf-8")
    assert list(load(dataset=str(file)).train) == [{"prompt": "a;b"}]


def test_columns_the_other_way_round(tmp_path):
    """`--columns old=new` is recognised by what the rows have, and corrected; a name that is nowhere is not."""
    file = tmp_path / "rows.csv"
    file.write_text("question,good answer\na,b\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"question and not prompt: the other way round, --columns prompt=question$"):
        load(dataset=str(file), columns=["question=prompt"])
    with pytest.raises(UsageError, match=r"--columns prompt=question 'chosen=good answer'$"):
        load("pairs", dataset=str(file), columns=["question=prompt", "good answer=chosen"])
    with pytest.raises(UsageError, match="have no column 'frage'"):
        load(dataset=str(file), columns=["prompt=frage"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,chosen\na\n", "line 2 has fewer cells than the header"),
        ("prompt\na,b\n", "line 2 has more cells than the header"),
        ("", "has no header line"),
        ("prompt\n", "has no rows"),
        ("prompt,margin\na,much\n", "the column margin must hold numbers"),
    ],
)
def test_csv_files_with_mistakes(tmp_path, text, message):
    file = tmp_path / "rows.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load(dataset=str(file))


def test_other_files(tmp_path):
    """JSON Lines (a column that only a later row has is kept), a JSON list, parquet, TSV, a saved dataset."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": "y", "answer": "1"}\n', encoding="utf-8")
    rows = [{"prompt": "x", "answer": None}, {"prompt": "y", "answer": "1"}]
    assert list(load(dataset=str(tmp_path / "a.jsonl")).train) == rows
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    assert list(load(dataset=str(tmp_path / "b.json")).train) == rows
    Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    assert list(load(dataset=str(tmp_path / "c.parquet")).train) == rows
    (tmp_path / "d.tsv").write_text("prompt\tanswer\nx\t5\n", encoding="utf-8")
    assert list(load(dataset=str(tmp_path / "d.tsv")).train) == [{"prompt": "x", "answer": "5"}]
    DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1])).save_to_disk(tmp_path / "saved")
    data = load(dataset=str(tmp_path / "saved"), eval_split="test")
    assert (len(data.train), len(data.held_out)) == (2, 1)
    with pytest.raises(ValueError, match="has no split 'dev'; it has train, test"):
        load(dataset=str(tmp_path / "saved"), eval_split="dev")


def test_a_relative_path_is_also_looked_for_beside_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    monkeypatch.chdir("/")
    assert located("rows.jsonl", tmp_path) == str(tmp_path / "rows.jsonl")
    assert (located("me/data", tmp_path), located(None, tmp_path)) == ("me/data", None)
    with pytest.raises(FileNotFoundError, match=r"no file or folder rows\.jsonl"):
        load(dataset="rows.jsonl")


def test_held_out_rows(tmp_path):
    """A tenth of 40 rows, none of them trained on; another file; never two of these."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(40)), encoding="utf-8")
    data = load(dataset=str(file), eval_fraction=0.1)
    sides = [{row["prompt"] for row in side} for side in (data.train, data.held_out)]
    assert [len(side) for side in sides] == [36, 4]
    assert not sides[0] & sides[1]
    assert len(load(dataset=str(file), eval_dataset=str(file)).held_out) == 40
    with pytest.raises(UsageError, match="--eval-dataset and --eval-fraction both say"):
        load(dataset=str(file), eval_dataset=str(file), eval_fraction=0.1)
    with pytest.raises(UsageError, match="is one file; hold out with"):
        load(dataset=str(file), eval_split="test")
    with pytest.raises(UsageError, match="between 0 and 1, got 2"):
        load(dataset=str(file), eval_fraction=2.0)


def test_renamed_columns(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("question,good,bad\na,b,c\n", encoding="utf-8")
    columns = ["prompt=question", "chosen=good,rejected=bad"]
    assert list(load("pairs", dataset=str(file), columns=columns).train) == [
        {"prompt": "a", "chosen": "b", "rejected": "c"}
    ]
    assert load("pairs", dataset=str(file), columns={"prompt": "question"}).train.column_names[0] == "prompt"
    with pytest.raises(UsageError, match="no column 'questoin'; did you mean 'question'"):
        load(dataset=str(file), columns=["prompt=questoin"])
    with pytest.raises(UsageError, match="takes new=old"):
        load(dataset=str(file), columns=["prompt"])
    with pytest.raises(UsageError, match="have a column 'bad' already"):
        load(dataset=str(file), columns=["bad=good"])


def test_tasks():
    """Options behind a colon; a task brings its held-out side, its verifier and the length of an answer. For
    fine-tuning its right answers are the completions."""
    data = load(dataset="arithmetic:n_train=8,n_test=4")
    assert (len(data.train), len(data.held_out)) == (8, 4)
    assert data.reward == {"name": "number", "extract": "whole"}
    assert data.max_completion_length == 8
    shown = load("demonstrations", dataset="spoken-arithmetic:n_train=8,n_test=4").train[0]
    assert shown.keys() == {"prompt", "completion"}
    assert shown["completion"][0]["role"] == "assistant"
    assert isinstance(load(dataset="countdown:n_train=4,n_test=2,conversational=false").train[0]["prompt"], str)
    with pytest.raises(UsageError, match="needs rows with chosen and rejected"):
        load("pairs", dataset="arithmetic")
    with pytest.raises(UsageError, match="did you mean 'arithmetic'"):
        load(dataset="arithmetics")
    with pytest.raises(UsageError, match=r"refuses its options: .*n_trian"):
        load(dataset="arithmetic:n_trian=3")
    with pytest.raises(UsageError, match="reasoning_gym needs the name"):
        load(dataset="reasoning_gym")


def test_options_of_a_name():
    """JSON where it is JSON, else text; commas inside brackets and quotes separate nothing."""
    assert options_of("math") == ("math", {})
    assert options_of("number:extract=last,tolerance=0.1") == ("number", {"extract": "last", "tolerance": 0.1})
    assert options_of('tags:tags=["think", "answer"],x="a,b"') == ("tags", {"tags": ["think", "answer"], "x": "a,b"})
    assert options_of('code:{"timeout": 5}') == ("code", {"timeout": 5})
    with pytest.raises(ValueError, match="options are written name:key=value"):
        options_of("math:fast")


def test_a_column_with_a_space_is_quoted(tmp_path):
    """The shell has split it: the message has the whole line; of half a name it says which column is meant."""
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"question": "a", "good answer": "b", "bad answer": "c"}\n', encoding="utf-8")
    split = ["chosen=good", "answer", "rejected=bad", "answer"]
    with pytest.raises(UsageError, match=r"quote .*: --columns 'chosen=good answer' 'rejected=bad answer'$"):
        load("pairs", dataset=str(file), columns=split)
    with pytest.raises(UsageError, match="no column 'good'; did you mean 'good answer'"):
        load("pairs", dataset=str(file), columns=["chosen=good"])


def test_splits_that_could_be_held_out(tmp_path):
    """Of a saved dataset and of a folder of files; the training split is none, and a file has none."""
    rows = Dataset.from_list([{"prompt": "a"}])
    DatasetDict({"train": rows, "test": rows, "other": rows}).save_to_disk(str(tmp_path / "saved"))
    assert held_out_splits(str(tmp_path / "saved"), "train") == ["test"]
    (tmp_path / "files").mkdir()
    for name in ("train.jsonl", "validation.jsonl", "notes.txt"):
        (tmp_path / "files" / name).write_text('{"prompt": "a"}\n', encoding="utf-8")
    assert held_out_splits(str(tmp_path / "files"), "train") == ["validation"]
    assert held_out_splits(str(tmp_path / "files" / "train.jsonl"), "train") == []
    assert held_out_splits("arithmetic", "train") == []


def test_a_header_that_says_a_name_twice(tmp_path, capsys):
    """The second would silently take the place of the first; for training and for `pairs`."""
    file = tmp_path / "rows.csv"
    file.write_text("prompt,chosen,rejected,chosen\na,b,c,d\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.csv has two columns called 'chosen'; rename one of them"):
        read_rows_of(file)
    assert main(["pairs", str(file)]) == 1
    assert "two columns called 'chosen'" in capsys.readouterr().err
