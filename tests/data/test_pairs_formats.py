"""Forms of preference data, from one to another, and from and to files."""

from __future__ import annotations

import json
import math
from datetime import datetime
from decimal import Decimal

import numpy as np
import pytest
from datasets import Dataset, load_dataset

from hf_rlx.data.pair_checks import check_preferences
from hf_rlx.data.pairs import build_pairs, convert, from_pairs, from_ultrafeedback, read_rows, write_rows

HH = {
    "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: two?\n\nAssistant: 2",
    "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: two?\n\nAssistant: 3, no\n\nHuman: so?\n\nAssistant: 2",
}


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


# --- forms -----------------------------------------------------------------------------------------------------------


def test_texts_part_at_a_white_space():
    """TRL's example; and a word in common is not cut in two."""
    rows = [
        {"chosen": "The sky is blue.", "rejected": "The sky is green.", "n": 1},
        {"chosen": "The sky is blue.", "rejected": "The sky is black.", "n": 2},
        {"chosen": "a b c", "rejected": "a b", "n": 3},
    ]
    made = convert(rows, "explicit")
    assert made == [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green.", "n": 1},
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " black.", "n": 2},
        {"prompt": "a", "chosen": " b c", "rejected": " b", "n": 3},
    ]
    assert convert(made, "implicit") == rows


def test_without_a_common_prompt_a_row_is_left_out():
    made = convert([{"chosen": "yes", "rejected": "no"}, {"chosen": [says("a")], "rejected": [says("b")]}], "explicit")
    assert made == []
    assert made.left_out == {"no prompt in common": [0, 1]}


def test_hh_parts_in_front_of_the_turn_that_differs():
    """Both sides together are what they were, to the letter."""
    (row,) = convert([HH], "explicit")
    assert row == {
        "prompt": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: two?\n\nAssistant:",
        "chosen": " 2",
        "rejected": " 3, no\n\nHuman: so?\n\nAssistant: 2",
    }
    assert convert([row], "implicit") == [HH]


def test_hh_to_messages_and_back():
    (row,) = convert([HH], "messages")
    assert row == {
        "prompt": [user("hi"), says("hello"), user("two?")],
        "chosen": [says("2")],
        "rejected": [says("3, no"), user("so?"), says("2")],
    }
    assert convert([row], "hh") == [HH]
    assert convert(convert([row], "implicit"), "explicit") == [row]


def test_hh_of_different_questions_has_no_prompt():
    row = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"}
    assert convert([row], "explicit").left_out == {"no prompt in common": [0]}


def test_hh_that_goes_on_with_another_question_parts_before_the_answer():
    """The same answer, then other questions: the last common Assistant turn is where the answers begin."""
    row = {
        "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
        "rejected": "\n\nHuman: a\n\nAssistant: b\n\nHuman: e\n\nAssistant: f",
    }
    (made,) = convert([row], "explicit")
    assert made["prompt"] == "\n\nHuman: a\n\nAssistant:"
    assert made["chosen"] == " b\n\nHuman: c\n\nAssistant: d"


def test_text_to_messages_and_back():
    text = {"prompt": "q", "chosen": "a", "rejected": "b"}
    messages = {"prompt": [user("q")], "chosen": [says("a")], "rejected": [says("b")]}
    assert convert([text], "messages") == [messages]
    assert convert([messages], "text") == [text]
    assert convert([text], "hh") == [
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}
    ]


def test_lists_are_converted_too():
    ranked = {"prompt": "q", "responses": ["a", "b", "c"], "ranks": [1, 2, 3]}
    assert convert([ranked], "messages") == [
        {"prompt": [user("q")], "responses": [[says("a")], [says("b")], [says("c")]], "ranks": [1, 2, 3]}
    ]


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        (
            {"prompt": [user("q"), says("r"), user("s")], "chosen": [says("a")], "rejected": [says("b")]},
            "text",
            "row 0 has the messages of user, assistant, user where plain text holds one of user",
        ),
        ({"prompt": [user("q")], "chosen": "a", "rejected": "b"}, "implicit", "row 0 mixes plain text and messages"),
        (
            {"prompt": [{"role": "tool", "content": "x"}], "chosen": [says("a")], "rejected": [says("b")]},
            "hh",
            "row 0 has a message of 'tool'",
        ),
        ({"prompt": "q"}, "text", "row 0 has neither `chosen` and `rejected`"),
        ({}, "xml", "the form is one of explicit, implicit, text, messages, hh, got 'xml'"),
    ],
)
def test_what_a_form_cannot_hold_is_named(row, form, message):
    with pytest.raises(ValueError, match=message):
        convert([row], form)


