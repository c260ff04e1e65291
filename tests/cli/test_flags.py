"""Flags from the fields of configurations, and values from text and YAML."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from types import SimpleNamespace

import pytest

from hf_rlx.cli import COMMANDS, UsageError, module_of
from hf_rlx.cli.flags import Flag, Kinds, add_flags, config_flags
from hf_rlx.cli.options import DATA, MODEL, REWARD, RUN, choose, defaults
from hf_rlx.cli.session import Session, class_of
from hf_rlx.cli.settings import ALIASES, read_file, resolve
from hf_rlx.cli.training import Recipe, fields_of, flags_of

RECIPES = [
    module.RECIPE for name in COMMANDS if isinstance(getattr(module := module_of(name), "RECIPE", None), Recipe)
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_flags_read_from_the_source_are_the_fields(recipe):
    """Neither more nor fewer than the constructor takes; each of ours has its help; none is called like another
    setting of the command."""
    fields = {f.name for f in dataclasses.fields(class_of(recipe.config)) if f.init}
    flags = config_flags(recipe.config, recipe.name)
    assert {flag.name for flag in flags} == fields
    assert all(flag.text for flag in flags)
    others = [flag.name for flag in (*MODEL, *DATA, *REWARD, *RUN, *recipe.further)]
    assert not {flag.name for flag in fields_of(recipe)} & {*others, *ALIASES}
    assert class_of(recipe.trainer).__name__.endswith("Trainer")
    names = [flag.name for flag in flags_of(recipe)]
    assert len(names) == len(set(names))


def test_a_field_has_the_help_and_default_of_the_class_that_says_it_last():
    """`learning_rate` is a field of TrainingArguments (5e-5), OnlineConfig (1e-6) and PPOConfig (3e-6)."""
    flags = {flag.name: flag for flag in config_flags("hf_rlx.trainers.ppo_config:PPOConfig", "ppo")}
    assert flags["learning_rate"].default == "3e-06"
    assert flags["learning_rate"].group == "ppo"
    assert flags["num_train_epochs"].group == "of transformers.TrainingArguments"
    assert flags["reward_weights"].kinds == Kinds(frozenset({"list", "None"}), frozenset({"float"}))
    assert flags["bf16"].kinds.names == {"bool", "None"}


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        ("int", "8", 8),
        ("int", "1e3", 1000),
        ("float", "1e-5", 1e-5),  # YAML 1.1 reads it as text
        ("float", 3, 3.0),
        ("bool", "no", False),
        ("bool", True, True),
        ("bool | None", None, None),
        ("float | None", "none", None),
        ("str", "none", "none"),
        ("str", 5, "5"),
        ("SaveStrategy | str", False, "no"),  # `save_strategy: no` is a truth value for YAML
        ("int | str | None", "auto", "auto"),
        ("int | str | None", "8", 8),
        ("list[float] | None", ["1", "0.5"], [1.0, 0.5]),
        ("list[float] | None", ["1,0.5"], [1.0, 0.5]),
        ("list[float] | None", 2, [2.0]),
        ("list[str] | None", ["stop"], ["stop"]),
        ("list[str] | str", "sigmoid", "sigmoid"),
        ("list[str] | str", ["sigmoid", "sft"], ["sigmoid", "sft"]),
        ("dict[str, Any] | None", '{"a": 1}', {"a": 1}),
        ("dict | str | None", {"a": 1}, {"a": 1}),
        ("dict | str | None", "file.json", "file.json"),
        ('Literal["raise", "skip"]', "raise", "raise"),
        ("str | None | Literal[False]", False, False),
        ("Optional[int]", "null", None),
        ("list[Any] | None", {"name": "number"}, [{"name": "number"}]),
    ],
)
def test_values(annotation, value, expected):
    read = Flag("x", Kinds.of(annotation), "", "", "").read(value, "--x")
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        ("int", "many", "--x: a whole number is wanted, got 'many'"),
        ("int", 0.5, "a whole number is wanted, got 0.5"),
        ("int", None, "a whole number is wanted, not null"),
        ("float", True, "a number is wanted, got true"),
        ("bool", "perhaps", "true or false is wanted, got 'perhaps'"),
        ("float", [1], "a number is wanted, not a list"),
        ("float", {"a": 1}, "a number is wanted, not a section"),
        ("list[float]", ["1", "x"], "a number is wanted, got 'x'"),
        ("dict | None", "[1", "is no JSON"),
    ],
)
def test_values_of_another_kind(annotation, value, message):
    with pytest.raises(UsageError) as error:
        Flag("x", Kinds.of(annotation), "", "", "").read(value, "--x")
    assert message in str(error.value)


FLAGS = [
    Flag("max_steps", Kinds.of("int"), "-1", "Steps.", "a"),
    Flag("learning_rate", Kinds.of("float"), "5e-05", "Rate, 95 %.", "a"),
    Flag("save_strategy", Kinds.of("str"), "steps", "When.", "a"),
    Flag("packing", Kinds.of("bool"), "True", "Pack.", "b"),
    Flag("model", Kinds.of("str | None"), "None", "Which.", "b"),
]


def resolved(tmp_path, text, *words):
    """Settings of a YAML text and a command line."""
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_flags(parser, FLAGS)
    parser.add_argument("--config")
    parser.add_argument("--model-name-or-path", default=argparse.SUPPRESS)
    assert "95 %" in parser.format_help()
    return resolve(parser.parse_args(["--config", str(file), *words]), FLAGS)


def test_flags_win_over_the_file(tmp_path):
    """Both names of a model are one; hyphens in the file too; `--no-x` is false."""
    text = "max-steps: 30\nlearning_rate: 1e-4\nsave_strategy: no\nmodel_name_or_path: a/b\npacking: true\n"
    assert resolved(tmp_path, text) == {
        "max_steps": 30,
        "learning_rate": 1e-4,
        "save_strategy": "no",
        "model": "a/b",
        "packing": True,
    }
    changed = resolved(tmp_path, text, "--max-steps", "5", "--no-packing", "--model-name-or-path", "c/d")
    assert (changed["max_steps"], changed["packing"], changed["model"]) == (5, False, "c/d")
    assert resolved(tmp_path, "# nothing\n", "--packing") == {"packing": True}


def test_a_list_that_is_given_twice_is_both():
    """`--reward a --reward b c`; once is as before."""
    flag = Flag("reward", Kinds.of("list[Any] | None"), "", "What.", "a")
    parser = argparse.ArgumentParser()
    add_flags(parser, [flag])
    twice = parser.parse_args(["--reward", "a", "--reward", "b", "c"])
    assert flag.read(twice.reward, "--reward") == ["a", "b", "c"]
    assert flag.read(parser.parse_args(["--reward", "a"]).reward, "--reward") == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnig_rate: 1", "run.yaml: unknown setting 'learnig_rate'; did you mean 'learning_rate'?"),
        (
            "training:\n  max_steps: 1",
            "'training' is a section; write its names at the beginning of a line: max_steps",
        ),
        ("max_steps: 1\nmax_steps: 2", "max_steps is set twice"),
        ("max_steps: 1\nmax-steps: 2", "max-steps is set twice"),
        ("max_steps: [1]", "run.yaml: max_steps: a whole number is wanted, not a list"),
        ("- max_steps", "holds a list; it must have lines like"),
        ("max_steps: {", "is no YAML file"),
        ("use_vlm: true", "unknown setting 'use_vlm'"),
        (
            "use_liger_loss: true",
            "there is no setting 'use_liger_loss'; use nothing: log-probs are computed in chunks",
        ),
    ],
)
def test_files_with_mistakes(tmp_path, text, message):
    with pytest.raises(UsageError) as error:
        resolved(tmp_path, text)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    """With one of a like name beside it, and the folder otherwise; a folder is none."""
    with pytest.raises(UsageError, match=r"there is no file .*/none.yaml \(looked for in "):
        read_file(tmp_path / "none.yaml", {})
    (tmp_path / "grpo.yaml").touch()
    with pytest.raises(UsageError, match=r"no file .*/grp.yaml; did you mean .*/grpo.yaml\?"):
        read_file(tmp_path / "grp.yaml", {})
    with pytest.raises(UsageError, match="is a folder"):
        read_file(tmp_path, {})


def test_every_trainer_of_the_list_has_a_command():
    """A recipe for each, under the name of its module."""
    assert [r.name for r in RECIPES] == [
        "sft",
        "reward",
        "prm",
        "grpo",
        "ppo",
        "dpo",
        "ipo",
        "simpo",
        "orpo",
        "iterative-dpo",
    ]
    assert all(importlib.import_module(r.config.partition(":")[0]) for r in RECIPES)


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        (["q_proj"], {"q_proj"}),
        (["q_proj,v_proj"], {"q_proj", "v_proj"}),
        (["q_proj", "self_attn.v_proj"], {"q_proj", "self_attn.v_proj"}),
        (["all-linear"], "all-linear"),
        ([".*layers\\.[01]\\..*proj"], ".*layers\\.[01]\\..*proj"),
    ],
)
def test_modules_of_an_adapter(words, modules):
    """One name is a list of one, as PEFT takes a text for a pattern; a pattern stays one."""
    parser = argparse.ArgumentParser()
    (flag,) = choose(MODEL, "lora_target_modules")
    flag.add_to(parser)
    read = flag.read(parser.parse_args([flag.option, *words]).lora_target_modules, "here")
    session = SimpleNamespace(options={**defaults({"model": "tiny"}), "lora_target_modules": read})
    assert Session.adapter(session).target_modules == modules
