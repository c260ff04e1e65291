"""What every verifier has in common: an example that works, text or messages, columns that nobody asked for."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys

import pytest

import hf_rlx.verifiers
from hf_rlx.verifiers import proof, sandbox

CLASSES = [
    getattr(hf_rlx.verifiers, name)
    for name in hf_rlx.verifiers.__all__
    if inspect.isclass(getattr(hf_rlx.verifiers, name)) and name != "StepCheck"
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_example_in_the_docstring(cls, capsys):
    """Every class has one, and it prints what it says; skipped where a prover or a box is not to be had."""
    if cls.__name__ in ("ReasoningGymVerifier", "MathVerifier"):
        pytest.importorskip("reasoning_gym" if "Gym" in cls.__name__ else "sympy")
    names = {**vars(hf_rlx.verifiers)}
    [test] = doctest.DocTestFinder(recurse=False).find(cls, cls.__name__, globs=names)
    assert test.examples
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, clear_globs=False)
    printed = capsys.readouterr().out
    if proof.ProverUnavailable.__name__ in printed or sandbox.SandboxUnavailable.__name__ in printed:
        pytest.skip("not to be had here")
    assert runner.failures == 0, printed


ROWS = {
    "answer": ["4"],
    "numbers": [[1, 3]],
    "target": [4],
    "state": ["1"],
    "metadata": ['{"answer": "4"}'],
    "completion_ids": [[1, 2]],
}


def verifiers() -> dict[str, tuple]:
    """For each that needs no box: (verifier, a completion worth its best score)."""
    v = hf_rlx.verifiers
    return {
        "math": (v.MathVerifier(), "4"),
        "number": (v.NumberVerifier(), "4"),
        "countdown": (v.CountdownVerifier(), "1 + 3"),
        "nim": (v.NimVerifier(), "1:1"),
        "puzzle": (v.PuzzleVerifier("countdown"), "1 + 3"),
        "regex": (v.RegexVerifier("4"), "4"),
        "tags": (v.TagVerifier(["a"]), "<a>4</a>"),
        "json": (v.JsonVerifier(), "4"),
        "eos": (v.EosRequired(2), "4"),
        "script": (v.ScriptVerifier(), "four"),
        "weighted": (v.Weighted([v.NumberVerifier()]), "4"),
        "gate": (v.Gate(v.RegexVerifier("4"), v.NumberVerifier()), "4"),
        "product": (v.Product([v.NumberVerifier()]), "4"),
    }


@pytest.mark.parametrize("name", verifiers())
def test_as_trl_calls_it(name: str):
    """Keywords only; text and messages score alike; other columns, the trainer's state and loggers may come along."""
    verifier, completion = verifiers()[name]
    prompts = ["?"]
    more = {**ROWS, "id": [7], "trainer_state": object(), "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    assert verifier(prompts=prompts, completions=[completion], **more) == [1.0]
    messages = [[{"role": "assistant", "content": completion}]]
    assert verifier(prompts=[[{"role": "user", "content": "?"}]], completions=messages, **more) == [1.0]
    assert isinstance(verifier.__name__, str)


@pytest.mark.parametrize("name", ["math", "number", "countdown", "nim"])
def test_a_row_without_gold_has_no_score_and_a_missing_column_is_an_error(name: str):
    verifier, completion = verifiers()[name]
    none = {key: [None] for key in ROWS}
    assert verifier(prompts=["?"], completions=[completion], **none) == [None]
    with pytest.raises(ValueError, match="reads the column"):
        verifier(prompts=["?"], completions=[completion])
    with pytest.raises(ValueError, match="1 completions but 2 values"):
        verifier(prompts=["?"], completions=[completion], **{key: value * 2 for key, value in ROWS.items()})


def test_gold_under_the_name_of_trl():
    assert hf_rlx.verifiers.MathVerifier()(["?"], ["4"], solution=["#### 4"]) == [1.0]
    assert hf_rlx.verifiers.NumberVerifier()(["?"], ["4"], solution=["#### 4"]) == [1.0]


def test_all_of_them_without_torch():
    """In a process of its own: they are made and called, and torch is not loaded."""
    code = """
import sys
from hf_rlx.verifiers import *
TagVerifier(["a"])([""], ["<a>1</a>"]), RegexVerifier("(a)")([""], ["a"]), JsonVerifier()([""], ["1"])
NumberVerifier()([""], ["1"], answer=[1]), CountdownVerifier()([""], ["1"], numbers=[[1]], target=[1])
NimVerifier()([""], ["1:1"], state=["1"]), ScriptVerifier()([""], ["a"])
EosRequired(1)([""], [""], completion_ids=[[1]])
Gate(RegexVerifier("1"), NumberVerifier())([""], ["1"], answer=[1]), check_steps("1 + 1 = 2")
assert not {"torch", "transformers", "trl"} & set(sys.modules), "loaded"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
