"""Dataset checks: one clear message before anything is trained."""

import pytest
from datasets import Dataset

from hf_rlx.data.formats import check_prompts


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
