"""`hf-rlx` itself: every command is there, quick to ask for help, and ends as a script expects."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hf_rlx import cli
from hf_rlx.cli import COMMANDS, UsageError, main

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ["sft", "reward", "prm", "grpo", "ppo", "dpo", "ipo", "simpo", "orpo", "iterative-dpo"]


def test_modules_and_help_need_no_torch():
    """Every command's module imports, has the two functions and says its help, all without torch, transformers and
    other slow packages; so does the overview, which lists every command."""
    code = """
import contextlib, io, sys
from hf_rlx.cli import COMMANDS, main, module_of

def help_of(words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(words)
        except SystemExit as stop:
            assert stop.code == 0, words
    return out.getvalue()

SLOW = {"torch", "transformers", "datasets", "peft", "trl", "accelerate", "pandas", "pyarrow", "huggingface_hub"}

def check(what):
    assert not SLOW & sys.modules.keys(), f"{what}: {SLOW & sys.modules.keys()}"

overview = help_of(["--help"])
for name in COMMANDS:
    assert f"  {name} " in overview, name
    module = module_of(name)
    assert callable(module.add_arguments) and callable(module.run), name
    check(f"importing {name}")
    shown = help_of([name, "--help"])
    check(f"help of {name}")
    if name in sys.argv[1:]:
        assert "--per-device-train-batch-size" in shown and "--model" in shown, name
assert {*sys.argv[1:]} <= COMMANDS.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *TRAINING], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-800:]


def test_every_command_of_the_documents_is_there():
    named = "sft reward prm grpo ppo dpo ipo simpo orpo iterative-dpo pipeline demo verify pairs eval estimate doctor"
    assert {*named.split(), "card", "push", "merge"} == COMMANDS.keys()


def usage_error(words, capsys):
    """What stderr says of a wrong command line."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_mistyped_words_name_the_nearest(capsys):
    assert "did you mean 'grpo'?" in usage_error(["gpro"], capsys)
    assert "a command is missing" in usage_error([], capsys)
    assert "unknown flag --learing-rate; did you mean --learning-rate?" in usage_error(
        ["grpo", "--learing-rate", "1"], capsys
    )
    assert "unexpected 'extra'" in usage_error(["demo", "extra"], capsys)
    # One flag says another thing than a longer one that begins like it.
    assert "unknown flag --num" in usage_error(["grpo", "--num", "3"], capsys)


def module(run):
    """A command's module whose `run` is this."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--some-number", type=int)

    return types.SimpleNamespace(add_arguments=add_arguments, run=run)


def test_how_a_command_ends(monkeypatch, capsys):
    """On purpose: one line and 1, or the usage and 2. A fault of the program: its traceback. Ctrl-C: 130."""

    def ends(run):
        monkeypatch.setattr(cli, "module_of", lambda name: module(run))
        return main(["demo", "--some_number=3"])

    def refuse(args):
        raise ValueError(f"no such thing: {args.some_number}")

    assert ends(refuse) == 1
    assert capsys.readouterr().err == "hf-rlx demo: error: no such thing: 3\n"
    assert ends(lambda args: open("/nowhere/at/all")) == 1  # noqa: SIM115
    assert capsys.readouterr().err == "hf-rlx demo: error: there is no file or folder /nowhere/at/all\n"
    assert ends(lambda args: open("/")) == 1  # noqa: SIM115
    assert capsys.readouterr().err == "hf-rlx demo: error: /: Is a directory\n"
    assert ends(lambda args: 7) == 7

    def interrupt(args):
        raise KeyboardInterrupt

    assert ends(interrupt) == 130

    def misuse(args):
        raise UsageError("--x and --y")

    with pytest.raises(SystemExit) as stop:
        ends(misuse)
    assert stop.value.code == 2
    for fault in (lambda args: int("x"), lambda args: {}["x"], lambda args: None + 1):
        with pytest.raises((ValueError, KeyError, TypeError)):
            ends(fault)
    assert set(TRAINING) <= COMMANDS.keys()


@pytest.mark.parametrize(
    ("name", "words", "found"),
    [
        ("demo", ["--output-dir", "x", "--max-steps", "3"], {"output": "x", "steps": 3}),
        ("card", ["folder", "--output-dir", "x"], {"out": "x"}),
        ("pairs", ["rows.csv", "--output", "x"], {"out": "x"}),
        ("verify", ["rows.jsonl", "--verifier", "number", "--output", "x"], {"out": "x"}),
    ],
)
def test_outputs_under_the_names_of_other_commands(name, words, found):
    parser = argparse.ArgumentParser()
    cli.module_of(name).add_arguments(parser)
    given = vars(parser.parse_args(words))
    assert {key: given[key] for key in found} == found
