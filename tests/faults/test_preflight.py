"""What users get wrong, in every trainer that it can go wrong in: told before anything is trained, with the fix.

| row | test here | and |
|---|---|---|
| missing column | test_a_missing_column | data/test_formats, data/test_pair_encoding, trainers/test_sft |
| misspelt column, or none like it | test_a_column_in_other_letters, test_a_column_that_nothing_is_like | |
| prompt under another name | test_a_prompt_under_another_name | |
| prompt said twice | test_a_prompt_that_the_answers_repeat | |
| no dataset, messages of other formats | test_what_is_no_dataset, test_messages_of_other_formats | data/test_formats |
| no step, no room for a prompt | test_no_step_at_all, test_no_room_for_a_prompt | cli |
| empty dataset | test_an_empty_dataset | data/test_formats |
| fewer rows than one batch | test_fewer_rows_than_a_rollout, test_fewer_rows_than_a_step | faults/test_bad_input |
| constant reward | test_a_constant_reward, test_rounds_of_a_constant_reward | trainers/test_alerts |
| misspelt model | test_a_model_that_is_nowhere | |
| model in memory without a name | test_a_model_in_memory_is_its_own_reference | trainers/test_dpo |
| answers all the same | test_rows_without_a_pair, test_steps_without_a_label | |
| all truncated | test_everything_truncated, test_all_rows_cut | trainers/test_alerts, faults/test_bad_input |
| reward without **kwargs | test_a_reward_takes_what_it_names | faults/test_reward_faults |
| reward of a column that is not there | test_a_reward_that_needs_what_no_column_has | rollout/test_scoring |
| reward that is a class, or missing | test_a_reward_that_is_none | |
| reward returning strings | test_a_reward_of_strings | faults/test_reward_faults, rollout/test_scoring |
| reward raising | test_a_reward_that_raises | faults/test_reward_faults |
| typo in a field | test_a_typo_in_a_field | trainers/test_config, cli |
| removed names of TRL | test_removed_names | trainers/test_config, trainers/test_ppo_config |
| names of older versions and scripts | test_names_of_older_versions_and_scripts | |
| wrong LoRA targets | test_wrong_lora_targets | |
| xet upload to a server without xet | test_pushing_is_asked_for_before_training | tests/hub |
| several GPUs without a launcher | test_several_gpus | faults/test_bad_input |
| torchao too old for PEFT | test_a_torchao_that_peft_refuses | |
| optimizer that needs a GPU | test_an_optimizer_that_needs_a_gpu | |
| no token, read-only token, no permission, offline | test_pushing_is_asked_for_before_training | |
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import peft.import_utils
import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainingArguments

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.reward_models import RewardError
from hf_rlx.trainers.dpo import DPOConfig, DPOTrainer
from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_rlx.trainers.ipo import IPOConfig, IPOTrainer
from hf_rlx.trainers.iterative_dpo import IterativeDPOConfig, IterativeDPOTrainer
from hf_rlx.trainers.orpo import ORPOConfig, ORPOTrainer
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.trainers.ppo_config import RENAMED, WITHOUT_EFFECT, PPOConfig
from hf_rlx.trainers.preflight import PreflightError
from hf_rlx.trainers.prm import PRMConfig, PRMTrainer
from hf_rlx.trainers.removed_fields import _OF_OTHERS, REMOVED_FIELDS
from hf_rlx.trainers.reward import RewardConfig, RewardTrainer
from hf_rlx.trainers.sft import SFTConfig, SFTTrainer
from hf_rlx.trainers.simpo import SimPOConfig, SimPOTrainer
from tests.trainers.prm_tools import solutions
from tests.trainers.reward_tools import pairs
from tests.trainers.tools import ScriptedSampler, lora, rows, tiny_llama

CLASSES: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "ppo": (PPOConfig, PPOTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "ipo": (IPOConfig, IPOTrainer),
    "simpo": (SimPOConfig, SimPOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
    "reward": (RewardConfig, RewardTrainer),
    "sft": (SFTConfig, SFTTrainer),
    "prm": (PRMConfig, PRMTrainer),
    "iterative_dpo": (IterativeDPOConfig, IterativeDPOTrainer),
}
ONLINE = ("grpo", "ppo", "iterative_dpo")
GIVEN = ("dpo", "ipo", "simpo", "orpo", "reward", "sft", "prm")
PAIRED = ("dpo", "ipo", "simpo", "orpo", "reward")
EVERY = pytest.mark.parametrize("kind", CLASSES)
SAMPLING = pytest.mark.parametrize("kind", ONLINE)
ON_PAIRS = pytest.mark.parametrize("kind", PAIRED)
ON_ROWS = pytest.mark.parametrize("kind", GIVEN)


def config(kind: str, folder: Path | str, **fields: Any) -> Any:
    """A quiet configuration: one step of four rows, or of four prompts with four completions each, on the CPU."""
    online = {"per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 6}
    if kind == "iterative_dpo":
        online |= {"per_device_train_batch_size": 4, "num_rounds": 1, "prompts_per_round": 4}
    given = {
        "per_device_train_batch_size": 4,
        **(online if kind in ONLINE else {}),
        **({"num_iterations": 1} if kind == "ppo" else {}),
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        **fields,
    }
    return CLASSES[kind][0](str(folder), **given)


def data(kind: str, count: int = 16) -> Dataset:
    """Rows that the trainer takes."""
    if kind in ONLINE:
        return rows(count)
    if kind == "prm":
        return solutions(count)
    found = pairs(count)
    return found.rename_column("chosen", "completion") if kind == "sft" else found


def by_length(completions, **_):
    """A reward."""
    return [float(len(text)) for text in completions]


def make(kind: str, folder: Path | str, fields: dict[str, Any] | None = None, **changed: Any) -> Any:
    """A trainer of an adapter on the random Llama, some of its arguments changed; completions are scripted."""
    given = {
        "model": tiny_llama(),
        "args": config(kind, folder, **(fields or {})),
        "train_dataset": data(kind),
        "processing_class": load_tokenizer("tiny"),
        "peft_config": lora(),
        **({"reward_funcs": by_length} if kind in ONLINE else {}),
    }
    trainer = CLASSES[kind][1](**{**given, **changed})
    if kind in ONLINE:
        trainer.sampler = ScriptedSampler(trainer.tokenizer, trainer.args.max_completion_length)
    return trainer


# --- data ------------------------------------------------------------------------------------------------------------


@EVERY
def test_a_missing_column(tmp_path, kind):
    """The message has the columns that there are, and a rename that makes them right."""
    if kind in ONLINE:
        data = Dataset.from_dict({"question": ["1+1="] * 8})
        fix = (
            "train_dataset has no column `prompt`; it has ['question']. If `question` is the prompt: "
            'dataset = dataset.rename_column("question", "prompt")'
        )
    elif kind == "prm":
        data = Dataset.from_dict({"prompt": ["1+1="] * 8, "steps": [["2"]] * 8, "label": [[True]] * 8})
        fix = "dataset.rename_columns({'steps': 'completions', 'label': 'labels'})"
    elif kind == "sft":
        data = Dataset.from_dict({"question": ["1+1="] * 8, "answer": ["2"] * 8})
        fix = "dataset.rename_columns({'answer': 'completion', 'question': 'prompt'})"
    else:
        data = Dataset.from_dict({"prompt": ["1+1="] * 8, "chosen": ["2"] * 8, "worse": ["3"] * 8})
        fix = "has no column `rejected`; it has ['prompt', 'chosen', 'worse']"
    with pytest.raises(ValueError) as caught:
        make(kind, tmp_path, train_dataset=data)
    assert fix in str(caught.value)
    assert "rename_column" in str(caught.value)


@EVERY
@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset"])
def test_a_column_in_other_letters(tmp_path, kind, place):
    """`Prompt`, `Chosen`, ...: each is renamed, in one line that can be pasted."""
    right = data(kind)
    renamed = right.rename_columns({name: name.title() for name in right.column_names})
    with pytest.raises(ValueError, match=rf"^{place} has .*dataset = dataset\.rename_column") as caught:
        make(kind, tmp_path, **{place: renamed})
    for name in set(right.column_names) - {"number", *(["rejected"] if kind == "sft" else [])}:
        assert repr(name) in str(caught.value).replace('"', "'")


@EVERY
def test_a_column_that_nothing_is_like(tmp_path, kind):
    """The rename is told with a gap for the name."""
    with pytest.raises(ValueError, match=r"\['foo'\].*dataset = dataset\.rename_column\("):
        make(kind, tmp_path, train_dataset=Dataset.from_dict({"foo": ["1+1="] * 8}))


@ON_PAIRS
def test_a_prompt_under_another_name(tmp_path, kind):
    """Pairs may hold their prompt in both answers; beside a question that they do not hold it was left out."""
    asked = data(kind).rename_column("prompt", "question")
    told = r'the answers do not hold `question`.*rename_column\("question", "prompt"\); if not: .*remove_columns'
    with pytest.raises(ValueError, match=told):
        make(kind, tmp_path, train_dataset=asked)
    held = asked.map(lambda row: {name: row["question"] + row[name] for name in ("chosen", "rejected")})
    make(kind, tmp_path, train_dataset=held)


@ON_PAIRS
def test_a_prompt_that_the_answers_repeat(tmp_path, kind):
    """As UltraFeedback's: to write the text as a message would ask it twice."""
    answer = [*said("1+1="), *said("2", "assistant")]
    row = {"prompt": "1+1=", "chosen": answer, "rejected": answer}
    with pytest.raises(ValueError, match=r'row 0 .*begin with it as messages.*remove_columns\("prompt"\)'):
        make(kind, tmp_path, train_dataset=[row] * 8)
    row = {"prompt": said("1+1="), "chosen": said("2"), "rejected": said("3")}
    with pytest.raises(ValueError, match="row 0 has an answer that ends with a message of 'user'"):
        make(kind, tmp_path, train_dataset=[row] * 8)


