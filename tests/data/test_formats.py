"""Dataset checks: one clear message before anything is trained."""

import pytest
from datasets import Dataset

from hf_rlx.data.demonstrations import check_demonstrations
from hf_rlx.data.formats import PromptError, check_all_prompts, check_prompts, naming_rows
from hf_rlx.data.pair_checks import check_preferences


def test_good_datasets_pass():
    check_prompts(None, "eval_dataset")
    check_prompts(Dataset.from_list([{"prompt": "a", "answer": "b"}]), "train_dataset")
    check_prompts([{"prompt": "a"}], "train_dataset")


@pytest.mark.parametrize("wrap", [Dataset.from_list, list])
def test_the_message_has_the_columns_and_the_rename(wrap):
    rows = [{"id": 1, "question": "a", "answer": "b"}]
    with pytest.raises(ValueError, match="train_dataset has no column `prompt`") as caught:
        check_prompts(wrap(rows), "train_dataset")
    assert "it has ['id', 'question', 'answer']. If `question` is the prompt" in str(caught.value)
    assert 'dataset = dataset.rename_column("question", "prompt")' in str(caught.value)


def test_an_unknown_column_is_suggested_by_its_place():
    with pytest.raises(ValueError, match='rename_column\\("aufgabe", "prompt"\\)'):
        check_prompts([{"aufgabe": "a"}], "train_dataset")


def test_the_rename_in_the_message_works():
    dataset = Dataset.from_list([{"text": "a"}])
    with pytest.raises(ValueError, match="rename_column") as caught:
        check_prompts(dataset, "train_dataset")
    line = str(caught.value).split("dataset = ")[1]
    check_prompts(eval(line, {"dataset": dataset}), "train_dataset")


def test_empty():
    for dataset in ([], Dataset.from_dict({"prompt": []})):
        with pytest.raises(ValueError, match="eval_dataset is empty"):
            check_prompts(dataset, "eval_dataset")


def test_streaming():
    stream = Dataset.from_list([{"prompt": "a"}]).to_iterable_dataset()
    for dataset in (stream, iter([{"prompt": "a"}])):
        with pytest.raises(ValueError, match="train_dataset is a streaming dataset; load it whole"):
            check_prompts(dataset, "train_dataset")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            {"train": [{"prompt": "a"}]},
            r"dictionary of \[.train.\]; pass one of its datasets",
        ),
        ("some/set", "is the text 'some/set'; load it"),
        (["1+1="], "must have rows that are dictionaries with a `prompt`, got str"),
        ([{"prompt": "a"}, {"prompt": None}], "row 1 has the prompt None"),
        ([{"prompt": "a"}, {"prompt": ""}], "row 1 has the prompt ''"),
        ([{"prompt": "a", "images": []}], "does not carry vision models"),
    ],
)
def test_datasets_that_cannot_be_trained_on(dataset, message):
    """Each message names the row or the way out."""
    with pytest.raises(ValueError, match=message):
        check_prompts(dataset, "train_dataset")


def said(*contents):
    """A conversation of one role."""
    return [{"role": "user", "content": content} for content in contents]


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_good_conversations_pass():
    check_prompts([{"prompt": said("a")}, {"prompt": said("", "b")}], "train_dataset")
    check_prompts([{"prompt": said([{"type": "text", "text": "a"}])}], "train_dataset")
    check_prompts(Dataset.from_list([{"prompt": [{"role": "system", "content": "s"}, *said("a")]}]), "train_dataset")
    called = [{"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "name": "f", "content": "5"}]
    check_prompts([{"prompt": [*said("a"), *called]}], "train_dataset")
    check_prompts(Dataset.from_list([{"prompt": [*said("a"), *called]}]), "train_dataset")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"row 1 has the prompt \[\]"),
        ({"role": "user"}, r"row 1 has the prompt \{'role': 'user'\}"),
        (7, "row 1 has the prompt 7"),
        (["a"], "row 1 has a list of str as prompt, where message 0 should be a dictionary"),
        ([{"content": "a"}], r"row 1 has a message 0 without `role` \(it has \['content'\]\)"),
        ([{"role": "user", "value": "a"}], r"row 1 has a message 0 without `content` \(it has \['role', 'value'\]\)"),
        (said("a", None), "row 1 has the content None in message 1"),
        ([*said("a"), {"role": "assistant", "content": None, "tool_calls": []}], "row 1 has the content None"),
        (said([]), r"row 1 has the content \[\] in message 0"),
        (said([{"type": "image"}]), "row 1 has parts in message 0 that are not all"),
        ([{"role": None, "content": "a"}], "row 1 has the role None in message 0"),
        (said("", ""), "row 1 has messages without any text"),
    ],
)
def test_conversations_that_cannot_be_trained_on(prompt, message):
    with pytest.raises(ValueError, match=f"train_dataset: {message}"):
        check_prompts([{"prompt": said("a")}, {"prompt": prompt}], "train_dataset")


def test_both_kinds_in_one_dataset():
    """Rewards would get strings for some rows and messages for others."""
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": said("c")}]
    with pytest.raises(ValueError, match="mixes both kinds of prompts: row 0 is plain text, row 2 is messages"):
        check_prompts(rows, "train_dataset")
    with pytest.raises(ValueError, match="row 0 is messages, row 1 is plain text"):
        check_prompts(rows[::-1], "eval_dataset")


