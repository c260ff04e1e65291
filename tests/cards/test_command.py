"""The command of a card: as it would be typed, without secrets and without the machine's paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_rlx.cards.command import command_line, short_path, without_local_paths

PYTHON = "/opt/env/bin/python3"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([PYTHON, "train.py", "--beta", "0.1"], "python3 train.py --beta 0.1"),
        ([PYTHON, "-m", "hf_rlx.cli", "grpo"], "python3 -m hf_rlx.cli grpo"),
        ([PYTHON, "/opt/env/bin/hf-rlx", "grpo", "--config", "/data/x/a b.yaml"], "hf-rlx grpo --config 'a b.yaml'"),
        ([PYTHON, "/data/me/train.py", "--out=/data/me/runs/x"], "python3 train.py --out=x"),
        ([PYTHON, "x.py", "--hub_token", "abc", "--lr", "1"], "python3 x.py --hub_token '<SECRET>' --lr 1"),
        ([PYTHON, "x.py", "--hub-token=abc"], "python3 x.py '--hub-token=<SECRET>'"),
        ([PYTHON, "x.py", "API_KEY=abc"], "python3 x.py 'API_KEY=<SECRET>'"),
        ([PYTHON, "x.py", "--url", "http://u:pass@h:80/v1"], "python3 x.py --url 'http://<LOGIN>@h:80/v1'"),
        ([PYTHON, "x.py", "hf_" + "a" * 30], "python3 x.py '<HUB_TOKEN>'"),
        ([PYTHON, "x.py", "--name", "known-to-be-secret"], "python3 x.py --name '<SECRET>'"),
        ([PYTHON], None),
        ([PYTHON, "-c", "import hf_rlx"], None),
        ([PYTHON, "-m", "ipykernel_launcher", "-f", "/x/kernel.json"], None),
        ([PYTHON, "x.py", "y" * 2001], None),
    ],
)
def test_command_line(argv: list[str], line: str | None):
    assert command_line(argv, ["known-to-be-secret", None]) == line


def test_paths_below_the_working_folder_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert command_line([PYTHON, str(tmp_path / "a" / "x.py"), str(tmp_path)]) == "python3 a/x.py ."
    assert short_path(str(tmp_path / "a" / "b")) == "a/b"
    assert short_path("/elsewhere/c") == "c"
    assert short_path("a/b") == "a/b"


def test_texts_lose_the_places_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not what only looks alike: URLs, other folders, longer names."""
    monkeypatch.setenv("HOME", "/home-of/me")
    monkeypatch.chdir(tmp_path)
    text = without_local_paths(
        f"`{tmp_path}/a/b.json`, /home-of/me/c d, {tmp_path}: https://x.org/home-of/me/c /home-of/men"
    )
    assert text == f"`b.json`, c d, {tmp_path.name}: https://x.org/home-of/me/c /home-of/men"
