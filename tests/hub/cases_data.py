"""Pairs to the Hub and back, and the command `hf-rlx push`."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, load_dataset
from huggingface_hub import HfApi

from hf_rlx.cli import main
from hf_rlx.data.hub import push_pairs
from hf_rlx.data.pair_files import read_rows
from hf_rlx.hub import HubError
from hf_rlx.models.shared import SharedModel
from hf_rlx.secrets import SecretFoundError
from tests.hub.server import WRITER, Fault
from tests.hub.tools import all_roles, assert_same, names, tokenizer
from tests.trainers import pair_tools

ROWS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "7", "margin": i / 2} for i in range(6)]


def said(text):
    """A conversation of one message."""
    return [{"role": "assistant", "content": text}]


def test_pairs_come_back(hub, tmp_path):
    """By `datasets`, by our reader, and as training data; a second split joins, a new push replaces its split only."""
    push_pairs(ROWS, "me/pairs", license="cc0-1.0")
    push_pairs(ROWS[:2], "pairs", split="test")
    assert load_dataset("me/pairs", split="train").to_list() == ROWS
    assert load_dataset("me/pairs", split="test").to_list() == ROWS[:2]
    assert read_rows("me/pairs") == ROWS
    assert names(hub, "me/pairs", kind="dataset") == [
        "README.md",
        "data/test-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet",
    ]
    card = hub.files("me/pairs", kind="dataset")["README.md"].decode()
    for line in (
        "license: cc0-1.0",
        "- preference",
        "| train | 6 |",
        "| test | 2 |",
        "| chosen | the better answer |",
    ):
        assert line in card
    push_pairs(Dataset.from_list(ROWS[3:]), "me/pairs")
    assert load_dataset("me/pairs", split="train").to_list() == ROWS[3:]
    assert "| train | 3 |" in hub.files("me/pairs", kind="dataset")["README.md"].decode()
    assert load_dataset("me/pairs", split="test").to_list() == ROWS[:2]
    rows = load_dataset("me/pairs", split="train")
    pair_tools.trainer(pair_tools.config(tmp_path, per_device_train_batch_size=1), dataset=rows).train()


def test_conversations_and_ranked_lists_come_back(hub):
    talks = [{"prompt": [{"role": "user", "content": "hi"}], "chosen": said("a"), "rejected": said("b")}] * 3
    push_pairs(talks, "me/talks", private=True)
    assert load_dataset("me/talks", split="train").to_list() == talks
    assert hub.repos["dataset", "me/talks"].private
    assert "license" not in hub.files("me/talks", kind="dataset")["README.md"].decode()
    lists = [{"prompt": "p", "responses": ["a", "b", "c"], "scores": [1.0, 0.0, 0.5]}] * 2
    push_pairs(lists, "me/lists", revision="next")
    assert load_dataset("me/lists", split="train", revision="next").to_list() == lists


def test_pushed_by_datasets_alone(hub):
    """Rows that `Dataset.push_to_hub` sent; a card with words of its own keeps them."""
    Dataset.from_list(ROWS).push_to_hub("me/plain")
    assert read_rows("me/plain") == ROWS
    HfApi().upload_file(
        path_or_fileobj=hub.files("me/plain", kind="dataset")["README.md"] + b"\nMy words.\n",
        path_in_repo="README.md",
        repo_id="me/plain",
        repo_type="dataset",
    )
    push_pairs(ROWS[:1], "me/plain", split="test")
    card = hub.files("me/plain", kind="dataset")["README.md"].decode()
    assert "My words." in card
    assert "# plain" not in card


def test_what_is_refused(hub):
    """Wrong rows, a token in a row, a public place for private rows, a commit that fails: nothing is left there."""
    with pytest.raises(ValueError, match="no column `rejected`"):
        push_pairs([{"prompt": "a", "chosen": "b"}], "me/refused-pairs")
    with pytest.raises(SecretFoundError, match="the rows hold") as caught:
        push_pairs([{"prompt": "a", "chosen": f"my token is {WRITER}", "rejected": "c"}], "me/refused-pairs")
    assert WRITER not in str(caught.value)
    assert ("dataset", "me/refused-pairs") not in hub.repos
    hub.faults = [Fault("commit", "500", 99)]
    with pytest.raises(HubError, match=r"pushing 6 rows to datasets/me/refused-pairs failed.*Push once more"):
        push_pairs(ROWS, "me/refused-pairs")
    assert names(hub, "me/refused-pairs", kind="dataset") == []
    hub.faults = []
    push_pairs(ROWS, "me/refused-pairs")
    with pytest.raises(HubError, match="exists and is public"):
        push_pairs(ROWS, "me/refused-pairs", private=True)


def test_the_command(hub, tmp_path, capsys):
    """A folder with roles, a branch, pairs from a file; errors are one line and status 1."""
    shared = all_roles(hub)
    shared.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model/notes.txt").write_text("mine")
    assert main(["push", str(tmp_path / "model"), "me/command", "--private", "--message", "By hand"]) == 0
    out = capsys.readouterr().out
    assert "reward/head.safetensors" in out
    assert "notes.txt" not in out
    assert out.splitlines()[-1] == f"{hub.endpoint}/me/command"
    assert hub.repos["model", "me/command"].private
    assert hub.repos["model", "me/command"].messages[-1] == "By hand"
    assert_same(SharedModel.from_pretrained("me/command"), shared)
    assert main(["push", str(tmp_path / "model"), "me/command", "--revision", "two"]) == 0
    assert "two" in hub.repos["model", "me/command"].refs

    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["push", str(pairs), "me/command-pairs", "--dataset", "--license", "mit"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "6 rows with prompt, chosen, rejected, margin",
        f"{hub.endpoint}/datasets/me/command-pairs",
    ]
    assert read_rows("me/command-pairs") == ROWS

    (tmp_path / "model/README.md").write_text(f"with {WRITER}")
    for words, expected in (
        ([str(pairs), "me/x"], "is no folder; pairs in a file need --dataset"),
        ([str(tmp_path), "me/x"], "holds no model"),
        ([str(tmp_path / "none"), "me/x", "--dataset"], "does not exist"),
        ([str(tmp_path / "model"), "me/x"], "README.md holds"),
    ):
        assert main(["push", *words]) == 1
        error = capsys.readouterr().err.splitlines()[-1]  # behind progress bars
        assert error.startswith("hf-rlx push: error: ")
        assert expected in error
        assert WRITER not in error
    (tmp_path / "model/README.md").unlink()
    assert main(["push", str(tmp_path / "model"), "not a name"]) == 1
    assert "Repo id must" in capsys.readouterr().err
    assert ("model", "me/x") not in hub.repos