@pytest.mark.parametrize(("column", "index"), [("prompts", 1), ("Prompt", 0), ("prompt_text", 1), ("PROMPT", 1)])
def test_a_misspelt_column_is_suggested_first(column, index):
    row = {"question": "a"} | {column: "b"} if index else {column: "b", "question": "a"}
    with pytest.raises(ValueError, match=rf'rename_column\("{column}", "prompt"\)'):
        check_prompts([row], "train_dataset")


@pytest.mark.parametrize("long", ["x" * 1_000_000, said("x" * 999_999, "y"), said([{"text": "x" * 1_000_000}])])
def test_a_megabyte_prompt_is_refused_with_its_row(long):
    short = "a" if isinstance(long, str) else said("a")
    rows = [{"prompt": short}, {"prompt": long}]
    check_prompts(rows, "train_dataset")
    with pytest.raises(
        ValueError, match="train_dataset: row 1 has a prompt of 1,000,000 characters, which cannot fit"
    ):
        check_prompts(rows, "train_dataset", max_characters=999_999)
    check_prompts(rows, "train_dataset", max_characters=1_000_000)


def test_the_datasets_of_a_trainer():
    """Room for 10 tokens: 200 characters may fit, 201 may not."""
    check_all_prompts(None, None)
    check_all_prompts([{"prompt": "x" * 200}], {"a": [{"prompt": "x" * 200}]}, room=10)
    with pytest.raises(ValueError, match="train_dataset: row 0 has a prompt of 201 characters"):
        check_all_prompts([{"prompt": "x" * 201}], None, room=10)
    with pytest.raises(ValueError, match="eval_dataset b: row 1 has the prompt None"):
        check_all_prompts(None, {"a": [{"prompt": "x"}], "b": [{"prompt": "x"}, {"prompt": None}]})
    check_all_prompts([{"prompt": "x"}], None, room=0)  # not the prompt's fault


@pytest.mark.parametrize("wrap", [Dataset.from_list, list])
def test_faults_of_a_rollout_name_the_row(wrap):
    rows = wrap([{"prompt": "a"}, {"prompt": "b"}])
    with (
        pytest.raises(PromptError, match=r"^train_dataset: row 1: too long$") as caught,
        naming_rows(rows, "train_dataset"),
    ):
        raise PromptError("too long", "b")
    assert caught.value.prompt == "b"
    for dataset in (rows, None):
        with pytest.raises(PromptError, match=r"^too long$"), naming_rows(dataset, "train_dataset"):
            raise PromptError("too long", "c")
    with pytest.raises(KeyError), naming_rows(rows, "train_dataset"):
        raise KeyError("other faults pass")


def test_a_row_that_is_no_dictionary_is_named():
    with pytest.raises(ValueError, match="train_dataset: row 1 is a str; rows are dictionaries with a `prompt`"):
        check_prompts([{"prompt": "a"}, "b"], "train_dataset")


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ("a\ud83d", ""),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "\udc00b"}], " in message 1"),
        ([{"role": "us\ud83der", "content": "a"}], " in message 0"),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}], " in message 0"),
    ],
)
def test_half_a_character_is_named(prompt, where):
    """No tokenizer takes one half of a pair (D800-DFFF); a whole character of two halves passes."""
    whole = "a\U0001f600" if isinstance(prompt, str) else [{"role": "user", "content": "\U0001f600"}]
    with pytest.raises(ValueError, match=rf"eval_dataset: row 1 holds half a character \(.*\){where}; give it text"):
        check_prompts([{"prompt": whole}, {"prompt": prompt}], "eval_dataset")
    check_prompts([{"prompt": whole}], "eval_dataset")


def test_token_ids_are_no_prompts():
    """What a tokenizing map leaves is never offered as the prompt, not even where it is all that is there."""
    row = {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [1, 2]}
    for rows, check in (([row], check_prompts), ([row], check_preferences), ([row], check_demonstrations)):
        with pytest.raises(ValueError, match="not token ids: leave out the map that tokenizes") as caught:
            check(rows, "train_dataset")
        assert "rename" not in str(caught.value)


def test_every_likely_rename_is_given_at_once():
    """By the words of the names; a score and a kind are no answer and no question."""
    columns = {"user question": "q", "good answer": "a", "bad answer": "b", "good_score": 1.0, "question_type": "x"}
    with pytest.raises(ValueError, match="rename_columns") as caught:
        check_preferences([columns], "train_dataset")
    renamed = "{'good answer': 'chosen', 'bad answer': 'rejected', 'user question': 'prompt'}"
    assert f"dataset = dataset.rename_columns({renamed})" in str(caught.value)


def test_a_row_is_shown_with_its_number():
    """Shortened, with what drops all of the kind."""
    rows = [{"prompt": "p" * 99, "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "", "rejected": "b"}]
    with pytest.raises(ValueError, match="row 1 has '' as `chosen`") as caught:
        check_preferences(rows, "train_dataset")
    assert str(caught.value).endswith(
        "The row: {'prompt': 'q', 'chosen': '', 'rejected': 'b'}; to drop all such rows: "
        'dataset = dataset.filter(lambda row: row["chosen"])'
    )
    with pytest.raises(
        ValueError, match=r"row 0 has 3 as `chosen`.*The row: \{'prompt': 'p{56}\.\.\., 'chosen': 3, .*'b'\}$"
    ):
        check_preferences([{**rows[0], "chosen": 3}], "train_dataset")
    with pytest.raises(
        ValueError, match=r"row 1 has the prompt None.*The row: .*filter\(lambda row: row\[\"prompt\"\]\)"
    ):
        check_prompts([{"prompt": "a"}, {"prompt": None}], "train_dataset")