@EVERY
@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset"])
def test_what_is_no_dataset(tmp_path, kind, place):
    """Each names the argument, what it got, and what to write."""
    given = data(kind)
    for value, told in (
        (given.to_pandas(), "a table of pandas; write datasets.Dataset.from_pandas"),
        (given.to_iterable_dataset(), "a streaming dataset; load it whole"),
        ("me/data", "load it first: datasets.load_dataset"),
        (["1+1="] * 8, r'rows that are dictionaries.*got str; write \[\{"(prompt|text)": text\}'),
    ):
        if kind in (*PAIRED, "prm") and isinstance(value, list):
            told = "rows that are dictionaries, got str"
        with pytest.raises(ValueError, match=rf"^{place} (is|must have) .*{told}"):
            make(kind, tmp_path, **{place: value})
    with pytest.raises(ValueError, match=r'train_dataset is a dictionary of \[\'train\'\].*e\.g\. dataset\["train"\]'):
        make(kind, tmp_path, train_dataset={"train": given})
    with pytest.raises(ValueError, match=r"train_dataset is a dictionary of lists.*Dataset\.from_dict"):
        make(kind, tmp_path, train_dataset={"prompt": ["1+1="] * 8})


def said(text: str, role: str = "user") -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": role, "content": text}]


@SAMPLING
def test_messages_of_other_formats(tmp_path, kind):
    shared = [{"from": "human", "value": "1+1="}]
    with pytest.raises(ValueError, match=r"row 0 .*`from` and `value` are `role` and `content` here"):
        make(kind, tmp_path, train_dataset=[{"prompt": shared}] * 8)
    with pytest.raises(ValueError, match=r"row 0 has one message by itself, where a list"):
        make(kind, tmp_path, train_dataset=[{"prompt": said("1+1=")[0]}] * 8)