# --- rows that are pairs ---------------------------------------------------------------------------------------------


def test_pairs_of_which_nothing_can_be_learnt_are_left_out():
    def scored(chosen, rejected):
        return {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": chosen, "score_rejected": rejected}

    rows = [
        {"prompt": "q", "chosen": "a", "rejected": ""},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        scored(1, 1),
        scored(1, 2),
        scored(2, 1.5),
        scored(3, 1),
    ]
    made = from_pairs(rows, 0.5)
    assert made == rows[5:]
    assert made.left_out == {
        "empty responses": [0],
        "identical responses": [1],
        "all scores equal": [2],
        "chosen scores below rejected": [3],
        "difference within the margin": [4],
    }


def test_conversations_beside_their_prompt_lose_it():
    """As HuggingFaceH4/ultrafeedback_binarized writes them; argilla names the scores otherwise."""
    row = {"prompt": "q", "chosen": [user("q"), says("a")], "rejected": [user("q"), says("b")], "chosen-rating": 4.0}
    assert from_pairs([row | {"rejected-rating": 2.0}]) == [
        {
            "prompt": [user("q")],
            "chosen": [says("a")],
            "rejected": [says("b")],
            "score_chosen": 4.0,
            "score_rejected": 2.0,
        }
    ]
    listed = {"prompt": [user("q")], "chosen": [user("q"), says("a")], "rejected": [user("q"), says("b")]}
    assert from_pairs([listed]) == [{"prompt": [user("q")], "chosen": [says("a")], "rejected": [says("b")]}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "a"}, "row 0 has neither `chosen` and `rejected`"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "row 0 has 3 as `chosen`"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "row 0 has the prompt ''"),
        ("a", "row 0 is a str"),
    ],
)
def test_a_bad_pair_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        from_pairs([row])


def test_a_margin_of_pairs_needs_scores():
    with pytest.raises(ValueError, match="row 0 has no scores to hold against the margin"):
        from_pairs([{"prompt": "q", "chosen": "a", "rejected": "b"}], 0.5)
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 1.0, "score_rejected": 1.5}
    with pytest.raises(ValueError, match="margin must be a number of at least 0, got -1"):  # 1.0 - 1.5 is above it
        from_pairs([row], -1.0)


# --- UltraFeedback ---------------------------------------------------------------------------------------------------


def completion(text, model, *ratings, overall=1.0):
    aspects = {f"aspect {n}": {"Rating": rating} for n, rating in enumerate(ratings)}
    return {"response": text, "model": model, "annotations": aspects, "overall_score": overall}


def test_ultrafeedback():
    """Mean ratings a (5 + 4) / 2, b 3 (the other one is N/A), c none."""
    row = {
        "instruction": "q",
        "source": "x",
        "completions": [
            completion("a", "m", "5", "4", overall=2),
            completion("b", "n", "N/A", "3", overall=7),
            completion("c", "o", "N/A"),
        ],
    }
    (made,) = from_ultrafeedback([row])
    assert made == {
        "prompt": "q",
        "responses": ["a", "b", "c"],
        "scores": [4.5, 3.0, None],
        "models": ["m", "n", "o"],
        "source": "x",
    }
    (pair,) = build_pairs([made], response_columns=["models"])
    assert (pair["chosen"], pair["rejected"], pair["models_chosen"]) == ("a", "b", "m")
    assert from_ultrafeedback([row], "overall")[0]["scores"] == [2.0, 7.0, 1.0]


def test_a_bad_rating_is_named():
    row = {"instruction": "q", "completions": [completion("a", "m", "good")]}
    with pytest.raises(ValueError, match="row 0 has the rating 'good' of aspect 0; give a number, or N/A"):
        from_ultrafeedback([row])
    with pytest.raises(ValueError, match="row 0 has no `instruction` and `completions`"):
        from_ultrafeedback([{"instruction": "q"}])


# --- files -----------------------------------------------------------------------------------------------------------

