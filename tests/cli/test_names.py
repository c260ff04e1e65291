"""Models and data sets that are nowhere: one message of ours, with the fix, and no asking again and again."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants

from hf_rlx.cli import UsageError, main, names


class TransportError(Exception):
    """By its name what the client's HTTP library raises where nobody answers."""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Names that the Hub is asked for; nobody answers."""
    found = []

    class Hub:
        def model_info(self, name, **options):
            found.append(name)
            raise TransportError("Name or service not known\nand a page of text")

        dataset_info = model_info

    monkeypatch.setattr(names, "api", Hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["grpo", "--dataset", "arithmetic"],
        ["dpo", "--dataset", "arithmetic", "--dry-run"],
        ["eval", "--dataset", "arithmetic"],
        ["estimate"],
    ],
)
def test_offline_the_hub_is_not_asked(asked, monkeypatch, capsys, words):
    """Where was looked, `--model tiny` and HF_HUB_OFFLINE are named; one line, status 1."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([*words, "--model", "Qwen/Qwen9-Nope"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hf-rlx {words[0]}: error: the model 'Qwen/Qwen9-Nope' is not on this machine")
    assert constants.HF_HUB_CACHE in line
    assert "HF_HUB_OFFLINE is set; unset it" in line
    assert "--model tiny" in line
    assert asked == []


def test_a_hub_that_does_not_answer_is_asked_once(asked, capsys, tmp_path):
    """Of the client's error the first line is shown; data sets alike."""
    output = ["--output-dir", str(tmp_path / "run")]
    assert main(["grpo", "--model", "Qwen/Qwen9-Nope", "--dataset", "arithmetic", *output]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "gives no answer (Name or service not known)" in line
    assert main(["grpo", "--model", "tiny", "--dataset", "me/nothing", *output]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the dataset 'me/nothing' is not on this machine" in line
    assert "a task: arithmetic" in line
    assert asked == ["Qwen/Qwen9-Nope", "me/nothing"]


def test_a_name_in_the_cache_is_not_looked_up(asked, monkeypatch):
    monkeypatch.setattr(names, "try_to_load_from_cache", lambda name, file, **options: f"/cache/{file}")
    names.check_model("me/cached")
    names.check_model("tiny")
    assert asked == []
    with pytest.raises(UsageError, match=r"there is no folder \./nothing"):
        names.check_model("./nothing")


@pytest.mark.parametrize(
    ("name", "folder"), [("me/pairs", "me___pairs"), ("me/UltraFeedback", "me___ultra_feedback"), ("GSM8K", "gsm8_k")]
)
def test_a_dataset_in_the_cache_is_not_looked_up(asked, monkeypatch, tmp_path, name, folder):
    """The cache spells names its own way."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / folder).mkdir()
    names.check_dataset(name, "")
    assert asked == []


def test_a_short_name_that_is_nearly_one(asked):
    with pytest.raises(FileNotFoundError, match="Did you mean 'tiny'"):
        names.check_model("tinny")
    with pytest.raises(FileNotFoundError, match="a Hub id is written owner/name"):
        names.check_model("what is this")


def test_the_doctor_has_it_in_its_report(asked, capsys):
    """One line among the others, and one question."""
    assert main(["doctor", "grpo", "--model", "me/none"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "problem model the model 'me/none' is not on this machine" in printed
    assert asked == ["me/none"]


def test_the_estimate_advises_in_flags(capsys):
    words = ["estimate", "--model", "tiny", "--card", "t4", "--per-device-train-batch-size", "16"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "  --per-device-train-batch-size 8 with twice the --gradient-accumulation-steps: saves" in out
    assert main([*words, "--json"]) == 0
    changes = [each["change"] for each in json.loads(capsys.readouterr().out)["advice"]]
    assert any(change.startswith("--per-device-train-batch-size 8") for change in changes)