@EVERY
@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset"])
def test_an_empty_dataset(tmp_path, kind, place):
    empty = data(kind).select([])
    with pytest.raises(ValueError, match=rf"^{place} is empty$"):
        make(kind, tmp_path, **{place: empty})


@EVERY
def test_data_are_looked_at_before_a_model_is_loaded(tmp_path, kind):
    """The model is a name that is nowhere: loading it would fail, and take minutes where it does not."""
    with pytest.raises(ValueError, match=r"^train_dataset is empty$"):
        make(kind, tmp_path, model="nobody/nothing", train_dataset=data(kind).select([]))


@EVERY
def test_all_problems_are_told_at_once(tmp_path, kind):
    with pytest.raises(
        PreflightError, match=r"^2 problems:\n  1\. train_dataset is empty\n  2\. eval_dataset held is the"
    ):
        make(kind, tmp_path, train_dataset=data(kind).select([]), eval_dataset={"held": "a text"})


@EVERY
def test_a_problem_of_several_datasets_is_told_once(tmp_path, kind):
    """Both are empty; a third one is not, and is not named."""
    held = {"a": data(kind).select([]), "b": data(kind)}
    with pytest.raises(ValueError, match=r"^train_dataset is empty\. The same holds for eval_dataset a$"):
        make(kind, tmp_path, train_dataset=data(kind).select([]), eval_dataset=held)


@SAMPLING
def test_fewer_rows_than_a_rollout(tmp_path, kind):
    """A rollout is 16 completions, four a prompt."""
    if kind == "iterative_dpo":
        with pytest.raises(ValueError, match="prompts_per_round is 4, but train_dataset has 3 prompts; lower it"):
            make(kind, tmp_path, train_dataset=data(kind, 3))
        return
    trainer = make(kind, tmp_path, train_dataset=data(kind, 3))
    with pytest.raises(ValueError, match="the dataset has 3 prompts but a rollout needs 4; add some, or lower"):
        trainer.train()


@ON_ROWS
def test_fewer_rows_than_a_step(tmp_path, kind, caplog):
    """Every step takes the three of them, which is said; with dataloader_drop_last there is no step at all."""
    trainer = make(kind, tmp_path / "a", train_dataset=data(kind, 3))
    trainer.train()
    assert trainer.state.global_step == 1
    assert "train_dataset has 3 rows, fewer than the 4 of one optimizer step" in caplog.text
    assert "lower per_device_train_batch_size" in caplog.text
    with pytest.raises(ValueError, match="the dataset has 3 rows but an optimizer step needs 4; add some"):
        make(kind, tmp_path / "b", {"dataloader_drop_last": True}, train_dataset=data(kind, 3)).train()


@EVERY
def test_messages_without_a_template(tmp_path, kind):
    """Told when training starts, before the first rollout or step."""
    said = [{"role": "user", "content": "1+1="}]
    answer, other = ([{"role": "assistant", "content": text}] for text in ("2", "3"))
    columns = {"prompt": [said] * 8}
    if kind == "sft":
        columns["completion"] = [answer] * 8
    elif kind == "prm":
        columns |= {"completions": [["2"]] * 8, "labels": [[True]] * 8}
    elif kind in GIVEN:
        columns |= {"chosen": [answer] * 8, "rejected": [other] * 8}
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = None
    trainer = make(kind, tmp_path, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer)
    with pytest.raises(ValueError, match=r"row 0.*chat.template"):
        trainer.train()
    assert trainer.state.global_step == 0
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    trainer = make(kind, tmp_path, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer)
    with pytest.raises(ValueError, match=r"row 0.*the chat template refuses these messages: roles must alternate"):
        trainer.train()


