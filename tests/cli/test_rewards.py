"""What `--reward` may name."""

from __future__ import annotations

import sys

import pytest

from hf_rlx.cli import UsageError
from hf_rlx.cli.rewards import read_rewards, role_of
from hf_rlx.verifiers import NumberVerifier

SOURCE = """
from neighbour import BONUS

def longer(completions, **kwargs):
    return [len(c) + BONUS for c in completions]

class Fixed:
    def __init__(self, value=0.0):
        self.value = value
    def __call__(self, completions, **kwargs):
        return [self.value] * len(completions)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Own rewards in a file beside a module that they import; what the import leaves behind goes."""
    (tmp_path / "own.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "neighbour.py").write_text("BONUS = 1\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("x = 1\ny = x.nothing\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own", "neighbour", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_verifiers_with_options():
    """As text and as a section of YAML."""
    for spec in ("number:extract=last", {"name": "number", "extract": "last"}):
        (verifier,) = read_rewards([spec])
        assert isinstance(verifier, NumberVerifier)
        assert verifier(prompts=["?"], completions=["so 5 it is: 7"], answer=["7"]) == [1.0]
    with pytest.raises(ValueError, match="the verifier number has no option 'extrct'"):
        read_rewards(["number:extrct=last"])


def test_functions_of_files_and_modules(folder):
    """A file is found from here and beside the configuration, its neighbours can be imported; a class is made with the
    options."""
    longer, named = read_rewards(["own.py:longer", "own:longer"])
    assert longer(completions=["abc"]) == named(completions=["abc"]) == [4]
    (fixed,) = read_rewards([{"name": "own:Fixed", "value": 2.5}])
    assert fixed(completions=["a", "b"]) == [2.5, 2.5]
    below = folder / "below"
    below.mkdir()
    (below / "more.py").write_text("def one(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    assert read_rewards(["more.py:one"], below)[0](completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mth", "nothing is called 'mth'; did you mean 'math'?"),
        ("own.py:longr", "own.py has no 'longr'; did you mean 'longer'?"),
        ("own.py:number", "own.py:number is a int, no function"),
        ("none.py:f", "there is no file none.py"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ({"name": "own:longer", "x": 1}, "is a function and takes no options"),
        ({"name": "own:Fixed", "x": 1}, "own:Fixed refuses its options"),
        ({"extract": "last"}, "has no name; in YAML write"),
    ],
)
def test_what_is_not_there_is_named(folder, spec, message):
    with pytest.raises(UsageError) as error:
        read_rewards([spec])
    assert message in str(error.value)


def test_a_file_that_fails_is_named_with_its_line(folder):
    with pytest.raises(ValueError, match=r"broken\.py cannot be imported: AttributeError: .*, line 2 of broken\.py"):
        read_rewards(["broken.py:f"])


def test_roles_and_reward_models_stay_texts(tmp_path):
    """They are made with the model."""
    assert read_rewards(["role", "role:reward_1", "me/my-reward-model", str(tmp_path)]) == [
        "role",
        "role:reward_1",
        "me/my-reward-model",
        str(tmp_path),
    ]
    assert [role_of(spec) for spec in ("role", "role:reward_1", "math", len)] == ["reward", "reward_1", None, None]


def test_dotted_paths_and_names_of_trl(folder):
    """As TRL's own script takes them: module.function, and its four functions by name, one of them made with the
    lengths that the script has, or others."""
    assert read_rewards(["own.longer"])[0](completions=["abc"]) == [4]
    short, long = read_rewards(
        ["get_soft_overlong_punishment", {"name": "get_soft_overlong_punishment", "max_completion_len": 2000}]
    )
    ids = {"completions": [""], "completion_ids": [[0] * 1300]}
    assert short(**ids) == [-1]
    assert long(**ids) == [0.0]
    (thinks,) = read_rewards(["think_format_reward"])
    assert thinks([[{"content": "<think>a</think>b"}], [{"content": "b"}]]) == [1.0, 0.0]
    for spec, told in (
        ("own.nothing", "own has no 'nothing'"),
        ("own.py", r"which function of own\.py\? Write own\.py:FUNCTION"),
        ("accuracy_rewrd", "of TRL's there are accuracy_reward"),
        ({"name": "think_format_reward", "a": 1}, "takes no options"),
    ):
        with pytest.raises(UsageError, match=told):
            read_rewards([spec])


def test_accuracy_of_trl_needs_its_package(monkeypatch):
    """TRL says so at the first completion; here it is said before anything is loaded."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="accuracy_reward needs the package math-verify; run: pip install"):
        read_rewards(["accuracy_reward"])