TEXT = [
    {"prompt": 'q, "r"\r\n2', "chosen": "[1, 2]", "rejected": "null", "score_chosen": 1.0, "score_rejected": 0.5},
    {"prompt": "q", "chosen": "7", "rejected": "true", "score_chosen": 2.0, "score_rejected": 0.0},
]
MESSAGES = [{"prompt": [user("q")], "chosen": [says("a")], "rejected": [says("b")]}]
LISTS = [{"prompt": "q", "responses": ["a", "b"], "scores": [1.0, 0.5]}]


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("rows", [TEXT, MESSAGES, LISTS], ids=["text", "messages", "lists"])
def test_what_was_written_is_read(tmp_path, rows, ending):
    """Texts that look like numbers or JSON stay texts."""
    path = write_rows(rows, tmp_path / "deep" / f"pairs.{ending}")
    assert read_rows(path) == rows
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_datasets_loads_what_was_written(tmp_path, ending):
    """And the columns are those of a preference dataset in TRL: prompt, chosen, rejected."""
    rows = [{"prompt": "q", "chosen": f"a {n}", "rejected": "b", "score_chosen": 0.5} for n in range(3)]
    path = write_rows(rows, tmp_path / f"pairs.{ending}")
    kind = "json" if ending.startswith("json") else ending
    found = load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert list(found) == rows
    assert {"prompt", "chosen", "rejected"} <= set(found.column_names)


def test_messages_of_a_file_are_what_trainers_read(tmp_path):
    path = write_rows(MESSAGES, tmp_path / "pairs.jsonl")
    found = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    check_preferences(found, "train_dataset")
    assert list(found) == MESSAGES


def test_columns_are_made_even(tmp_path):
    """JSON has no NaN."""
    path = write_rows([{"chosen": "a", "n": math.nan}, {"chosen": "b", "m": 1}], tmp_path / "x.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"chosen": "a", "n": None, "m": None},
        {"chosen": "b", "n": None, "m": 1},
    ]


@pytest.mark.parametrize("column", ["prediction", "output", "completion", "question"])
def test_texts_of_a_table_stay_texts(tmp_path, column):
    """An answer 42 is no number."""
    (tmp_path / "x.csv").write_text(f"prompt,{column},label\n1,42,true\n", encoding="utf-8")
    assert read_rows(tmp_path / "x.csv") == [{"prompt": "1", column: "42", "label": True}]


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_values_that_json_lacks(tmp_path, ending):
    """Of NumPy they become Python's, dates and decimals text; bytes have no place there."""
    odd = {"n": [np.float32(0.5)], "when": [datetime(2026, 1, 2)], "sum": {"of": Decimal("1.50")}}
    path = write_rows([{"chosen": "a", **odd}], tmp_path / f"x.{ending}")
    assert read_rows(path) == [{"chosen": "a", "n": [0.5], "when": ["2026-01-02 00:00:00"], "sum": {"of": "1.50"}}]
    with pytest.raises(ValueError, match="a column holds a bytes, which JSON and CSV lack"):
        write_rows([{"chosen": "a", "n": [b"b"]}], path)


def test_folders_of_datasets_are_read(tmp_path):
    Dataset.from_list(TEXT).save_to_disk(str(tmp_path / "saved"))
    assert read_rows(tmp_path / "saved") == TEXT
    with pytest.raises(ValueError, match="has no split"):
        read_rows(write_rows(TEXT, tmp_path / "x.jsonl"), "train")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = write_rows(TEXT, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="a column holds values of several kinds"):
        write_rows([{"a": 1}, {"a": "b"}], path)
    assert read_rows(path) == TEXT
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.parquet"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n\n{"a": \n', r"x.jsonl, line 3: no JSON"),
        ("x.jsonl", "[1]\n", "x.jsonl, line 1: a list, not an object"),
        ("x.json", '{"a": 1}', "x.json: a dict, not a list of rows"),
        ("x.json", '{"a": 1}\n{"a": 2}', "one object a line belongs in a .jsonl file"),
        ("x.json", "[1]", "x.json: row 0 is a int"),
        ("x.csv", "a,b\n1\n", "x.csv, line 2: another number of cells than of columns"),
        ("x.csv", "a,b\n1,2,3\n", "x.csv, line 2: another number of cells"),
        ("x.parquet", "text", "x.parquet: no parquet file"),
        ("x.txt", "text", "x.txt ends with '.txt'; files end with .jsonl, .json, .csv, .parquet"),
        ("x.jsonl", "\n", "x.jsonl has no rows"),
        ("x.jsonl", b'{"a": "\xff"}', "x.jsonl: no UTF-8 text"),
        ("x.csv", b"a\n\xff\n", "x.csv: no UTF-8 text"),
        ("x.json", "[" * 100_000, "x.json: lists or objects too deep"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_rows(path)


def test_missing_files_endings_and_rows(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl does not exist"):
        read_rows(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match=r"ends with '.txt'; give one of .jsonl"):
        write_rows(TEXT, tmp_path / "x.txt")
    with pytest.raises(ValueError, match="no rows are left to write"):
        write_rows([], tmp_path / "x.jsonl")