@EVERY
def test_no_step_at_all(tmp_path, kind, caplog):
    """TRL trains nothing, or with max_steps=0 one step, and reports success."""
    with pytest.raises(ValueError, match=r"^max_steps=0: there would be no optimizer step; give at least 1"):
        make(kind, tmp_path, {"max_steps": 0}).train()
    if kind != "iterative_dpo":  # whose rounds say it at construction
        with pytest.raises(ValueError, match=r"^num_train_epochs=0 and no max_steps: .*set one"):
            make(kind, tmp_path, {"max_steps": -1, "num_train_epochs": 0}).train()
    caplog.clear()
    make(kind, tmp_path, {"learning_rate": 0.0}).train()
    assert caplog.text.count("learning_rate=0: no weight will change") == 1


@SAMPLING
@pytest.mark.parametrize("limit", [64, 512])
def test_no_room_for_a_prompt(tmp_path, kind, limit):
    """Told before anything is sampled, with both numbers; the model's context is 64."""
    trainer = make(kind, tmp_path, {"max_completion_length": limit})
    told = f"^max_completion_length={limit} leaves no token for a prompt in the model's context of 64; lower it$"
    with pytest.raises(ValueError, match=told):
        trainer.train()
    assert not trainer.sampler.calls


# --- nothing to learn from -------------------------------------------------------------------------------------------


def constant(completions, **_):
    return [0.5] * len(completions)


def test_rounds_of_a_constant_reward(tmp_path):
    """Equal scores make no pair, so the first round says it."""
    with pytest.raises(ValueError, match=r"round 0 has no pair: .*all scores equal: 4.*log_completions=True"):
        make("iterative_dpo", tmp_path, reward_funcs=constant).train()


@pytest.mark.parametrize(("kind", "generations"), [("grpo", 4), ("ppo", 4), ("ppo", 1)])
def test_a_constant_reward(tmp_path, kind, generations, caplog):
    """At the second log, once. With one completion a prompt it is all prompts that are compared."""
    fields = {"max_steps": 3, "num_generations": generations}
    make(kind, tmp_path, fields, reward_funcs=constant, train_dataset=data(kind, 64)).train()
    assert caplog.text.count("step 2: constant reward") == 1
    assert "(mean 0.5)" in caplog.text
    assert "at what constant says of them" in caplog.text
    assert "log_completions=True" in caplog.text


def test_single_completions_with_different_rewards_are_no_constant_reward(tmp_path, caplog):
    make("ppo", tmp_path, {"max_steps": 3, "num_generations": 1}, train_dataset=data("ppo", 64)).train()
    assert "constant reward" not in caplog.text


def test_steps_without_a_label(tmp_path, caplog):
    unknown = data("prm").map(lambda row: {"labels": [None] * len(row["labels"])})
    make("prm", tmp_path, train_dataset=unknown).train()
    assert caplog.text.count("none of the 16 rows looked at teaches anything") == 1


@ON_PAIRS
def test_rows_without_a_pair(tmp_path, kind, caplog):
    """The constant reward of given answers: chosen and rejected are the same everywhere."""
    same = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(8)], "chosen": ["2"] * 8, "rejected": ["2"] * 8})
    make(kind, tmp_path, train_dataset=same).train()
    assert caplog.text.count("none of the 8 rows looked at teaches anything") == 1
    caplog.clear()
    make(kind, tmp_path / "b").train()
    assert "teaches" not in caplog.text


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_everything_truncated(tmp_path, kind, caplog):
    trainer = make(kind, tmp_path, {"max_steps": 2})
    generate = trainer.sampler.generate

    def cut(*args, **kwargs):
        groups = generate(*args, **kwargs)
        for completion in (c for group in groups for c in group):
            completion.finished = False
        return groups

    trainer.sampler.generate = cut
    trainer.train()
    assert "every completion was cut at max_completion_length=6: raise it" in caplog.text
    assert "check eos_token" in caplog.text


@ON_ROWS
def test_all_rows_cut(tmp_path, kind, caplog):
    """Prompts of two digits and answers of up to eleven letters do not fit four tokens."""
    long = data(kind).map(lambda row: {"prompt": "123456789+1="})
    make(kind, tmp_path, {"max_length": 8}, train_dataset=long).train()
    assert "all of the 16 rows looked at are longer than max_length=8" in caplog.text
    assert "raise max_length" in caplog.text


# --- rewards ---------------------------------------------------------------------------------------------------------


@SAMPLING
def test_a_reward_takes_what_it_names(tmp_path, kind):
    """Without **kwargs it is called with what it takes, columns included."""

    def bare(completions, number):
        return [float(len(text) + n) for text, n in zip(completions, number, strict=True)]

    trainer = make(kind, tmp_path, reward_funcs=bare)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/bare/std"] > 0


@SAMPLING
@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset"])
def test_a_reward_that_needs_what_no_column_has(tmp_path, kind, place):
    """Told before a model is loaded, also where only the held-out data lack the column: at the first evaluation it
    would have been hours of training."""

    def right(completions, number, numbr):
        return [0.0] * len(completions)

    def fine(completions, number):
        return [0.0] * len(completions)

    lacking = data(kind).remove_columns("number")
    if place == "train_dataset":
        told = r"train_dataset: reward function 'right' requires the parameter 'numbr'.*did you mean 'number'\?"
        with pytest.raises(RewardError, match=told):
            make(kind, tmp_path, model="nobody/nothing", reward_funcs=[fine, right])
    told = rf"{place}: reward function 'fine' requires the parameter 'number', which no dataset column gives"
    with pytest.raises(RewardError, match=told):
        make(kind, tmp_path, model="nobody/nothing", reward_funcs=fine, **{place: lacking})


def test_step_rewards_and_lists_of_rows(tmp_path):
    """Rows of a plain list need not have the same columns; a step reward function is asked like any other."""
    listed = [{"prompt": "1+1="}, *({"prompt": f"{i}+1=", "number": i} for i in range(7))]
    make("grpo", tmp_path, reward_funcs=lambda completions, number: [0.0], train_dataset=listed)

    def steps(completions, gold):
        return [[] for _ in completions]

    told = "train_dataset: step reward function 'steps' requires the parameter 'gold'"
    with pytest.raises(RewardError, match=told):
        make("grpo", tmp_path, step_reward_funcs=[steps])


@SAMPLING
def test_a_reward_that_is_none(tmp_path, kind):
    """A class is not an object of it; a missing one is told."""

    class Length:
        def __call__(self, completions, **_):
            return [float(len(text)) for text in completions]

    with pytest.raises(RewardError, match=r"'Length' is a class; pass an instance: Length\(\.\.\.\)"):
        make(kind, tmp_path, model="nobody/nothing", reward_funcs=[Length])
    make(kind, tmp_path, reward_funcs=Length())
    with pytest.raises(ValueError, match="reward_funcs is missing: a function"):
        make(kind, tmp_path, reward_funcs=None)


@SAMPLING
def test_a_reward_of_strings(tmp_path, kind):
    def odd(completions, **_):
        return ["1.0"] * len(completions)

    trainer = make(kind, tmp_path, reward_funcs=odd)
    with pytest.raises(
        RewardError, match=r"'odd' returned '1.0' of type str; expected a number or None(?s:.*)index 0"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


@SAMPLING
def test_a_reward_that_raises(tmp_path, kind):
    """Function, prompt and completion are named; `on_reward_error="skip"` lets the run go on, up to a share."""

    def fragile(completions, number, **_):
        if number[0] == 2:
            raise KeyError("answer")
        return [float(len(text)) for text in completions]

    fields = {"shuffle_dataset": False, "on_reward_error": "raise"}
    trainer = make(kind, tmp_path, fields, reward_funcs=fragile)
    with pytest.raises(
        RewardError, match=r"'fragile' raised KeyError: 'answer'\nprompt: '2\+2='\ncompletion at index"
    ):
        trainer.train()
    trainer = make(kind, tmp_path, {**fields, "on_reward_error": "skip"}, reward_funcs=fragile)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/fragile/errors"] == 4


# --- names -----------------------------------------------------------------------------------------------------------


@EVERY
def test_a_typo_in_a_field(tmp_path, kind):
    with pytest.raises(TypeError, match=r"Config has no field `learing_rate`; did you mean `learning_rate`\?"):
        config(kind, tmp_path, learing_rate=1e-5)


@EVERY
@pytest.mark.parametrize(
    ("name", "online", "given"),
    [
        ("max_prompt_length", r"dataset\.filter\(", r"max_length \(prompt and answer together"),
        ("max_new_tokens", "max_completion_length", "max_length"),
        ("max_seq_length", "max_completion_length", "max_length"),
        ("evaluation_strategy", "eval_strategy", "eval_strategy"),
        ("no_cuda", "use_cpu", "use_cpu"),
        ("warmup_ratio", "warmup_steps", "warmup_steps"),
        ("push_to_hub_token", "hub_token", "hub_token"),
        ("tokenizer", "the argument processing_class", "the argument processing_class"),
        ("vllm_max_model_len", "vllm_max_model_length", "nothing: this trainer samples nothing"),
    ],
)
def test_removed_names(tmp_path, kind, name, online, given):
    fields = {f.name for f in dataclasses.fields(CLASSES[kind][0])}
    if name in fields:
        pytest.skip("a field of this configuration")
    short = name == "max_new_tokens" and "max_completion_length" in fields
    instead = online if kind in ("grpo", "ppo") or short else given
    if kind == "iterative_dpo" and name.startswith("vllm_"):
        instead = "nothing: this trainer samples with the built-in engine"
    with pytest.raises(TypeError, match=f"has no field `{name}` any more; use {instead}"):
        config(kind, tmp_path, **{name: 1})


OLD_NAMES = {
    "model_name_or_path": "the argument model of the trainer",
    "query_dataset": "the argument train_dataset of the trainer",
    "use_peft": "the argument peft_config of the trainer",
    "load_in_4bit": "the argument quantization_config of the trainer",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "train_batch_size": "per_device_train_batch_size",
    "log_with": "report_to",
    "tracker_project_name": "project",
    "torchdynamo": "torch_compile_backend",
}


@EVERY
def test_names_of_older_versions_and_scripts(tmp_path, kind):
    """Nearest names would mislead: `reward_model` is near to `sync_ref_model`, `stop_token` to `top_k`."""
    fields = {f.name for f in dataclasses.fields(CLASSES[kind][0])}
    sampled = "the argument reward_funcs of the trainer" if kind in ONLINE else "nothing: this trainer has no reward"
    pulled = "beta" if "beta" in fields else "nothing: this trainer holds nothing near a reference"
    expected = {**OLD_NAMES, "reward_model": sampled, "judge": sampled}
    if kind != "ppo":  # which understands it
        expected |= {"init_kl_coef": pulled, "ppo_epochs": "num_iterations" if kind == "grpo" else "num_train_epochs"}
    if kind not in ONLINE:
        expected |= dict.fromkeys(("temperature", "use_vllm", "vllm_mode"), "nothing: this trainer samples nothing")
    for name, instead in expected.items():
        with pytest.raises(TypeError, match=rf"has no field `{name}`( any more)?; use {instead}"):
            config(kind, tmp_path, **{name: 1})
    with pytest.raises(TypeError, match=r"has no field `sft_modle`$"):
        config(kind, tmp_path, sft_modle=1)


@EVERY
def test_what_a_removed_name_is_replaced_by_is_there(tmp_path, kind):
    """A replacement that is one word is a field of that configuration; an argument is one of the trainer."""
    fields = {f.name for f in dataclasses.fields(CLASSES[kind][0])}
    arguments = inspect.signature(CLASSES[kind][1].__init__).parameters
    told = []
    understood = {*RENAMED, *WITHOUT_EFFECT, "stop_token"} if kind == "ppo" else set()
    for name in sorted((REMOVED_FIELDS | _OF_OTHERS.keys()) - fields - understood):
        with pytest.raises(TypeError) as caught:
            config(kind, tmp_path, **{name: 1})
        told.append(str(caught.value))
        _, there, instead = told[-1].partition("; use ")
        if there and instead.isidentifier():
            assert instead in fields, told[-1]
        for argument in re.findall(r"the argument (\w+) of the trainer", told[-1]):
            assert argument in arguments, told[-1]
    assert len(told) > 30


@pytest.mark.parametrize("kind", ["reward", "sft"])
def test_fields_of_other_trainers(tmp_path, kind):
    with pytest.raises(TypeError, match=r"has no field `max_completion_length`; use max_length \(prompt and answer"):
        config(kind, tmp_path, max_completion_length=64)


@EVERY
def test_arguments_under_other_names(tmp_path, kind):
    given = {"model": tiny_llama(), "args": config(kind, tmp_path)}
    name, cls = CLASSES[kind][1].__name__, CLASSES[kind][1]
    with pytest.raises(TypeError, match=f"{name} has no argument 'tokenizer'; it is called `processing_class`"):
        cls(**given, tokenizer=load_tokenizer("tiny"))
    with pytest.raises(TypeError, match=rf"'max_steps'; it belongs to the configuration: args={name[:-7]}Config\(max"):
        cls(**given, max_steps=3)
    with pytest.raises(TypeError, match=r"'train_datset'; did you mean `train_dataset`\?"):
        cls(**given, train_datset=data(kind))
    with pytest.raises(TypeError, match=r"'dataset_text_field'; use dataset\.rename_column\(\.\.\., \"text\"\)"):
        cls(**given, dataset_text_field="text")
    with pytest.raises((TypeError, ValueError), match=r"formatting_func.*[;:] dataset = dataset\.map\(\.\.\.\)"):
        cls(**given, formatting_func=str)


@SAMPLING
def test_numbers_of_another_kind(tmp_path, kind):
    """YAML and JSON may write 6 as 6.0; one weight by itself is no list."""
    assert repr(config(kind, tmp_path, max_completion_length=6.0).max_completion_length) == "6"
    with pytest.raises(ValueError, match=r"^reward_weights must be a list of finite numbers, got 1\.0$"):
        config(kind, tmp_path, reward_weights=1.0)


@EVERY
def test_a_model_that_is_nowhere(tmp_path, kind):
    """The library's message has the Hub's address and not the name."""
    with pytest.raises(OSError, match="'nobody/nothing'"):
        make(kind, tmp_path, model="nobody/nothing")
    with pytest.raises(OSError, match=r"no model 'tinny'; did you mean 'tiny'\?"):
        make(kind, tmp_path, model="tinny")


@pytest.mark.parametrize("kind", ["grpo", "ppo", "iterative_dpo", "dpo", "ipo"])
@pytest.mark.parametrize("adapter", [lora(), None])
def test_a_model_in_memory_is_its_own_reference(tmp_path, kind, adapter):
    """It has no name to load a reference by: the adapter is switched off, or the model is copied."""
    trainer = make(kind, tmp_path, peft_config=adapter)
    assert not trainer.shared.config.name_or_path
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_trainer_of_ones_own_may_take_anything(tmp_path):
    class Mine(GRPOTrainer):
        def __init__(self, *args, mine, **kwargs):
            self.mine = mine
            super().__init__(*args, **kwargs)

    assert Mine(
        tiny_llama(), by_length, config("grpo", tmp_path), mine=1, processing_class=load_tokenizer("tiny")
    ).mine
    assert all(field in {f.name for f in dataclasses.fields(GRPOConfig)} for field in ("output_dir", "max_steps"))
    assert not REMOVED_FIELDS & {f.name for f in dataclasses.fields(TrainingArguments)}


@EVERY
def test_wrong_lora_targets(tmp_path, kind):
    """Nothing that the names fit: the nearest modules are told, and all that there are."""
    told = (
        r"target_modules: the model has no module 'atention\.q_proj' \(did you mean 'self_attn\.q_proj'.*\), "
        r"'q_prj' \(did you mean 'q_proj'.*\); "
        r"it has embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head .*all-linear"
    )
    with pytest.raises(ValueError, match=told):
        make(kind, tmp_path, peft_config=lora(target_modules=["q_prj", "atention.q_proj"]))


def test_lora_targets_of_which_some_are_wrong(tmp_path, caplog):
    """Lists for several families name modules that one lacks: it trains, and says so."""
    make("grpo", tmp_path, peft_config=lora(target_modules=["q_proj", "query_key_value"], modules_to_save=["lm_hed"]))
    assert "target_modules: the model has no module 'query_key_value'" in caplog.text
    assert "modules_to_save: the model has no module 'lm_hed' (did you mean 'lm_head'?)" in caplog.text
    caplog.clear()
    for targets in (["q_proj"], ["self_attn.v_proj"], r".*layers\.0\..*_proj", "all-linear", "All-Linear"):
        SharedModel.build(tiny_llama(), lora(target_modules=targets, modules_to_save=["lm_head"]))
    assert "has no module" not in caplog.text


def test_a_misspelt_lora_target_beside_a_right_one(tmp_path):
    """PEFT would train q_proj alone. A pattern is one text, which either fits or does not."""
    with pytest.raises(ValueError, match=r"the model has no module 'vproj' \(did you mean 'v_proj'"):
        make("grpo", tmp_path, peft_config=lora(target_modules=["q_proj", "vproj"]))
    SharedModel.build(tiny_llama(), lora(target_modules=r".*\.(q_proj|vproj)"))


@pytest.mark.parametrize(
    ("targets", "message"),
    [(r"layers\.0\.q", "has no module 'layers"), ("q_proj(", "target_modules='q_proj\\(' is no regular expression")],
)
def test_lora_targets_as_a_pattern(targets, message):
    with pytest.raises(ValueError, match=message):
        SharedModel.build(tiny_llama(), lora(target_modules=targets))


def test_a_role_s_targets_are_looked_at_too():
    shared = SharedModel.build(tiny_llama(), lora())
    with pytest.raises(ValueError, match=r"no module 'k_prj' \(did you mean 'k_proj'"):
        shared.add_role("reward", lora(target_modules=["k_prj"]))


# --- the machine -----------------------------------------------------------------------------------------------------


@EVERY
def test_several_gpus(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(CLASSES[kind][0], "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"2 GPUs are visible without a launcher.*CUDA_VISIBLE_DEVICES=0.*accelerate"):
        make(kind, tmp_path, model="nobody/nothing")


@EVERY
def test_an_optimizer_that_needs_a_gpu(tmp_path, kind, monkeypatch):
    """Older versions of bitsandbytes have none for CPUs."""
    monkeypatch.setattr("hf_rlx.preflight.packages._step_on_cpu", lambda paged: NotImplementedError("no kernel"))
    told = r"optim=paged_adamw_8bit does not run on this CPU \(NotImplementedError: no kernel\); leave optim out"
    with pytest.raises(ValueError, match=told):
        make(kind, tmp_path, {"optim": "paged_adamw_8bit"}, model="nobody/nothing")


@pytest.fixture
def old_torchao(tmp_path, monkeypatch):
    """A torchao 0.10 on the path, as on Colab."""
    folder = tmp_path / "site"
    (folder / "torchao").mkdir(parents=True)
    (folder / "torchao" / "__init__.py").write_text("")
    (folder / "torchao-0.10.0.dist-info").mkdir()
    (folder / "torchao-0.10.0.dist-info" / "METADATA").write_text("Name: torchao\nVersion: 0.10.0\n")
    monkeypatch.syspath_prepend(str(folder))
    peft.import_utils.is_torchao_available.cache_clear()
    yield
    peft.import_utils.is_torchao_available.cache_clear()


@EVERY
def test_a_torchao_that_peft_refuses(tmp_path, kind, old_torchao):
    """PEFT says it at the first adapter, after the model was loaded, and not what to do."""
    with pytest.raises(ValueError, match=r"version of torchao.*0\.10\.0.*pip uninstall -y torchao.*restart"):
        make(kind, tmp_path, model="nobody/nothing")


def test_a_torchao_is_no_obstacle_without_an_adapter(tmp_path, old_torchao):
    make("grpo", tmp_path, peft_config=None)


@EVERY
def test_a_folder_that_is_a_file(tmp_path, kind):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=r"output_dir='.*run': .*run is a file; name another folder"):
        make(kind, tmp_path / "run", model="nobody/nothing")


# --- the Hub ---------------------------------------------------------------------------------------------------------


class _Hub(BaseHTTPRequestHandler):
    """Knows four tokens, refuses to make `other/...`, and has no xet."""

    def do_GET(self) -> None:
        token = str(self.headers.get("authorization", "")).removeprefix("Bearer ")
        if self.path != "/api/whoami-v2":
            self._send(404, {"error": "no such page"})
        elif token == "hf_write":
            self._send(200, {"name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}})
        elif token == "hf_read":
            self._send(200, {"name": "me", "orgs": [], "auth": {"accessToken": {"role": "read"}}})
        elif token == "hf_fine":
            scoped = [{"entity": {"name": "me"}, "permissions": ["repo.content.read"]}]
            self._send(
                200,
                {"name": "me", "auth": {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": scoped}}}},
            )
        else:
            self._send(401, {"error": f"Invalid credentials: {token}"})

    do_HEAD = do_GET  # noqa: N815 - the name is the library's

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if given.get("organization") == "other":
            self._send(403, {"error": "You don't have the rights to create a model under this namespace"})
        else:
            self._send(200, {"url": f"http://{self.headers['host']}/me/{given['name']}"})

    def _send(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@contextmanager
def hub() -> Iterator[str]:
    """Address of a server like a Hub, on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


SCRIPT = textwrap.dedent(
    """
    import json, sys, tempfile, time
    from huggingface_hub import constants
    from hf_rlx.checkup import doctor
    from tests.faults.test_preflight import make

    told = {}

    def attempt(name, kind="grpo", **fields):
        start = time.monotonic()
        try:
            trainer = make(kind, tempfile.mkdtemp(), {"push_to_hub": True, **fields})
            told[name] = f"ready: {trainer.hub_model_id}"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
        told[name + "/seconds"] = time.monotonic() - start

    attempt("none", hub_model_id="me/x")
    attempt("wrong", hub_token="hf_wrong", hub_model_id="me/x")
    attempt("read", hub_token="hf_read", hub_model_id="me/x")
    attempt("fine", hub_token="hf_fine", hub_model_id="me/x")
    attempt("other", hub_token="hf_write", hub_model_id="other/x")
    attempt("xet", hub_token="hf_write", hub_model_id="me/x")
    constants.HF_HUB_DISABLE_XET = True
    for kind in ("grpo", "sft"):
        attempt(kind, kind, hub_token="hf_write", hub_model_id="me/x")
    for name, token in (("write", "hf_write"), ("read", "hf_read")):
        from hf_rlx import GRPOConfig
        args = GRPOConfig("runs/none", use_cpu=True, hub_token=token)
        report = doctor(args=args, push_to_hub="me/x")
        told["doctor/" + name] = [str(f) for f in report if f.what in ("Hub", "xet")]
    args = GRPOConfig("runs/none", use_cpu=True, hub_token="hf_write")
    told["doctor/other"] = [str(f) for f in doctor(args=args, push_to_hub="other/x") if f.what == "Hub"]
    constants.HF_HUB_OFFLINE = True
    attempt("offline", hub_token="hf_write", hub_model_id="me/x")
    print("TOLD " + json.dumps(told))
    """
)


def test_pushing_is_asked_for_before_training(tmp_path):
    """Against a server without xet: what would fail after hours is told at construction, in seconds, with the way
    out, and no message holds a token. In a process of its own: addresses are read at import."""
    with hub() as endpoint:
        env = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_DISABLE_XET")}
        env |= {
            "HF_ENDPOINT": endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        root = Path(__file__).resolve().parents[2]
        run = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(run, cwd=root, env=env, capture_output=True, text=True, timeout=240, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("TOLD ")), None)
    assert line is not None, done.stderr[-2000:]
    told = json.loads(line.removeprefix("TOLD "))
    assert "needs a token, and there is none; log in with `hf auth login`" in told["none"]
    assert "refuses the token (401" in told["wrong"]
    assert "the token of 'me' may only read; make a token of the type \"write\"" in told["read"]
    assert "the token of 'me' may only read" in told["fine"]
    assert "no permission to write 'other/x'" in told["other"]
    assert "(403" in told["other"]
    assert "set hub_model_id to a repository of your own" in told["other"]
    assert "has no xet (404), and uploads would hang on it; set HF_HUB_DISABLE_XET=1 before Python" in told["xet"]
    assert told["xet/seconds"] < 20
    assert told["grpo"] == told["sft"] == "ready: me/x"
    assert "HF_HUB_OFFLINE is set" in told["offline"]
    assert told["doctor/write"] == [f"ok       Hub: logged in as me at {endpoint}, with permission to write"]
    assert "may only read" in told["doctor/read"][0]
    assert "'me' is not a member of 'other'" in told["doctor/other"][0]
    said = done.stdout + done.stderr
    assert not [token for token in ("hf_wrong", "hf_read", "hf_write", "hf_fine") if token in said]


def test_without_pushing_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda *_, **__: pytest.fail("asked"))
    make("grpo", tmp_path, {"hub_token": "hf_some"})


def test_the_table_names_tests_that_exist():
    told = str(__doc__)
    named = {word.strip(",|") for word in told.split() if word.startswith("test_")}
    assert named
    assert named <= set(globals()), named - set(globals())
    root = Path(__file__).resolve().parents[1]
    for word in told.split():
        if "/test_" in word:
            assert (root / f"{word.strip(',|')}.py").is_file(), word


@EVERY
def test_a_tracker_that_is_not_installed(tmp_path, kind, monkeypatch):
    """Before the model is loaded, with the line that brings it."""
    monkeypatch.setattr("hf_rlx.trainers.preflight.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="report_to='wandb' needs a package: pip install wandb"):
        make(kind, tmp_path, {"report_to": "wandb"}, model="nowhere/to-be-found")


@EVERY
def test_an_adapter_of_a_classifier_is_no_policy(tmp_path, kind):
    """Reward models take it; a policy that was saved with it could not be loaded."""
    wrong = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    if kind in ("reward", "prm"):
        make(kind, tmp_path, peft_config=wrong)
        return
    with pytest.raises(ValueError, match='task_type="SEQ_CLS", and a policy saved with it could not be loaded'):
        make(kind, tmp_path, peft_config=wrong)
